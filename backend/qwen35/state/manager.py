"""The manager: who owns which block and slot, which leases live. The only writer of the tables but for holders' rows.

It keeps nothing of its own: every call works on the tables, under the manager's lock, so a manager can be reloaded at
any time and an old and a new one can live beside each other. No call waits for a request, a client or a holder."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from qwen35.errors import StateError, Unavailable
from qwen35.state.entries import NOTHING, EntryTable
from qwen35.state.extents import ExtentRef, ExtentTable, HolderRef, Need
from qwen35.state.holder import Clock, HolderInfo, TableOwner, holder_infos, holder_lock_name
from qwen35.state.leases import CLAIMED, Lease, LeaseTable
from qwen35.state.locks import acquire_within
from qwen35.state.prefix import EntryRef, Publication, Published
from qwen35.state.stats import Stats, check_integrity, collect
from qwen35.state.tables import FREE, HOLDER_ACTIVE, HOLDER_DONE, OWNER_FREE

LOCK_TIMEOUT_SECONDS = 2.0
PRESSURE_SECONDS = 2.0  # a holder's turn to get what others have idle
PAUSE_SECONDS = 0.5  # before it may have the next one


class Manager:
    """Operations on an arena's tables. Thread-safe; processes exclude each other by the lock named ``manager``."""

    def __init__(
        self,
        owner: TableOwner,
        *,
        unclaimed_lease_seconds: float,
        prefix_cache_bytes: int = 0,
        clock: Clock = time.monotonic,
    ) -> None:
        """``prefix_cache_bytes``: bound of what cached prefixes keep beside those in use; 0: none."""
        self._owner = owner
        self._tables = owner.tables
        self._claim_within = unclaimed_lease_seconds
        self._clock = clock
        self._extents = ExtentTable(owner.tables)
        self._leases = LeaseTable(owner.tables)
        self._entries = EntryTable(owner.tables, self._extents)
        self._prefix_cache_bytes = prefix_cache_bytes
        self._mutex = threading.Lock()

    def open(self, request_id: str, *, deadline: float, arrival: float | None = None) -> Lease:
        """A lease for one request; times in seconds of CLOCK_MONOTONIC. Pins nothing yet but its row.

        A remembered cancel of the same id refuses it, unless it is known to have arrived later."""
        with self._tables_locked() as now:
            arrived = -math.inf if arrival is None else arrival
            return self._leases.open(
                request_id, now=now, arrival=arrived, deadline=deadline, claim_within=self._claim_within
            )

    def claim(
        self,
        holder: HolderRef,
        leases: Sequence[Lease],
        candidates: Sequence[Sequence[EntryRef] | None] | None = None,
    ) -> tuple[list[str], list[EntryRef | None]]:
        """For each lease ``claimed``, ``expired`` or ``cancelled``, and the entry that it has pinned now: the first of
        its ``candidates`` that still stands (None: it looks for none). Can be repeated."""
        with self._tables_locked() as now:
            self._require_holder(holder)
            self._expire(now)
            claims = [self._leases.claim(holder, lease) for lease in leases]
            hits: list[EntryRef | None] = [None] * len(claims)
            for index, entries in enumerate(candidates or ()):
                if entries is not None and claims[index] == CLAIMED:
                    hits[index] = self._entries.pin(leases[index], entries)
            return claims, hits

    def close(self, holder: HolderRef | None, leases: Sequence[Lease]) -> int:
        """End leases and their pins; returns how many were live and the holder's (or unclaimed). Can be repeated."""
        with self._tables_locked():
            num_closed = sum(self._leases.close(holder, lease) for lease in leases)
            self._tidy_cache()
            return num_closed

    def publish(self, holder: HolderRef, lease: Lease, publication: Publication) -> Published:
        """Give a committed prefix to the cache; see `Published`. Can be repeated. What is older goes when the cache is
        full of what nobody uses; with a claimed lease only, and never in a geometry without checkpoints."""
        with self._tables_locked():
            self._require_holder(holder)
            if self._tables.geometry.num_checkpoints == 0 or not self._leases.is_claimed(holder, lease):
                return NOTHING
            published = self._entries.publish(holder, lease, publication)
            self._tidy_cache()
            return published

    def unpin(self, holder: HolderRef, lease: Lease, entries: Sequence[EntryRef]) -> int:
        """The lease uses these entries no more; returns how many it had pinned. Can be repeated."""
        with self._tables_locked():
            if not self._leases.is_claimed(holder, lease):
                return 0
            num_unpinned = self._entries.unpin(lease, entries)
            self._tidy_cache()
            return num_unpinned

    def cancel(self, request_id: str) -> int:
        """Cancel every live request of the id; returns how many. Remembered for 10 s for one still on its way."""
        with self._tables_locked() as now:
            return self._leases.cancel(request_id, now)

    def drain(self) -> int:
        """Cancel every live request, because the server is about to stop; returns how many."""
        with self._tables_locked():
            return self._leases.cancel_all()

    def acquire(
        self, holder: HolderRef, key: int, num_blocks: int, num_slots: int, need: Need = Need.RESERVE
    ) -> ExtentRef | None:
        """Up to so many blocks and slots; see `ExtentTable.acquire`. Where free ones fall short it reclaims from dead
        holders, then evicts cached prefixes if that suffices, then asks the living holders for idle extents, as far as
        ``need`` goes. A second call with the same ``key`` gives the extent of the first."""
        with self._tables_locked() as now:
            self._require_holder(holder)
            known = self._extents.find(holder, key)
            if known is not None:
                return known

            if self._falls_short(num_blocks, num_slots):
                self._reclaim_from_dead()
            if need is not Need.SPARE and not self._falls_short(num_blocks, num_slots, *self._entries.num_evictable()):
                self._entries.evict_until(lambda: not self._falls_short(num_blocks, num_slots))
            if need is Need.WISH:
                if self._falls_short(num_blocks, num_slots):
                    self._press(holder, now)
                    return None
                self._end_pressure(holder, now)
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
            died = self._reclaim_from_dead(free_rows=True)
            self._tidy_cache()
            return died

    def stats(self) -> Stats:
        with self._tables_locked() as now:
            return collect(self._tables, now)

    def check_integrity(self) -> None:
        """Raise `StateError` unless the tables agree with each other; see `stats.check_integrity`."""
        with self._tables_locked():
            check_integrity(self._tables)

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
                    self._entries.recover()
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

    def _falls_short(self, num_blocks: int, num_slots: int, num_more_blocks: int = 0, num_more_slots: int = 0) -> bool:
        num_free_blocks = int((self._tables.block_owner == OWNER_FREE).sum()) + num_more_blocks
        num_free_slots = int((self._tables.slot_owner == OWNER_FREE).sum()) + num_more_slots
        return num_blocks > num_free_blocks or num_slots > num_free_slots

    def _press(self, holder: HolderRef, now: float) -> None:
        """It is one holder's turn at a time. Who has had one leaves the next to others for a moment."""
        header = self._tables.header
        is_again = header["pressure_holder"] == holder.row and now < header["pressure_until"] + PAUSE_SECONDS
        if now >= header["pressure_until"] and not is_again:
            header["pressure_holder"], header["pressure_until"] = holder.row, now + PRESSURE_SECONDS

    def _end_pressure(self, holder: HolderRef, now: float) -> None:
        header = self._tables.header
        if header["pressure_holder"] == holder.row:
            header["pressure_until"] = min(float(header["pressure_until"]), now)

    def _tidy_cache(self) -> None:
        """Pins of ended leases go, and the oldest entries while the cache is above its bound."""
        self._entries.drop_stale_pins()
        if self._prefix_cache_bytes:
            self._entries.evict_until(lambda: self._entries.cached_bytes <= self._prefix_cache_bytes)

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
            if self._leases.close_all(info.row):
                self._entries.drop_stale_pins()
            self._tables.header["num_reclaimed_extents"] += self._extents.release_all(info.row)
            if free_rows:
                self._tables.header["num_dead_holders"] += not is_done
                rows["state"][info.row] = FREE
                died += [] if is_done else [info]
            lock.release()
        return died
