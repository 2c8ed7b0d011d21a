"""The manager's operations as JSON objects, in and out: what travels between processes. Knows no transport.

  open      request_id, deadline_unix_ns, arrival_unix_ns?      -> row, generation (the lease)
  claim     holder, leases, candidates?: entries or null, each  -> claims: "claimed", "expired" or "cancelled", each,
                                                                   hits: the entry pinned for it, or null
  publish   holder, lease, publication                          -> entry (or null), taken_blocks
  unpin     holder, lease, entries                              -> unpinned
  close     leases, holder? (without it only unclaimed ones)    -> closed
  cancel    request_id                                          -> cancelled
  drain                                                         -> cancelled, every live request
  acquire   holder, key, num_blocks, num_slots, need?           -> extent: row, generation, or null
  release   holder, extents                                     -> released
  stats                                                         -> fields of `Stats`
  check                                                         -> ok: true, or an error that names the damage

Holders, leases, extents and entries are objects of row and generation. A publication's ``block_ids`` and ``block_keys``
are base64 of little-endian int32 and int64: thousands of numbers as decimal text take milliseconds to read."""

from __future__ import annotations

import base64
import binascii
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, TypeVar

import numpy as np

from qwen35.errors import InvalidArgument
from qwen35.state.extents import ExtentRef, HolderRef, Need
from qwen35.state.leases import Lease
from qwen35.state.manager import Manager
from qwen35.state.prefix import EntryRef, Publication

Message = Mapping[str, Any]
Ref = TypeVar("Ref", HolderRef, ExtentRef, Lease, EntryRef)


