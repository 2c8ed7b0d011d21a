"""Sessions: saved at any step, restored elsewhere, they go on as if nothing had happened."""

import dataclasses
import math
import random

import pytest
import safetensors.torch
import torch

from qwen35.engine.engine import Engine
from qwen35.engine.request import Emission, Request, StructuredOutputs
from qwen35.engine.session import Session
from qwen35.engine.session_file import load_session, save_session
from qwen35.errors import InvalidArgument, StateError
from tests.engine import differential
from tests.engine.fakes import THINK, Rig, request
from tests.engine.test_swap import REQUESTS, make_engine, taint

FINGERPRINT = "0123456789abcdef"


def told(emission: Emission) -> tuple:
    """All but times."""
    return tuple(getattr(emission, field.name) for field in dataclasses.fields(emission)
                 if field.name not in ("times", "session"))  # fmt: skip


def run_on(engine: Engine) -> list[list[tuple]]:
    """What each step says."""
    steps = []
    while engine.has_work:
        steps.append([told(emission) for emission in engine.step()])
    return steps


def through_a_file(session: Session, directory) -> Session:
    path = directory / "session"
    save_session(session, path, FINGERPRINT)
    return load_session(path, FINGERPRINT)


def resume(engine: Engine, session: Session, **changes) -> None:
    engine.resume(session, session.request_on(uid=0, deadline=math.inf, arrival=0.0, **changes))


@pytest.mark.parametrize("lengths", ["steady", "fickle"])
@pytest.mark.parametrize("kind", ["fp8", "float64"])
@pytest.mark.parametrize("one", REQUESTS, ids=["greedy", "penalties", "image"])
def test_a_restored_request_says_the_rest_step_by_step(kind, lengths, one, tmp_path):
    whole = make_engine(kind, lengths)
    whole.submit(one)
    expected = run_on(whole)
    saving = make_engine(kind, lengths)
    saving.submit(one)
    pending = set()
    for step in range(1, len(expected)):
        saving.step()
        session = saving.save(one.uid)
        pending.add(session.snapshot.num_pending)
        if step % 2:
            continue
        other = make_engine(kind, lengths, block_tokens=4)
        taint(other)
        resume(other, through_a_file(session, tmp_path))
        assert run_on(other) == expected[step:]
    assert run_on(saving) == expected[-1:], "saving changes nothing"
    assert max(pending) > 0


TEXTS = {
    "grammar": {"structured_outputs": StructuredOutputs("regex", "(ab|c|d e){9,17}f*")},
    "thinking": {"token_ids": (0, THINK), "thinking_token_budget": 4,
                 "structured_outputs": StructuredOutputs("regex", "(ab|c|d e){5,17}f*")},
    "penalties": {"frequency_penalty": 0.7, "presence_penalty": 0.3, "repetition_penalty": 1.3},
    "stop": {"stop": ("ab c", "mnop", "é€"), "temperature": 1.5, "bad_words": ("a",)},
    "prompt_logprobs": {"token_ids": tuple(range(14)), "prompt_logprobs": 2},
}  # fmt: skip


@pytest.mark.parametrize("name", TEXTS)
def test_sampler_grammar_and_text_go_on_too(name, tmp_path):
    one = request(**{"temperature": 1.0, "max_tokens": 24, "seed": 5, "logprobs": 1, **TEXTS[name]})
    options = {"draft": "mixed", "max_batch_tokens": 6}
    whole = Rig(**options).engine
    whole.submit(one)
    expected = run_on(whole)
    saving = Rig(**options).engine
    saving.submit(one)
    for step in range(1, len(expected)):
        saving.step()
        rig = Rig(**options)
        resume(rig.engine, through_a_file(saving.save(0), tmp_path))
        assert run_on(rig.engine) == expected[step:]
        rig.check_pool()


