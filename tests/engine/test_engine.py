"""The loop over table-driven fakes: lossless for every draft, stops, limits, memory, faults."""

import math
import threading
import time

import pytest
import torch

from qwen35.engine.request import Emission
from qwen35.errors import Cancelled, DeadlineExceeded, InvalidArgument, Unavailable
from tests.engine.fakes import BLOCK_TOKENS, EOS, IMAGE, VOCAB_SIZE, FakeTarget, Rig, request

PROMPTS = ((3,), (0, 1, 2), tuple(range(5, 18)), tuple(i % 20 for i in range(41)))
SAMPLED = {"temperature": 0.8, "top_k": 12, "top_p": 0.9}
PENALISED = {"temperature": 0.8, "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.4,
             "logit_bias": ((4, 2.0),), "min_tokens": 9, "bad_words": ("a",)}  # fmt: skip


def requests(**sampling):
    """Different prompts and lengths, side by side."""
    return [
        request(prompt, uid=uid, seed=uid, max_tokens=20 + 3 * uid, **sampling) for uid, prompt in enumerate(PROMPTS)
    ]


def outcome(rig: Rig) -> dict[int, tuple]:
    """All that must not depend on the draft."""
    return {
        uid: (rig.token_ids(uid), rig.text(uid), rig.final(uid).finish_reason, [e for x in news for e in x.logprobs],
              rig.final(uid).cumulative_logprob)
        for uid, news in rig.emissions.items()
    }  # fmt: skip


@pytest.mark.parametrize("sampling", [{}, SAMPLED, PENALISED | {"logprobs": 3}], ids=["greedy", "sampled", "penalised"])
@pytest.mark.parametrize("draft", ["mixed", "right", "wrong"])
@pytest.mark.parametrize("num_draft_tokens", [1, 2, 3, 5])
def test_speculative_equals_plain(num_draft_tokens, draft, sampling):
    plain = Rig(num_draft_tokens=0)
    plain.run(requests(**sampling))
    rig = Rig(num_draft_tokens=num_draft_tokens, draft=draft)
    rig.run(requests(**sampling))
    assert outcome(rig) == outcome(plain)
    assert {len(rig.token_ids(uid)) for uid in rig.emissions} != {1}, "prompts that end at once prove nothing"
    metrics = rig.engine.metrics
    if draft == "wrong":
        assert metrics.num_draft_tokens > 0 and metrics.num_accepted_draft_tokens == 0
    else:
        assert metrics.num_accepted_draft_tokens > 0
        assert metrics.num_steps < plain.engine.metrics.num_steps


@pytest.mark.parametrize("max_batch_tokens", [1, 2, 3, 5, 7, 16])
@pytest.mark.parametrize("num_draft_tokens", [0, 3])
def test_chunks_and_company_change_nothing(max_batch_tokens, num_draft_tokens):
    alone = {}
    for one in requests(**SAMPLED):
        rig = Rig(num_draft_tokens=0)
        rig.run([one])
        alone |= outcome(rig)
    rig = Rig(num_draft_tokens=num_draft_tokens, max_batch_tokens=max_batch_tokens, num_slots=2)
    rig.run(requests(**SAMPLED))
    assert outcome(rig) == alone
    assert max(int(batch.cu_tokens[-1]) for batch in rig.target.batches) <= max_batch_tokens


def test_a_draft_that_is_always_right_gives_all_tokens_and_the_bonus():
    rig = Rig(num_draft_tokens=3, draft="right")
    rig.run([request(max_tokens=13, ignore_eos=True)])
    # 1 token after the prompt, then 4 a step (three drafts and the bonus), 12 of them.
    assert [len(emission.token_ids) for emission in rig.emissions[0]] == [1, 4, 4, 4]
    usage = rig.final().usage
    assert (usage.num_output_tokens, usage.num_draft_tokens, usage.num_accepted_draft_tokens) == (13, 9, 9)
    assert len(rig.target.batches) == 4
    # 1 row after the prompt and 4 a verify for the target, 3 drafts after each of the first three steps.
    assert rig.target.num_logit_rows == 1 + 3 * 4 + 3 * 3
    assert rig.draft.num_passes == 9


