"""Draft lengths that change while a sequence runs: pauses without holes, and lengths that pay."""

import itertools
import random

import pytest

from qwen35.engine.draft_length import PROBE_SHARE, AdaptiveLengths, Costs, LineFit
from tests.drafters import ScriptedLengths
from tests.engine import differential
from tests.engine.fakes import Rig, request
from tests.engine.test_scheduler import sequence

LENGTHS = ([0], [3, 0], [0, 0, 0, 0, 2], [1, 0, 3, 0, 0, 5], [0] * 9 + [5])


def scripted(lengths: list[int]) -> ScriptedLengths:
    turn = itertools.cycle(lengths)
    return ScriptedLengths(lambda _: next(turn))


@pytest.mark.parametrize("draft", ["right", "mixed"])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_switching_changes_nothing_and_leaves_no_hole(lengths, draft):
    """The fakes fail at an entry of the draft that is missing, stale or out of place."""
    one = request((1, 2, 3), max_tokens=40, ignore_eos=True, logprobs=1)
    plain, rig = Rig(num_draft_tokens=0), Rig(num_draft_tokens=5, draft=draft)
    plain.run([one])
    rig.engine._drafter._lengths = scripted(lengths)
    rig.run([one])
    assert rig.token_ids() == plain.token_ids()
    metrics = rig.engine.metrics
    assert metrics.num_lost_drafts == 0
    assert (metrics.num_draft_tokens > 0) == (max(lengths) > 0)
    if draft == "right":
        assert metrics.num_accepted_draft_tokens == metrics.num_draft_tokens, "after a pause as without one"


def proposals(lengths: list[int]) -> dict[tuple[int, int], tuple[int, ...]]:
    """What the real draft head proposes, by request and number of decided tokens."""
    engine, _ = differential.make_engine("fp8", 64, num_draft_tokens=3, block_tokens=4)
    engine._drafter._lengths = scripted(lengths)
    found = {}
    propose = engine._drafter.propose

    def recorded(pieces, hidden):
        propose(pieces, hidden)
        for piece in pieces:
            if piece.sequence.drafts:
                found[piece.sequence.request.uid, len(piece.sequence.token_ids)] = piece.sequence.drafts

    engine._drafter.propose = recorded
    for one in differential.catalogue()[:16]:
        engine.submit(one)
    while engine.has_work:
        assert all(emission.error is None for emission in engine.step())
    return found


def test_the_draft_head_proposes_after_a_pause_what_it_would_have_without():
    always, paused = proposals([3]), proposals([0, 0, 0, 0, 0, 3, 2])
    both = always.keys() & paused.keys()
    assert len(both) > 20
    assert all(always[place][: len(paused[place])] == paused[place] for place in both)
    assert len({always[place] for place in both}) > 10


def test_a_pause_that_grows_too_long_ends_drafting_and_is_counted():
    rig = Rig(num_draft_tokens=3, draft="right", max_undrafted_tokens=5)
    rig.engine._drafter._lengths = ScriptedLengths(lambda s: 0 if s.num_generated_tokens < 9 else 3)
    rig.run([request(uid=0, max_tokens=40, ignore_eos=True)])
    assert rig.engine.metrics.num_lost_drafts == 1 and rig.engine.metrics.num_draft_tokens == 0
    rig.engine._drafter._lengths = ScriptedLengths(lambda s: 0 if s.num_generated_tokens < 6 else 3)
    rig.run([request(uid=1, max_tokens=40, ignore_eos=True)])
    assert rig.engine.metrics.num_lost_drafts == 1 and rig.engine.metrics.num_draft_tokens > 20
    assert rig.token_ids(0) == rig.token_ids(1)


def test_a_long_prompt_is_drafted_while_the_length_is_0():
    rig = Rig(num_draft_tokens=3, draft="right", max_undrafted_tokens=5, max_batch_tokens=8)
    rig.engine._drafter._lengths = ScriptedLengths(lambda s: 0 if s.num_generated_tokens < 4 else 3)
    rig.run([request(range(20), max_tokens=20, ignore_eos=True)])
    assert rig.engine.metrics.num_lost_drafts == 0 and rig.engine.metrics.num_draft_tokens > 0


def costs(target_fixed: float, target_each: float, draft_fixed: float, draft_each: float) -> Costs:
    made = Costs()
    for x in (1, 2, 4, 8) * 4:
        made.target.add(x, target_fixed + x * target_each)
        made.draft.add(x, draft_fixed + x * draft_each)
    return made


