"""Scans of rows of logits, and the sampler's quick way over them: the plain way's choice on every row."""

import math

import numpy as np
import pytest
import torch

from qwen35.engine import leading
from qwen35.engine.leading import choose_leading
from qwen35.engine.logprobs import token_logprobs
from qwen35.engine.noise import gumbel, row_keys, words
from qwen35.engine.request import SamplingParams
from qwen35.engine.sampler import Row, choose
from qwen35.kernels.cpu.recipe import instruction_sets
from qwen35.kernels.cpu.scan import NativeRowScan
from qwen35.kernels.scan import DEPTHS_PER_NAT, NUM_DEPTHS

V = 5003  # fills no vector


@pytest.fixture(params=instruction_sets())
def scan(request, native_library):
    if native_library.qwen35_select(request.param.encode()) is None:
        pytest.skip(f"this CPU has no {request.param}")
    yield NativeRowScan(native_library)
    native_library.qwen35_select(b"")


def logits_of(kind: str, seed: int, dtype: type = np.float32) -> np.ndarray:
    random = np.random.default_rng(seed)
    values = random.normal(size=V) * {"flat": 0.05, "wide": 3.0, "peaked": 2.0, "ties": 1.0, "banned": 1.0}[kind]
    if kind == "peaked":
        values[random.integers(0, V, 30)] += np.linspace(12.0, 3.0, 30)
    if kind == "ties":
        values = np.round(values * 4) / 4
    if kind == "banned":
        values[random.random(V) < 0.9] = -np.inf
    return values.astype(dtype)


KINDS = ["flat", "wide", "peaked", "ties", "banned"]
OPTIONS = [
    {},
    {"temperature": 0.3},
    {"temperature": 2.5},
    {"top_k": 1},
    {"top_k": 40},
    {"top_k": 4000},
    {"top_p": 0.95},
    {"top_p": 0.5, "temperature": 0.7},
    {"top_p": 1e-9},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"min_p": 1e-12, "top_p": 0.9},
    {"top_k": 50, "top_p": 0.95, "min_p": 0.01, "temperature": 0.6},
    {"top_k": 2000, "top_p": 0.999},
    {"top_p": 0.9, "typical_p": 0.8},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_the_quick_way_chooses_as_the_plain_way(scan, kind, options):
    sampling = SamplingParams(**options)
    for dtype in (torch.float32, torch.float64):
        logits = torch.stack([torch.from_numpy(logits_of(kind, seed)).to(dtype) for seed in range(6)])
        rows = [Row(sampling, seed, seed * 7) for seed in range(6)]
        assert choose(logits, rows, scan).token_ids.tolist() == choose(logits, rows).token_ids.tolist()


@pytest.mark.parametrize("options", [{}, {"top_k": 40}, {"top_p": 0.95}, {"min_p": 0.1}], ids=str)
def test_the_quick_way_is_gone_nearly_always(scan, options):
    sampling = SamplingParams(**options)
    for kind in ("flat", "wide", "peaked", "banned"):
        found = [choose_leading(logits_of(kind, s), sampling, row_keys(s, 0, 0)[0], scan) for s in range(20)]
        assert found.count(None) == 0


def test_a_sum_on_the_margin_is_left_to_the_plain_way(scan):
    """Half of the weight is reached by exactly half of equal tokens: one rounding decides."""
    logits = np.zeros(8192, np.float32)
    sampling = SamplingParams(top_p=0.5)
    assert choose_leading(logits, sampling, row_keys(1, 0, 0)[0], scan) is None
    rows = [Row(sampling, seed, 0) for seed in range(8)]
    several = torch.from_numpy(logits).expand(8, -1)
    assert choose(several, rows, scan).token_ids.tolist() == choose(several, rows).token_ids.tolist()


def test_too_many_about_the_end_and_too_large_values_are_left_too(scan, monkeypatch):
    key = row_keys(1, 0, 0)[0]
    assert choose_leading(np.full(V, 2e6), SamplingParams(), key, scan) is None
    monkeypatch.setattr(leading, "_MAX_AT_END", 10)
    assert choose_leading(logits_of("flat", 0), SamplingParams(top_p=0.9), key, scan) is None


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("temperature", [1.0, 0.3, 7.0])
def test_weights_and_depths(scan, dtype, temperature):
    values = logits_of("wide", 3, dtype)
    peak = float(values.max())
    row = scan.open(values, peak, temperature)
    counts, masses = row.weights()
    depths = (peak - values.astype(np.float64)) * (DEPTHS_PER_NAT / temperature)
    assert row.depths(np.arange(V)).tolist() == depths.tolist()
    places = np.minimum(depths.astype(np.int64), NUM_DEPTHS - 1)
    assert counts.tolist() == np.bincount(places, minlength=NUM_DEPTHS).tolist()
    expected = np.bincount(places, np.exp((values.astype(np.float64) - peak) / temperature), NUM_DEPTHS)
    np.testing.assert_allclose(masses, expected, rtol=1e-12)
    assert row.between(10.0, 90.5).tolist() == np.flatnonzero((depths >= 10.0) & (depths < 90.5)).tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_contenders_are_few_and_hold_the_winner(scan, kind):
    for seed in range(20):
        values, key = logits_of(kind, seed), row_keys(seed, 0, 0)
        found = scan.open(values, float(values.max()), 1.0).contenders(1e9, key[0])
        scores = values.astype(np.float64) + gumbel(words(key, np.arange(V)))
        assert scores.argmax() in found and len(found) <= 2


@pytest.mark.parametrize("num_top", [0, 1, 20])
def test_logprobs(scan, num_top):
    for kind in KINDS[:4]:
        values = logits_of(kind, 5)
        for token_id in (0, int(values.argmax()), V - 1):
            quick, plain = (token_logprobs(values, token_id, num_top, s) for s in (scan, None))
            assert [(e.token_id, e.rank) for e in quick] == [(e.token_id, e.rank) for e in plain]
            assert all(math.isclose(q.logprob, p.logprob, abs_tol=1e-12) for q, p in zip(quick, plain, strict=True))
