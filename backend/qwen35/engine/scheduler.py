"""Who waits, who runs, and what the next step does: chunks of prompts mixed with drafted decodes under a token budget.

Knows no model. A sequence takes blocks as it grows. When they run out, those that wait let go of the checkpoints they
would start from; then the last in rank (lowest priority, then latest arrival) is preempted: it waits in its old place
and later goes on from a copy on the host or, where none was kept, from its newest checkpoint, and runs the tokens
behind that again, to the same bits. The first in rank is never preempted by equals and can always have every block, in
the end without any checkpoint, so it comes to its end, and then the next one is first. Drafts are cut to the room there
is; nobody is preempted for them."""

from __future__ import annotations

import itertools
import time

from qwen35.engine.batch import Piece
from qwen35.engine.checkpoints import Checkpoints
from qwen35.engine.memory import Memory
from qwen35.engine.sequence import Sequence
from qwen35.engine.swap import Swap


class Scheduler:
    """``waiting`` and ``running`` belong to the engine's thread. Larger priorities first, equals by arrival; a running
    sequence is displaced only by one of higher priority, or when blocks run out. Among equals decodes go before
    prompts, but leave them a quarter of the budget; where it does not reach everyone, those that were served longest
    ago come first. So nobody starves: prompts always advance, and only so many can come as decodes end and free their
    slots."""

    def __init__(self, memory: Memory, checkpoints: Checkpoints, swap: Swap, *, max_batch_tokens: int) -> None:
        self._memory = memory
        self._checkpoints = checkpoints
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
            num_wanted = sum(max(1, len(s.token_ids) - s.num_computed_tokens) for s in prompts)
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
            if num_tokens == 0 and sequence.num_computed_tokens < len(sequence.token_ids):
                continue  # what starts behind a whole cached prompt takes nothing of the budget
            pieces.append(self._piece(sequence, num_tokens))
            num_tokens -= pieces[-1].num_inputs
            sequence.last_step = self._step
            sequence.times.setdefault("first_scheduled", time.time_ns())
        return pieces

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence, waiting or running, and give back what it holds."""
        (self.waiting if sequence in self.waiting else self.running).remove(sequence)
        self._swap.drop(sequence)
        self._memory.release(sequence)
        self._checkpoints.stand_on(sequence, None)

    def _grow(self) -> None:
        """Room for the next step of every running sequence. Where blocks run out and none are on their way, those that
        wait give up their checkpoints, then the last in rank its own blocks."""
        for sequence in sorted(self.running, key=_rank):
            while sequence.slot is not None and not self._memory.extend(sequence, sequence.num_needed_tokens):
                if self._memory.may_get_blocks or self._checkpoints.num_in_flight > 0:
                    break
                if not self._give_up_checkpoint():
                    self._preempt(max(self.running, key=_rank))

    def _admit(self) -> None:
        """Nobody overtakes: a large request would wait for ever. A block for each running sequence stays free, so that
        a newcomer is not the next one to be preempted."""
        while sequence := next((s for s in self.waiting if not s.is_held_back), None):
            if self._swap.holds(sequence):  # more than any checkpoint has
                self._checkpoints.stand_on(sequence, None)
            if self._memory.start(sequence, num_spare_blocks=len(self.running)):
                self._checkpoints.restore(sequence)
                sequence.last_step = self._step  # behind those who have waited longer for their next chunk
                self._swap.restore(sequence)
                self.waiting.remove(sequence)
                self.running.append(sequence)
            elif not (self._make_way(sequence) or self._make_way_alone(sequence)):
                return

    def _make_way_alone(self, sequence: Sequence) -> bool:
        """Where nobody runs and nothing is on its way, checkpoints that sequences would start from are in the way."""
        is_coming = self._memory.is_coming(sequence, len(self.running)) or self._checkpoints.num_in_flight > 0
        return not self.running and not is_coming and self._give_up_checkpoint()

    def _give_up_checkpoint(self) -> bool:
        """The last in rank that waits for a start from one."""
        last = next((sequence for sequence in reversed(self.waiting) if sequence.base is not None), None)
        if last is not None:
            self._checkpoints.stand_on(last, None)
        return last is not None

    def _make_way(self, sequence: Sequence) -> bool:
        """Preempts the last in rank for one of higher priority, provided that it can get all it needs that way."""
        lower = [s for s in self.running if s.request.priority < sequence.request.priority]
        if not lower or not self._memory.needs_room_of(sequence, len(self.running) - len(lower), lower):
            return False
        self._preempt(max(lower, key=_rank))
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.num_preemptions += 1
        if self._swap.save(sequence):
            self._checkpoints.stand_on(sequence, None)
        else:
            num_kept_tokens = 0 if sequence.base is None else sequence.base.num_tokens
            self.num_dropped_tokens += sequence.num_computed_tokens - num_kept_tokens
        self.running.remove(sequence)
        self._memory.release(sequence)
        sequence.rewind()
        self.add(sequence)

    def _piece(self, sequence: Sequence, num_tokens: int) -> Piece:
        """What a sequence does next with at most ``num_tokens`` inputs; its phase is told by its state."""
        start = sequence.num_computed_tokens
        if sequence.is_prefilling:
            end = min(start + num_tokens, len(sequence.token_ids))
            end, is_deferred = self._checkpoints.piece_end(sequence, start, end)
            return Piece(sequence, start, num_decided=end - start, is_deferred=is_deferred)
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
