"""Starts from cached prefixes: what is run, what is said, who owns what. Table-driven fakes over the real manager."""

import random
from dataclasses import replace

import pytest
import torch

from qwen35.engine.request import ImageSpan
from qwen35.state.prefix import EntryRef
from qwen35.state.tables import ENTRY_READY
from tests.engine.fakes import IMAGE, Rig, request

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


def said(rig: Rig, uid: int, sample: int) -> tuple:
    news = [emission for emission in rig.emissions[uid] if emission.sample_index == sample]
    assert news[-1].is_final and news[-1].error is None
    token_ids = tuple(token_id for emission in news for token_id in emission.token_ids)
    return token_ids, [entry for emission in news for entry in emission.logprobs], news[-1].finish_reason


def num_plain(rig: Rig) -> int:
    """Inputs that the target has run, but for drafts."""
    return rig.engine.metrics.num_target_tokens - rig.engine.metrics.num_draft_tokens


def entries(rig: Rig) -> list:
    """Hits of all that is cached, shorter prefixes first."""
    rows = rig.state.reader._tables.entries
    found = [rig.state.reader.hit(EntryRef(int(row), int(rows["generation"][row])))
             for row in (rows["state"] == ENTRY_READY).nonzero()[0]]  # fmt: skip
    return sorted(found, key=lambda hit: hit.num_tokens)