def test_one_that_waits_is_saved_as_it_waits(tmp_path):
    """Not started, swapped out, or dropped: each goes on in its own way to the same tokens."""
    for swap_bytes in (0, 10_000):
        rig = Rig(num_blocks=8, swap_bytes=swap_bytes)
        many = [request((1, 2), uid=uid, max_tokens=30, ignore_eos=True, arrival=float(uid)) for uid in range(3)]
        for one in many:
            rig.engine.submit(one)
        assert rig.engine.save(2).snapshot is None
        while rig.engine.metrics.num_preemptions == 0:
            rig.step()
        uid = rig.engine._scheduler.waiting[0].request.uid
        session = through_a_file(rig.engine.save(uid), tmp_path)
        assert (session.snapshot is None) == (swap_bytes == 0)
        other = Rig(num_blocks=8)
        resume(other.engine, session)
        news = [emission for step in run_on(other.engine) for emission in step]
        rig.run()
        told_before = rig.token_ids(uid)[: len(session.progress.token_ids)]
        assert told_before == session.progress.token_ids
        assert session.progress.token_ids + tuple(t for e in news for t in e[2]) == rig.token_ids(uid)


def finished(engine: Engine, one: Request) -> Session:
    engine.submit(dataclasses.replace(one, wants_session=True))
    sessions = []
    while engine.has_work:
        sessions += [emission.session for emission in engine.step() if emission.is_final]
    [session] = sessions
    return session


@pytest.mark.parametrize("num_first", [1, 2, 5, 6])
@pytest.mark.parametrize("one", REQUESTS, ids=["greedy", "penalties", "image"])
def test_a_text_that_ended_by_its_length_goes_on(one, num_first, tmp_path):
    def of_length(num_tokens: int) -> Request:
        return dataclasses.replace(one, sampling=dataclasses.replace(one.sampling, max_tokens=num_tokens, min_tokens=0))

    whole = finished(make_engine("fp8", "steady"), of_length(11))
    session = through_a_file(finished(make_engine("fp8", "steady"), of_length(num_first)), tmp_path)
    assert session.progress.finish_reason == "length"
    assert session.num_computed_tokens == len(session.token_ids) - 1
    engine = make_engine("fp8", "steady")
    resume(engine, session, max_new_tokens=11 - num_first, wants_session=True)
    news = []
    while engine.has_work:
        news += engine.step()
    again = news[-1].session.progress
    assert again.token_ids == whole.progress.token_ids
    assert again.cumulative_logprob == whole.progress.cumulative_logprob
    assert sum(len(emission.token_ids) for emission in news) == 11 - num_first
    assert num_first < 3 or again.num_draft_tokens > session.progress.num_draft_tokens, "it drafts on"


def test_a_text_that_was_stopped_or_has_no_room_does_not_go_on():
    rig = Rig()
    stopped = finished(rig.engine, request(max_tokens=40, stop=("a", "b", "c", "d", "e")))
    with pytest.raises(InvalidArgument, match="whose text goes on, got one that was stopped"):
        resume(rig.engine, stopped, max_new_tokens=4)
    full = finished(rig.engine, request(max_tokens=6, ignore_eos=True))
    with pytest.raises(InvalidArgument, match="expected room behind the 9 tokens of the session, got 9 tokens in all"):
        resume(rig.engine, full)
    assert not rig.engine.has_work


def next_turn(session: Session, tail: tuple[int, ...]) -> Request:
    """A prompt that begins with all of a session's tokens."""
    token_ids = session.token_ids + tail
    behind = int(session.request.positions.max()) + 1 + torch.arange(len(token_ids) - len(session.request.token_ids))
    positions = torch.cat([session.request.positions, behind.expand(3, -1)], dim=1)
    return dataclasses.replace(session.request, token_ids=token_ids, positions=positions, uid=1, deadline=math.inf)


@pytest.mark.parametrize("num_first", [2, 5, 6])
@pytest.mark.parametrize("one", [REQUESTS[0], REQUESTS[2]], ids=["text", "image"])
def test_a_prompt_that_begins_with_a_session_runs_the_rest_alone(one, num_first, tmp_path):
    one = dataclasses.replace(one, sampling=dataclasses.replace(one.sampling, max_tokens=num_first))
    session = through_a_file(finished(make_engine("fp8", "steady"), one), tmp_path)
    prompt = next_turn(session, (61, 62, 63))
    plain, engine = make_engine("fp8", "steady"), make_engine("fp8", "steady", block_tokens=4)
    plain.submit(prompt)
    expected = [emission for step in run_on(plain) for emission in step]
    engine.submit(prompt, session)
    got = [emission for step in run_on(engine) for emission in step]
    assert (got[-1][1].num_cached_tokens, expected[-1][1].num_cached_tokens) == (session.num_computed_tokens, 0)
    for place in (2, 4):  # token ids, logprobs
        assert [x for e in got for x in e[place]] == [x for e in expected for x in e[place]]
    if num_first > 2:  # else nothing was drafted there, and nothing is after it
        assert dataclasses.replace(got[-1][1], num_cached_tokens=0) == expected[-1][1]
        num_target_tokens = plain.metrics.num_target_tokens - session.num_computed_tokens
        assert engine.metrics.num_target_tokens == num_target_tokens


