"""Extents: sets of blocks and slots that a holder has been given. The caller holds the manager's lock.

A block or slot has one owner at any time, a number in one array, so nothing is ever counted twice. An extent that is
half made or half released when its manager dies is CHANGING and is undone by `recover`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import numpy as np

from qwen35.errors import Unavailable
from qwen35.state.tables import EXTENT_CHANGING, EXTENT_HELD, FREE, OWNER_FREE, Tables


class Need(Enum):
    """How much a holder needs what it asks for, and so what is done for it."""

    SPARE = "spare"  # free ones, as many as there are
    RESERVE = "reserve"  # and cached ones that nobody uses, if all are to be had that way
    WISH = "wish"  # somebody waits for all of them or none: the other holders are asked for what lies idle with them


@dataclass(frozen=True)
class ExtentRef:
    """Names an extent: its row and the generation that the row had."""

    row: int
    generation: int


@dataclass(frozen=True)
class HolderRef:
    """Names a holder: its row and the generation that the row had."""

    row: int
    generation: int


@dataclass(frozen=True)
class Extent:
    """Blocks and slots that belong to one holder until it releases them."""

    ref: ExtentRef
    block_ids: tuple[int, ...]
    slots: tuple[int, ...]


class ExtentTable:
    """Acquire, release, look up."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables

    def acquire(self, holder: HolderRef, key: int, num_blocks: int, num_slots: int) -> ExtentRef | None:
        """Up to so many free blocks and slots, lowest numbers first; None when nothing of either is free. ``key``:
        unique in the holder's life."""
        blocks = _lowest_free(self._tables.block_owner, num_blocks)
        slots = _lowest_free(self._tables.slot_owner, num_slots)
        if len(blocks) + len(slots) == 0:
            return None
        rows = self._tables.extents
        free_rows = np.flatnonzero(rows["state"] == FREE)
        if len(free_rows) == 0:
            raise Unavailable(f"extents: expected a free row, got {len(rows)} extents held")
        row, generation = int(free_rows[0]), self._tables.new_generation()
        rows[row] = (EXTENT_CHANGING, generation, holder.row, holder.generation, key)
        self._tables.block_owner[blocks] = row + 1
        self._tables.slot_owner[slots] = row + 1
        rows["state"][row] = EXTENT_HELD
        return ExtentRef(row, generation)

    def release(self, holder: HolderRef, extent: ExtentRef) -> bool:
        """Free everything in the extent; False when it's not (or no longer) this holder's."""
        row = self._tables.extents[extent.row] if 0 <= extent.row < len(self._tables.extents) else None
        if row is None or row["state"] != EXTENT_HELD or row["generation"] != extent.generation:
            return False
        if (row["holder"], row["holder_generation"]) != (holder.row, holder.generation):
            return False
        self._free(extent.row)
        return True

    def release_all(self, holder_row: int) -> int:
        """Free every extent of a holder that is gone; returns how many there were."""
        rows = self._tables.extents
        owned = np.flatnonzero((rows["state"] == EXTENT_HELD) & (rows["holder"] == holder_row))
        for row in owned:
            self._free(int(row))
        return len(owned)

    def drop_empty(self) -> None:
        """Free the rows of extents of which the prefix cache has taken everything."""
        rows = self._tables.extents
        sizes = sum(
            np.bincount(owner[owner > OWNER_FREE] - 1, minlength=len(rows))
            for owner in (self._tables.block_owner, self._tables.slot_owner)
        )
        rows["state"][(rows["state"] == EXTENT_HELD) & (sizes == 0)] = FREE

    def recover(self) -> int:
        """Undo what a manager left half done; returns how many extents that were."""
        changing = np.flatnonzero(self._tables.extents["state"] == EXTENT_CHANGING)
        for row in changing:
            self._free(int(row))
        return len(changing)

    def contents(self, ref: ExtentRef) -> Extent:
        """Block and slot numbers of a held extent; a reader needs no lock for its own extents."""
        blocks = np.flatnonzero(self._tables.block_owner == ref.row + 1)
        slots = np.flatnonzero(self._tables.slot_owner == ref.row + 1)
        return Extent(ref, tuple(blocks.tolist()), tuple(slots.tolist()))

    def find(self, holder: HolderRef, key: int) -> ExtentRef | None:
        """The extent that was acquired with ``key``: a holder whose answer was lost asks again."""
        rows = self._tables.extents
        is_same = (rows["state"] == EXTENT_HELD) & (rows["holder"] == holder.row)
        is_same &= (rows["holder_generation"] == holder.generation) & (rows["key"] == key)
        found = np.flatnonzero(is_same)
        return ExtentRef(int(found[0]), int(rows["generation"][found[0]])) if len(found) else None

    def _free(self, row: int) -> None:
        self._tables.extents["state"][row] = EXTENT_CHANGING
        for owner in (self._tables.block_owner, self._tables.slot_owner):
            owner[owner == row + 1] = OWNER_FREE
        self._tables.extents["state"][row] = FREE


def _lowest_free(owner: np.ndarray, count: int) -> np.ndarray:
    return np.flatnonzero(owner == OWNER_FREE)[: max(count, 0)]
