"""Random schedules against solo runs, and faults that they must find.

`pytest tests/engine/test_differential.py --schedules 3000` plays more of them than the 100 of every run."""

import dataclasses
import random

import pytest
import torch

from qwen35.engine import checkpoints, prefix
from qwen35.engine.batch import Piece
from qwen35.engine.checkpoints import Checkpoints
from qwen35.engine.engine import Engine
from qwen35.engine.request import Request
from qwen35.engine.scheduler import Scheduler
from qwen35.engine.sequence import Sequence
from qwen35.engine.snapshot import Snapshot
from qwen35.engine.target import TargetRunner
from qwen35.kernels.reference import attention, gated_delta, plan
from qwen35.state.local import LocalState
from qwen35.state.prefix import PrefixHasher
from tests.engine import differential
from tests.engine.differential import play, schedule
from tests.engine.fakes import LateStore

NUM_LOOKED_AT = 24


def test_every_request_equals_its_solo_run(schedule_seed):
    play(schedule(schedule_seed))


def test_schedules_reach_what_they_are_for():
    """Else they would show nothing: accepted and rejected drafts, cancelled and preempted requests, images, hits."""
    engines = [play(schedule(seed)) for seed in range(NUM_LOOKED_AT)]
    drafted = sum(engine.metrics.num_draft_tokens for engine in engines)
    accepted = sum(engine.metrics.num_accepted_draft_tokens for engine in engines)
    assert min(accepted, drafted - accepted) > 30
    assert sum(engine.metrics.num_failed_requests for engine in engines) > 1
    for name in ("num_preemptions", "num_dropped_tokens", "num_swapped_in_tokens", "num_skipped_checkpoints"):
        assert sum(getattr(engine.metrics, name) for engine in engines) > 3, name
    for name in ("num_cached_tokens", "num_checkpoints"):
        assert sum(getattr(engine.metrics, name) for engine in engines) > 100, name
    visits = [visit for seed in range(NUM_LOOKED_AT) for visit in schedule(seed).visits]
    assert sum(len(differential.catalogue()[visit.index].images) for visit in visits) > 5
    assert min(sum(v.num_samples > 1 for v in visits), sum(v.wants_prompt_logprobs for v in visits)) > 3


@pytest.mark.parametrize("seed", range(4))
def test_a_storm_of_cancels_leaves_the_survivor_alone(seed):
    """Twenty requests come and are cancelled within a few steps, in the slots and blocks of one that stays."""
    made = schedule(seed)
    draw = random.Random(seed)
    stays = dataclasses.replace(made.visits[0], uid=0, arrives=0, cancelled=None)
    storm = tuple(
        dataclasses.replace(draw.choice(made.visits), uid=uid, arrives=uid % 7, cancelled=uid % 7 + draw.randint(0, 4))
        for uid in range(1, 21)
    )
    engine = play(dataclasses.replace(made, visits=(stays, *storm)))
    assert engine.metrics.num_failed_requests > 10 and engine.metrics.num_finished_requests > 0


def replay_off_by_one(monkeypatch):
    """One accepted input too few goes into the state."""
    commit = Sequence.commit

    def faulty(self, *args, **kwargs):
        commit(self, *args, **kwargs)
        self.num_pending = max(0, self.num_pending - 1)

    monkeypatch.setattr(Sequence, "commit", faulty)


def stale_conv_window(monkeypatch):
    """The recurrent state takes the accepted inputs, the convolution's columns stay behind."""
    run = gated_delta._run

    def faulty(sequence, columns, steps, view, out):
        before = view.conv[sequence.slot].clone()
        run(sequence, columns, steps, view, out)
        if sequence.defer and sequence.num_pending:
            view.conv[sequence.slot] = before

    monkeypatch.setattr(gated_delta, "_run", faulty)


def own_chunk_unrounded(monkeypatch):
    """Keys of the chunk that is being run are used as they were computed, not as the cache keeps them."""
    write, partition = attention._write, attention._partition
    written: list[torch.Tensor] = []

    def keep(cache, index, values, scale):
        written.append(values)
        write(cache, index, values, scale)

    def faulty(view, sequence, start, dtype):
        keys, values = partition(view, sequence, start, dtype)  # [Hkv, D, L]
        low, high = max(start, sequence.kv_start), min(start + keys.shape[-1], sequence.kv_stop)
        if low < high:
            first = sequence.start + low - sequence.kv_start
            own = written[-2][first : first + high - low]  # keys come before values
            keys[:, :, low - start : high - start] = own.to(dtype).permute(1, 2, 0)
        return keys, values

    monkeypatch.setattr(attention, "_write", keep)
    monkeypatch.setattr(attention, "_partition", faulty)


def slot_reused_without_reset(monkeypatch):
    """A sequence starts from whatever its slot holds."""
    monkeypatch.setattr(plan.SequencePlan, "is_fresh", property(lambda self: False))


def penalties_blind_to_drafts(monkeypatch):
    """The rows of a verify all see the decided tokens alone."""
    row = Sequence.row
    monkeypatch.setattr(Sequence, "row", lambda self, drafts=(): dataclasses.replace(row(self, drafts), drafts=()))


def drafts_at_the_wrong_position(monkeypatch):
    """The rotary positions of a verify are those of one token later."""
    shift = property(lambda self: self.sequence.rotary_positions(
        self.start - self.is_draft_pass, self.end - self.is_draft_pass) + self.is_deferred)  # fmt: skip
    monkeypatch.setattr(Piece, "rotary_positions", shift)


def preempted_state_kept(monkeypatch):
    """A preempted sequence does not run all of its tokens again."""
    rewind = Sequence.rewind

    def faulty(self):
        rewind(self)
        self.num_computed_tokens = max(0, self.num_generated_tokens - 1)

    monkeypatch.setattr(Sequence, "rewind", faulty)


