"""min-p, top-k, top-p, typical against a slow reference that sorts (value, id) pairs, ties and bans included."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qwen35.engine import filters
from qwen35.engine.filters import surviving


def kept(values, *options, temperature: float = 1.0) -> list[set[int]]:
    """Token ids that survive in each row."""
    found = surviving(np.asarray(values), temperature, *options)
    assert (found.scaled == np.asarray(values)[found.row_of, found.token_ids].astype(np.float64) / temperature).all()
    return [set(found.token_ids[found.row_of == row].tolist()) for row in range(len(values))]


def reference(values: list[float], min_p: float, top_k: int, top_p: float, typical_p: float = 1.0) -> set[int]:
    """One row, by the definitions."""
    peak = max(values)
    left = {i: math.exp(v - peak) for i, v in enumerate(values) if v > -math.inf}
    left = {i: w for i, w in left.items() if min_p == 0.0 or values[i] - peak >= math.log(min_p)}
    ranked = sorted(left, key=lambda i: (-values[i], i))
    ranked = ranked[:top_k] if top_k > 0 else ranked
    total, before, kept = sum(left[i] for i in ranked), 0.0, set()
    for i in ranked:
        if before < top_p * total or top_p == 1.0:
            kept.add(i)
        before += left[i]
    return kept if typical_p == 1.0 else typical({i: left[i] for i in kept}, typical_p)


def typical(weights: dict[int, float], typical_p: float) -> set[int]:
    total = sum(weights[i] for i in sorted(weights))
    surprise = {i: math.log(total) - math.log(w) for i, w in weights.items()}
    entropy = sum(weights[i] * surprise[i] for i in sorted(weights)) / total
    before, kept = 0.0, set()
    for i in sorted(weights, key=lambda i: (round(abs(surprise[i] - entropy), 9), i)):
        if before < typical_p * total:
            kept.add(i)
        before += weights[i]
    return kept


TABLE = [
    # values, min_p, top_k, top_p, expected
    ([1.0, 3.0, 2.0], 0.0, 0, 1.0, {0, 1, 2}),
    ([1.0, 3.0, 2.0], 0.0, 2, 1.0, {1, 2}),
    ([3.0, 3.0, 3.0, 3.0], 0.0, 2, 1.0, {0, 1}),  # ties: lowest ids
    ([0.0, 5.0, 0.0, 5.0, 0.0], 0.0, 3, 1.0, {0, 1, 3}),
    ([0.0, 0.0, 0.0, 0.0], 0.0, 0, 0.5, {0, 1}),  # exactly reached: the next one does not stay
    ([0.0, 0.0, 0.0, 0.0], 0.0, 0, 0.51, {0, 1, 2}),  # the crossing token stays
    ([9.0, 0.0, 0.0], 0.0, 0, 1e-9, {0}),
    ([0.0, -math.inf, 0.0], 0.0, 3, 1.0, {0, 2}),  # banned tokens never come back
    ([0.0, -math.inf, -math.inf], 0.0, 2, 0.999, {0}),
    ([0.0, math.log(0.51), math.log(0.49)], 0.5, 0, 1.0, {0, 1}),
    ([2.0, 2.0, 1.0], 1.0, 0, 1.0, {0, 1}),
    ([3.0, 2.0, 1.0, 0.0], 0.0, 2, 0.8, {0, 1}),  # top-p counts after top-k: 0.73 of the two that are left
]


@pytest.mark.parametrize(("values", "min_p", "top_k", "top_p", "expected"), TABLE)
def test_table(values, min_p, top_k, top_p, expected):
    assert kept([values], min_p, top_k, top_p) == [expected]
    assert kept(np.array([values], np.float32) * 2.0, min_p, top_k, top_p, temperature=2.0) == [expected]


VALUES = st.lists(st.sampled_from([-math.inf, *(x / 4 for x in range(-20, 21))]), min_size=1, max_size=40)


@settings(max_examples=200, deadline=None)
@given(VALUES, st.sampled_from([0.0, 0.013, 0.37]), st.integers(-1, 45), st.sampled_from([1.0, 0.93, 0.61, 0.07]))
def test_equals_reference(values, min_p, top_k, top_p):
    values[0] = max(values[0], 0.0)
    assert kept([values], min_p, top_k, top_p) == [reference(values, min_p, top_k, top_p)]


SPREAD = [math.log(p) for p in (0.5, 0.2, 0.15, 0.1, 0.05)]  # entropy 1.35 nats: 0.2 (1.61) is nearest, then 0.15


@pytest.mark.parametrize(
    ("values", "typical_p", "expected"),
    [
        (SPREAD, 0.1, {1}),
        (SPREAD, 0.21, {1, 2}),
        (SPREAD, 0.36, {0, 1, 2}),  # the most likely token comes third
        (SPREAD, 0.86, {0, 1, 2, 3}),
        ([0.0] * 4, 0.5, {0, 1}),  # all alike: lowest ids
        ([0.0, -math.inf, -1.0], 0.999, {0, 2}),
    ],
)
def test_typical(values, typical_p, expected):
    assert kept([values], 0.0, 0, 1.0, typical_p) == [expected]


def test_typical_counts_what_the_other_filters_left():
    assert kept([SPREAD], 0.0, 0, 1.0, 0.1) == [{1}]
    # 0.59, 0.24 and 0.18 are left; entropy 0.96, surprises 0.53, 1.45 and 1.73.
    assert kept([SPREAD], 0.0, 3, 1.0, 0.1) == [{0}]


OPTIONS = [
    (0.0, 0, 1.0, 0.7),
    (0.0, 60, 0.95, 0.5),
    (0.0, 0, 0.9),
    (0.0, 50, 0.9),
    (0.01, 0, 0.99),
    (0.02, 40, 1.0),
    (0.0, 7, 1.0),
    (0.0, 0, 0.999),
]


@pytest.mark.parametrize("options", OPTIONS)
def test_rows_do_not_depend_on_their_company(options):
    random = np.random.default_rng(0)
    rows = random.normal(size=(19, 4099)) * random.choice([0.01, 1.0, 5.0], size=(19, 1))  # flat and peaked ones
    together = kept(rows, *options, temperature=0.7)
    for row, found in zip(rows, together, strict=True):
        assert kept(row[None], *options, temperature=0.7) == [found]
        assert found == reference((row / 0.7).tolist(), *options)


def test_sums_have_the_same_bits_however_far_a_row_is_filled_up():
    random = np.random.default_rng(1)
    mass = random.random((50, 13))
    filled = np.concatenate([mass, np.zeros((50, 250))], axis=1)
    assert (filters._sum(filled) == filters._sum(mass)).all()
    assert (filled.sum(axis=1) != mass.sum(axis=1)).any(), "a pairwise sum would not do"


def test_without_filters_only_what_no_noise_could_lift_is_left_out():
    values = np.array([[0.0, -40.0, -41.0, -np.inf]])
    assert kept(values, 0.0, 0, 1.0) == [{0, 1}]
    assert kept(values, 0.0, 0, 1.0, temperature=2.0) == [{0, 1, 2}]