class Operations:
    """Checks a message's fields and calls the manager. Errors are `Qwen35Error`s that name the field."""

    def __init__(
        self,
        manager: Manager,
        clock: Callable[[], float] = time.monotonic,
        unix_clock_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._manager = manager
        self._clock = clock
        self._unix_clock_ns = unix_clock_ns
        self._operations: dict[str, Callable[[Message], dict[str, Any]]] = {
            "open": self._open,
            "claim": self._claim,
            "publish": self._publish,
            "unpin": self._unpin,
            "close": self._close,
            "cancel": self._cancel,
            "drain": self._drain,
            "acquire": self._acquire,
            "release": self._release,
            "stats": self._stats,
            "check": self._check,
        }

    def run(self, operation: str, message: object) -> dict[str, Any]:
        """Do one operation. Keys that it does not need are ignored: `open` is given the whole resolved request."""
        if operation not in self._operations:
            raise InvalidArgument.field("operation", f"one of {', '.join(self._operations)}", operation)
        if not isinstance(message, Mapping):
            raise InvalidArgument.field("request", "a JSON object", message)
        return self._operations[operation](message)

    def _open(self, message: Message) -> dict[str, Any]:
        deadline = self._monotonic(_integer(message, "deadline_unix_ns"))
        arrival = None
        if "arrival_unix_ns" in message:
            arrival = self._monotonic(_integer(message, "arrival_unix_ns"))
        return asdict(self._manager.open(_text(message, "request_id"), deadline=deadline, arrival=arrival))

    def _claim(self, message: Message) -> dict[str, Any]:
        leases, candidates = _refs(Lease, message, "leases"), message.get("candidates")
        if candidates is not None:
            if not isinstance(candidates, list) or len(candidates) != len(leases):
                raise InvalidArgument.field("candidates", "a list with one item for each lease", candidates)
            candidates = [None if one is None else _parse_refs(EntryRef, "candidates", one) for one in candidates]
        claims, hits = self._manager.claim(_ref(HolderRef, message, "holder"), leases, candidates)
        return {"claims": claims, "hits": [None if hit is None else asdict(hit) for hit in hits]}

    def _publish(self, message: Message) -> dict[str, Any]:
        holder, lease = _ref(HolderRef, message, "holder"), _ref(Lease, message, "lease")
        published = self._manager.publish(holder, lease, _publication(message.get("publication")))
        entry = None if published.entry is None else asdict(published.entry)
        return {"entry": entry, "taken_blocks": list(published.taken_blocks)}

    def _unpin(self, message: Message) -> dict[str, Any]:
        holder, lease = _ref(HolderRef, message, "holder"), _ref(Lease, message, "lease")
        return {"unpinned": self._manager.unpin(holder, lease, _refs(EntryRef, message, "entries"))}

    def _close(self, message: Message) -> dict[str, Any]:
        holder = _ref(HolderRef, message, "holder") if "holder" in message else None
        return {"closed": self._manager.close(holder, _refs(Lease, message, "leases"))}

    def _cancel(self, message: Message) -> dict[str, Any]:
        return {"cancelled": self._manager.cancel(_text(message, "request_id"))}

    def _drain(self, _: Message) -> dict[str, Any]:
        return {"cancelled": self._manager.drain()}

    def _acquire(self, message: Message) -> dict[str, Any]:
        key, num_blocks, num_slots = (_integer(message, name) for name in ("key", "num_blocks", "num_slots"))
        need = message.get("need", Need.RESERVE.value)
        if need not in [one.value for one in Need]:
            raise InvalidArgument.field("need", f"one of {', '.join(one.value for one in Need)}", need)
        extent = self._manager.acquire(_ref(HolderRef, message, "holder"), key, num_blocks, num_slots, Need(need))
        return {"extent": None if extent is None else asdict(extent)}

    def _release(self, message: Message) -> dict[str, Any]:
        extents = _refs(ExtentRef, message, "extents")
        return {"released": self._manager.release(_ref(HolderRef, message, "holder"), extents)}

    def _stats(self, _: Message) -> dict[str, Any]:
        return self._manager.stats().as_dict()

    def _check(self, _: Message) -> dict[str, Any]:
        self._manager.check_integrity()
        return {"ok": True}

    def _monotonic(self, unix_ns: int) -> float:
        return self._clock() + (unix_ns - self._unix_clock_ns()) / 1e9


def publication_to_json(publication: Publication) -> dict[str, Any]:
    """The object that `publish` takes."""
    return {
        "num_tokens": publication.num_tokens,
        "digest": list(publication.digest),
        "block_ids": _encode(np.asarray(publication.block_ids, "<i4")),
        "block_keys": _encode(publication.block_keys.astype("<i8", copy=False)),
        "slot": publication.slot,
        "has_draft": publication.has_draft,
    }


def _publication(value: object) -> Publication:
    if not isinstance(value, Mapping):
        raise InvalidArgument.field("publication", "an object", value)
    digest, has_draft = value.get("digest"), value.get("has_draft")
    if not isinstance(digest, list) or len(digest) != 2:
        raise InvalidArgument.field("digest", "a list of two integers", digest)
    if not isinstance(has_draft, bool):
        raise InvalidArgument.field("has_draft", "true or false", has_draft)
    low, high = (_integer({"digest": number}, "digest") for number in digest)
    return Publication(
        num_tokens=_integer(value, "num_tokens"),
        digest=(low, high),
        block_ids=tuple(_decode(value, "block_ids", "<i4").tolist()),
        block_keys=_decode(value, "block_keys", "<i8").reshape(-1, 2),
        slot=_integer(value, "slot"),
        has_draft=has_draft,
    )


def _encode(numbers: np.ndarray) -> str:
    return base64.b64encode(numbers.tobytes()).decode("ascii")


def _decode(message: Message, name: str, dtype: str) -> np.ndarray:
    """[N] for ids, [2 N] for keys."""
    text = _text(message, name)
    try:
        numbers = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidArgument.field(name, "base64", text) from error
    if len(numbers) % (4 if dtype == "<i4" else 16):
        raise InvalidArgument(f"{name}: expected whole numbers or keys, got {len(numbers)} bytes")
    return np.frombuffer(numbers, dtype)


def _text(message: Message, name: str) -> str:
    value = message.get(name)
    if not isinstance(value, str):
        raise InvalidArgument.field(name, "text", value)
    return value


def _integer(message: Message, name: str) -> int:
    value = message.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not -(2**63) <= value < 2**63:
        raise InvalidArgument.field(name, "an integer of 64 bits", value)
    return value


def _ref(kind: type[Ref], message: Message, name: str) -> Ref:
    return _parse_ref(kind, name, message.get(name))


def _refs(kind: type[Ref], message: Message, name: str) -> list[Ref]:
    return _parse_refs(kind, name, message.get(name))


def _parse_refs(kind: type[Ref], name: str, values: object) -> list[Ref]:
    if not isinstance(values, list):
        raise InvalidArgument.field(name, "a list of objects with row and generation", values)
    return [_parse_ref(kind, name, value) for value in values]


def _parse_ref(kind: type[Ref], name: str, value: object) -> Ref:
    if not isinstance(value, Mapping):
        raise InvalidArgument.field(name, "an object with row and generation", value)
    return kind(_integer(value, "row"), _integer(value, "generation"))