def test_line_fit():
    fit = LineFit()
    assert not fit.is_known and (fit.slope, fit.intercept) == (0.0, 0.0)
    for _ in range(5):
        fit.add(4, 2.0)
    assert (fit.slope, fit.intercept) == pytest.approx((0.5, 0.0)), "one kind of step cannot tell the parts apart"
    for x in range(1, 9):
        fit.add(x, 1.0 + 0.25 * x)
    assert (fit.slope, fit.intercept) == pytest.approx((0.25, 1.0))
    for x in (1, 9) * 200:
        fit.add(x, 5.0 - 0.1 * x)
    assert fit.slope == 0.0 and fit.intercept == pytest.approx(4.5, abs=0.1)


CASES = [
    (costs(10.0, 0.1, 0.2, 0.1), 1.0, 3),  # memory-bound target, cheap draft: as many as there can be
    (costs(10.0, 0.1, 0.2, 0.1), 0.0, 0),  # nothing is ever accepted
    (costs(1.0, 1.0, 0.1, 0.1), 0.0, 0),
    (costs(1.0, 1.0, 9.0, 1.0), 1.0, 0),  # a draft as dear as five steps
    (costs(10.0, 0.1, 4.0, 0.1), 0.6, 1),  # the first pays, the second does not
]


@pytest.mark.parametrize(("measured", "acceptance", "expected"), CASES)
def test_the_length_is_what_pays(measured, acceptance, expected):
    lengths, one, draw = AdaptiveLengths(measured), sequence(0), random.Random(0)
    for _ in range(200):
        lengths.observe(one, 3, next((i for i in range(3) if draw.random() >= acceptance), 3))
    assert lengths._best(one, num_sequences=1) == expected


def test_a_new_sequence_starts_with_what_others_had():
    lengths, first, second = AdaptiveLengths(costs(10.0, 0.1, 4.0, 0.1)), sequence(0), sequence(1)
    for _ in range(200):
        lengths.observe(first, 3, 0)
    lengths.choose([second])
    assert second.draft_length == 0


def test_drafting_until_something_is_measured():
    one = sequence(0)
    AdaptiveLengths(Costs()).choose([one])
    assert one.draft_length == 3


def test_probes_cost_their_share_and_find_a_draft_that_got_better():
    measured = costs(10.0, 0.1, 4.0, 0.1)
    lengths, one = AdaptiveLengths(measured), sequence(0)
    for _ in range(50):
        lengths.observe(one, 1, 0)
    plain, probes = 0.0, 0
    for _ in range(1000):
        lengths.choose([one])
        plain += lengths.seconds(0, 1)
        if one.draft_length:
            probes += 1
            lengths.observe(one, 1, 0)
    spent = probes * (lengths.seconds(1, 1) - lengths.seconds(0, 1))
    assert 0.5 * PROBE_SHARE * plain < spent <= PROBE_SHARE * plain
    for _ in range(2000):
        lengths.choose([one])
        lengths.observe(one, one.draft_length, one.draft_length)
    assert one.draft_length > 0


@pytest.mark.parametrize("draft", ["right", "wrong"])
def test_adaptive_changes_nothing(draft):
    many = [request((uid, 1), uid=uid, seed=uid, max_tokens=60, ignore_eos=True, temperature=0.9) for uid in range(3)]
    plain = Rig(num_draft_tokens=0)
    plain.run(many)
    rig = Rig(num_draft_tokens=3, draft=draft, draft_length="adaptive")
    lengths = rig.engine._drafter._lengths
    assert isinstance(lengths, AdaptiveLengths)
    lengths._costs = costs(10.0, 0.1, 2.0, 0.1)  # the fakes' own say nothing
    rig.run(many)
    assert [rig.token_ids(uid) for uid in range(3)] == [plain.token_ids(uid) for uid in range(3)]
    metrics = rig.engine.metrics
    if draft == "wrong":
        assert 0 < metrics.num_draft_tokens < 60, "of 180 tokens"
    else:
        assert metrics.num_draft_tokens == metrics.num_accepted_draft_tokens > 100


def test_costs_of_target_and_draft_are_measured():
    rig = Rig(num_draft_tokens=3, draft="mixed", draft_length="adaptive")
    rig.run([request(max_tokens=30, ignore_eos=True)])
    measured = rig.engine._drafter._costs
    assert measured.target.is_known and measured.draft.is_known
    assert measured.target.slope + measured.target.intercept > 0.0
