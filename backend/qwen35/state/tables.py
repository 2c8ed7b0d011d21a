"""The ownership tables as numpy arrays over a piece of memory: header, holders, extents, owners, leases, cancels, and
the entries, block keys and pins of the prefix cache.

Knows the layout only; who may write what:
  a holder's row    the holder while it holds its lock; the manager once it got that lock
  everything else   the manager, under the manager's lock

Times are seconds of CLOCK_MONOTONIC, which all processes of a machine share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from qwen35.state.geometry import Geometry

LAYOUT_VERSION = 2
MAGIC = 0x5133355354415445  # written last: a header without it was never finished
HEADER_BYTES = 4096
MAX_REMEMBERED_CANCELS = 256

HEADER = np.dtype(
    [
        ("magic", "i8"),
        ("layout_version", "i8"),
        ("generation", "i8"),  # of the arena: nanoseconds since the epoch when it was created
        ("next_generation", "i8"),  # the last number given to an extent, lease, entry or use of an entry
        ("busy", "i8"),  # 1 while a manager changes the tables
        ("pressure_holder", "i8"),  # row of the holder whose turn it is to get what it wishes for,
        ("pressure_until", "f8"),  # and until when: the others give idle extents back at once
        ("num_expired_leases", "i8"),
        ("num_reclaimed_extents", "i8"),
        ("num_dead_holders", "i8"),
        ("num_lookups", "i8"),  # of claims in the prefix cache
        ("num_hits", "i8"),
        ("num_hit_tokens", "i8"),
        ("num_published", "i8"),
        ("num_refused", "i8"),  # publications that did not fit what the tables said
        ("num_evicted", "i8"),
        ("is_cache_ready", "i8"),  # the file with the cache bytes is complete
        ("fingerprint", "S128"),
        ("geometry", "S2048"),  # JSON
    ],
    align=True,
)
HOLDER = np.dtype(
    [
        ("state", "i8"),
        ("generation", "i8"),  # counts the holders that this row has had
        ("pid", "i8"),
        ("start_time", "i8"),  # of the process, clock ticks since boot
        ("heartbeat", "f8"),
        ("used_blocks", "i8"),  # of its extents, as it says
        ("used_slots", "i8"),
        ("instance", "S64"),
    ],
    align=True,
)
EXTENT = np.dtype(
    [("state", "i8"), ("generation", "i8"), ("holder", "i8"), ("holder_generation", "i8"), ("key", "i8")], align=True
)
LEASE = np.dtype(
    [
        ("state", "i8"),
        ("cancelled", "i8"),
        ("generation", "i8"),
        ("holder", "i8"),
        ("holder_generation", "i8"),
        ("opened", "f8"),
        ("expires", "f8"),  # while nobody has claimed it
        ("deadline", "f8"),
        ("id_low", "i8"),  # digest of the request id
        ("id_high", "i8"),
    ],
    align=True,
)
CANCEL = np.dtype([("id_low", "i8"), ("id_high", "i8"), ("cancelled_at", "f8"), ("until", "f8")], align=True)

ENTRY = np.dtype(  # one row for each slot: the entry whose state is in that slot
    [
        ("state", "i8"),
        ("generation", "i8"),
        ("num_tokens", "i8"),
        ("digest_low", "i8"),
        ("digest_high", "i8"),
        ("has_draft", "i8"),
        ("last_used", "i8"),  # a number of `new_generation`: larger is later
    ],
    align=True,
)
PIN = np.dtype(
    [("state", "i8"), ("entry", "i8"), ("entry_generation", "i8"), ("lease", "i8"), ("lease_generation", "i8")],
    align=True,
)

FREE = 0  # of every row
HOLDER_ACTIVE, HOLDER_DONE = 1, 2
EXTENT_CHANGING, EXTENT_HELD = 1, 2
LEASE_OPEN, LEASE_CLAIMED = 1, 2
ENTRY_PUBLISHING, ENTRY_READY, ENTRY_EVICTING = 1, 2, 3
PIN_HELD = 1
OWNER_FREE, OWNER_CACHE = 0, -1  # of a block or slot: nobody, the prefix cache, or e + 1: the extent in row e


class Buffer(Protocol):
    """Writable memory: an mmap or a bytearray."""

    def __len__(self) -> int: ...


@dataclass(frozen=True)
class TableLayout:
    """Byte offsets of the tables, which follow the header page."""

    holders: int
    extents: int
    block_owner: int
    slot_owner: int
    leases: int
    cancels: int
    entries: int
    entry_blocks: int
    entry_taken: int
    block_keys: int
    pins: int
    num_bytes: int

    @classmethod
    def of(cls, geometry: Geometry) -> TableLayout:
        sizes = (
            geometry.max_holders * HOLDER.itemsize,
            geometry.max_extents * EXTENT.itemsize,
            geometry.num_blocks * 4,
            geometry.num_slots * 4,
            geometry.max_leases * LEASE.itemsize,
            MAX_REMEMBERED_CANCELS * CANCEL.itemsize,
            geometry.num_slots * ENTRY.itemsize,
            geometry.num_slots * geometry.max_sequence_blocks * 4,
            geometry.num_slots * geometry.max_sequence_blocks,
            geometry.num_blocks * 16,
            geometry.max_pins * PIN.itemsize,
        )
        offsets = [HEADER_BYTES]
        for num_bytes in sizes:
            offsets.append(offsets[-1] + -(-num_bytes // 64) * 64)
        return cls(*offsets)


@dataclass(frozen=True)
class Tables:
    """Arrays that alias one buffer. ``header`` is a zero-dimensional structured array. L: most blocks of a sequence."""

    geometry: Geometry
    header: np.ndarray
    holders: np.ndarray  # [max_holders] HOLDER
    extents: np.ndarray  # [max_extents] EXTENT
    block_owner: np.ndarray  # [B] int32
    slot_owner: np.ndarray  # [C] int32
    leases: np.ndarray  # [max_leases] LEASE
    cancels: np.ndarray  # [MAX_REMEMBERED_CANCELS] CANCEL
    entries: np.ndarray  # [C] ENTRY
    entry_blocks: np.ndarray  # [C, L] int32, the blocks that cover an entry's tokens, in order; undefined behind them
    entry_taken: np.ndarray  # [C, L] bool, which of them its publisher gave
    block_keys: np.ndarray  # [B, 2] int64 of full cached blocks: content, lowest bit: with the draft's half
    pins: np.ndarray  # [max_pins] PIN, at most one for an entry and a lease

    @classmethod
    def over(cls, buffer: Buffer, geometry: Geometry) -> Tables:
        layout = TableLayout.of(geometry)
        if len(buffer) < layout.num_bytes:
            raise ValueError(f"tables: expected {layout.num_bytes} bytes, got {len(buffer)}")
        lists = (geometry.num_slots, geometry.max_sequence_blocks)
        num_listed = lists[0] * lists[1]
        return cls(
            geometry=geometry,
            header=header_over(buffer),
            holders=np.frombuffer(buffer, HOLDER, geometry.max_holders, layout.holders),
            extents=np.frombuffer(buffer, EXTENT, geometry.max_extents, layout.extents),
            block_owner=np.frombuffer(buffer, np.int32, geometry.num_blocks, layout.block_owner),
            slot_owner=np.frombuffer(buffer, np.int32, geometry.num_slots, layout.slot_owner),
            leases=np.frombuffer(buffer, LEASE, geometry.max_leases, layout.leases),
            cancels=np.frombuffer(buffer, CANCEL, MAX_REMEMBERED_CANCELS, layout.cancels),
            entries=np.frombuffer(buffer, ENTRY, geometry.num_slots, layout.entries),
            entry_blocks=np.frombuffer(buffer, np.int32, num_listed, layout.entry_blocks).reshape(lists),
            entry_taken=np.frombuffer(buffer, np.bool_, num_listed, layout.entry_taken).reshape(lists),
            block_keys=np.frombuffer(buffer, np.int64, 2 * geometry.num_blocks, layout.block_keys).reshape(-1, 2),
            pins=np.frombuffer(buffer, PIN, geometry.max_pins, layout.pins),
        )

    def new_generation(self) -> int:
        """The next number for an extent, a lease, an entry or a use of one; unique in the life of the arena."""
        self.header["next_generation"] += 1
        return int(self.header["next_generation"])


def header_over(buffer: Buffer) -> np.ndarray:
    """The header alone, readable before the geometry is known."""
    return np.frombuffer(buffer, HEADER, 1).reshape(())
