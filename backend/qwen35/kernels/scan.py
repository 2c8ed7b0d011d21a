"""Looks at one row of logits for the sampler, which decides: how weight is spread below the peak, which tokens lie at a
depth, which few can win. Depths are in steps of 1 / DEPTHS_PER_NAT nat below the row's maximum, after the temperature;
they fall as values rise, and equal values have equal ones.

Letters: V vocabulary."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

NUM_DEPTHS = 2048  # the last one holds everything further down, banned tokens (-inf) included
DEPTHS_PER_NAT = 32


class ScannedRow(Protocol):
    """``values`` [V] float32 or float64 over a temperature, with a finite maximum."""

    def weights(self) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Tokens at each depth, and the sum of their exp(scaled - peak) to 1e-12: both [NUM_DEPTHS]."""
        ...

    def depths(self, token_ids: NDArray[np.int64]) -> NDArray[np.float64]:
        """Depths of tokens, fractions included."""
        ...

    def between(self, low: float, high: float) -> NDArray[np.int64]:
        """Ids, ascending, of the tokens with low <= depth < high."""
        ...

    def contenders(self, limit: float, key: np.uint64) -> NDArray[np.int64] | None:
        """Ids, ascending, of tokens less deep than ``limit`` among which is whoever has the highest sum of scaled logit
        and Gumbel noise of ``key`` (see engine.noise); hardly ever more than one. None: too many to tell."""
        ...


class RowScan(Protocol):
    """Opens rows; they must not change while they are looked at."""

    def open(self, values: NDArray[np.float32 | np.float64], peak: float, temperature: float) -> ScannedRow:
        """``peak``: the maximum of ``values``, not yet divided by the temperature."""
        ...