def test_draft_is_clamped_near_the_end():
    rig = Rig(num_draft_tokens=5, draft="right")
    rig.run([request(max_tokens=4, ignore_eos=True)])
    # 3 tokens are left after the first one: two drafts and the bonus.
    assert [len(emission.token_ids) for emission in rig.emissions[0]] == [1, 3]
    assert rig.final().usage.num_draft_tokens == 2
    assert rig.final().finish_reason == "length"


@pytest.mark.parametrize("max_tokens", [1, 2])
def test_too_short_for_drafts_runs_no_draft(max_tokens):
    rig = Rig(num_draft_tokens=3)
    rig.run([request(max_tokens=max_tokens, ignore_eos=True)])
    assert (len(rig.token_ids()), rig.draft.num_passes) == (max_tokens, 0)


def test_draft_length_of_a_request():
    rig = Rig(num_draft_tokens=5, draft="right")
    rig.run([request(uid=k, num_draft_tokens=k, max_tokens=9, ignore_eos=True) for k in (0, 2)])
    assert [len(emission.token_ids) for emission in rig.emissions[0]] == [1] * 9
    assert [len(emission.token_ids) for emission in rig.emissions[2]] == [1, 3, 3, 2]
    assert rig.token_ids(0) == rig.token_ids(2)


@pytest.mark.parametrize("num_draft_tokens", [0, 3])
def test_context_limit(num_draft_tokens):
    rig = Rig(num_draft_tokens=num_draft_tokens, draft="right", max_context_tokens=10)
    rig.run([request((1, 2, 3, 4), max_tokens=100, ignore_eos=True)])
    assert (len(rig.token_ids()), rig.final().finish_reason) == (6, "length")
    with pytest.raises(InvalidArgument, match="expected 1 to 9 tokens .* got 10"):
        rig.engine.submit(request(range(10)))


def generated(max_tokens: int = 40, **sampling) -> tuple[int, ...]:
    """What the target says after the usual prompt when nothing stops it."""
    rig = Rig(num_draft_tokens=0)
    rig.run([request(max_tokens=max_tokens, ignore_eos=True, **sampling)])
    return rig.token_ids()


@pytest.mark.parametrize("num_draft_tokens", [0, 1, 3, 5])
@pytest.mark.parametrize("place", range(1, 12))
def test_stop_token_inside_an_accepted_run(num_draft_tokens, place):
    whole = generated()
    stop = whole[place]
    first = whole.index(stop)
    rig = Rig(num_draft_tokens=num_draft_tokens, draft="right")
    rig.run([request(max_tokens=40, ignore_eos=True, stop_token_ids=(stop,), logprobs=0)])
    assert rig.token_ids() == whole[: first + 1]
    assert (rig.final().finish_reason, rig.final().usage.num_output_tokens) == ("stop", first + 1)
    assert sum(len(emission.logprobs) for emission in rig.emissions[0]) == first + 1
    plain = Rig(num_draft_tokens=0)
    plain.run([request(max_tokens=max(first, 1), ignore_eos=True)])
    if first:
        assert rig.text() == plain.text(), "the stop token's text is not part of the text"


def test_eos_before_length():
    target = FakeTarget()
    target.table[:] = 0.0
    target.table[:, EOS] = 1.0
    for max_tokens in (1, 5):
        rig = Rig(target=target, draft="right")
        rig.run([request(max_tokens=max_tokens)])
        assert (rig.token_ids(), rig.text(), rig.final().finish_reason) == ((EOS,), "", "stop")
    rig = Rig(target=target, draft="right")
    rig.run([request(max_tokens=5, min_tokens=3)])
    assert rig.token_ids()[3:] == (EOS,) and EOS not in rig.token_ids()[:3]


