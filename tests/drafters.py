"""Stand-ins for the draft over a real target."""

import random
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor

from qwen35.engine.batch import Piece
from qwen35.engine.sequence import Sequence


class OracleDrafter:
    """Proposes what plain decoding is known to say, each token wrong with probability ``wrong``.

    Replaces ``engine._drafter``: accepted runs of every length, without a draft that would have to be good."""

    def __init__(self, known: Mapping[Any, tuple[int, ...]], wrong: float, seed: int = 0) -> None:
        """``known``: token ids by uid, or by uid and sample."""
        self._known = known
        self._wrong = wrong
        self._random = random.Random(seed)

    def propose(self, pieces: Iterable[Piece], hidden: Tensor) -> None:
        for sequence in (piece.sequence for piece in pieces):
            if not (sequence.is_prefilling or sequence.is_finished):
                first = sequence.num_generated_tokens
                uid, sample = sequence.request.uid, sequence.request.sample_index
                known = self._known[uid] if uid in self._known else self._known[uid, sample]
                right = known[first : first + sequence.num_wanted_drafts]
                sequence.drafts = tuple(t ^ 1 if self._random.random() < self._wrong else t for t in right)


class ScriptedLengths:
    """Draft lengths by a function of the sequence. Replaces ``engine._drafter._lengths``."""

    def __init__(self, length: Callable[[Sequence], int]) -> None:
        self._length = length

    def observe(self, sequence: Sequence, num_drafts: int, num_accepted: int) -> None:
        assert 0 <= num_accepted <= num_drafts

    def choose(self, sequences: Iterable[Sequence]) -> None:
        for sequence in sequences:
            sequence.draft_length = min(sequence.max_draft_tokens, self._length(sequence))
