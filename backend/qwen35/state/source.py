"""Where a pool gets its extents from: the manager in this process, or one behind a call (JSON in, JSON out).

The numbers of blocks and slots are not in the answers: a holder reads them from the arena's tables."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, Protocol

from qwen35.state.extents import Extent, ExtentRef, ExtentTable, HolderRef, Need
from qwen35.state.holder import Clock, Holder, TableOwner
from qwen35.state.leases import Lease
from qwen35.state.manager import Manager
from qwen35.state.operations import publication_to_json
from qwen35.state.prefix import EntryRef, Publication, Published


class ExtentSource(Protocol):
    """What a pool needs. Calls may take milliseconds: never from the engine's thread."""

    def acquire(self, num_blocks: int, num_slots: int, need: Need) -> Extent | None:
        """Up to so many; None when nothing is free now."""
        ...

    def release(self, extents: Sequence[Extent]) -> None: ...

    def beat(self, num_used_blocks: int, num_used_slots: int) -> None:
        """Heartbeat, with what is in use."""
        ...

    @property
    def is_under_pressure(self) -> bool:
        """Another holder needs what lies idle here."""
        ...


class ManagerSource:
    """Extents from a manager, for one holder."""

    def __init__(self, manager: Manager | RemoteManager, owner: TableOwner, holder: Holder, clock: Clock) -> None:
        self._manager = manager
        self._owner = owner
        self._holder = holder
        self._clock = clock
        self._keys = itertools.count(1)
        self._key = next(self._keys)  # kept until an answer came: a repeated question gets the lost answer's extent
        self._mutex = threading.Lock()

    def acquire(self, num_blocks: int, num_slots: int, need: Need = Need.RESERVE) -> Extent | None:
        with self._mutex:
            ref = self._manager.acquire(self._holder.ref, self._key, num_blocks, num_slots, need)
            self._key = next(self._keys)
        return None if ref is None else ExtentTable(self._owner.tables).contents(ref)

    def release(self, extents: Sequence[Extent]) -> None:
        self._manager.release(self._holder.ref, [extent.ref for extent in extents])

    def beat(self, num_used_blocks: int, num_used_slots: int) -> None:
        self._holder.beat(num_used_blocks, num_used_slots)

    @property
    def is_under_pressure(self) -> bool:
        header = self._owner.tables.header
        return bool(header["pressure_until"] > self._clock() and header["pressure_holder"] != self._holder.ref.row)


class RemoteManager:
    """The llm's side of the manager's operations. ``call`` sends one JSON object and returns the answer's object; it
    raises when no answer came, and every operation here can then be repeated."""

    def __init__(self, call: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        self._call = call

    def claim(
        self,
        holder: HolderRef,
        leases: Sequence[Lease],
        candidates: Sequence[Sequence[EntryRef] | None] | None = None,
    ) -> tuple[list[str], list[EntryRef | None]]:
        message = {"operation": "claim", "holder": asdict(holder), "leases": _dicts(leases)}
        if candidates is not None:
            message["candidates"] = [None if entries is None else _dicts(entries) for entries in candidates]
        answer = self._call(message)
        return answer["claims"], [None if hit is None else EntryRef(**hit) for hit in answer["hits"]]

    def publish(self, holder: HolderRef, lease: Lease, publication: Publication) -> Published:
        answer = self._call({"operation": "publish", "holder": asdict(holder), "lease": asdict(lease),
                             "publication": publication_to_json(publication)})  # fmt: skip
        entry = None if answer["entry"] is None else EntryRef(**answer["entry"])
        return Published(entry, tuple(answer["taken_blocks"]))

    def unpin(self, holder: HolderRef, lease: Lease, entries: Sequence[EntryRef]) -> int:
        return self._call({"operation": "unpin", "holder": asdict(holder), "lease": asdict(lease),
                           "entries": _dicts(entries)})["unpinned"]  # fmt: skip

    def close(self, holder: HolderRef, leases: Sequence[Lease]) -> int:
        return self._call({"operation": "close", "holder": asdict(holder), "leases": _dicts(leases)})["closed"]

    def acquire(
        self, holder: HolderRef, key: int, num_blocks: int, num_slots: int, need: Need = Need.RESERVE
    ) -> ExtentRef | None:
        answer = self._call({"operation": "acquire", "holder": asdict(holder), "key": key, "need": need.value,
                             "num_blocks": num_blocks, "num_slots": num_slots})  # fmt: skip
        return None if answer["extent"] is None else ExtentRef(**answer["extent"])

    def release(self, holder: HolderRef, extents: Sequence[ExtentRef]) -> int:
        return self._call({"operation": "release", "holder": asdict(holder), "extents": _dicts(extents)})["released"]


def _dicts(refs: Sequence[Any]) -> list[dict[str, int]]:
    return [asdict(ref) for ref in refs]