def test_stop_strings_wait_for_min_tokens():
    target = FakeTarget()
    target.table[:] = 0.0
    target.table[:, 3] = 1.0
    rig = Rig(target=target, draft="right")
    rig.run([request(max_tokens=9, min_tokens=3, stop=("d",))])
    assert (rig.token_ids(), rig.text(), rig.final().finish_reason) == ((3,) * 4, "ddd", "stop")


def test_usage_counts_accepted_drafts_that_were_delivered():
    target = FakeTarget()
    target.table[:] = 0.0
    target.table[:, 3] = 1.0
    rig = Rig(target=target, draft="right", num_draft_tokens=3)
    rig.run([request(max_tokens=20, stop=("dddd",))])  # 1 token, then 3 accepted drafts; the bonus is not delivered
    usage = rig.final().usage
    assert (usage.num_output_tokens, usage.num_draft_tokens, usage.num_accepted_draft_tokens) == (4, 3, 3)
    rig = Rig(target=target, draft="right", num_draft_tokens=3)
    rig.run([request(max_tokens=20, stop=("dd",))])
    usage = rig.final().usage
    assert (usage.num_output_tokens, usage.num_draft_tokens, usage.num_accepted_draft_tokens) == (2, 3, 1)
    assert (rig.token_ids(), rig.text(), rig.final().finish_reason) == ((3, 3), "", "stop")


def test_images_reach_target_and_draft_and_positions_go_on_behind_them():
    """Prompt: a, an image of 2 x 2 tokens, b. Rows of the image count as content, in chunks of any size."""
    positions = torch.tensor([[0, 1, 1, 1, 1, 3], [0, 1, 1, 2, 2, 3], [0, 1, 2, 1, 2, 3]])
    embeds = torch.tensor([[1000.0, 0.0], [2000.0, 0.0], [3000.0, 0.0], [4000.0, 0.0]])
    prompt = (0, IMAGE, IMAGE, IMAGE, IMAGE, 1)
    outputs = {}
    for budget in (1, 2, 3, 64):
        rig = Rig(draft="right", max_batch_tokens=budget)
        rig.run([request(prompt, image_embeds=embeds, positions=positions, ignore_eos=True)])
        outputs[budget] = rig.token_ids()
        runs = [b.positions for b in rig.target.batches if int(b.kv_start[0]) >= 6]
        assert runs[0][:, 0].tolist() == [4, 4, 4]
    assert len(set(outputs.values())) == 1
    assert rig.draft.batches[0].positions.tolist() == positions.tolist()  # entry j has the position of token j - 1
    other = Rig()
    other.run([request(prompt, image_embeds=embeds.flip(0), positions=positions, ignore_eos=True)])
    assert other.token_ids() != outputs[64]


def test_more_requests_than_slots_and_blocks():
    rig = Rig(num_slots=2, num_blocks=12)
    many = [request((uid % 5, 1), uid=uid, seed=uid, max_tokens=10, **SAMPLED) for uid in range(20)]
    rig.run(many)
    for one in many:
        alone = Rig(num_draft_tokens=0)
        alone.run([one])
        assert rig.token_ids(one.uid) == alone.token_ids(one.uid)
    assert max(len(batch.slots) for batch in rig.target.batches) == 2


def test_second_request_speaks_before_the_first_ends():
    rig = Rig(max_batch_tokens=8)
    rig.engine.submit(request(range(20), uid=0, max_tokens=30, ignore_eos=True))
    rig.step()
    rig.engine.submit(request((1, 2), uid=1, max_tokens=3, ignore_eos=True))
    order = [emission.uid for _ in range(60) for emission in rig.step() if emission.token_ids]
    assert order.index(1) < len(order) - order[::-1].index(0) - 1


