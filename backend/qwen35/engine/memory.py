"""Blocks and slots of sequences: taken as a sequence grows, given back at once. Knows no order among sequences."""

from __future__ import annotations

from collections.abc import Iterable

from qwen35.engine.ledger import Ledger, Pool
from qwen35.engine.sequence import Sequence
from qwen35.errors import Unavailable


class Memory:
    """Keeps ``block_ids``, ``num_held_tokens`` and ``slot`` of the sequences. Those that start from a checkpoint share
    its full blocks; the partial one they get as a block of their own, to be copied into."""

    def __init__(self, pool: Pool, *, block_tokens: int, max_sequences: int) -> None:
        self.ledger = Ledger(pool)
        self._pool = pool
        self._block_tokens = block_tokens
        self._max_sequences = max_sequences
        self._started: set[Sequence] = set()

    @property
    def may_get_blocks(self) -> bool:
        return self._pool.may_get_blocks

    def start(self, sequence: Sequence, num_spare_blocks: int) -> bool:
        """A slot, and blocks for all that is decided and one token more; False, and nothing is taken, unless they are
        there and leave ``num_spare_blocks``."""
        num_blocks = self._num_missing_blocks(sequence)
        if len(self._started) == self._max_sequences:
            return False
        if not self._pool.can_allocate(num_blocks + num_spare_blocks, num_slots=1):
            return False
        try:
            sequence.slot = self._pool.allocate_slot()
        except Unavailable:  # the pool's own thread gave memory back in between
            return False
        self._started.add(sequence)
        if sequence.base is not None:
            sequence.block_ids = sequence.base.block_ids[: self._num_shared_blocks(sequence)]
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
            sequence.block_ids += self.ledger.take_blocks(num_missing)
        except Unavailable:
            return False
        sequence.num_held_tokens = len(sequence.block_ids) * self._block_tokens
        return True

    def extend_if_free(self, sequence: Sequence, num_tokens: int) -> None:
        """As ``extend``, for what is merely useful: asks nobody for blocks that are not at hand."""
        if self._num_blocks(num_tokens) - len(sequence.block_ids) <= self._pool.num_free_blocks:
            self.extend(sequence, num_tokens)

    def release(self, sequence: Sequence) -> None:
        """All but the checkpoint that it may start from."""
        self.ledger.drop(sequence.block_ids)
        if sequence.slot is not None:
            self._pool.free_slot(sequence.slot)
        sequence.block_ids, sequence.num_held_tokens, sequence.slot = (), 0, None
        self._started.discard(sequence)

    def spare_slot(self) -> int | None:
        """For a checkpoint; None when there is none now."""
        if not self._pool.can_allocate(0, num_slots=1):
            return None
        try:
            return self._pool.allocate_slot()
        except Unavailable:
            return None

    def return_slot(self, slot: int) -> None:
        """One that was spared or handed over."""
        self._pool.free_slot(slot)

    def hand_over_slot(self, sequence: Sequence) -> None:
        """The slot of a sequence that has ended is somebody else's from now on."""
        sequence.slot = None
        self._started.discard(sequence)

    def replace_blocks(self, sequence: Sequence, block_ids: tuple[int, ...]) -> None:
        """The first blocks of a sequence by cached ones with the same contents."""
        replaced = sequence.block_ids[: len(block_ids)]
        sequence.block_ids = block_ids + sequence.block_ids[len(block_ids) :]
        self.ledger.drop(old for old, new in zip(replaced, block_ids, strict=True) if old != new)

    def is_coming(self, sequence: Sequence, num_spare_blocks: int) -> bool:
        """Whether what ``start`` lacks may come without anybody here giving something back."""
        has_blocks, has_slot = self._has(sequence, num_spare_blocks)
        has_place = len(self._started) < self._max_sequences
        return (has_blocks or self._pool.may_get_blocks) and (has_slot or (has_place and self._pool.may_get_slots))

    def needs_room_of(self, sequence: Sequence, num_spare_blocks: int, others: Iterable[Sequence]) -> bool:
        """Whether ``start`` fails now, and would succeed if ``others`` gave back what they hold, but not by waiting for
        memory that is on its way."""
        given = list(others)
        if self.is_coming(sequence, num_spare_blocks):
            return False
        num_blocks = self._num_missing_blocks(sequence) + num_spare_blocks
        num_given_blocks = sum(len(other.block_ids) for other in given)
        has_slot = self._has(sequence, num_spare_blocks)[1]
        return self._pool.num_free_blocks + num_given_blocks >= num_blocks and (has_slot or len(given) > 0)

    def _has(self, sequence: Sequence, num_spare_blocks: int) -> tuple[bool, bool]:
        """Blocks, and a slot, for ``start``."""
        num_blocks = self._num_missing_blocks(sequence) + num_spare_blocks
        has_slot = self._pool.num_free_slots > 0 and len(self._started) < self._max_sequences
        return self._pool.num_free_blocks >= num_blocks, has_slot

    def _num_missing_blocks(self, sequence: Sequence) -> int:
        return self._num_blocks(sequence.num_needed_tokens) - self._num_shared_blocks(sequence)

    def _num_shared_blocks(self, sequence: Sequence) -> int:
        return 0 if sequence.base is None else sequence.base.num_tokens // self._block_tokens

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_tokens)
