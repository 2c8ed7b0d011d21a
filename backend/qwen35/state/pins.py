"""Pins: which leases use which entries of the prefix cache. The caller holds the manager's lock."""

from __future__ import annotations

import numpy as np

from qwen35.state.leases import Lease
from qwen35.state.prefix import EntryRef
from qwen35.state.tables import ENTRY_READY, FREE, LEASE_CLAIMED, PIN_HELD, Tables


class PinTable:
    """Rows, never counts."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        self._rows = tables.pins

    @property
    def is_full(self) -> bool:
        return bool(np.all(self._rows["state"] == PIN_HELD))

    def add(self, entry: EntryRef, lease: Lease) -> bool:
        """False when no row is free."""
        free = np.flatnonzero(self._rows["state"] == FREE)
        if len(free) == 0:
            return False
        self._rows[free[0]] = (FREE, entry.row, entry.generation, lease.row, lease.generation)
        self._rows["state"][free[0]] = PIN_HELD
        return True

    def find(self, entry: EntryRef, lease: Lease) -> int | None:
        held = np.flatnonzero(self._rows["state"] == PIN_HELD)
        wanted = (entry.row, entry.generation, lease.row, lease.generation)
        for index in held[self._rows["entry_generation"][held] == entry.generation].tolist():
            if self._rows[index].item()[1:] == wanted:
                return index
        return None

    def remove(self, entry: EntryRef, lease: Lease) -> bool:
        index = self.find(entry, lease)
        if index is not None:
            self._rows["state"][index] = FREE
        return index is not None

    def drop_stale(self) -> None:
        """Free the rows whose lease or entry has ended."""
        held = np.flatnonzero(self._rows["state"] == PIN_HELD)
        self._rows["state"][held[~self._are_live(self._rows[held])]] = FREE

    def rows_of(self, lease: Lease) -> list[int]:
        """Rows of the entries that it uses."""
        held = self._rows[self._rows["state"] == PIN_HELD]
        is_its = (held["lease"] == lease.row) & (held["lease_generation"] == lease.generation)
        return held["entry"][is_its].tolist()

    def pinned_rows(self) -> np.ndarray:
        """Rows of the entries that are in use."""
        return np.unique(self._rows["entry"][self._rows["state"] == PIN_HELD])

    def _are_live(self, pins: np.ndarray) -> np.ndarray:
        leases = self._tables.leases[pins["lease"]]
        entries = self._tables.entries[pins["entry"]]
        is_live = (leases["state"] == LEASE_CLAIMED) & (leases["generation"] == pins["lease_generation"])
        return is_live & (entries["state"] == ENTRY_READY) & (entries["generation"] == pins["entry_generation"])