REFUSED = [
    ({"token_ids": ()}, "prompt: expected 1 to 511 tokens .* got 0"),
    ({"token_ids": (0, VOCAB_SIZE)}, "token_ids: expected token ids from 0 to 31, got 32"),
    ({"max_tokens": 400}, r"KV cache of 64 blocks \(256 tokens\), got 3 \+ 400 tokens \(101 blocks\)"),
    ({"stop_token_ids": (99,)}, "stop_token_ids: expected"),
    ({"logit_bias": ((99, 1.0),)}, "logit_bias: expected"),
    ({"token_ids": (0, IMAGE)}, "one embedding for each of 1 placeholder tokens of the prompt, got 0"),
    ({"image_embeds": torch.zeros(1, 2)}, "one embedding for each of 0 placeholder tokens of the prompt, got 1"),
    ({"positions": torch.zeros(3, 2)}, r"positions: expected shape \[3, 3\]"),
]


@pytest.mark.parametrize(("fields", "message"), REFUSED)
def test_refused_at_submit(fields, message):
    rig = Rig()
    with pytest.raises(InvalidArgument, match=message):
        rig.engine.submit(request(**fields))
    assert not rig.engine.has_work


def test_queue_limit_and_double_uid():
    rig = Rig(num_slots=1, max_queued_requests=2)
    rig.engine.submit(request(uid=0))
    with pytest.raises(InvalidArgument, match="uid"):
        rig.engine.submit(request(uid=0))
    rig.step()  # uid 0 runs, the queue is empty again
    rig.engine.submit(request(uid=1))
    rig.engine.submit(request(uid=2))
    with pytest.raises(Unavailable, match="at most 2 waiting samples, got 2 and 1 of this"):
        rig.engine.submit(request(uid=3))
    rig.run()
    assert set(rig.emissions) == {0, 1, 2}


def test_abort_waiting_running_and_unknown():
    rig = Rig(num_slots=1)
    for uid in range(3):
        rig.engine.submit(request(uid=uid, max_tokens=30, ignore_eos=True))
    rig.step()
    rig.engine.abort(0)
    rig.engine.abort(1, Unavailable("lease expired"))
    rig.engine.abort(99)
    rig.run()
    assert isinstance(rig.final(0).error, Cancelled) and rig.final(0).usage.num_output_tokens == 1
    assert str(rig.final(1).error) == "UNAVAILABLE: lease expired" and rig.token_ids(1) == ()
    assert rig.final(2).finish_reason == "length"
    assert (rig.engine.metrics.num_failed_requests, rig.engine.metrics.num_finished_requests) == (2, 1)


def test_an_abort_of_nobody_hits_nobody_later():
    rig = Rig()
    rig.engine.abort(5)
    rig.run([request(uid=5)])
    assert rig.final(5).error is None


def test_deadlines_of_waiting_and_running():
    now = time.monotonic()
    rig = Rig(num_slots=1)
    rig.engine.submit(request(uid=0, deadline=now + 0.05, arrival=now, max_tokens=200, ignore_eos=True))
    rig.engine.submit(request(uid=1, deadline=now + 0.05, arrival=now))
    rig.step()
    time.sleep(0.06)
    rig.run()
    assert isinstance(rig.final(0).error, DeadlineExceeded) and "after 1 tokens" in str(rig.final(0).error)
    assert isinstance(rig.final(1).error, DeadlineExceeded) and "still waiting" in str(rig.final(1).error)


def test_a_step_that_throws_ends_its_requests_and_the_next_one_works(caplog):
    rig = Rig(num_slots=1)
    rig.engine.submit(request(uid=0, max_tokens=30, ignore_eos=True))
    rig.engine.submit(request(uid=1))
    rig.step()
    forward = rig.target.forward
    rig.target.forward = lambda *_: 1 / 0
    rig.step()
    rig.target.forward = forward
    assert str(rig.final(0).error) == "INTERNAL: engine: a step failed with ZeroDivisionError"
    rig.run()
    assert rig.final(1).finish_reason is not None
    assert "ZeroDivisionError" in caplog.text


