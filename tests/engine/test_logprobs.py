"""Log probabilities of raw logits against torch in float64."""

import numpy as np
import pytest
import torch

from qwen35.engine.logprobs import token_logprobs
from tests.engine.fakes import Rig, chain, request


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


def prompt_logprobs(rig: Rig, uid: int = 0) -> list:
    return [entry for emission in rig.emissions[uid] for entry in emission.prompt_logprobs]


def test_of_a_prompt_equal_the_targets_rows():
    prompt = tuple(i % 20 for i in range(41))
    rig = Rig(num_draft_tokens=0)
    rig.run([request(prompt, prompt_logprobs=2)])
    found, hashed = prompt_logprobs(rig), 0.0
    assert len(found) == len(prompt) - 1
    for entry, token_id, next_id in zip(found, prompt, prompt[1:], strict=False):
        hashed = chain(hashed, float(token_id))
        row = rig.target.table[int(hashed) % len(rig.target.table)]
        assert entry == token_logprobs(row.numpy(), next_id, 2)


@pytest.mark.parametrize("num_draft_tokens", [0, 3])
@pytest.mark.parametrize("limits", [{"max_batch_tokens": 3}, {"max_batch_tokens": 17}, {"num_blocks": 14}])
def test_of_a_prompt_depend_on_neither_chunks_nor_drafts_nor_preemption(limits, num_draft_tokens):
    prompts = [tuple((i * 7 + uid) % 20 for i in range(20 + uid)) for uid in range(3)]
    options = {"max_tokens": 20, "ignore_eos": True, "prompt_logprobs": 1}
    plain = Rig(num_draft_tokens=0)
    plain.run([request(prompt, uid=uid, **options) for uid, prompt in enumerate(prompts)])
    rig = Rig(num_draft_tokens=num_draft_tokens, **limits)
    rig.run([request(prompt, uid=uid, n=2, **options) for uid, prompt in enumerate(prompts)])
    for uid, prompt in enumerate(prompts):
        assert prompt_logprobs(rig, uid) == prompt_logprobs(plain, uid)
        assert len(prompt_logprobs(rig, uid)) == len(prompt) - 1
    if "num_blocks" in limits:
        assert rig.engine.metrics.num_preemptions > 0


def test_of_a_prompt_only_when_asked_for_and_with_the_first_token():
    rig = Rig()
    rig.run([request((1, 2, 3)), request((1, 2, 3), uid=1, prompt_logprobs=0), request((1,), uid=2, prompt_logprobs=0)])
    assert prompt_logprobs(rig, 0) == prompt_logprobs(rig, 2) == []
    assert [len(emission.prompt_logprobs) for emission in rig.emissions[1]][:2] == [2, 0]
