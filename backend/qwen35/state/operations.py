"""The manager's operations as JSON objects, in and out: what travels between processes. Knows no transport.

  open      request_id, deadline_unix_ns, arrival_unix_ns?      -> row, generation (the lease)
  claim     holder, leases                                      -> claims: "claimed", "expired" or "cancelled" for each
  close     leases, holder? (without it only unclaimed ones)    -> closed
  cancel    request_id                                          -> cancelled
  drain                                                         -> cancelled, every live request
  acquire   holder, key, num_blocks, num_slots                  -> extent: row, generation, or null
  release   holder, extents                                     -> released
  stats                                                         -> fields of `Stats`
  check                                                         -> ok: true, or an error that names the damage

Holders, leases and extents are objects of row and generation."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, TypeVar

from qwen35.errors import InvalidArgument
from qwen35.state.extents import ExtentRef, HolderRef
from qwen35.state.leases import Lease
from qwen35.state.manager import Manager

Message = Mapping[str, Any]
Ref = TypeVar("Ref", HolderRef, ExtentRef, Lease)


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
        return {"claims": self._manager.claim(_ref(HolderRef, message, "holder"), _refs(Lease, message, "leases"))}

    def _close(self, message: Message) -> dict[str, Any]:
        holder = _ref(HolderRef, message, "holder") if "holder" in message else None
        return {"closed": self._manager.close(holder, _refs(Lease, message, "leases"))}

    def _cancel(self, message: Message) -> dict[str, Any]:
        return {"cancelled": self._manager.cancel(_text(message, "request_id"))}

    def _drain(self, _: Message) -> dict[str, Any]:
        return {"cancelled": self._manager.drain()}

    def _acquire(self, message: Message) -> dict[str, Any]:
        key, num_blocks, num_slots = (_integer(message, name) for name in ("key", "num_blocks", "num_slots"))
        extent = self._manager.acquire(_ref(HolderRef, message, "holder"), key, num_blocks, num_slots)
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
    values = message.get(name)
    if not isinstance(values, list):
        raise InvalidArgument.field(name, "a list of objects with row and generation", values)
    return [_parse_ref(kind, name, value) for value in values]


def _parse_ref(kind: type[Ref], name: str, value: object) -> Ref:
    if not isinstance(value, Mapping):
        raise InvalidArgument.field(name, "an object with row and generation", value)
    return kind(_integer(value, "row"), _integer(value, "generation"))
