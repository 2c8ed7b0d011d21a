"""How many drafts each sequence proposes next: a fixed number, or what has paid so far. Never changes an output.

With a the measured chance that draft i is accepted when those before it were, k drafts give on average
    tokens(k) = 1 + a1 + a1 a2 + … + a1 … ak
and cost one target step with k + 1 inputs and k draft passes; a step's constant part is shared by the S sequences in
it. The k with the most tokens a second is taken. Where that is 0 the draft pauses, and the time that plain steps take
saves up for a probe: one pass that catches up and one draft, whose whole cost is paid from what was saved."""

from __future__ import annotations

import itertools
import time
import weakref
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Protocol

from qwen35.engine.sequence import Sequence

COST_MEMORY = 0.98  # weight of a measured time after one more
ACCEPTANCE_MEMORY = 0.9  # weight of a verified draft after one more
PRIOR_ACCEPTANCE = 0.7  # before anything is measured
PRIOR_WEIGHT = 2.0  # drafts of one sequence that weigh as much as all sequences together
PROBE_SHARE = 0.05  # of the time of plain steps


class LineFit:
    """y = intercept + slope * x by least squares over the recent past; neither is negative."""

    def __init__(self) -> None:
        self._n = self._x = self._y = self._xx = self._xy = 0.0

    def add(self, x: float, y: float) -> None:
        new = (1.0, x, y, x * x, x * y)
        old = (self._n, self._x, self._y, self._xx, self._xy)
        self._n, self._x, self._y, self._xx, self._xy = (COST_MEMORY * a + b for a, b in zip(old, new, strict=True))

    @property
    def is_known(self) -> bool:
        return self._n > 0.0

    @property
    def slope(self) -> float:
        """y / x where all x were alike: nothing tells the parts apart, and the safe guess is that rows cost."""
        if not self.is_known:
            return 0.0
        proportional = self._y / self._x
        spread = self._n * self._xx - self._x**2
        if spread <= 1e-6 * self._x**2:
            return proportional
        return min(proportional, max(0.0, (self._n * self._xy - self._x * self._y) / spread))

    @property
    def intercept(self) -> float:
        return (self._y - self.slope * self._x) / self._n if self.is_known else 0.0


class Costs:
    """Seconds of a target step of decodes and of a draft pass, against their numbers of inputs, as measured."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self.target = LineFit()
        self.draft = LineFit()


class DraftLengths(Protocol):
    """Sets ``draft_length`` of sequences before they propose."""

    def observe(self, sequence: Sequence, num_drafts: int, num_accepted: int) -> None:
        """The target has verified ``num_drafts`` drafts; the first ``num_accepted`` were right."""
        ...

    def choose(self, sequences: SequenceOf[Sequence]) -> None:
        """Those that decode in this step."""
        ...


class FixedLengths:
    """Every sequence at its largest draft length."""

    def observe(self, sequence: Sequence, num_drafts: int, num_accepted: int) -> None:
        """Nothing is learnt."""

    def choose(self, sequences: SequenceOf[Sequence]) -> None:
        for sequence in sequences:
            sequence.draft_length = sequence.max_draft_tokens


@dataclass
class _Acceptance:
    """Weighted counts for each place in a run of drafts: verified after right ones, and right themselves."""

    trials: list[float] = field(default_factory=lambda: [0.0] * 16)
    hits: list[float] = field(default_factory=lambda: [0.0] * 16)
    saved_seconds: float = 0.0  # for a probe

    def add(self, num_drafts: int, num_accepted: int, memory: float) -> None:
        for place in range(min(num_drafts, num_accepted + 1)):
            self.trials[place] = memory * self.trials[place] + 1.0
            self.hits[place] = memory * self.hits[place] + float(place < num_accepted)

    def rate(self, place: int, prior: float) -> float:
        return (self.hits[place] + PRIOR_WEIGHT * prior) / (self.trials[place] + PRIOR_WEIGHT)


class AdaptiveLengths:
    """The length with the most tokens a second, for each sequence by its own acceptance."""

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        self._all = _Acceptance()
        self._own: weakref.WeakKeyDictionary[Sequence, _Acceptance] = weakref.WeakKeyDictionary()

    def observe(self, sequence: Sequence, num_drafts: int, num_accepted: int) -> None:
        self._all.add(num_drafts, num_accepted, memory=0.99)
        self._own.setdefault(sequence, _Acceptance()).add(num_drafts, num_accepted, ACCEPTANCE_MEMORY)

    def choose(self, sequences: SequenceOf[Sequence]) -> None:
        for sequence in sequences:
            sequence.draft_length = self._best(sequence, len(sequences))
            if sequence.draft_length == 0:
                sequence.draft_length = self._probe(sequence, len(sequences))

    def seconds(self, num_drafts: int, num_sequences: int) -> float:
        """A sequence's share of a step with so many drafts."""
        target, draft = self._costs.target, self._costs.draft
        plain = target.intercept / num_sequences + target.slope * (1 + num_drafts)
        return plain + num_drafts * (draft.intercept / num_sequences + draft.slope)

    def _best(self, sequence: Sequence, num_sequences: int) -> int:
        if not (self._costs.target.is_known and self._costs.draft.is_known):
            return sequence.max_draft_tokens  # to be measured
        own = self._own.setdefault(sequence, _Acceptance())
        rates = [own.rate(i, self._all.rate(i, PRIOR_ACCEPTANCE)) for i in range(sequence.max_draft_tokens)]
        tokens = itertools.accumulate(itertools.accumulate(rates, lambda a, b: a * b), initial=1.0)
        speeds = [n / max(self.seconds(k, num_sequences), 1e-12) for k, n in enumerate(tokens)]
        return max(range(len(speeds)), key=speeds.__getitem__)  # the shortest of the best

    def _probe(self, sequence: Sequence, num_sequences: int) -> int:
        """1 when the time saved up pays for it, else 0."""
        own = self._own.setdefault(sequence, _Acceptance())
        own.saved_seconds += PROBE_SHARE * self.seconds(0, num_sequences)
        catch_up = self._costs.draft.slope * sequence.num_undrafted_tokens
        price = catch_up + self.seconds(1, num_sequences) - self.seconds(0, num_sequences)
        if own.saved_seconds < price:
            return 0
        own.saved_seconds -= price
        return 1