def pending_inputs_not_swapped(monkeypatch):
    """A sequence comes back without the inputs that were accepted last."""
    restore = Snapshot.restore

    def faulty(self, cache, sequence):
        restore(self, cache, sequence)
        for view in cache.gated_delta:
            view.pending_inputs[sequence.slot].zero_()

    monkeypatch.setattr(Snapshot, "restore", faulty)


def published_before_commit(monkeypatch):
    """What a chunk will have computed is offered before it has run."""
    next_batch, materialise = Scheduler.next_batch, TargetRunner.materialise

    def faulty(self):
        pieces, checkpoints = next_batch(self), self._checkpoints
        for piece in pieces:
            sequence, end = piece.sequence, piece.end
            if sequence.is_prefilling and piece.num_inputs:
                for place in checkpoints._new(sequence, checkpoints._landmarks.between(sequence, end - 1, end)):
                    checkpoints._publish(sequence, place, checkpoints._cache.boundary_hidden[sequence.slot])
        return pieces

    def lenient(self, sequence, position):
        if position <= sequence.num_computed_tokens:
            materialise(self, sequence, position)

    monkeypatch.setattr(Scheduler, "next_batch", faulty)
    monkeypatch.setattr(TargetRunner, "materialise", lenient)


def partial_block_not_copied(monkeypatch):
    """Who starts in the middle of a block has garbage in front of it."""
    monkeypatch.setattr(checkpoints, "copy_rows", lambda cache, source, target, num_rows: None)


def boundary_hidden_stale(monkeypatch):
    """A checkpoint keeps the hidden state that its slot had before."""
    publish = Checkpoints._publish

    def faulty(self, sequence, place, hidden):
        publish(self, sequence, place, self._cache.boundary_hidden[sequence.slot].clone())

    monkeypatch.setattr(Checkpoints, "_publish", faulty)


def state_of_another_place(monkeypatch):
    """A checkpoint inside an accepted run has the state of the run's start."""
    monkeypatch.setattr(TargetRunner, "materialise", lambda self, sequence, position: None)


def images_without_a_name(monkeypatch):
    """Prompts that differ in an image alone count as equal."""
    nameless = lambda token_ids, images, **options: PrefixHasher(token_ids, **options)  # noqa: E731
    monkeypatch.setattr(prefix, "PrefixHasher", nameless)


FAULTS = [pending_inputs_not_swapped, preempted_state_kept, replay_off_by_one, stale_conv_window, own_chunk_unrounded,
          slot_reused_without_reset, penalties_blind_to_drafts, drafts_at_the_wrong_position, published_before_commit,
          partial_block_not_copied, boundary_hidden_stale, state_of_another_place,
          images_without_a_name]  # fmt: skip

WHERE_IT_IS_RARE = {pending_inputs_not_swapped: 160}  # seeds to begin with: schedules before them do not meet the fault


@pytest.fixture
def own_solo_runs():
    """Solo runs with the fault: it must show by what differs between schedules, as one in the code would."""
    caches = (differential.solo, differential.request_of)
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_planted_fault_is_found(monkeypatch, own_solo_runs, fault):
    fault(monkeypatch)
    first = WHERE_IT_IS_RARE.get(fault, 0)
    with pytest.raises(AssertionError, match="seed"):
        for seed in range(first, first + 200):
            play(schedule(seed))


CHAT = next(r for r in differential.catalogue() if len(r.token_ids) > 30 and r.token_ids[0] == differential.TURN_START)


def proposals(kind: str) -> list[list[tuple]]:
    """What the draft head proposes after each step: of a request, of the same again, of one that begins like it, and of
    that without a prefix cache."""
    cached = differential.make_engine(kind, 40, num_draft_tokens=3, num_checkpoints=6, block_tokens=4)
    plain = differential.make_engine(kind, 40, num_draft_tokens=3, block_tokens=4)
    sampling = dataclasses.replace(CHAT.sampling, max_tokens=12, ignore_eos=True)
    first = dataclasses.replace(CHAT, sampling=sampling)
    other = differential.make_request(0, (*CHAT.token_ids[:-2], 7, 8, 9), sampling, image=0)
    found = [
        proposed(*made, asked) for made, asked in ((cached, first), (cached, first), (cached, other), (plain, other))
    ]
    assert cached[0].metrics.num_cached_tokens > len(first.token_ids)
    return found


def proposed(engine: Engine, state: LocalState, asked: Request) -> list[tuple]:
    store = LateStore(state, 0) if engine._store is None else engine._store
    lease, hit = store.open(engine.query(asked))
    engine.submit(dataclasses.replace(asked, lease=lease), hit=hit)
    [sequence] = engine._live_sequences()
    drafts = []
    while engine.has_work:
        engine.step()
        drafts += [(sequence.num_generated_tokens, sequence.drafts)] if sequence.num_generated_tokens else []
    store.close(lease)
    return drafts


@pytest.mark.parametrize("kind", differential.KINDS)
def test_drafts_after_a_hit_are_those_without(kind):
    first, again, other, plain = proposals(kind)
    assert first == again and other == plain
    assert len(first) > 2 and all(len(drafts) == 3 for _, drafts in first[:2])


def test_a_unit_that_is_lost_at_the_boundary_is_found(monkeypatch):
    """The draft's first entry behind a checkpoint needs the hidden state before it."""
    resume = Sequence.resume

    def faulty(self, num_tokens, boundary, has_draft):
        resume(self, num_tokens, boundary, has_draft)
        self.undrafted = [torch.zeros_like(hidden) for hidden in self.undrafted]

    monkeypatch.setattr(Sequence, "resume", faulty)
    first, again, other, plain = proposals("bfloat16")
    assert first != again or other != plain
