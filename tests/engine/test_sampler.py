"""The target's choice: ties, temperature, faults, grouping."""

import math

import numpy as np
import pytest
import torch

from qwen35.engine import sampler
from qwen35.engine.noise import gumbel, row_keys, words
from qwen35.engine.processors import Processors
from qwen35.engine.request import SamplingParams
from qwen35.engine.sampler import Row, choose

GREEDY = SamplingParams(temperature=0.0)


def row(seed: int = 0, token_index: int = 0, **sampling) -> Row:
    return Row(SamplingParams(**sampling), seed, token_index)


@pytest.mark.parametrize(
    ("values", "expected"),
    [([1.0, 3.0, 2.0], 1), ([3.0, 1.0, 3.0], 0), ([0.0] * 9, 0), ([-math.inf, -5.0, -math.inf], 1)],
)
def test_greedy_takes_the_lowest_of_equal_ids(values, expected):
    for temperature in (0.0, 9e-6):
        assert choose(torch.tensor([values]), [row(temperature=temperature)]).token_ids.tolist() == [expected]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("values", [[1.0, math.nan, 2.0], [math.inf, 1.0, 0.0], [-math.inf] * 3])
def test_rows_without_a_choice_are_named_and_spoil_no_other(values, temperature):
    logits = torch.tensor([[0.0, 9.0, 0.0], values, [0.0, 0.0, 99.0]])
    choices = choose(logits, [row(temperature=temperature)] * 3)
    assert choices.is_valid.tolist() == [True, False, True]
    assert choices.token_ids[2] == 2


def test_a_sampled_choice_is_argmax_of_scaled_logits_and_noise():
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(1))
    for seed in range(20):
        scores = logits[0].double().numpy() / 0.7 + gumbel(words(row_keys(seed, 0, 4), np.arange(50)))
        assert choose(logits, [row(seed, 4, temperature=0.7)]).token_ids.tolist() == [scores.argmax()]


@pytest.mark.parametrize("near_nats", [8.0, 0.5])
@pytest.mark.parametrize("spread", [0.01, 1.0, 10.0])
def test_dropping_losers_early_changes_no_choice(monkeypatch, spread, near_nats):
    monkeypatch.setattr(sampler, "_NEAR_NATS", near_nats)
    logits = torch.randn(64, 5000, generator=torch.Generator().manual_seed(6)) * spread
    rows = [row(seed, temperature=1.0) for seed in range(64)]
    early = choose(logits, rows).token_ids.tolist()
    monkeypatch.setattr(sampler, "_MANY_CANDIDATES", 10**9)
    assert choose(logits, rows).token_ids.tolist() == early
    monkeypatch.setattr(sampler, "_MANY_CANDIDATES", 0)
    assert choose(logits, rows).token_ids.tolist() == early


def test_processed_together_or_alone_is_the_same_and_logits_are_left_alone():
    """Rows of all kinds in one call, bits and order of the answer."""
    kinds = [
        {"temperature": 0.0},
        {"temperature": 0.7},
        {"temperature": 0.7, "top_k": 5},
        {"temperature": 1.3, "top_p": 0.8, "min_p": 0.02},
        {"temperature": 0.0, "presence_penalty": 1.0},
        {"temperature": 0.7, "repetition_penalty": 1.5},
    ]
    rows = []
    for index in range(60):
        sampling = SamplingParams(**kinds[index % len(kinds)])
        processors = Processors(sampling, (1, 2, 3), frozenset(), ()) if Processors.are_needed(sampling) else None
        rows.append(Row(sampling, seed=index, token_index=index % 7, processors=processors, drafts=(index % 11,)))
    for dtype in (torch.float32, torch.float64):
        logits = torch.randn(60, 33, generator=torch.Generator().manual_seed(2)).to(dtype)
        before = logits.clone()
        together = choose(logits, rows)
        assert together.token_ids.tolist() == [
            int(choose(logits[i : i + 1], [one]).token_ids[0]) for i, one in enumerate(rows)
        ]
        assert torch.equal(logits, before)


def test_blocks_of_rows(monkeypatch):
    logits = torch.randn(40, 16, generator=torch.Generator().manual_seed(3))
    rows = [row(seed, temperature=1.0) for seed in range(40)]
    whole = choose(logits, rows).token_ids.tolist()
    monkeypatch.setattr("qwen35.engine.sampler._MAX_BLOCK_ELEMENTS", 48)
    assert choose(logits, rows).token_ids.tolist() == whole


def test_draws_depend_on_seed_token_index_and_sample():
    logits = torch.zeros(200, 64)
    draws = {
        "seed": [row(i, 0) for i in range(200)],
        "token_index": [row(0, i) for i in range(200)],
        "sample_index": [Row(SamplingParams(), 0, 0, sample_index=i) for i in range(200)],
    }
    results = {name: tuple(choose(logits, rows).token_ids) for name, rows in draws.items()}
    assert len(set(results.values())) == 3
    assert all(len(set(result)) > 50 for result in results.values())
    assert len(set(choose(logits, [row(5, 5)] * 200).token_ids)) == 1
