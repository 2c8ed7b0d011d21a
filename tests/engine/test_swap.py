"""Copies of sequences on the host: taken at any step, restored into other memory, nobody can tell."""

import dataclasses

import pytest
import torch

from qwen35.engine.engine import Engine
from qwen35.engine.request import Request
from qwen35.engine.snapshot import Snapshot, num_snapshot_bytes
from tests.drafters import ScriptedLengths
from tests.engine import differential
from tests.engine.fakes import Rig, request
from tests.tiny_checkpoint import TOKEN_ID

MAX_TOKENS = 10


def asked(index: int, **sampling) -> Request:
    """Requests of the catalogue with as many tokens to come as a step by step comparison needs."""
    made = differential.catalogue()[index]
    placeholders = (differential.IMAGE, TOKEN_ID["<|video_pad|>"])
    bias = (*made.sampling.logit_bias, *((t, -100.0) for t in placeholders))  # what it says can be a prompt
    options = dataclasses.replace(made.sampling, max_tokens=MAX_TOKENS, ignore_eos=True, logit_bias=bias, **sampling)
    return dataclasses.replace(made, uid=0, sampling=options)


KINDS = ("fp8", "float64")
# Greedy, sampled with penalties, with an image.
REQUESTS = [asked(0), asked(6), asked(3)]


def make_engine(kind: str, lengths: str, **settings) -> Engine:
    options = {"num_slots": 2, "max_batch_tokens": 8, "swap_bytes": 1 << 20, **settings}
    engine, _ = differential.make_engine(kind, 32, num_draft_tokens=3, **options)
    if lengths == "fickle":  # pauses too: hidden states wait to be drafted
        engine._drafter._lengths = ScriptedLengths(lambda s: (0, 0, 3, 1)[s.num_generated_tokens % 4])
    return engine


def run(engine: Engine, asked: Request, preempted_at: int | None = None) -> tuple:
    """Tokens, text, logprobs and the counts of drafts; preempted before one step."""
    engine.submit(asked)
    news, step = [], 0
    while engine.has_work:
        if step == preempted_at and engine._scheduler.running:
            engine._scheduler._preempt(engine._scheduler.running[0])
            taint(engine)
        news += engine.step()
        step += 1
    return differential.outcome(news), news[-1].usage, step


def taint(engine: Engine) -> None:
    """Whatever the caches hold is garbage from now on."""
    cache = engine._target._cache
    for view in (*cache.attention, cache.draft, *cache.gated_delta):
        for field in dataclasses.fields(view):
            value = getattr(view, field.name)
            if isinstance(value, torch.Tensor):
                value.view(torch.uint8).fill_(0x7F)  # NaN in every type


@pytest.fixture(scope="module")
def undisturbed():
    return {(kind, lengths, index): run(make_engine(kind, lengths), one)
            for kind in KINDS for lengths in ("steady", "fickle")
            for index, one in enumerate(REQUESTS)}  # fmt: skip


@pytest.mark.parametrize("lengths", ["steady", "fickle"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_swapped_sequence_goes_on_with_the_same_drafts(kind, lengths, undisturbed):
    """Preempted in prompts and behind accepted runs: acceptance too is that of the whole run."""
    pending = set()
    for index, one in enumerate(REQUESTS):
        *expected, num_steps = undisturbed[kind, lengths, index]
        for step in range(1 + index % 2, num_steps, 2):
            engine = make_engine(kind, lengths)
            engine._swap._keep = noting(engine._swap._keep, pending)
            *got, steps = run(engine, one, preempted_at=step)
            assert (got, steps) == (expected, num_steps)
            assert engine.metrics.num_swapped_in_tokens == engine.metrics.num_swapped_out_tokens > 0
            assert engine.metrics.num_dropped_tokens == engine._swap.num_bytes == 0
    assert min(pending) == 0 and (max(pending) > 1 or lengths == "fickle")


def noting(keep, pending: set[int]):
    def noted(sequence, snapshot):
        pending.add(snapshot.num_pending)
        keep(sequence, snapshot)

    return noted


def test_it_restores_into_other_blocks_another_slot_and_another_block_size():
    one = REQUESTS[1]
    engine = make_engine("fp8", "steady")
    engine.submit(one)
    for _ in range(6):
        engine.step()
    [sequence] = engine._scheduler.running
    taken = Snapshot.take(engine._target._cache, sequence)
    assert taken.num_bytes == num_snapshot_bytes(engine._target._cache, sequence)
    other = make_engine("fp8", "steady", block_tokens=4)
    taint(other)
    pool = other._scheduler._memory._pool
    sequence.block_ids = tuple(pool.allocate_blocks(20)[::-1])
    sequence.slot = [pool.allocate_slot() for _ in range(2)][1]
    taken.restore(other._target._cache, sequence)
    again = Snapshot.take(other._target._cache, sequence)
    assert taken.tensors.keys() == again.tensors.keys()
    for name, tensor in taken.tensors.items():
        assert tensor.dtype == again.tensors[name].dtype
        assert torch.equal(bits(tensor), bits(again.tensors[name])), name


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def test_what_does_not_fit_is_computed_again():
    one = REQUESTS[1]
    plain, *_ = run(make_engine("fp8", "steady"), one)
    engine = make_engine("fp8", "steady", swap_bytes=1000)
    got, *_ = run(engine, one, preempted_at=6)
    assert got == plain
    metrics = engine.metrics
    assert (metrics.num_swapped_out_tokens, metrics.num_swapped_bytes) == (0, 0) and metrics.num_dropped_tokens > 0


def test_the_copy_of_a_cancelled_sequence_goes():
    rig = Rig(num_blocks=8)
    for uid in range(3):
        rig.engine.submit(request((1, 2), uid=uid, max_tokens=30, ignore_eos=True, arrival=float(uid)))
    while rig.engine.metrics.num_swapped_bytes == 0:
        rig.step()
    rig.engine.abort(1)
    rig.engine.abort(2)
    rig.step()
    assert rig.engine.metrics.num_swapped_bytes == 0
    rig.run()