def test_a_prompt_that_does_not_begin_with_it_is_refused():
    engine = make_engine("fp8", "steady")
    session = finished(engine, REQUESTS[2])
    turn = next_turn(session, (61,))
    other_token = dataclasses.replace(turn, token_ids=(7, *turn.token_ids[1:]))
    with pytest.raises(InvalidArgument, match=r"got token 7 instead of \d+ at place 0"):
        engine.submit(other_token, session)
    with pytest.raises(InvalidArgument, match="expected a prompt of more than the"):
        engine.submit(session.request, session)
    other_image = dataclasses.replace(turn, image_embeds=turn.image_embeds.flip(0))
    other_place = dataclasses.replace(turn, positions=turn.positions + 1)
    for other in (other_image, other_place):
        with pytest.raises(InvalidArgument, match="expected the images of the session, got others"):
            engine.submit(other, session)
    two = dataclasses.replace(turn, sampling=dataclasses.replace(turn.sampling, n=2))
    with pytest.raises(InvalidArgument, match="neither n above 1 nor prompt_logprobs"):
        engine.submit(two, session)
    assert not engine.has_work


@pytest.fixture
def saved(tmp_path):
    engine = make_engine("fp8", "steady")
    engine.submit(REQUESTS[1])
    while engine._live[0][0].num_pending < 2:
        engine.step()
    session = engine.save(0)
    save_session(session, tmp_path / "it", FINGERPRINT)
    return session, tmp_path / "it"


@pytest.mark.parametrize(("settings", "name", "message"), [
    ({"kv_cache_dtype": "bfloat16"}, "fp8", "attention0.keys: expected bfloat16 .*, got float8_e4m3fn "),
    ({}, "float64", "attention0.keys: expected float64 .*, got float8_e4m3fn "),
])  # fmt: skip
def test_other_caches_refuse_it_with_both_values(saved, settings, name, message):
    engine = make_engine(name, "steady", **settings)
    with pytest.raises(StateError, match=message):
        resume(engine, saved[0])
    assert not engine.has_work


@pytest.mark.parametrize("counter", ["num_computed_tokens", "num_pending", "num_drafted_tokens"])
def test_counters_that_do_not_fit_the_tensors_are_refused(saved, counter):
    """Found before it waits: in a step it would end the requests of others."""
    session, _ = saved
    for change in (-1, 1):
        snapshot = dataclasses.replace(session.snapshot, **{counter: getattr(session.snapshot, counter) + change})
        engine = make_engine("fp8", "steady")
        with pytest.raises(StateError, match=r"session: (attention|gated_delta|draft|undrafted).*: expected .*, got "):
            resume(engine, dataclasses.replace(session, snapshot=snapshot))


def test_open_inputs_need_room(saved):
    engine, _ = differential.make_engine("fp8", 32, num_draft_tokens=0)
    with pytest.raises(StateError, match="num_draft_tokens: expected at least [123] .*, got 0"):
        resume(engine, saved[0])


@pytest.mark.parametrize(("first", "then"), [(0, 3), (5, 3), (3, 5)])
def test_another_draft_length_says_the_same(first, then, tmp_path):
    """One that was saved without drafts has holes in the draft's cache: it goes on without them."""
    one = REQUESTS[1]
    plain, _ = differential.make_engine("fp8", 32, num_draft_tokens=0)
    whole = finished(plain, one)
    saving, _ = differential.make_engine("fp8", 32, num_draft_tokens=first)
    saving.submit(one)
    for _ in range(3):
        saving.step()
    session = saving.save(0)
    engine, _ = differential.make_engine("fp8", 32, num_draft_tokens=then)
    resume(engine, through_a_file(session, tmp_path), wants_session=True)
    news = []
    while engine.has_work:
        news += engine.step()
    assert news[-1].session.progress.token_ids == whole.progress.token_ids
    assert (engine.metrics.num_draft_tokens > 0) == (first > 0)


