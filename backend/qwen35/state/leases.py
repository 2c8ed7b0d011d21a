"""Leases: one row for each request between `open` and `close`. The caller holds the manager's lock.

A lease is OPEN until a holder claims it (or it expires), CLAIMED until the holder closes it (or dies). The cancel flag
stands in the row, so that the holder reads it without a call."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from qwen35.errors import Cancelled, DeadlineExceeded, InvalidArgument, Unavailable
from qwen35.state.extents import HolderRef
from qwen35.state.tables import FREE, LEASE_CLAIMED, LEASE_OPEN, Tables

REMEMBER_CANCEL_SECONDS = 10.0
CLAIMED, EXPIRED, CANCELLED = "claimed", "expired", "cancelled"  # answers of `claim`


@dataclass(frozen=True)
class Lease:
    """Names a lease: its row and the generation that the row had."""

    row: int
    generation: int


class LeaseTable:
    """Open, claim, close, cancel, expire."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        self._rows = tables.leases

    def open(self, request_id: str, *, now: float, arrival: float, deadline: float, claim_within: float) -> Lease:
        """A lease for a request that arrived at ``arrival``; all times in seconds of CLOCK_MONOTONIC.

        A cancel of the same id that came after the arrival refuses it."""
        if deadline <= now:
            raise DeadlineExceeded(f"deadline: expected a time to come, got {now - deadline:.3f} s ago")
        low, high = _digest(request_id)
        if request_id and self._is_remembered(low, high, now, arrival):
            raise Cancelled()
        free = np.flatnonzero(self._rows["state"] == FREE)
        if len(free) == 0:
            raise Unavailable(f"leases: expected fewer than {len(self._rows)} requests at a time; try again later")
        row, generation = int(free[0]), self._tables.new_generation()
        self._rows[row] = (FREE, 0, generation, 0, 0, now, min(now + claim_within, deadline), deadline, low, high)
        self._rows["state"][row] = LEASE_OPEN
        return Lease(row, generation)

    def claim(self, holder: HolderRef, lease: Lease) -> str:
        """CLAIMED, EXPIRED or CANCELLED. A second claim by the same holder is CLAIMED again."""
        if not self._is_current(lease):
            return EXPIRED
        row = self._rows[lease.row]
        if row["state"] == LEASE_CLAIMED:
            return CLAIMED if self._is_owned(row, holder) else EXPIRED
        if row["cancelled"]:
            row["state"] = FREE
            return CANCELLED
        row["holder"], row["holder_generation"] = holder.row, holder.generation
        row["state"] = LEASE_CLAIMED
        return CLAIMED

    def is_claimed(self, holder: HolderRef, lease: Lease) -> bool:
        """Whether it is live and the holder's."""
        if not self._is_current(lease):
            return False
        row = self._rows[lease.row]
        return bool(row["state"] == LEASE_CLAIMED) and self._is_owned(row, holder)

    def close(self, holder: HolderRef | None, lease: Lease) -> bool:
        """Free the row. False when it's gone already or another holder's; without a holder only an OPEN one goes."""
        if not self._is_current(lease):
            return False
        row = self._rows[lease.row]
        if row["state"] == LEASE_CLAIMED and (holder is None or not self._is_owned(row, holder)):
            return False
        row["state"] = FREE
        return True

    def cancel(self, request_id: str, now: float) -> int:
        """Flag every live lease of the id and remember it for 10 s; returns how many leases were flagged."""
        if not request_id:
            raise InvalidArgument.field("request_id", "a non-empty string", request_id)
        low, high = _digest(request_id)
        hits = (self._rows["state"] != FREE) & (self._rows["id_low"] == low) & (self._rows["id_high"] == high)
        self._rows["cancelled"][hits] = 1
        oldest = int(np.argmin(self._tables.cancels["until"]))
        self._tables.cancels[oldest] = (low, high, now, now + REMEMBER_CANCEL_SECONDS)
        return int(hits.sum())

    def cancel_all(self) -> int:
        """Flag every live lease; returns how many were flagged."""
        live = self._rows["state"] != FREE
        self._rows["cancelled"][live] = 1
        return int(live.sum())

    def expire(self, now: float) -> int:
        """Free the leases that nobody has claimed in time; returns how many."""
        late = (self._rows["state"] == LEASE_OPEN) & (self._rows["expires"] <= now)
        self._rows["state"][late] = FREE
        return int(late.sum())

    def close_all(self, holder_row: int) -> int:
        """Free the leases of a holder that is gone; returns how many."""
        owned = (self._rows["state"] == LEASE_CLAIMED) & (self._rows["holder"] == holder_row)
        self._rows["state"][owned] = FREE
        return int(owned.sum())

    def cancelled(self, leases: Sequence[Lease]) -> list[bool]:
        """Which of the holder's own claimed leases are to stop. Reads only: no lock, no call."""
        if not leases:
            return []
        index = np.fromiter((lease.row for lease in leases), np.int64, len(leases))
        generation = np.fromiter((lease.generation for lease in leases), np.int64, len(leases))
        rows = self._rows
        return ((rows["generation"][index] == generation) & (rows["cancelled"][index] != 0)).tolist()

    def _is_current(self, lease: Lease) -> bool:
        if not 0 <= lease.row < len(self._rows):
            return False
        row = self._rows[lease.row]
        return bool(row["state"] != FREE and row["generation"] == lease.generation)

    def _is_remembered(self, low: int, high: int, now: float, arrival: float) -> bool:
        cancels = self._tables.cancels
        is_same = (cancels["id_low"] == low) & (cancels["id_high"] == high)
        return bool(np.any(is_same & (cancels["until"] > now) & (cancels["cancelled_at"] >= arrival)))

    @staticmethod
    def _is_owned(row: np.void, holder: HolderRef) -> bool:
        return bool(row["holder"] == holder.row and row["holder_generation"] == holder.generation)


def _digest(request_id: str) -> tuple[int, int]:
    digest = hashlib.blake2b(request_id.encode("utf-8", "surrogatepass"), digest_size=16).digest()
    return int.from_bytes(digest[:8], "little", signed=True), int.from_bytes(digest[8:], "little", signed=True)
