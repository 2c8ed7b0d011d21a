"""Which blocks of the pool are in use here, and how often: by the sequence that writes them, and by checkpoints that
are being published. A block that the cache has taken is in nobody's ledger; a pinned checkpoint keeps it in place."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Protocol


class Pool(Protocol):
    """Free blocks and slots (``state.pool.BlockPool``)."""

    num_total_blocks: int  # that could ever be had

    @property
    def num_free_blocks(self) -> int: ...

    @property
    def num_free_slots(self) -> int: ...

    @property
    def may_get_blocks(self) -> bool:
        """Whether free blocks may come without anybody here giving some back."""
        ...

    @property
    def may_get_slots(self) -> bool: ...

    def can_allocate(self, num_blocks: int, num_slots: int = 0) -> bool: ...

    def allocate_blocks(self, num_blocks: int) -> list[int]: ...

    def free_blocks(self, block_ids: list[int]) -> None: ...

    def allocate_slot(self) -> int: ...

    def free_slot(self, slot: int) -> None: ...

    def transfer(self, block_ids: Iterable[int], slots: Iterable[int]) -> None:
        """These belong to the cache from now on."""
        ...


class Ledger:
    """Counts uses of the pool's blocks. Cached blocks pass through ``share`` and ``drop`` without effect."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self._num_uses: Counter[int] = Counter()

    def take_blocks(self, num_blocks: int) -> tuple[int, ...]:
        """Raises Unavailable when so many are not free now."""
        block_ids = tuple(self.pool.allocate_blocks(num_blocks))
        self._num_uses.update(block_ids)
        return block_ids

    def share(self, block_ids: Iterable[int]) -> None:
        self._num_uses.update(block_id for block_id in block_ids if block_id in self._num_uses)

    def drop(self, block_ids: Iterable[int]) -> None:
        """One use less of each; blocks that nobody uses any more go back to the pool."""
        own = [block_id for block_id in block_ids if block_id in self._num_uses]
        self._num_uses.subtract(own)
        free = [block_id for block_id in own if self._num_uses[block_id] == 0]
        self._forget(free)
        if free:
            self.pool.free_blocks(free)

    def give(self, block_ids: Iterable[int], slots: Iterable[int]) -> None:
        """The cache has taken these, whoever goes on using them."""
        taken = list(block_ids)
        self._forget(taken)
        self.pool.transfer(taken, slots)

    def _forget(self, block_ids: list[int]) -> None:
        for block_id in block_ids:
            del self._num_uses[block_id]