def test_a_scheduler_that_throws_ends_everything():
    rig = Rig(num_slots=1)
    rig.engine._scheduler.next_batch = lambda: 1 / 0
    rig.engine.submit(request(uid=0))
    rig.engine.submit(request(uid=1))
    rig.run(max_steps=1)
    assert rig.final(0).error.code == rig.final(1).error.code == "INTERNAL"


def test_logits_that_are_not_finite_end_that_request_alone():
    rig = Rig(draft=None)
    logits = rig.target.logits

    def poisoned(hidden):
        values = logits(hidden)
        values[rig.target.batches[-1].slots == rig.target.batches[0].slots[0]] = math.nan
        return values

    rig.target.logits = poisoned
    rig.run([request(uid=0), request(uid=1)])
    assert "logits" in str(rig.final(0).error) and rig.final(1).error is None


def test_shutdown_ends_all_and_refuses():
    rig = Rig(num_slots=1)
    rig.engine.submit(request(uid=0, max_tokens=30))
    rig.step()
    rig.engine.submit(request(uid=1))
    emissions = rig.engine.shutdown(Unavailable("engine: shut down"))
    assert [(e.uid, str(e.error)) for e in emissions] == [(0, "UNAVAILABLE: engine: shut down")] + [
        (1, "UNAVAILABLE: engine: shut down")
    ]
    rig.check_pool()
    with pytest.raises(Unavailable, match="shut down"):
        rig.engine.submit(request(uid=2))


def test_wait_returns_on_submit_and_when_there_is_something_to_run():
    rig = Rig()
    started = time.monotonic()
    timer = threading.Timer(0.05, lambda: rig.engine.submit(request(uid=0)))
    timer.start()
    rig.engine.wait(10.0)
    assert rig.engine.has_work and time.monotonic() - started < 5.0
    rig.step()
    rig.engine.wait(10.0)
    assert time.monotonic() - started < 5.0
    timer.join()


def test_wait_sleeps_while_all_blocks_are_on_their_way(monkeypatch):
    rig = Rig(num_draft_tokens=0, num_blocks=8)
    pool = rig.state.pool
    rig.engine.submit(request(uid=0, max_tokens=20, ignore_eos=True))
    rig.step()
    taken = pool.allocate_blocks(pool.num_free_blocks)
    monkeypatch.setattr(type(pool), "may_get_blocks", True)
    while rig.step():
        pass
    started = time.monotonic()
    rig.engine.wait(0.05)
    assert time.monotonic() - started >= 0.04
    pool.free_blocks(taken)
    timer = threading.Timer(0.02, rig.engine.notify)  # as the pool does when it has grown
    timer.start()
    rig.engine.wait(10.0)
    timer.join()
    assert time.monotonic() - started < 5.0
    rig.run()
    assert rig.final(0).finish_reason == "length" and rig.engine.metrics.num_preemptions == 0


def test_metrics_and_times():
    rig = Rig(draft="right")
    rig.run([request(range(7), uid=uid, max_tokens=9, ignore_eos=True) for uid in range(2)])
    metrics = rig.engine.metrics
    assert (metrics.num_prompt_tokens, metrics.num_output_tokens, metrics.num_finished_requests) == (14, 18, 2)
    assert (metrics.num_waiting_requests, metrics.num_running_requests) == (0, 0)
    assert metrics.num_target_tokens == sum(int(batch.cu_tokens[-1]) for batch in rig.target.batches)
    assert metrics.num_accepted_draft_tokens == metrics.num_draft_tokens == 12
    times = rig.final().times
    assert sorted(times, key=times.get) == ["arrival", "first_scheduled", "first_token", "last_token"]


