"""Log probabilities of raw logits against torch in float64."""

import numpy as np
import pytest
import torch

from qwen35.engine.logprobs import token_logprobs


@pytest.mark.parametrize("num_top", [0, 1, 5, 20])
@pytest.mark.parametrize("token_id", [0, 17, 99])
def test_values_ranks_and_order(token_id, num_top):
    logits = torch.randn(100, generator=torch.Generator().manual_seed(0)) * 3
    expected = torch.log_softmax(logits.double(), dim=0)
    order = torch.argsort(expected, descending=True).tolist()
    first, *others = token_logprobs(logits.numpy(), token_id, num_top)
    assert first.token_id == token_id and first.rank == order.index(token_id) + 1
    assert [entry.token_id for entry in others] == [i for i in order[:num_top] if i != token_id]
    for entry in (first, *others):
        assert entry.logprob == pytest.approx(expected[entry.token_id].item(), abs=1e-12)
        assert order[entry.rank - 1] == entry.token_id


def test_ranks_are_unique_among_equals():
    logits = np.array([0.0, 2.0, 2.0, 2.0, 1.0], dtype=np.float32)
    assert [(e.token_id, e.rank) for e in token_logprobs(logits, 3, 3)] == [(3, 3), (1, 1), (2, 2)]


def test_more_alternatives_than_tokens():
    assert len(token_logprobs(np.zeros(4, dtype=np.float32), 0, 20)) == 4
