"""The manager: who owns which block and slot, which leases live. The only writer of the tables but for holders' rows.

It keeps nothing of its own: every call works on the tables, under the manager's lock, so a manager can be reloaded at
any time and an old and a new one can live beside each other. No call waits for a request, a client or a holder."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import numpy as np

from qwen35.errors import StateError, Unavailable
from qwen35.state.extents import ExtentRef, ExtentTable, HolderRef
from qwen35.state.holder import Clock, HolderInfo, TableOwner, holder_infos, holder_lock_name
from qwen35.state.leases import Lease, LeaseTable
from qwen35.state.locks import acquire_within
from qwen35.state.tables import (
    EXTENT_HELD,
    FREE,
    HOLDER_ACTIVE,
    HOLDER_DONE,
    LEASE_CLAIMED,
    LEASE_OPEN,
    OWNER_FREE,
)

LOCK_TIMEOUT_SECONDS = 2.0
PRESSURE_SECONDS = 2.0


@dataclass(frozen=True)
class Counts:
    """free + held + cached == total."""

    total: int
    free: int
    held: int
    cached: int


@dataclass(frozen=True)
class Stats:
    """A consistent look at the tables."""

    blocks: Counts
    slots: Counts
    num_used_blocks: int  # of the held ones, as their holders said with the last heartbeat
    num_used_slots: int
    num_open_leases: int
    num_claimed_leases: int
    num_extents: int
    num_expired_leases: int  # since the arena was made, as the two below
    num_reclaimed_extents: int
    num_dead_holders: int
    holders: tuple[HolderInfo, ...]

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


class Manager:
    """Operations on an arena's tables. Thread-safe; processes exclude each other by the lock named ``manager``."""

    def __init__(self, owner: TableOwner, *, unclaimed_lease_seconds: float, clock: Clock = time.monotonic) -> None:
        self._owner = owner
        self._tables = owner.tables
        self._claim_within = unclaimed_lease_seconds
        self._clock = clock
        self._extents = ExtentTable(owner.tables)
        self._leases = LeaseTable(owner.tables)
        self._mutex = threading.Lock()

    def open(self, request_id: str, *, deadline: float, arrival: float | None = None) -> Lease:
        """A lease for one request; times in seconds of CLOCK_MONOTONIC. Pins nothing yet but its row.

        A remembered cancel of the same id refuses it, unless it is known to have arrived later."""
        with self._tables_locked() as now:
            arrived = -math.inf if arrival is None else arrival
            return self._leases.open(
                request_id, now=now, arrival=arrived, deadline=deadline, claim_within=self._claim_within
            )

    def claim(self, holder: HolderRef, leases: Sequence[Lease]) -> list[str]:
        """For each lease ``claimed``, ``expired`` or ``cancelled``. Can be repeated."""
        with self._tables_locked() as now:
            self._require_holder(holder)
            self._expire(now)
            return [self._leases.claim(holder, lease) for lease in leases]

    def close(self, holder: HolderRef | None, leases: Sequence[Lease]) -> int:
        """End leases; returns how many were live and the holder's (or unclaimed). Can be repeated."""
        with self._tables_locked():
            return sum(self._leases.close(holder, lease) for lease in leases)

    def cancel(self, request_id: str) -> int:
        """Cancel every live request of the id; returns how many. Remembered for 10 s for one still on its way."""
        with self._tables_locked() as now:
            return self._leases.cancel(request_id, now)

    def drain(self) -> int:
        """Cancel every live request, because the server is about to stop; returns how many."""
        with self._tables_locked():
            return self._leases.cancel_all()

    def acquire(self, holder: HolderRef, key: int, num_blocks: int, num_slots: int) -> ExtentRef | None:
        """Up to so many blocks and slots; see `ExtentTable.acquire`. Reclaims from dead holders first if it must, and
        asks the living ones for idle extents if it still falls short."""
        with self._tables_locked() as now:
            self._require_holder(holder)
            if self._falls_short(num_blocks, num_slots):
                self._reclaim_from_dead()
            if self._falls_short(num_blocks, num_slots):
                self._tables.header["pressure_until"] = now + PRESSURE_SECONDS
            return self._extents.acquire(holder, key, num_blocks, num_slots)

    def release(self, holder: HolderRef, extents: Sequence[ExtentRef]) -> int:
        """The holder gives extents back; returns how many were its own. Can be repeated."""
        with self._tables_locked():
            return sum(self._extents.release(holder, extent) for extent in extents)

    def reap(self) -> list[HolderInfo]:
        """Free what is overdue: leases unclaimed in time, everything of holders whose lock is free.

        Returns the holders that died without saying that they had finished."""
        with self._tables_locked() as now:
            self._expire(now)
            return self._reclaim_from_dead(free_rows=True)

    def stats(self) -> Stats:
        with self._tables_locked() as now:
            tables, header = self._tables, self._tables.header
            holders = holder_infos(tables, now)
            return Stats(
                blocks=_count(tables.block_owner),
                slots=_count(tables.slot_owner),
                num_used_blocks=sum(holder.num_used_blocks for holder in holders),
                num_used_slots=sum(holder.num_used_slots for holder in holders),
                num_open_leases=int((tables.leases["state"] == LEASE_OPEN).sum()),
                num_claimed_leases=int((tables.leases["state"] == LEASE_CLAIMED).sum()),
                num_extents=int((tables.extents["state"] == EXTENT_HELD).sum()),
                num_expired_leases=int(header["num_expired_leases"]),
                num_reclaimed_extents=int(header["num_reclaimed_extents"]),
                num_dead_holders=int(header["num_dead_holders"]),
                holders=tuple(holders),
            )

    def check_integrity(self) -> None:
        """Raise `StateError` unless every owner is a held extent and extents and leases belong to occupied rows."""
        with self._tables_locked():
            tables = self._tables
            sizes = _owned(tables.block_owner, "block", tables.extents)
            sizes += _owned(tables.slot_owner, "slot", tables.extents)
            empty = np.flatnonzero((tables.extents["state"] == EXTENT_HELD) & (sizes == 0))
            if len(empty):
                raise StateError(f"extents: expected at least one block or slot in each, got none in row {empty[0]}")
            for kind, rows, state in (("extent", tables.extents, EXTENT_HELD), ("lease", tables.leases, LEASE_CLAIMED)):
                owned = rows[rows["state"] == state]
                holders = tables.holders[owned["holder"]]
                if np.any((holders["state"] == FREE) | (holders["generation"] != owned["holder_generation"])):
                    raise StateError(f"{kind} rows: expected owners among the holders, got one that is gone")

    @contextmanager
    def _tables_locked(self) -> Iterator[float]:
        """Exclusive use of the tables; undoes what a killed manager left half done. Yields the time."""
        lock = self._owner.new_lock("manager")
        with self._mutex:
            if not acquire_within(lock, LOCK_TIMEOUT_SECONDS):
                raise Unavailable(f"manager lock: expected it within {LOCK_TIMEOUT_SECONDS} s, got it held elsewhere")
            try:
                if self._tables.header["busy"]:  # a manager died, or an operation was refused, which left nothing
                    self._extents.recover()
                self._tables.header["busy"] = 1
                yield self._clock()
                self._tables.header["busy"] = 0
            finally:
                lock.release()

    def _require_holder(self, holder: HolderRef) -> None:
        rows = self._tables.holders
        row = rows[holder.row] if 0 <= holder.row < len(rows) else None
        if row is None or row["state"] != HOLDER_ACTIVE or row["generation"] != holder.generation:
            raise StateError(f"holder: expected a registered one, got row {holder.row}, generation {holder.generation}")

    def _falls_short(self, num_blocks: int, num_slots: int) -> bool:
        free_blocks = int((self._tables.block_owner == OWNER_FREE).sum())
        return num_blocks > free_blocks or num_slots > int((self._tables.slot_owner == OWNER_FREE).sum())

    def _expire(self, now: float) -> None:
        self._tables.header["num_expired_leases"] += self._leases.expire(now)

    def _reclaim_from_dead(self, free_rows: bool = False) -> list[HolderInfo]:
        """Take back leases and extents of holders whose lock is free. Returns those that died without finishing.

        Rows stay occupied unless ``free_rows``: only `reap` reports a death, and none may be lost."""
        rows, died = self._tables.holders, []
        for info in holder_infos(self._tables, self._clock()):
            lock = self._owner.new_lock(holder_lock_name(info.row))
            if not lock.try_acquire():
                continue  # alive, perhaps stopped: its bytes stay
            is_done = rows["state"][info.row] == HOLDER_DONE
            self._leases.close_all(info.row)
            self._tables.header["num_reclaimed_extents"] += self._extents.release_all(info.row)
            if free_rows:
                self._tables.header["num_dead_holders"] += not is_done
                rows["state"][info.row] = FREE
                died += [] if is_done else [info]
            lock.release()
        return died


def _count(owner: np.ndarray) -> Counts:
    free, cached = int((owner == OWNER_FREE).sum()), int((owner < OWNER_FREE).sum())
    return Counts(total=len(owner), free=free, held=int((owner > OWNER_FREE).sum()), cached=cached)


def _owned(owner: np.ndarray, kind: str, extents: np.ndarray) -> np.ndarray:
    """How many blocks or slots each extent row owns; an owner that isn't a held extent is an error."""
    rows = owner[owner > OWNER_FREE] - 1
    bad = rows[extents["state"][rows] != EXTENT_HELD]
    if len(bad):
        raise StateError(f"{kind}s: expected owners among held extents, got extent row {int(bad[0])}")
    return np.bincount(rows, minlength=len(extents))
