"""Checkpoints of sequences: taken after commit, offered to the store, and started from.

A checkpoint at p stands for exactly the first p tokens: a slot of its own with the state behind them and the hidden
state of the last one, and the sequence's blocks that cover them, of which nobody writes a row below p again.
    take      after a step: the state is brought to p, the slot copied, the whole published; never waits
    settle    the store has answered: the cache owns slot and blocks, and pins them for the request, which now stands on
              this checkpoint (``Sequence.base``); or it owned the same already, and everything is as it was
    restore   a sequence starts: slot copied, full blocks shared, the partial one copied
So every cached block that a sequence uses is listed by its base, which is pinned as long as it has users."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from torch import Tensor

from qwen35.engine.batch import Piece
from qwen35.engine.copies import copy_rows, copy_state
from qwen35.engine.landmarks import Landmarks
from qwen35.engine.memory import Memory
from qwen35.engine.metrics import EngineMetrics
from qwen35.engine.prefix import Answer, Checkpoint, PrefixStore, hasher_of
from qwen35.engine.sequence import Sequence
from qwen35.engine.target import TargetRunner
from qwen35.state.prefix import Hit, Publication
from qwen35.views import CacheView


@dataclass(frozen=True)
class _Flight:
    """A publication without an answer yet; it uses its blocks and owns its slot."""

    sequence: Sequence
    start: int  # Sequence.num_starts then
    publication: Publication


class Checkpoints:
    """Owned by the engine's thread; ``cache`` is written in place. Without a ``store`` nothing is ever taken."""

    def __init__(
        self,
        memory: Memory,
        store: PrefixStore | None,
        landmarks: Landmarks,
        target: TargetRunner,
        cache: CacheView,
        metrics: EngineMetrics,
    ) -> None:
        self._memory = memory
        self._store = store
        self._landmarks = landmarks
        self._target = target
        self._cache = cache
        self._metrics = metrics
        self._block_tokens = cache.attention[0].keys.shape[1]
        self._flights: deque[_Flight] = deque()

    @property
    def num_in_flight(self) -> int:
        return len(self._flights)

    def admit(self, samples: SequenceOf[Sequence], hit: Hit | None) -> None:
        """By any thread, before anybody else knows the samples of a request. All start from the hit, but for one that
        reads the prompt's logprobs; the others wait for a checkpoint of its prompt, unless the hit is that."""
        request = samples[0].request
        if self._store is None or request.lease is None:
            return
        base = None if hit is None else Checkpoint.of_hit(request.lease, hit)
        for sequence in samples:
            sequence.hasher = hasher_of(request, sequence.placeholder_indices.tolist(), self._block_tokens)
            sequence.landmarks = self._landmarks.of_prompt(request.token_ids)
            if base is not None and sequence.num_wanted_prompt_logprobs == 0:
                self.stand_on(sequence, base)
        if samples[0].hasher is not None and (base is None or base.num_tokens < len(request.token_ids)):
            samples[0].followers = list(samples[1:])
            for follower in samples[1:]:
                follower.is_held_back = True

    def piece_end(self, sequence: Sequence, start: int, end: int) -> tuple[int, bool]:
        """Where the next piece of a prompt ends, at most at ``end``, and whether its inputs stay pending."""
        wanted = self._new(sequence, self._landmarks.between(sequence, start, end))
        end = self._landmarks.end_of_piece(start, end, wanted)
        return end, any(place < end for place in wanted)

    def mark(self, pieces: SequenceOf[Piece]) -> None:
        """After commit: sets ``due`` of the sequences. The draft's keys and values must reach there before ``take``."""
        for piece in pieces:
            piece.sequence.due = self._due(piece)

    def take(self, pieces: SequenceOf[Piece], hidden: Tensor) -> None:
        """Publishes what is due. ``hidden``: [T, H] of the pieces' inputs."""
        offset = 0
        for piece in pieces:
            sequence, shift = piece.sequence, offset - piece.start - 1
            for place in sequence.due:
                self._publish(sequence, place, hidden[place + shift])
            sequence.due = ()
            offset += piece.num_inputs
        self.settle()
        for sequence in (piece.sequence for piece in pieces):
            if sequence.num_generated_tokens > 0 and not self._awaits_end_of_prompt(sequence):
                self._release_followers(sequence, None)

    def settle(self) -> None:
        """Takes in the answers that have come."""
        for answer in self._store.answers() if self._store is not None else ():
            self._settle(self._flights.popleft(), answer)

    def restore(self, sequence: Sequence) -> None:
        """The memory of a sequence that starts gets the contents of its base."""
        sequence.num_starts += 1
        base = sequence.base
        if base is None:
            return
        copy_state(self._cache, base.slot, sequence.slot)
        full, num_rows = divmod(base.num_tokens, self._block_tokens)
        if num_rows:
            copy_rows(self._cache, base.block_ids[full], sequence.block_ids[full], num_rows)
        sequence.resume(base.num_tokens, self._cache.boundary_hidden[base.slot].clone()[None], base.has_draft)
        if sequence.num_starts == 1:
            sequence.num_cached_tokens = base.num_tokens if base.is_hit else sequence.num_cached_tokens
            self._metrics.num_cached_tokens += base.num_tokens

    def stand_on(self, sequence: Sequence, checkpoint: Checkpoint | None) -> None:
        """Moves a sequence to another base, or to none; a base without users is unpinned."""
        old, sequence.base = sequence.base, checkpoint
        if checkpoint is not None:
            checkpoint.num_users += 1
        if old is not None:
            old.num_users -= 1
            self._unpin_unused(old)

    def _due(self, piece: Piece) -> tuple[int, ...]:
        """Places inside what the piece has committed to which the state can still be brought."""
        sequence = piece.sequence
        end = min(sequence.num_computed_tokens, len(sequence.token_ids))
        if sequence.error is not None or end <= piece.start:
            return ()
        places = self._landmarks.between(sequence, piece.start, end)
        if sequence.is_finished and end not in places:
            places.append(end)
        first = sequence.num_computed_tokens - sequence.num_pending
        return tuple(self._new(sequence, [place for place in places if place >= first]))

    def _new(self, sequence: Sequence, places: list[int]) -> list[int]:
        """Those of which the store has no checkpoint; none for a sequence that is not to be cached."""
        if self._store is None or sequence.hasher is None:
            return []
        hasher = sequence.extended_hasher()
        return [p for p in places if not self._store.contains(hasher, p, sequence.keeps_draft)]

    def _publish(self, sequence: Sequence, place: int, hidden: Tensor) -> None:
        """``hidden``: [H], of the token before ``place``. A sequence that has ended gives its own slot."""
        is_last = sequence.is_finished and place == sequence.due[-1] and not sequence.request.wants_session
        slot = sequence.slot if is_last else self._memory.spare_slot()
        if slot is None:
            self._metrics.num_skipped_checkpoints += 1
            return
        self._target.materialise(sequence, place)
        if is_last:
            self._memory.hand_over_slot(sequence)
        else:
            copy_state(self._cache, sequence.slot, slot)
        self._cache.boundary_hidden[slot] = hidden
        block_ids = sequence.block_ids[: -(-place // self._block_tokens)]
        publication = Publication(
            num_tokens=place,
            digest=sequence.hasher.digest(place),
            block_ids=block_ids,
            block_keys=sequence.hasher.block_keys(place),
            slot=slot,
            has_draft=sequence.keeps_draft and sequence.num_drafted_tokens >= place - 1,
        )
        self._memory.ledger.share(block_ids)
        self._flights.append(_Flight(sequence, sequence.num_starts, publication))
        self._store.publish(sequence.request.lease, publication)

    def _settle(self, flight: _Flight, answer: Answer) -> None:
        offered, published = flight.publication, answer.published
        checkpoint = None
        if published.entry is None:
            self._memory.return_slot(offered.slot)
        else:
            self._memory.ledger.give(published.taken_blocks, [offered.slot])
            checkpoint = Checkpoint(
                lease=flight.sequence.request.lease,
                entry=published.entry,
                num_tokens=offered.num_tokens,
                slot=offered.slot,
                block_ids=answer.block_ids,
                has_draft=offered.has_draft,
            )
            self._metrics.num_checkpoints += 1
            self._adopt(flight, checkpoint)
        self._memory.ledger.drop(offered.block_ids)
        if offered.num_tokens == flight.sequence.num_prompt_tokens:
            self._release_followers(flight.sequence, checkpoint)
        if checkpoint is not None:
            self._unpin_unused(checkpoint)

    def _adopt(self, flight: _Flight, checkpoint: Checkpoint) -> None:
        """The sequence that it was taken of stands on it, unless that has lost its memory meanwhile and waits with
        something better. Equal blocks that were there before take the place of its own."""
        sequence, base = flight.sequence, flight.sequence.base
        if sequence.is_finished:
            return
        if sequence.slot is None:
            if base is None or base.num_tokens < checkpoint.num_tokens:
                self.stand_on(sequence, checkpoint)
        elif sequence.num_starts == flight.start:
            num_full_blocks = checkpoint.num_tokens // self._block_tokens
            self._memory.replace_blocks(sequence, checkpoint.block_ids[:num_full_blocks])
            self.stand_on(sequence, checkpoint)

    def _release_followers(self, leader: Sequence, checkpoint: Checkpoint | None) -> None:
        """The other samples may start: from the end of the prompt, if there is a checkpoint of it."""
        for follower in leader.followers:
            follower.is_held_back = False
            if checkpoint is not None and not follower.is_finished:
                self.stand_on(follower, checkpoint)
                follower.num_cached_tokens = leader.num_cached_tokens
        leader.followers = []

    def _awaits_end_of_prompt(self, sequence: Sequence) -> bool:
        return any(
            flight.sequence is sequence and flight.publication.num_tokens == sequence.num_prompt_tokens
            for flight in self._flights
        )

    def _unpin_unused(self, checkpoint: Checkpoint) -> None:
        if checkpoint.num_users == 0:
            self._store.unpin(checkpoint.lease, checkpoint.entry)
