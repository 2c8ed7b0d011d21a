"""Who waits, who runs, and what the next step does: chunks of prompts mixed with drafted decodes under a token budget.

Knows no model. A sequence takes blocks as it grows. When they run out, the last in rank (lowest priority, then latest
arrival) is preempted: it gives everything back, waits in its old place, and later goes on from a copy on the host or,
where none was kept, runs all its tokens again, to the same bits. The first in rank is never preempted by equals and can
always have every block, so it comes to its end, and then the next one is first. Drafts are cut to the room there is;
nobody is preempted for them."""

from __future__ import annotations

import itertools
import time

from qwen35.engine.batch import Piece
from qwen35.engine.memory import Memory, Pool
from qwen35.engine.sequence import Sequence
from qwen35.engine.swap import Swap


class Scheduler:
    """``waiting`` and ``running`` belong to the engine's thread. Larger priorities first, equals by arrival; a running
    sequence is displaced only by one of higher priority, or when blocks run out. Among equals decodes go before
    prompts, but leave them a quarter of the budget; where it does not reach everyone, those that were served longest
    ago come first. So nobody starves: prompts always advance, and only so many can come as decodes end and free their
    slots."""

    def __init__(self, pool: Pool, swap: Swap, *, block_tokens: int, max_batch_tokens: int) -> None:
        self._memory = Memory(pool, block_tokens=block_tokens)
        self._swap = swap
        self._max_batch_tokens = max_batch_tokens
        self._step = 0
        self._order = itertools.count()
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.is_stalled = False  # sequences run, but all of them wait for blocks that are on their way
        self.num_preemptions = 0
        self.num_dropped_tokens = 0  # that had been computed and must be computed again

    def add(self, sequence: Sequence) -> None:
        if sequence.order is None:
            sequence.order = next(self._order)
        self.waiting.append(sequence)
        self.waiting.sort(key=_rank)

    def next_batch(self) -> list[Piece]:
        """Admits whom it can and picks the pieces of the next step: at most ``max_batch_tokens`` inputs, none twice."""
        self._grow()
        self._admit()
        for sequence in self.running:
            self._memory.extend_if_free(sequence, sequence.num_useful_tokens)
        self._step += 1
        pieces: list[Piece] = []
        ready = [sequence for sequence in self.running if sequence.has_room]
        for priority in sorted({sequence.request.priority for sequence in ready}, reverse=True):
            equals = sorted((s for s in ready if s.request.priority == priority), key=_turn)
            num_left = self._max_batch_tokens - _num_inputs(pieces)
            prompts = [sequence for sequence in equals if sequence.is_prefilling]
            num_wanted = sum(len(sequence.token_ids) - sequence.num_computed_tokens for sequence in prompts)
            num_reserved = min(num_wanted, -(-num_left // 4))
            decodes = [sequence for sequence in equals if not sequence.is_prefilling]
            pieces += self._fill(decodes, num_left - num_reserved)
            pieces += self._fill(prompts, self._max_batch_tokens - _num_inputs(pieces))
        self.is_stalled = bool(self.running) and not pieces
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
        self._swap.drop(sequence)
        self._memory.release(sequence)

    def _grow(self) -> None:
        """Room for the next step of every running sequence. Where blocks run out and none are on their way, the last in
        rank gives up its own."""
        for sequence in sorted(self.running, key=_rank):
            while sequence.slot is not None and not self._memory.extend(sequence, sequence.num_needed_tokens):
                if self._memory.may_get_blocks:
                    break
                self._preempt(max(self.running, key=_rank))

    def _admit(self) -> None:
        """Nobody overtakes: a large request would wait for ever. A block for each running sequence stays free, so that
        a newcomer is not the next one to be preempted."""
        while self.waiting:
            sequence = self.waiting[0]
            if self._memory.start(sequence, num_spare_blocks=len(self.running)):
                sequence.last_step = self._step  # behind those who have waited longer for their next chunk
                self.running.append(self.waiting.pop(0))
                self._swap.restore(sequence)
            elif not self._make_way(sequence):
                return

    def _make_way(self, sequence: Sequence) -> bool:
        """Preempts the last in rank for one of higher priority, provided that it can get all it needs that way."""
        lower = [s for s in self.running if s.request.priority < sequence.request.priority]
        if not lower or not self._memory.needs_room_of(sequence, len(self.running) - len(lower), lower):
            return False
        self._preempt(max(lower, key=_rank))
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.num_preemptions += 1
        if not self._swap.save(sequence):
            self.num_dropped_tokens += sequence.num_computed_tokens
        self.running.remove(sequence)
        self._memory.release(sequence)
        sequence.rewind()
        self.add(sequence)


def _piece(sequence: Sequence, num_tokens: int) -> Piece:
    """What a sequence does next with at most ``num_tokens`` inputs; its phase is told by its state."""
    start = sequence.num_computed_tokens
    if sequence.is_prefilling:
        return Piece(sequence, start, num_decided=min(num_tokens, len(sequence.token_ids) - start))
    drafts = sequence.drafts[: min(num_tokens, sequence.num_held_tokens - start - 1) - 1]
    return Piece(sequence, start, num_decided=1, drafts=drafts, is_deferred=len(drafts) > 0)


def _rank(sequence: Sequence) -> tuple[int, float, int]:
    """A total order: no two sequences take each other's blocks in turn."""
    assert sequence.order is not None
    return (-sequence.request.priority, sequence.request.arrival, sequence.order)


def _turn(sequence: Sequence) -> tuple[int, float]:
    return (sequence.last_step, sequence.request.arrival)


def _num_inputs(pieces: list[Piece]) -> int:
    return sum(piece.num_inputs for piece in pieces)
