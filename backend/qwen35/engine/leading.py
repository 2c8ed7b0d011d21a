"""Choosing from one row of a large vocabulary without sorting it and without drawing noise for every token.

What min-p, top-k and top-p leave are always the first tokens by descending value, ties by ascending id. How weight is
spread over depths tells at which depth that row of tokens ends; only the tokens there are decided one by one, exactly
as `filters` does. Sums are known to `_MARGIN`: where a decision is nearer than that, nothing is said, and the sampler
goes the plain way. So the choice is the plain way's in every case, to the same bits.

Letters: V vocabulary, M tokens about the end."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from qwen35.engine.filters import largest, until
from qwen35.engine.noise import GUMBEL_MAX, GUMBEL_MIN, gumbel, words
from qwen35.engine.request import SamplingParams
from qwen35.kernels.scan import DEPTHS_PER_NAT, NUM_DEPTHS, RowScan, ScannedRow

MIN_VOCAB = 4096  # below it whole blocks of rows are quicker
_MAX_SCALED = 1e6  # beyond it doubles are too coarse for `_EDGE`
_EDGE = 1e-6  # in depths: tokens so near to the end may have the same weight as others behind it
_MARGIN = 1e-9  # of the whole weight, far above the rounding of 2^18 sums
_MAX_AT_END = 1 << 16
_NO_LIMIT = (GUMBEL_MAX - GUMBEL_MIN + 1e-3) * DEPTHS_PER_NAT  # no noise could lift a token from further down


@dataclass(frozen=True)
class Lead:
    """All tokens less deep than ``limit``, and some of those that follow."""

    limit: float
    token_ids: NDArray[np.int64]  # ascending


def choose_leading(
    values: NDArray[np.float32 | np.float64], options: SamplingParams, key: np.uint64, scan: RowScan
) -> int | None:
    """Token id for one row [V] with a finite maximum; None: the plain way must be gone. ``key``: of the row's noise."""
    peak, temperature = float(values.max()), options.temperature
    if options.typical_p < 1.0 or not abs(peak) <= _MAX_SCALED * temperature:
        return None
    row = scan.open(values, peak, temperature)
    lead = _lead(values, peak / temperature, options, row)
    rivals = None if lead is None else row.contenders(lead.limit, key)
    if rivals is None:
        return None
    token_ids = np.concatenate((rivals, lead.token_ids))
    scores = values[token_ids].astype(np.float64) / temperature + gumbel(words(key[None], token_ids))
    return int(token_ids[scores == scores.max()].min())


def _lead(
    values: NDArray[np.float32 | np.float64], peak: float, options: SamplingParams, row: ScannedRow
) -> Lead | None:
    top_k = options.top_k if 0 < options.top_k < len(values) else 0
    if not (options.min_p or top_k or options.top_p < 1.0):
        return Lead(_NO_LIMIT, np.empty(0, np.int64))
    counts, masses = row.weights()
    ending = None
    if options.min_p or top_k:
        end = _end(counts, options.min_p, top_k)
        ending = _About.depth(row, end, values, options.temperature)
        if options.min_p:
            ending = ending.those(ending.scaled >= peak + math.log(options.min_p))
        if top_k:
            num_left = top_k - int(counts[:end].sum()) + ending.num_before
            ending = ending.those(largest(ending.scaled[None], num_left)[0])
    if options.top_p < 1.0:
        ending = _top_p(
            masses, ending, options.top_p, peak, lambda at: _About.depth(row, at, values, options.temperature)
        )
    return None if ending is None or len(ending.token_ids) > _MAX_AT_END else ending.lead


def _end(counts: NDArray[np.int64], min_p: float, top_k: int) -> int:
    """The depth at which the last token that min-p and top-k leave lies."""
    end = NUM_DEPTHS - 1
    if min_p:
        end = min(end, int(-math.log(min_p) * DEPTHS_PER_NAT))
    if top_k:
        end = min(end, int(np.searchsorted(counts.cumsum(), top_k)))
    return end


@dataclass(frozen=True)
class _About:
    """Tokens at one depth, and those so near to it that they may weigh the same."""

    at: int
    token_ids: NDArray[np.int64]  # [M] ascending
    depths: NDArray[np.float64]  # [M]
    scaled: NDArray[np.float64]  # [M]

    @classmethod
    def depth(cls, row: ScannedRow, at: int, values: NDArray, temperature: float) -> _About:
        """A banned token (-inf) is never among them."""
        high = at + 1 + _EDGE if at < NUM_DEPTHS - 1 else math.inf
        token_ids = row.between(at - _EDGE, high)
        return cls(at, token_ids, row.depths(token_ids), values[token_ids].astype(np.float64) / temperature)

    def those(self, keep: NDArray[np.bool_]) -> _About:
        return _About(self.at, self.token_ids[keep], self.depths[keep], self.scaled[keep])

    @property
    def num_before(self) -> int:
        """Of these tokens, counted at the depth before."""
        return int(np.count_nonzero(self.depths < self.at))

    @property
    def lead(self) -> Lead:
        return Lead(self.at - _EDGE, self.token_ids)

    def mass(self, peak: float) -> NDArray[np.float64]:
        return np.exp(self.scaled - peak)


def _top_p(
    masses: NDArray[np.float64], ending: _About | None, top_p: float, peak: float, about: Callable[[int], _About]
) -> _About | None:
    """Where the sum crosses ``top_p`` of what the other filters left: all of ``masses`` [NUM_DEPTHS], or those before
    ``ending`` and that. None: too near to a token's own sum to tell."""
    if ending is None:
        reached = masses.cumsum()
    else:
        own = ending.mass(peak)[ending.depths >= ending.at].sum()
        reached = np.concatenate((masses[: ending.at], [own])).cumsum()
    needed = top_p * reached[-1]
    at = int(np.searchsorted(reached, needed))
    if ending is None or at < ending.at:
        here = about(at)
        if ending is not None:
            is_before = here.depths < ending.at - _EDGE
            here = here.those(is_before | np.isin(here.token_ids, ending.token_ids))
    else:
        here = ending
    mass = here.mass(peak)
    before = (reached[at - 1] if at else 0.0) - mass[here.depths < at].sum()
    sums = before + np.concatenate(([0.0], np.sort(mass)[::-1].cumsum()))
    if np.abs(sums - needed).min() <= _MARGIN * reached[-1]:
        return None
    return here.those(until(mass[None], -mass[None], np.array([needed - before]))[0])
