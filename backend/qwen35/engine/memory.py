"""Blocks and slots of sequences: taken as a sequence grows, given back at once. Knows no order among sequences."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from qwen35.engine.sequence import Sequence
from qwen35.errors import Unavailable


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


class Memory:
    """Keeps ``block_ids``, ``num_held_tokens`` and ``slot`` of the sequences; nobody else writes them."""

    def __init__(self, pool: Pool, *, block_tokens: int) -> None:
        self._pool = pool
        self._block_tokens = block_tokens

    @property
    def may_get_blocks(self) -> bool:
        return self._pool.may_get_blocks

    def start(self, sequence: Sequence, num_spare_blocks: int) -> bool:
        """A slot, and blocks for all that is decided and one token more; False, and nothing is taken, unless they are
        there and leave ``num_spare_blocks``."""
        num_blocks = self._num_blocks(sequence.num_needed_tokens)
        if not self._pool.can_allocate(num_blocks + num_spare_blocks, num_slots=1):
            return False
        try:
            sequence.slot = self._pool.allocate_slot()
        except Unavailable:  # the pool's own thread gave memory back in between
            return False
        if self.extend(sequence, sequence.num_needed_tokens):
            return True
        self.release(sequence)
        return False

    def extend(self, sequence: Sequence, num_tokens: int) -> bool:
        """Room for the first ``num_tokens`` of a sequence; False, and nothing changes, when blocks are missing."""
        num_missing = self._num_blocks(num_tokens) - len(sequence.block_ids)
        if num_missing <= 0:
            return True
        if not self._pool.can_allocate(num_missing):
            return False
        try:
            sequence.block_ids += tuple(self._pool.allocate_blocks(num_missing))
        except Unavailable:
            return False
        sequence.num_held_tokens = len(sequence.block_ids) * self._block_tokens
        return True

    def extend_if_free(self, sequence: Sequence, num_tokens: int) -> None:
        """As ``extend``, for what is merely useful: asks nobody for blocks that are not at hand."""
        if self._num_blocks(num_tokens) - len(sequence.block_ids) <= self._pool.num_free_blocks:
            self.extend(sequence, num_tokens)

    def release(self, sequence: Sequence) -> None:
        if sequence.block_ids:
            self._pool.free_blocks(list(sequence.block_ids))
        if sequence.slot is not None:
            self._pool.free_slot(sequence.slot)
        sequence.block_ids, sequence.num_held_tokens, sequence.slot = (), 0, None

    def needs_room_of(self, sequence: Sequence, num_spare_blocks: int, others: Iterable[Sequence]) -> bool:
        """Whether ``start`` fails now, and would succeed if ``others`` gave back what they hold, but not by waiting for
        memory that is on its way."""
        pool, given = self._pool, list(others)
        num_free_blocks, num_free_slots = pool.num_free_blocks, pool.num_free_slots
        num_blocks = self._num_blocks(sequence.num_needed_tokens) + num_spare_blocks
        has_blocks, has_slot = num_free_blocks >= num_blocks, num_free_slots > 0
        if (has_blocks or pool.may_get_blocks) and (has_slot or pool.may_get_slots):
            return False
        num_given_blocks = sum(len(other.block_ids) for other in given)
        return num_free_blocks + num_given_blocks >= num_blocks and num_free_slots + len(given) > 0

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_tokens)
