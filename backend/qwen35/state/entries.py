"""Entries of the prefix cache: publish, pin, evict. The caller holds the manager's lock.

An entry lists its blocks and owns the slot of its row; several entries may list one block. No count is kept anywhere:
a cached block is free again when no entry lists it, and an entry is in use while a pin names it and a live lease.
What a manager leaves half done when it dies is carried to its end by `recover`, forward in both directions: the writer
of a publication may go on using its blocks, so they can't go back."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from qwen35.errors import InvalidArgument
from qwen35.state.extents import ExtentTable, HolderRef
from qwen35.state.leases import Lease
from qwen35.state.pins import PinTable
from qwen35.state.prefix import EntryRef, Publication, Published
from qwen35.state.tables import (
    ENTRY_EVICTING,
    ENTRY_PUBLISHING,
    ENTRY_READY,
    EXTENT_HELD,
    FREE,
    OWNER_CACHE,
    OWNER_FREE,
    Tables,
)

NOTHING = Published(None)


class EntryTable:
    """Writes the entries, their lists and keys, and the pins."""

    def __init__(self, tables: Tables, extents: ExtentTable) -> None:
        self._tables = tables
        self._geometry = tables.geometry
        self._rows = tables.entries
        self._pins = PinTable(tables)
        self._extents = extents

    @property
    def cached_bytes(self) -> int:
        """Of blocks and slots that belong to the cache."""
        num_blocks = int((self._tables.block_owner == OWNER_CACHE).sum())
        num_slots = int((self._tables.slot_owner == OWNER_CACHE).sum())
        return num_blocks * self._geometry.block_bytes + num_slots * self._geometry.slot_bytes

    def pin(self, lease: Lease, candidates: Sequence[EntryRef]) -> EntryRef | None:
        """Pin the first of the candidates that still stands, as just used; counts a lookup and a hit. A lease that has
        pinned one of them already keeps that one: its holder asks again because the answer was lost."""
        standing = [entry for entry in candidates if self._is_ready(entry)]
        for entry in standing:
            if self._pins.find(entry, lease) is not None:
                return entry
        self._tables.header["num_lookups"] += 1
        if not standing or not self._pins.add(standing[0], lease):
            return None
        row = self._rows[standing[0].row]
        row["last_used"] = self._tables.new_generation()
        self._tables.header["num_hits"] += 1
        self._tables.header["num_hit_tokens"] += row["num_tokens"]
        return standing[0]

    def unpin(self, lease: Lease, entries: Sequence[EntryRef]) -> int:
        """Returns how many of them the lease had pinned."""
        return sum(self._pins.remove(entry, lease) for entry in entries)

    def drop_stale_pins(self) -> None:
        """Of leases that have ended."""
        self._pins.drop_stale()

    def publish(self, holder: HolderRef, lease: Lease, publication: Publication) -> Published:
        """See `Publication` and `Published`. The same publication again, of the same lease, gets the same answer.

        What is malformed is an `InvalidArgument`; what does not fit the tables any more is refused and counted."""
        blocks = self._checked(publication)
        if self._tables.slot_owner[publication.slot] == OWNER_CACHE:
            return self._repeated(lease, publication)
        if not self._is_acceptable(holder, lease, publication, blocks) or self._pins.is_full:
            self._tables.header["num_refused"] += 1
            return NOTHING
        same = self._find(publication)
        if same is not None:
            self._rows["last_used"][same] = self._tables.new_generation()
            return NOTHING
        return self._add(lease, publication, blocks)

    def num_evictable(self) -> tuple[int, int]:
        """Blocks and slots that are free when every entry that nobody has pinned is evicted."""
        pinned = self._pins.pinned_rows().tolist()
        num_pinned_blocks = len(np.unique(np.concatenate([[], *map(self._listed, pinned)])))
        num_blocks = int((self._tables.block_owner == OWNER_CACHE).sum()) - num_pinned_blocks
        return num_blocks, int((self._tables.slot_owner == OWNER_CACHE).sum()) - len(pinned)

    def evict_until(self, is_enough: Callable[[], bool]) -> int:
        """Evict entries that nobody has pinned, the least recently used first; returns how many."""
        if is_enough():
            return 0
        evictable = self._rows["state"] == ENTRY_READY
        evictable[self._pins.pinned_rows()] = False
        rows = np.flatnonzero(evictable)
        num_lists = self._num_lists()
        num_evicted = 0
        for row in rows[np.argsort(self._rows["last_used"][rows])].tolist():
            if is_enough():
                break
            self._rows["state"][row] = ENTRY_EVICTING
            num_lists[self._listed(row)] -= 1
            self._finish_eviction(row, num_lists)
            num_evicted += 1
        self._tables.header["num_evicted"] += num_evicted
        return num_evicted

    def recover(self) -> int:
        """Carry to the end what a manager left half done; returns how many entries that were."""
        publishing = np.flatnonzero(self._rows["state"] == ENTRY_PUBLISHING).tolist()
        for row in publishing:
            self._finish_publication(row)
        evicting = np.flatnonzero(self._rows["state"] == ENTRY_EVICTING).tolist()
        for row in evicting:
            self._finish_eviction(row, self._num_lists())
        self._pins.drop_stale()
        return len(publishing) + len(evicting)

    def _checked(self, publication: Publication) -> np.ndarray:
        """Its blocks; `InvalidArgument` for numbers that can't be."""
        geometry, num_tokens = self._geometry, publication.num_tokens
        num_blocks = -(-num_tokens // geometry.block_tokens)
        if num_tokens < 1 or num_blocks > geometry.max_sequence_blocks:
            raise InvalidArgument.field("num_tokens", f"1 to {geometry.max_context_tokens}", num_tokens)
        blocks = np.asarray(publication.block_ids, np.int64)
        if blocks.shape != (num_blocks,) or not _are_distinct(blocks, geometry.num_blocks):
            expected = f"{num_blocks} different numbers below {geometry.num_blocks}"
            raise InvalidArgument.field("block_ids", expected, publication.block_ids)
        keys_shape = (num_tokens // geometry.block_tokens, 2)
        if publication.block_keys.shape != keys_shape:
            raise InvalidArgument.field("block_keys", f"shape {keys_shape}", publication.block_keys.shape)
        if not 0 <= publication.slot < geometry.num_slots:
            raise InvalidArgument.field("slot", f"a number below {geometry.num_slots}", publication.slot)
        return blocks

    def _is_acceptable(self, holder: HolderRef, lease: Lease, publication: Publication, blocks: np.ndarray) -> bool:
        """Slot and blocks are the holder's, or cached blocks of this content."""
        owners = self._tables.block_owner[blocks]
        if np.any(owners == OWNER_FREE):
            return False
        own = np.append(owners[owners > OWNER_FREE], self._tables.slot_owner[publication.slot]) - 1
        extents = self._tables.extents[own]
        is_own = (own >= 0) & (extents["state"] == EXTENT_HELD) & (extents["holder"] == holder.row)
        if not np.all(is_own & (extents["holder_generation"] == holder.generation)):
            return False
        keys = self._tables.block_keys[blocks]
        is_good = owners > OWNER_FREE
        num_full = len(publication.block_keys)
        is_good[:num_full] |= _is_same_content(keys[:num_full], publication.block_keys)
        if not np.all(is_good):  # blocks that were cached as last ones, and that the same lease has written on
            used = [[], *map(self._listed, self._pins.rows_of(lease))]
            is_good |= ~keys.any(axis=1) & np.isin(blocks, np.concatenate(used))
        return bool(np.all(is_good))

    def _find(self, publication: Publication) -> int | None:
        rows = self._rows
        is_same = (rows["state"] == ENTRY_READY) & (rows["num_tokens"] == publication.num_tokens)
        is_same &= (rows["digest_low"] == publication.digest[0]) & (rows["digest_high"] == publication.digest[1])
        found = np.flatnonzero(is_same & (rows["has_draft"] >= publication.has_draft))
        return int(found[0]) if len(found) else None

    def _repeated(self, lease: Lease, publication: Publication) -> Published:
        """The answer that a publication got when its slot was taken."""
        row = self._rows[publication.slot]
        entry = EntryRef(publication.slot, int(row["generation"]))
        is_same = (row["digest_low"], row["digest_high"]) == publication.digest
        if not is_same or self._pins.find(entry, lease) is None:
            self._tables.header["num_refused"] += 1
            return NOTHING
        taken = self._tables.entry_taken[entry.row, : len(publication.block_ids)]
        return Published(entry, tuple(self._listed(entry.row)[taken].tolist()))

    def _add(self, lease: Lease, publication: Publication, blocks: np.ndarray) -> Published:
        """Row, lists, keys and pin first; once the row says PUBLISHING, the rest can be done from them."""
        tables, slot, num_blocks = self._tables, publication.slot, len(blocks)
        entry = EntryRef(slot, tables.new_generation())
        listed = self._with_cached_ones(publication, blocks)
        taken = (listed == blocks) & (tables.block_owner[blocks] > OWNER_FREE)
        row = self._rows[slot]
        row["generation"] = entry.generation  # first: readers take a row only if this has not changed meanwhile
        row["num_tokens"], row["has_draft"] = publication.num_tokens, publication.has_draft
        row["digest_low"], row["digest_high"] = publication.digest
        row["last_used"] = tables.new_generation()
        tables.entry_blocks[slot, :num_blocks] = listed
        tables.entry_taken[slot, :num_blocks] = taken
        tables.block_keys[blocks[taken]] = 0
        num_full = len(publication.block_keys)
        keys = publication.block_keys | _HAS_DRAFT
        keys[:, 0] -= not publication.has_draft
        keys[:, 0] |= tables.block_keys[listed[:num_full], 0] & 1
        tables.block_keys[listed[:num_full]] = keys
        self._pins.add(entry, lease)
        row["state"] = ENTRY_PUBLISHING
        self._finish_publication(slot)
        tables.header["num_published"] += 1
        return Published(entry, tuple(blocks[taken].tolist()))

    def _finish_publication(self, row: int) -> None:
        self._tables.block_owner[self._listed(row)] = OWNER_CACHE
        self._tables.slot_owner[row] = OWNER_CACHE
        self._extents.drop_empty()
        self._rows["state"][row] = ENTRY_READY

    def _finish_eviction(self, row: int, num_lists: np.ndarray) -> None:
        """``num_lists`` [B]: how many entries, this one left out, list each block."""
        listed = self._listed(row)
        self._tables.block_owner[listed[num_lists[listed] == 0]] = OWNER_FREE
        self._tables.slot_owner[row] = OWNER_FREE
        self._rows["state"][row] = FREE

    def _with_cached_ones(self, publication: Publication, blocks: np.ndarray) -> np.ndarray:
        """``blocks``, with cached blocks of the same content in the place of full ones of the holder's, where there are
        such. Cached ones stay: their publisher goes on using them, and only its newest entry may be pinned.

        Entries list whole prefixes and a key names all that is before its block: one entry has all the common ones."""
        tables, num_full = self._tables, len(publication.block_keys)
        rows = np.flatnonzero(self._rows["state"] == ENTRY_READY)
        if len(rows) == 0 or num_full == 0:
            return blocks
        low = np.zeros(len(rows), np.int64)  # longest common prefix in blocks, by bisection: low <= it <= high
        high = np.minimum(self._rows["num_tokens"][rows] // self._geometry.block_tokens, num_full)
        while np.any(low < high):
            middle = (low + high + 1) // 2
            last = np.maximum(middle, 1) - 1
            keys = tables.block_keys[tables.entry_blocks[rows, last]]
            is_common = (middle > 0) & _is_same_content(keys, publication.block_keys[last])
            low, high = np.where(is_common, middle, low), np.where(is_common, high, middle - 1)
        best = int(np.argmax(low))
        cached = tables.entry_blocks[rows[best], : low[best]]
        fits = (tables.block_keys[cached, 0] & 1) >= publication.has_draft
        fits &= tables.block_owner[blocks[: low[best]]] > OWNER_FREE
        listed = blocks.copy()
        listed[: low[best]][fits] = cached[fits]
        return listed

    def _listed(self, row: int) -> np.ndarray:
        num_blocks = -(-int(self._rows["num_tokens"][row]) // self._geometry.block_tokens)
        return self._tables.entry_blocks[row, :num_blocks]

    def _num_lists(self) -> np.ndarray:
        """[B]: how many ready entries list each block."""
        ready = np.flatnonzero(self._rows["state"] == ENTRY_READY).tolist()
        lists = [self._listed(row) for row in ready]
        return np.bincount(np.concatenate([[], *lists]).astype(np.int64), minlength=self._geometry.num_blocks)

    def _is_ready(self, entry: EntryRef) -> bool:
        if not 0 <= entry.row < len(self._rows):
            return False
        row = self._rows[entry.row]
        return bool(row["state"] == ENTRY_READY and row["generation"] == entry.generation)


_HAS_DRAFT = np.array([1, 0], np.int64)


def _is_same_content(stored: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Whether stored keys and those of a publication (both [N, 2]) name the same tokens, the draft's half left out."""
    return ((stored | _HAS_DRAFT) == (keys | _HAS_DRAFT)).all(axis=1)


def _are_distinct(numbers: np.ndarray, end: int) -> bool:
    """All from 0 to ``end`` - 1, none twice."""
    if len(numbers) == 0 or numbers.min() < 0 or numbers.max() >= end:
        return False
    return int(np.bincount(numbers).max()) == 1