@pytest.mark.parametrize("sampling", [OPTIONS, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("num_prompt", [1, 2, 3, 4, 5, 8, 21])
@pytest.mark.parametrize("num_draft_tokens", [0, 1, 3])
def test_the_same_prompt_is_run_once(num_draft_tokens, num_prompt, sampling):
    rig = Rig(num_draft_tokens=num_draft_tokens, draft="right", num_checkpoints=8)
    expected = alone(request(PROMPT[:num_prompt], **sampling))
    for uid in range(3):
        before = num_plain(rig)
        rig.run([request(PROMPT[:num_prompt], uid=uid, **sampling)])
        assert outcome(rig, uid) == expected
        num_decodes = len(rig.emissions[uid]) - 1
        assert num_plain(rig) - before - num_decodes == (num_prompt if uid == 0 else 0)
        assert rig.final(uid).usage.num_cached_tokens == (0 if uid == 0 else num_prompt)
    usages = [rig.final(uid).usage for uid in range(3)]
    assert len({(u.num_draft_tokens, u.num_accepted_draft_tokens) for u in usages}) == 1


def test_requests_of_another_salt_share_nothing():
    rig = Rig(num_draft_tokens=1, draft="right", num_checkpoints=8)
    for uid, salt in enumerate(("", "a", "a", "")):
        rig.run([replace(request(PROMPT, uid=uid, **OPTIONS), cache_salt=salt)])
    assert [rig.final(uid).usage.num_cached_tokens > 0 for uid in range(4)] == [False, False, True, True]


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


@pytest.mark.parametrize("num_slots", [1, 4])
@pytest.mark.parametrize("num_draft_tokens", [0, 3])
def test_samples_start_from_the_first_ones_prompt(num_draft_tokens, num_slots):
    asked = request(PROMPT, n=4, **SAMPLED)
    plain = Rig(num_draft_tokens=0)
    plain.run([asked])
    rig = Rig(num_draft_tokens=num_draft_tokens, num_slots=num_slots, num_checkpoints=8)
    for uid in range(2):
        before = num_plain(rig)
        rig.run([replace(asked, uid=uid)])
        for index in range(4):
            assert said(rig, uid, index) == said(plain, 0, index)
        num_decodes = sum(len(emission.token_ids) > 0 for emission in rig.emissions[uid]) - 4
        assert num_plain(rig) - before - num_decodes == (0 if uid else len(PROMPT)), "one prefill for all, then none"
        assert {emission.usage.num_cached_tokens for emission in rig.emissions[uid]} == {len(PROMPT) if uid else 0}


def test_samples_do_without_where_no_slot_is_left():
    rig = Rig(num_slots=2, num_checkpoints=1, num_blocks=24)
    asked = [request(PROMPT, uid=uid, n=3, **SAMPLED) for uid in range(4)]
    rig.run(asked)
    for uid in range(4):
        for index in range(3):
            assert said(rig, uid, index) == said(rig, 0, index)


def test_slots_of_checkpoints_are_not_for_more_sequences():
    rig = Rig(num_draft_tokens=1, draft="right", num_slots=2, num_checkpoints=8)
    for uid in range(6):
        rig.submit(request(PROMPT[uid:], uid=uid, **OPTIONS))
    most = 0
    while rig.engine.has_work:
        rig.step()
        most = max(most, len(rig.engine._scheduler.running))
    assert most == 2 and all(rig.final(uid).error is None for uid in range(6))


def test_prompt_logprobs_read_no_prefix_and_leave_one():
    rig = Rig(num_checkpoints=8)
    asked = request(PROMPT, prompt_logprobs=1, **OPTIONS)
    for uid in range(2):
        rig.run([replace(asked, uid=uid)])
        assert rig.final(uid).usage.num_cached_tokens == 0
    told = [[entry for emission in rig.emissions[uid] for entry in emission.prompt_logprobs] for uid in range(2)]
    assert told[0] == told[1] and len(told[0]) == len(PROMPT) - 1
    rig.run([request(PROMPT, uid=2, **OPTIONS)])
    assert rig.final(2).usage.num_cached_tokens == len(PROMPT)


def pictured(uid: int, image: int, tail: tuple[int, ...] = (1, 2)):
    """Four tokens, an image of eight, a tail."""
    embeds = torch.tensor([[1000.0 + image, 0.0]]).repeat(8, 1)
    made = request((0, 1, 2, 3, *[IMAGE] * 8, *tail), uid=uid, image_embeds=embeds, **OPTIONS)
    return replace(made, images=(ImageSpan(f"{image:064x}", 4, 8),))


def test_images_are_part_of_a_prefix_and_a_prefix_may_end_inside_one():
    rig = Rig(num_checkpoints=16, interval_tokens=6)
    cached = []
    for uid, (image, tail) in enumerate([(1, (1, 2)), (1, (1, 2)), (2, (1, 2)), (1, (5,)), (2, (1, 2, 3))]):
        one = pictured(uid, image, tail)
        rig.run([one])
        assert outcome(rig, uid) == alone(one)
        cached.append(rig.final(uid).usage.num_cached_tokens)
    # Nothing; all; not the other image; to the last place inside the image; the shorter prompt and no more.
    assert cached == [0, 14, 0, 12, 14]


def test_an_image_that_the_request_does_not_name_is_not_cached():
    rig = Rig(num_checkpoints=8)
    for uid in range(2):
        rig.run([replace(pictured(uid, 1), images=())])
        assert rig.final(uid).usage.num_cached_tokens == 0
    assert rig.engine.metrics.num_checkpoints == 0


def test_a_cancelled_prefill_leaves_what_it_finished_and_no_more():
    rig = Rig(num_checkpoints=8, max_batch_tokens=4, interval_tokens=6)
    rig.submit(request(PROMPT, **OPTIONS))
    for _ in range(4):  # chunks of 4, 2, 4 and 2 tokens: places 6 and 12 are reached
        rig.step()
    rig.engine.abort(0)
    rig.run()
    assert [entry.num_tokens for entry in entries(rig)] == [6, 12]
    rig.run([request(PROMPT, uid=1, **OPTIONS)])
    assert rig.final(1).usage.num_cached_tokens == 12
    assert outcome(rig, 1) == alone(request(PROMPT, **OPTIONS))


def test_a_step_that_throws_publishes_nothing():
    rig = Rig(num_checkpoints=8)
    forward, rig.target.forward = rig.target.forward, lambda *_: 1 / 0
    rig.run([request(PROMPT, **OPTIONS)])
    rig.target.forward = forward
    assert rig.final(0).error is not None and entries(rig) == []
    rig.run([request(PROMPT, uid=1, **OPTIONS)])
    assert outcome(rig, 1) == alone(request(PROMPT, **OPTIONS))


def test_what_a_sequence_stands_on_is_pinned_while_it_runs():
    rig = Rig(num_checkpoints=2)
    rig.run([request(PROMPT, **OPTIONS)])
    rig.submit(request(PROMPT, uid=1, **OPTIONS))
    while rig.engine.has_work:
        rig.step()
        live = rig.engine._live_sequences()
        assert all(sequence.base is not None for sequence in live)
        assert rig.state.manager.stats().prefix.num_pins == len(live)
    rig.check_pool()


@pytest.mark.parametrize("swap_bytes", [0, 1 << 20])
@pytest.mark.parametrize("num_checkpoints", [1, 6])
@pytest.mark.parametrize("num_blocks", [9, 12, 20])
def test_hits_are_given_up_before_anybody_stalls(num_blocks, num_checkpoints, swap_bytes):
    """Each needs nine blocks at its end: those that wait with cached prefixes must not keep them from the first."""
    rig = Rig(num_blocks=num_blocks, num_checkpoints=num_checkpoints, interval_tokens=5, swap_bytes=swap_bytes)
    prompts = [PROMPT[: 9 + 4 * (uid % 4)] for uid in range(8)]
    asked = [request(prompt, uid=uid, seed=uid, **SAMPLED) for uid, prompt in enumerate(prompts)]
    rig.run([replace(one, uid=100 + one.uid) for one in asked[:4]])
    rig.run(asked)
    for one in asked:
        assert outcome(rig, one.uid) == alone(one)


@pytest.mark.parametrize("num_late_steps", [1, 3])
@pytest.mark.parametrize("num_blocks", [12, 40])
def test_answers_may_come_late(num_blocks, num_late_steps):
    """As behind a server, where another thread asks the manager."""
    rig = Rig(num_blocks=num_blocks, num_checkpoints=6, interval_tokens=5, num_late_steps=num_late_steps)
    asked = [request(PROMPT[: 5 + uid % 16], uid=uid, seed=uid, n=1 + uid % 3, **SAMPLED) for uid in range(12)]
    rig.run(asked[:6])
    rig.run(asked[6:])
    for one in asked:
        plain = Rig(num_draft_tokens=0)
        plain.run([one])
        for index in range(one.sampling.n):
            assert said(rig, one.uid, index) == said(plain, one.uid, index)
    assert rig.engine.metrics.num_cached_tokens > 0


def test_a_storm_of_aborts_leaves_the_cache_whole():
    draw = random.Random(3)
    rig = Rig(num_blocks=30, num_checkpoints=5, interval_tokens=4, max_batch_tokens=9)
    for uid in range(80):
        rig.submit(request(PROMPT[: draw.randint(1, 21)], uid=uid, n=draw.choice((1, 1, 2)), **SAMPLED))
        for _ in range(draw.randint(0, 3)):
            rig.step()
        rig.engine.abort(draw.randint(0, uid))
        rig.state.manager.check_integrity()
    rig.run()
    rig.run([request(PROMPT, uid=999, **SAMPLED)])
    assert outcome(rig, 999) == alone(request(PROMPT, uid=999, **SAMPLED))
