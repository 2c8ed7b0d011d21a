"""A holder: one llm instance as the tables see it. Registers itself in a row, whose lock it keeps until it's gone.

Whoever gets the lock of a row knows that its holder is dead or has finished. A holder that is merely stopped keeps its
lock and with it everything it holds, however late its heartbeat."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from qwen35.errors import StateError
from qwen35.state.extents import HolderRef
from qwen35.state.leases import Lease, LeaseTable
from qwen35.state.locks import Lock, process_start_time
from qwen35.state.tables import FREE, HOLDER_ACTIVE, HOLDER_DONE, Tables

Clock = Callable[[], float]


class TableOwner(Protocol):
    """What holders and managers need of an arena."""

    @property
    def tables(self) -> Tables: ...

    def new_lock(self, name: str) -> Lock: ...


def holder_lock_name(row: int) -> str:
    return f"holder{row}"


@dataclass(frozen=True)
class HolderInfo:
    """One occupied row, as `stats` shows it."""

    row: int
    instance: str
    pid: int
    is_done: bool
    heartbeat_age_seconds: float
    num_used_blocks: int
    num_used_slots: int


class Holder:
    """This process's own row. ``announce_end`` says that it ends in order; a holder that dies never says so."""

    def __init__(self, owner: TableOwner, ref: HolderRef, lock: Lock, clock: Clock) -> None:
        self.ref = ref
        self._owner = owner
        self._row = owner.tables.holders[ref.row : ref.row + 1]
        self._lock = lock
        self._clock = clock
        self._leases = LeaseTable(owner.tables)
        self._is_closed = False

    @classmethod
    def register(cls, owner: TableOwner, instance: str, clock: Clock = time.monotonic) -> Holder:
        """Take the first free row whose lock is free. ``instance`` names the model instance (63 bytes are kept)."""
        rows = owner.tables.holders
        for row in range(len(rows)):
            lock = owner.new_lock(holder_lock_name(row))
            if rows["state"][row] != FREE or not lock.try_acquire():
                continue
            if rows["state"][row] != FREE:  # somebody was here between the look and the lock
                lock.release()
                continue
            ref = HolderRef(row, int(rows["generation"][row]) + 1)
            pid = os.getpid()
            name = instance.encode("utf-8")[:63]
            rows[row] = (FREE, ref.generation, pid, process_start_time(pid) or 0, clock(), 0, 0, name)
            rows["state"][row] = HOLDER_ACTIVE
            return cls(owner, ref, lock, clock)
        raise StateError(f"holders: expected a free row, got {len(rows)} holders that are alive or not yet reclaimed")

    def beat(self, num_used_blocks: int, num_used_slots: int) -> None:
        """Say that this holder runs, and how much of its extents it uses."""
        if self._is_closed:
            return
        self._row["used_blocks"], self._row["used_slots"] = num_used_blocks, num_used_slots
        self._row["heartbeat"] = self._clock()

    def cancelled(self, leases: list[Lease]) -> list[bool]:
        """Which of its claimed leases a client has cancelled: read from the tables, no call."""
        return self._leases.cancelled(leases)

    def predecessors(self) -> list[HolderInfo]:
        """Other holders of the same instance name that are still alive: an older generation that drains."""
        mine = bytes(self._row["instance"][0])
        others = []
        for info in holder_infos(self._owner.tables, self._clock()):
            if info.row == self.ref.row or info.instance.encode("utf-8") != mine:
                continue
            lock = self._owner.new_lock(holder_lock_name(info.row))
            if not lock.try_acquire():
                others.append(info)
            lock.release()
        return others

    def wait_for_predecessors(self, timeout_seconds: float) -> bool:
        """Wait until no older generation of this instance is alive (its weights are in memory until then)."""
        end = self._clock() + timeout_seconds
        while self.predecessors():
            if self._clock() >= end:
                return False
            time.sleep(0.02)
        return True

    def announce_end(self) -> None:
        """From now on nothing more is acquired, and the end of this process is no failure. What it holds stays its own
        until it has closed or ended."""
        if not self._is_closed:
            self._row["state"] = HOLDER_DONE

    def close(self) -> None:
        """Finished: nothing of ours will be touched again, whatever we still hold may be reclaimed. Idempotent."""
        self.announce_end()
        self._is_closed = True
        self._lock.release()


def holder_infos(tables: Tables, now: float) -> list[HolderInfo]:
    """All occupied rows."""
    rows = tables.holders
    return [_info(rows[row], int(row), now) for row in np.flatnonzero(rows["state"] != FREE)]


def _info(row: np.void, index: int, now: float) -> HolderInfo:
    return HolderInfo(
        row=index,
        instance=bytes(row["instance"]).decode("utf-8", "replace"),
        pid=int(row["pid"]),
        is_done=bool(row["state"] == HOLDER_DONE),
        heartbeat_age_seconds=max(0.0, now - float(row["heartbeat"])),
        num_used_blocks=int(row["used_blocks"]),
        num_used_slots=int(row["used_slots"]),
    )
