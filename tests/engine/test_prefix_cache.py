"""Starts from cached prefixes: what is run, what is said, who owns what. Table-driven fakes over the real manager."""

import pytest

from tests.engine.fakes import Rig, request

PROMPT = tuple(i % 20 for i in range(21))
OPTIONS = {"max_tokens": 12, "ignore_eos": True, "logprobs": 2}
SAMPLED = {**OPTIONS, "temperature": 0.9, "top_k": 12}


def outcome(rig: Rig, uid: int) -> tuple:
    news = rig.emissions[uid]
    return (rig.token_ids(uid), rig.text(uid), rig.final(uid).finish_reason, [e for x in news for e in x.logprobs],
            rig.final(uid).cumulative_logprob)  # fmt: skip


def alone(one) -> tuple:
    rig = Rig(num_draft_tokens=0)
    rig.run([one])
    return outcome(rig, one.uid)


def num_run(rig: Rig) -> int:
    return rig.engine.metrics.num_target_tokens


@pytest.mark.parametrize("sampling", [OPTIONS, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("num_prompt", [1, 2, 3, 4, 5, 8, 21])
@pytest.mark.parametrize("num_draft_tokens", [0, 1, 3])
def test_the_same_prompt_is_run_once(num_draft_tokens, num_prompt, sampling):
    rig = Rig(num_draft_tokens=num_draft_tokens, draft="right", num_checkpoints=8)
    expected = alone(request(PROMPT[:num_prompt], **sampling))
    for uid in range(3):
        before = rig.engine.metrics.num_target_tokens - rig.engine.metrics.num_draft_tokens
        rig.run([request(PROMPT[:num_prompt], uid=uid, **sampling)])
        assert outcome(rig, uid) == expected
        ran = rig.engine.metrics.num_target_tokens - rig.engine.metrics.num_draft_tokens - before
        decodes = sum(1 for emission in rig.emissions[uid]) - 1
        assert ran - decodes == (num_prompt if uid == 0 else 0)
        assert rig.final(uid).usage.num_cached_tokens == (0 if uid == 0 else num_prompt)
    usages = [rig.final(uid).usage for uid in range(3)]
    assert len({(u.num_draft_tokens, u.num_accepted_draft_tokens) for u in usages}) == 1


@pytest.mark.parametrize("max_batch_tokens", [1, 5, 64])
@pytest.mark.parametrize("draft", ["right", "mixed", "wrong"])
def test_a_second_turn_runs_what_is_behind_the_last_fed_token(draft, max_batch_tokens):
    rig = Rig(draft=draft, num_checkpoints=8, max_batch_tokens=max_batch_tokens)
    rig.run([request(PROMPT, **OPTIONS)])
    said = rig.token_ids()
    second = (*PROMPT, *said, 5, 6, 7)
    rig.run([request(second, uid=1, **SAMPLED)])
    assert outcome(rig, 1) == alone(request(second, uid=1, **SAMPLED))
    assert rig.final(1).usage.num_cached_tokens >= len(PROMPT) + len(said) - 1
    branch = (*PROMPT, *said[:4], 9)  # where no checkpoint was wanted: the end of the first prompt is the longest
    rig.run([request(branch, uid=2, **OPTIONS)])
    assert outcome(rig, 2) == alone(request(branch, uid=2, **OPTIONS))
    assert rig.final(2).usage.num_cached_tokens == len(PROMPT)
