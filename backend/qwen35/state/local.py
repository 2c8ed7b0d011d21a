"""State of one process: anonymous memory, and the same manager and pool as behind a server. No Triton, no files."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Sequence

import torch

from qwen35.state.cache import view_of_bytes
from qwen35.state.geometry import Geometry
from qwen35.state.holder import Clock, Holder
from qwen35.state.locks import Lock, ThreadLock
from qwen35.state.manager import Manager
from qwen35.state.pool import BlockPool
from qwen35.state.prefix import PrefixReader
from qwen35.state.source import ManagerSource
from qwen35.state.tables import LAYOUT_VERSION, TableLayout, Tables


class LocalTables:
    """Tables in this process's own memory."""

    def __init__(self, geometry: Geometry) -> None:
        self.geometry = geometry
        self.tables = Tables.over(bytearray(TableLayout.of(geometry).num_bytes), geometry)
        self.tables.header["layout_version"] = LAYOUT_VERSION
        self._locks: dict[str, threading.Lock] = defaultdict(threading.Lock)

    def new_lock(self, name: str) -> Lock:
        return ThreadLock(self._locks[name])


class LocalState:
    """``pool`` hands out every block and slot of ``cache`` (all zero at first); ``manager`` is there for leases and for
    the prefix cache, into which ``reader`` looks.

    The pool holds everything from the start and needs no thread: when it runs short it asks at once for what has come
    free from the cache and for what the cache can give up."""

    def __init__(
        self,
        geometry: Geometry,
        device: torch.device | str = "cpu",
        *,
        kv_scales: Sequence[tuple[float, float]] = (),
        unclaimed_lease_seconds: float = 5.0,
        prefix_cache_bytes: int = 0,
        clock: Clock = time.monotonic,
    ) -> None:
        self.geometry = geometry
        self._owner = owner = LocalTables(geometry)
        self.manager = Manager(
            owner,
            unclaimed_lease_seconds=unclaimed_lease_seconds,
            prefix_cache_bytes=prefix_cache_bytes,
            clock=clock,
        )
        self.reader = PrefixReader(owner.tables)
        self.holder = Holder.register(owner, "local", clock)
        self.pool = BlockPool(
            ManagerSource(self.manager, owner, self.holder, clock),
            num_total_blocks=geometry.num_blocks,
            num_total_slots=geometry.num_slots,
            extent_slots=1,
            asks_at_once=True,
        )
        self.pool.can_allocate(geometry.num_blocks, geometry.num_slots)
        flat = torch.zeros(geometry.cache_bytes, dtype=torch.uint8, device=device)
        self.cache = view_of_bytes(flat, geometry, kv_scales)

    def close(self) -> None:
        """Give everything back; a block still in use is a `StateError`."""
        self.pool.close()
        self.holder.close()