def test_logprobs_come_with_each_token():
    rig = Rig(draft="right")
    rig.run([request(max_tokens=9, ignore_eos=True, logprobs=2)])
    news: list[Emission] = rig.emissions[0]
    assert all(len(emission.logprobs) == len(emission.token_ids) for emission in news)
    firsts = [entry[0] for emission in news for entry in emission.logprobs]
    assert tuple(first.token_id for first in firsts) == rig.token_ids()
    assert all(first.rank == 1 for first in firsts)  # greedy
    assert rig.final().cumulative_logprob == pytest.approx(sum(first.logprob for first in firsts))


def test_blocks_grow_with_what_is_held():
    rig = Rig(num_draft_tokens=0)
    rig.engine.submit(request((1, 2, 3), max_tokens=60, ignore_eos=True))
    used = []
    while rig.engine.has_work:
        rig.step()
        used.append(rig.state.pool.num_used_blocks)
    # A step's blocks reach to the token that it decides, and hold nothing for later ones.
    assert used == [-(-(3 + i) // BLOCK_TOKENS) for i in range(1, 60)] + [0]
    rig.check_pool()


CROWD = [request((uid % 5, 1), uid=uid, seed=uid, max_tokens=30, ignore_eos=True, logprobs=1, **SAMPLED)
         for uid in range(6)]  # fmt: skip


@pytest.fixture(scope="module")
def crowd():
    """Each of CROWD alone."""
    alone = {}
    for one in CROWD:
        rig = Rig(num_draft_tokens=0)
        rig.run([one])
        alone |= outcome(rig)
    return alone


@pytest.mark.parametrize("num_blocks", [8, 9, 11, 15])
@pytest.mark.parametrize("num_draft_tokens", [0, 1, 3, 5])
@pytest.mark.parametrize(("draft", "swap_bytes"), [("right", 0), ("right", 10_000), ("mixed", 0), ("mixed", 700)])
def test_preemption_changes_nothing(num_draft_tokens, draft, swap_bytes, num_blocks, crowd):
    """Each needs 8 blocks at its end, together they can have little more. Copies of all of them, some or none fit."""
    rig = Rig(
        num_draft_tokens=num_draft_tokens,
        draft=draft,
        num_blocks=num_blocks,
        max_batch_tokens=9,
        swap_bytes=swap_bytes,
    )
    rig.run(CROWD)
    assert outcome(rig) == crowd
    metrics = rig.engine.metrics
    assert metrics.num_preemptions > 0 and metrics.num_dropped_tokens + metrics.num_swapped_out_tokens > 0
    assert metrics.num_dropped_tokens == 0 or swap_bytes < 10_000
    assert metrics.num_swapped_out_tokens == 0 or swap_bytes > 0
    assert metrics.num_swapped_in_tokens == metrics.num_swapped_out_tokens and metrics.num_swapped_bytes == 0
    assert metrics.num_prompt_tokens == 2 * len(CROWD), "prompts that are run again count once"
    ends = [emissions[-1].times["last_token"] for _, emissions in sorted(rig.emissions.items())]
    assert ends[0] == min(ends), "the first in rank is never preempted"


def test_preempted_sequences_can_be_cancelled_and_expire():
    now = time.monotonic()
    rig = Rig(num_draft_tokens=0, num_blocks=8)
    for uid in range(3):
        deadline = now + 0.5 if uid == 1 else math.inf
        rig.engine.submit(request((1, 2), uid=uid, max_tokens=30, ignore_eos=True, deadline=deadline, arrival=now))
    while rig.engine.metrics.num_preemptions < 2:
        rig.step()
    rig.engine.abort(2)
    time.sleep(max(0.0, now + 0.51 - time.monotonic()))
    rig.run()
    assert isinstance(rig.final(2).error, Cancelled) and len(rig.token_ids(2)) > 0
    assert isinstance(rig.final(1).error, DeadlineExceeded) and "after" in str(rig.final(1).error)
    assert rig.final(0).finish_reason == "length"
