"""The state of a sequence after a verify, at every place: real model, bit for bit."""

import dataclasses

import pytest
import torch

from qwen35.engine.engine import Engine
from qwen35.engine.request import Request
from tests.drafters import OracleDrafter, ScriptedLengths
from tests.engine import differential
from tests.engine.fakes import Rig, request

REQUEST = dataclasses.replace(
    differential.catalogue()[0],
    token_ids=tuple(range(60, 69)),
    positions=torch.arange(9).expand(3, -1),
    sampling=differential.SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True),
)


def states(engine: Engine, slot: int) -> list[torch.Tensor]:
    views = engine._target._cache.gated_delta
    return [part[slot].clone() for view in views for part in (view.recurrent, view.conv)]


def plain_run(kind: str, request: Request) -> tuple[tuple[int, ...], dict[int, list[torch.Tensor]]]:
    """All tokens, and the state after each number of computed tokens, one at a time."""
    engine, _ = differential.make_engine(kind, 16, num_draft_tokens=0)
    engine.submit(request)
    token_ids, after = [], {}
    while engine.has_work:
        [sequence] = engine._live[request.uid]
        token_ids += [token_id for emission in engine.step() for token_id in emission.token_ids]
        if not sequence.is_finished:
            after[sequence.num_computed_tokens] = states(engine, sequence.slot)
    return tuple(token_ids), after


def after_a_verify(kind: str, known: tuple[int, ...], num_accepted: int):
    """An engine in the middle of REQUEST, whose last step verified 5 drafts and accepted ``num_accepted``."""
    engine, _ = differential.make_engine(kind, 16, num_draft_tokens=5)
    wrong = tuple(t ^ (i > num_accepted) for i, t in enumerate(known))  # known[0] comes from the prompt
    engine._drafter = OracleDrafter({0: wrong}, wrong=0.0)
    engine.submit(REQUEST)
    engine.step()
    [sequence] = engine._live[0]
    emissions = engine.step()
    assert [len(emission.token_ids) for emission in emissions] == [num_accepted + 1]
    return engine, sequence


@pytest.fixture(scope="module", params=differential.KINDS)
def plain(request):
    return request.param, *plain_run(request.param, REQUEST)


@pytest.mark.parametrize("num_accepted", range(6))
def test_materialise_gives_the_state_of_a_run_to_that_place(plain, num_accepted):
    kind, known, after = plain
    engine, sequence = after_a_verify(kind, known, num_accepted)
    first = sequence.num_computed_tokens - sequence.num_pending
    assert sequence.num_pending == num_accepted + 1 and first == 9
    engine._drafter = OracleDrafter({0: known}, wrong=0.4)
    # Place by place, each from what the one before left pending.
    for position in range(first, sequence.num_computed_tokens + 1):
        engine._target.materialise(sequence, position)
        assert sequence.num_computed_tokens - sequence.num_pending == position
        pairs = zip(states(engine, sequence.slot), after[position], strict=True)
        assert all(torch.equal(state, expected) for state, expected in pairs)
    run_on(engine, sequence, known)


@pytest.mark.parametrize("position", range(9, 14))
def test_a_sequence_goes_on_with_what_is_left_pending(plain, position):
    kind, known, _ = plain
    engine, sequence = after_a_verify(kind, known, num_accepted=3)
    engine._target.materialise(sequence, position)
    assert sequence.num_pending == 13 - position
    run_on(engine, sequence, known)


def run_on(engine: Engine, sequence, known: tuple[int, ...]) -> None:
    while engine.has_work:
        assert all(emission.error is None for emission in engine.step())
    assert tuple(sequence.token_ids[9:]) == known


@pytest.mark.parametrize("position", [8, 14])
def test_materialise_refuses_other_places(plain, position):
    engine, sequence = after_a_verify(plain[0], plain[1], num_accepted=3)
    with pytest.raises(ValueError, match=f"position: expected 9 to 13 .* got {position}"):
        engine._target.materialise(sequence, position)


@pytest.mark.parametrize("then", [0, 1, 5])
@pytest.mark.parametrize("num_accepted", range(6))
def test_every_commit_then_any_draft_length(plain, num_accepted, then):
    """n = 1 to k + 1 inputs go into the state, whatever the next step drafts."""
    kind, known, _ = plain
    engine, sequence = after_a_verify(kind, known, num_accepted)
    sequence.drafts = known[num_accepted + 2 :][:then]
    run_on(engine, sequence, known)


def test_a_prompt_shorter_than_the_drafts():
    for num_prompt in (1, 2, 3):
        outputs = []
        for num_draft_tokens in (0, 5):
            rig = Rig(num_draft_tokens=num_draft_tokens, draft="right")
            rig.run([request(range(num_prompt), max_tokens=20, ignore_eos=True)])
            outputs.append(rig.token_ids())
        assert outputs[0] == outputs[1]


def test_an_abandoned_step_leaves_the_others_and_the_slot_usable():
    """A verify that throws commits nothing; the slot's next owner starts afresh."""
    engine, state = differential.make_engine("fp8", 16, num_draft_tokens=3, num_slots=1)
    engine._drafter._lengths = ScriptedLengths(lambda _: 3)
    first, second = (dataclasses.replace(REQUEST, uid=uid) for uid in (0, 1))
    engine.submit(first)
    engine.step()
    decide, engine._target.decide = engine._target.decide, lambda *_: 1 / 0
    [emission] = engine.step()
    assert emission.error is not None and emission.is_final
    engine._target.decide = decide
    engine.submit(second)
    tokens = []
    while engine.has_work:
        tokens += [token_id for emission in engine.step() for token_id in emission.token_ids]
    assert tuple(tokens) == plain_run("fp8", REQUEST)[0]
    state.close()
