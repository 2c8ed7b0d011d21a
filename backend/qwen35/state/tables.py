"""The ownership tables as numpy arrays over a piece of memory: header, holders, extents, owners, leases, cancels.

Knows the layout only; who may write what:
  header, extents, owners, leases, cancels   the manager, under the manager's lock
  a holder's row                             the holder while it holds its lock; the manager once it got that lock

Times are seconds of CLOCK_MONOTONIC, which all processes of a machine share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from qwen35.state.geometry import Geometry

LAYOUT_VERSION = 1
MAGIC = 0x5133355354415445  # written last: a header without it was never finished
HEADER_BYTES = 4096
MAX_REMEMBERED_CANCELS = 256

HEADER = np.dtype(
    [
        ("magic", "i8"),
        ("layout_version", "i8"),
        ("generation", "i8"),  # of the arena: nanoseconds since the epoch when it was created
        ("next_generation", "i8"),  # the last generation given to an extent or lease
        ("busy", "i8"),  # 1 while a manager changes the tables
        ("pressure_until", "f8"),  # until then holders give idle extents back at once
        ("num_expired_leases", "i8"),
        ("num_reclaimed_extents", "i8"),
        ("num_dead_holders", "i8"),
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

FREE = 0  # of every row
HOLDER_ACTIVE, HOLDER_DONE = 1, 2
EXTENT_CHANGING, EXTENT_HELD = 1, 2
LEASE_OPEN, LEASE_CLAIMED = 1, 2
OWNER_FREE = 0  # owner of a block or slot: 0 nobody, e + 1 the extent in row e, negative the prefix cache


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
        )
        offsets = [HEADER_BYTES]
        for num_bytes in sizes:
            offsets.append(offsets[-1] + -(-num_bytes // 64) * 64)
        return cls(*offsets)


@dataclass(frozen=True)
class Tables:
    """Arrays that alias one buffer. ``header`` is a zero-dimensional structured array."""

    header: np.ndarray
    holders: np.ndarray  # [max_holders] HOLDER
    extents: np.ndarray  # [max_extents] EXTENT
    block_owner: np.ndarray  # [B] int32
    slot_owner: np.ndarray  # [C] int32
    leases: np.ndarray  # [max_leases] LEASE
    cancels: np.ndarray  # [MAX_REMEMBERED_CANCELS] CANCEL

    @classmethod
    def over(cls, buffer: Buffer, geometry: Geometry) -> Tables:
        layout = TableLayout.of(geometry)
        if len(buffer) < layout.num_bytes:
            raise ValueError(f"tables: expected {layout.num_bytes} bytes, got {len(buffer)}")
        return cls(
            header=header_over(buffer),
            holders=np.frombuffer(buffer, HOLDER, geometry.max_holders, layout.holders),
            extents=np.frombuffer(buffer, EXTENT, geometry.max_extents, layout.extents),
            block_owner=np.frombuffer(buffer, np.int32, geometry.num_blocks, layout.block_owner),
            slot_owner=np.frombuffer(buffer, np.int32, geometry.num_slots, layout.slot_owner),
            leases=np.frombuffer(buffer, LEASE, geometry.max_leases, layout.leases),
            cancels=np.frombuffer(buffer, CANCEL, MAX_REMEMBERED_CANCELS, layout.cancels),
        )

    def new_generation(self) -> int:
        """The next number for an extent or lease; unique in the life of the arena."""
        self.header["next_generation"] += 1
        return int(self.header["next_generation"])


def header_over(buffer: Buffer) -> np.ndarray:
    """The header alone, readable before the geometry is known."""
    return np.frombuffer(buffer, HEADER, 1).reshape(())
