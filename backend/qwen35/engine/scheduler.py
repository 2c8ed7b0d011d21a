"""Who waits, who runs, and what the next step does: chunks of prompts mixed with drafted decodes under a token budget.

Knows no model. Admission takes a slot and blocks for everything that a sequence can ever hold, so a running sequence
never waits for memory and nothing can deadlock. Drafts are clamped to the tokens that may still come, so they need no
blocks of their own."""

from __future__ import annotations

import time
from typing import Protocol

from qwen35.engine.batch import Piece
from qwen35.engine.sequence import Sequence
from qwen35.errors import Unavailable


class Pool(Protocol):
    """Free blocks and slots (``state.pool.BlockPool``)."""

    num_total_blocks: int  # that could ever be had

    def can_allocate(self, num_blocks: int, num_slots: int = 0) -> bool: ...

    def allocate_blocks(self, num_blocks: int) -> list[int]: ...

    def free_blocks(self, block_ids: list[int]) -> None: ...

    def allocate_slot(self) -> int: ...

    def free_slot(self, slot: int) -> None: ...


class Scheduler:
    """``waiting`` and ``running`` belong to the engine's thread. Larger priorities first, equals by arrival; a
    running sequence is not displaced. Among equals decodes go before prompts, but leave them a quarter of the budget;
    where it does not reach everyone, those that were served longest ago come first. So nobody starves: prompts always
    advance, and only so many can come as decodes end and free their slots."""

    def __init__(self, pool: Pool, *, block_tokens: int, max_batch_tokens: int) -> None:
        self._pool = pool
        self._block_tokens = block_tokens
        self._max_batch_tokens = max_batch_tokens
        self._step = 0
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)
        self.waiting.sort(key=_waiting_order)  # stable: equals stay in order of arrival

    def next_batch(self) -> list[Piece]:
        """Admits whom it can and picks the pieces of the next step: at most ``max_batch_tokens`` inputs, none twice."""
        self._admit()
        self._step += 1
        pieces: list[Piece] = []
        for priority in sorted({sequence.request.priority for sequence in self.running}, reverse=True):
            equals = sorted((s for s in self.running if s.request.priority == priority), key=_turn)
            num_left = self._max_batch_tokens - _num_inputs(pieces)
            prompts = [sequence for sequence in equals if sequence.is_prefilling]
            num_wanted = sum(len(sequence.token_ids) - sequence.num_computed_tokens for sequence in prompts)
            num_reserved = min(num_wanted, -(-num_left // 4))
            decodes = [sequence for sequence in equals if not sequence.is_prefilling]
            pieces += self._fill(decodes, num_left - num_reserved)
            pieces += self._fill(prompts, self._max_batch_tokens - _num_inputs(pieces))
        return pieces

    def _fill(self, sequences: list[Sequence], num_tokens: int) -> list[Piece]:
        """Pieces of as many sequences, in order, as ``num_tokens`` reach for."""
        pieces: list[Piece] = []
        for sequence in sequences:
            if num_tokens == 0:
                break
            pieces.append(_piece(sequence, num_tokens))
            num_tokens -= pieces[-1].num_inputs
            sequence.last_step = self._step
            sequence.times.setdefault("first_scheduled", time.time_ns())
        return pieces

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence, waiting or running, and give back what it holds."""
        (self.waiting if sequence in self.waiting else self.running).remove(sequence)
        self._release(sequence)

    def _release(self, sequence: Sequence) -> None:
        if sequence.block_ids:
            self._pool.free_blocks(list(sequence.block_ids))
        if sequence.slot is not None:
            self._pool.free_slot(sequence.slot)
        sequence.block_ids, sequence.slot = (), None

    def _admit(self) -> None:
        while self.waiting:
            sequence = self.waiting[0]
            num_blocks = -(-sequence.max_total_tokens // self._block_tokens)
            if not self._pool.can_allocate(num_blocks, num_slots=1):
                return  # nobody overtakes: a large request would wait for ever
            try:
                sequence.block_ids = tuple(self._pool.allocate_blocks(num_blocks))
                sequence.slot = self._pool.allocate_slot()
            except Unavailable:  # the pool's own thread gave memory back in between
                self._release(sequence)
                return
            sequence.last_step = self._step  # behind those who have waited longer for their next chunk
            self.running.append(self.waiting.pop(0))


def _piece(sequence: Sequence, num_tokens: int) -> Piece:
    """What a sequence does next with at most ``num_tokens`` inputs; its phase is told by its state."""
    start = sequence.num_computed_tokens
    if sequence.is_prefilling:
        return Piece(sequence, start, num_decided=min(num_tokens, len(sequence.token_ids) - start))
    drafts = sequence.drafts[: num_tokens - 1]
    return Piece(sequence, start, num_decided=1, drafts=drafts, is_deferred=len(drafts) > 0)


def _waiting_order(sequence: Sequence) -> tuple[int, float]:
    return (-sequence.request.priority, sequence.request.arrival)


def _turn(sequence: Sequence) -> tuple[int, float]:
    return (sequence.last_step, sequence.request.arrival)


def _num_inputs(pieces: list[Piece]) -> int:
    return sum(piece.num_inputs for piece in pieces)