def test_a_file_keeps_all_of_a_request_but_what_its_engine_gave_it(tmp_path):
    engine = make_engine("fp8", "steady")
    one = dataclasses.replace(REQUESTS[2], priority=3, request_id="it")
    engine.submit(one)
    again = through_a_file(engine.save(0), tmp_path).request
    given = {"uid", "deadline", "arrival", "lease", "wants_session"}
    for field in dataclasses.fields(Request):
        saved, asked = getattr(again, field.name), getattr(one, field.name)
        is_same = torch.equal(saved, asked) if isinstance(asked, torch.Tensor) else saved == asked
        assert is_same or field.name in given, field.name
    assert len(again.images) == 1 and len(again.image_embeds) == 6


def test_a_file_of_another_program_is_refused_with_both_fingerprints(saved):
    with pytest.raises(StateError, match=f"fingerprint: expected other, got {FINGERPRINT}"):
        load_session(saved[1], "other")


def test_a_file_that_is_none_or_damaged_is_refused(saved, tmp_path):
    whole = saved[1].read_bytes()
    for name, content in (("short", whole[:-7]), ("empty", b""), ("text", b"session" * 9), ("head", whole[:200])):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(StateError, match=f"session: expected a readable file, got {name}"):
            load_session(tmp_path / name, FINGERPRINT)
    with pytest.raises(StateError, match="session: expected a readable file, got nothing"):
        load_session(tmp_path / "nothing", FINGERPRINT)
    safetensors.torch.save_file({}, tmp_path / "other")
    with pytest.raises(StateError, match="session: format: expected qwen35-session-1, got None"):
        load_session(tmp_path / "other", FINGERPRINT)
    metadata = {"format": "qwen35-session-1", "fingerprint": FINGERPRINT, "session": '{"request": {}}'}
    safetensors.torch.save_file({}, tmp_path / "partial", metadata)
    with pytest.raises(StateError, match="session: expected a whole record, got partial"):
        load_session(tmp_path / "partial", FINGERPRINT)


def test_a_write_that_fails_leaves_the_old_file(saved, tmp_path, monkeypatch):
    before = saved[1].read_bytes()

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr("qwen35.engine.session_file.os.replace", fail)
    with pytest.raises(OSError, match="disk full"):
        save_session(saved[0], saved[1], "other")
    assert saved[1].read_bytes() == before and [path.name for path in tmp_path.iterdir()] == ["it"]


def test_only_a_live_request_of_one_sample_is_saved():
    rig = Rig()
    with pytest.raises(InvalidArgument, match="uid: expected a live request of one sample, got 7"):
        rig.engine.save(7)
    rig.engine.submit(request(n=2, uid=3))
    with pytest.raises(InvalidArgument, match="one sample, got 3"):
        rig.engine.save(3)


@pytest.mark.parametrize("seed", range(12))
def test_all_that_is_live_moves_to_another_engine(seed, tmp_path):
    """Mixed requests under pressure, running, waiting and swapped out; each says what it says alone."""
    draw, made = random.Random(seed), differential.schedule(seed)
    visits = [visit for visit in made.visits if visit.num_draft_tokens is None] or made.visits
    news: dict[int, list[Emission]] = {visit.uid: [] for visit in visits}

    def step(engine: Engine) -> None:
        for emission in engine.step():
            assert emission.error is None, emission.error
            news[emission.uid].append(emission)

    engine, state = differential.make_engine(
        made.kind, made.num_blocks, num_draft_tokens=made.num_draft_tokens, **made.settings
    )
    for visit in visits:
        engine.submit(dataclasses.replace(differential.catalogue()[visit.index], uid=visit.uid))
    for _ in range(draw.randint(1, 6)):
        step(engine)
    sessions = {uid: through_a_file(engine.save(uid), tmp_path) for uid in list(engine._live)}
    settings = differential.schedule(seed + 4).settings
    other, its_state = differential.make_engine(made.kind, 40, num_draft_tokens=made.num_draft_tokens, **settings)
    for uid, session in sessions.items():
        other.resume(session, session.request_on(uid=uid, deadline=math.inf, arrival=0.0))
        engine.abort(uid)
    engine.step()
    while other.has_work:
        step(other)
    for visit in visits:
        *expected, _ = differential.solo(made.kind, visit.index, False)[0]  # all but the prompt's logprobs
        assert differential.outcome(news[visit.uid])[:-1] == tuple(expected)
    assert sessions
    for one in (state, its_state):
        one.close()
