"""Who runs when: budgets, phases, priorities, fairness, memory."""

import pytest

from qwen35.engine.checkpoints import Checkpoints
from qwen35.engine.detokenizer import TextStream, Vocabulary
from qwen35.engine.landmarks import Landmarks
from qwen35.engine.memory import Memory
from qwen35.engine.metrics import EngineMetrics
from qwen35.engine.scheduler import Scheduler
from qwen35.engine.sequence import Decision, Sequence
from qwen35.engine.swap import Swap
from qwen35.errors import Unavailable
from qwen35.state.pool import BlockPool
from qwen35.views import CacheView
from tests.engine.fakes import BLOCK_TOKENS, request, state, tokenizer
from tests.state.test_pool import FakeSource

VOCABULARY = Vocabulary(tokenizer())


def sequence(uid: int, num_prompt: int = 4, max_total_tokens: int = 40, **fields) -> Sequence:
    made = request(range(num_prompt), uid=uid, **fields)
    return Sequence(
        made,
        max_total_tokens=max_total_tokens,
        max_draft_tokens=3 if made.sampling.num_draft_tokens is None else made.sampling.num_draft_tokens,
        end_token_ids=frozenset(),
        text=TextStream(VOCABULARY, made.sampling),
    )


def scheduler(max_batch_tokens: int = 32, num_blocks: int = 64, num_slots: int = 4) -> Scheduler:
    made = state(num_blocks=num_blocks, num_slots=num_slots)
    return scheduler_over(made.pool, made.cache, max_batch_tokens)


def scheduler_over(pool: BlockPool, cache: CacheView, max_batch_tokens: int = 32) -> Scheduler:
    """Without a prefix cache and without swapping."""
    memory = Memory(pool, block_tokens=BLOCK_TOKENS, max_sequences=64)
    landmarks = Landmarks(VOCABULARY, interval_tokens=1000, max_deferred_tokens=4)
    checkpoints = Checkpoints(memory, None, landmarks, None, cache, EngineMetrics())
    return Scheduler(memory, checkpoints, Swap(cache, max_bytes=0), max_batch_tokens=max_batch_tokens)


def step(made: Scheduler, num_drafts: int = 0) -> list[tuple]:
    """One step in which every complete piece gets one new token and then ``num_drafts`` drafts.

    Returns uid, first KV position, inputs, deferred or not."""
    pieces = made.next_batch()
    run = [(p.sequence.request.uid, p.start, p.num_inputs, p.is_deferred) for p in pieces]
    for p in pieces:
        decision = Decision((7,) if p.num_rows else ())
        p.sequence.commit(decision, start=p.start, num_inputs=p.num_inputs, drafts=p.drafts, is_deferred=p.is_deferred)
        p.sequence.drafts = (1,) * (0 if p.sequence.is_prefilling else num_drafts)
    return run


def test_chunks_fill_what_decodes_leave():
    made = scheduler(max_batch_tokens=8)
    made.add(sequence(0, num_prompt=3))
    assert step(made, num_drafts=2) == [(0, 0, 3, False)]
    made.add(sequence(1, num_prompt=12))
    assert step(made, num_drafts=2) == [(0, 3, 3, True), (1, 0, 5, False)]
    assert step(made, num_drafts=2) == [(0, 4, 3, True), (1, 5, 5, False)]
    assert step(made, num_drafts=2) == [(0, 5, 3, True), (1, 10, 2, False)]
    assert step(made, num_drafts=0) == [(0, 6, 3, True), (1, 12, 3, True)]
    assert step(made) == [(0, 7, 1, False), (1, 13, 1, False)]


def test_phase_is_told_by_state_not_by_shape():
    """A chunk as short as a verify is not deferred, a decode with one input is no prefill."""
    made = scheduler(max_batch_tokens=3)
    made.add(sequence(0, num_prompt=5))
    assert step(made, num_drafts=2) == [(0, 0, 3, False)]
    assert made.running[0].is_prefilling
    assert step(made, num_drafts=2) == [(0, 3, 2, False)]
    assert not made.running[0].is_prefilling
    assert step(made, num_drafts=2) == [(0, 5, 3, True)]


def test_a_prompt_of_one_token_is_a_prefill():
    made = scheduler()
    made.add(sequence(0, num_prompt=1))
    assert step(made) == [(0, 0, 1, False)]
    assert step(made) == [(0, 1, 1, False)]


def test_drafts_are_cut_to_the_budget():
    made = scheduler(max_batch_tokens=5)
    for uid in range(2):
        made.add(sequence(uid, num_prompt=2))
    step(made, num_drafts=3)
    assert step(made, num_drafts=3) == [(0, 2, 4, True), (1, 2, 1, False)]


def test_decodes_take_turns_when_the_budget_is_short():
    made = scheduler(max_batch_tokens=2)
    for uid in range(4):
        made.add(sequence(uid, num_prompt=1))
    for _ in range(4):
        step(made)
    assert not any(s.is_prefilling for s in made.running), "decodes leave prompts a share, however small the budget"
    ran = [uid for _ in range(8) for uid, *_ in step(made)]
    assert sorted(ran) == sorted([0, 1, 2, 3] * 4)


def test_prompts_have_a_quarter_of_the_budget_of_their_own():
    made = scheduler(max_batch_tokens=8, num_slots=9)
    for uid in range(8):
        made.add(sequence(uid, num_prompt=1, max_total_tokens=16))
    step(made)
    made.add(sequence(8, num_prompt=3, max_total_tokens=16))
    assert step(made)[-1] == (8, 0, 2, False)
    assert step(made)[-1] == (8, 2, 1, False)  # no more is kept free than the prompt needs
    assert [len(step(made)) for _ in range(3)] == [8, 8, 8]


def test_prompts_share_what_is_left():
    made = scheduler(max_batch_tokens=4)
    for uid in range(2):
        made.add(sequence(uid, num_prompt=12))
    ran = [uid for _ in range(5) for uid, *_ in step(made)]
    assert ran == [0, 1, 0, 1, 0]


def test_a_new_prompt_does_not_overtake_one_that_is_under_way():
    made = scheduler(max_batch_tokens=4)
    made.add(sequence(0, num_prompt=12))
    first = step(made)
    made.add(sequence(1, num_prompt=12, arrival=1.0))
    assert [uid for uid, *_ in first + step(made) + step(made) + step(made)] == [0, 0, 1, 0]


def test_priority_first_then_arrival():
    made = scheduler(num_slots=1)
    for uid, (priority, arrival) in enumerate([(0, 1.0), (0, 0.5), (2, 3.0), (0, 0.5), (2, 2.0)]):
        made.add(sequence(uid, priority=priority, arrival=arrival))
    order = []
    while made.waiting or made.running:
        order.append(step(made)[0][0])
        made.remove(made.running[0])
    assert order == [4, 2, 1, 3, 0]


def test_higher_priority_takes_the_budget_in_each_step():
    made = scheduler(max_batch_tokens=4)
    made.add(sequence(0, num_prompt=8, priority=0))
    made.add(sequence(1, num_prompt=8, priority=1))
    assert [step(made) for _ in range(3)] == [
        [(1, 0, 4, False)],
        [(1, 4, 4, False)],
        [(1, 8, 1, False), (0, 0, 3, False)],
    ]


def pool_of(made: Scheduler):
    return made._memory._pool


def test_admission_takes_what_is_known_and_removal_returns_it():
    made = scheduler(num_blocks=10, num_slots=2)
    for uid in range(3):
        made.add(sequence(uid, num_prompt=2 * BLOCK_TOKENS, max_total_tokens=40, num_draft_tokens=0))
    step(made)
    assert [s.request.uid for s in made.running] == [0, 1] and len(made.waiting) == 1
    assert (pool_of(made).num_used_blocks, pool_of(made).num_used_slots) == (6, 2)  # two of the prompt, one to decode
    held = [set(s.block_ids) for s in made.running]
    assert not held[0] & held[1]
    made.remove(made.running[0])
    step(made)
    assert [s.request.uid for s in made.running] == [1, 2]
    for left in list(made.running):
        made.remove(left)
    assert (pool_of(made).num_used_blocks, pool_of(made).num_used_slots) == (0, 0)


def test_a_small_request_does_not_overtake_a_large_one():
    made = scheduler(num_blocks=10)
    made.add(sequence(0, num_prompt=20))
    made.add(sequence(1, num_prompt=32))
    made.add(sequence(2, num_prompt=1))
    step(made)
    assert [s.request.uid for s in made.running] == [0]
    made.remove(made.running[0])
    step(made)
    assert [s.request.uid for s in made.running][0] == 1


def test_a_newcomer_leaves_each_running_sequence_a_block():
    made = scheduler(num_blocks=5)
    made.add(sequence(0, num_prompt=11))
    step(made)
    made.add(sequence(1, num_prompt=7))
    step(made)
    assert [s.request.uid for s in made.running] == [0]
    made.remove(made.running[0])
    step(made)
    assert [s.request.uid for s in made.running] == [1]


def test_the_last_in_rank_gives_up_its_blocks_and_returns_to_its_place():
    made = scheduler(num_blocks=6)
    for uid, arrival in ((0, 2.0), (1, 1.0), (2, 3.0)):
        made.add(sequence(uid, num_prompt=4, arrival=arrival))
    step(made)
    assert [s.request.uid for s in made.running] == [1, 0] and [s.request.uid for s in made.waiting] == [2]
    made.add(sequence(3, num_prompt=4, arrival=4.0))
    while made.num_preemptions == 0:
        step(made)
    assert [s.request.uid for s in made.running] == [1] and [s.request.uid for s in made.waiting] == [0, 2, 3]
    preempted = made.waiting[0]
    assert (preempted.num_computed_tokens, preempted.num_pending, preempted.block_ids) == (0, 0, ())
    assert preempted.is_prefilling and preempted.num_generated_tokens > 0
    made.remove(made.running[0])
    computed = len(preempted.token_ids)
    assert step(made)[0] == (0, 0, computed, False)  # everything that was decided, in one chunk
    assert len(preempted.token_ids) == computed + 1


@pytest.mark.parametrize(("num_slots", "num_blocks"), [(1, 64), (4, 6)])
def test_a_higher_priority_displaces_a_lower_one(num_slots, num_blocks):
    made = scheduler(num_slots=num_slots, num_blocks=num_blocks)
    made.add(sequence(0, num_prompt=15))
    step(made)
    made.add(sequence(1, num_prompt=15, priority=0))
    step(made)
    assert [s.request.uid for s in made.running] == [0], "an equal waits"
    made.add(sequence(2, num_prompt=15, priority=1))
    step(made)
    assert [s.request.uid for s in made.running] == [2] and [s.request.uid for s in made.waiting] == [0, 1]


def test_nobody_is_displaced_when_a_slot_is_on_its_way(monkeypatch):
    made = scheduler(num_slots=1)
    made.add(sequence(0, num_prompt=15))
    step(made)
    made.add(sequence(1, num_prompt=15, priority=1))
    monkeypatch.setattr(type(pool_of(made)), "may_get_slots", True)
    step(made)
    assert [s.request.uid for s in made.running] == [0]


def test_nobody_is_displaced_in_vain():
    made = scheduler(num_blocks=10)
    made.add(sequence(0, num_prompt=19, priority=2))
    made.add(sequence(1, num_prompt=3))
    step(made)
    assert len(made.running) == 2
    made.add(sequence(2, num_prompt=30, priority=1))  # 8 blocks: more than 0 leaves
    step(made)
    assert [s.request.uid for s in made.running] == [0, 1] and made.num_preemptions == 0


def test_blocks_that_are_on_their_way_are_waited_for(monkeypatch):
    made = scheduler(num_blocks=8, num_slots=2)
    made.add(sequence(0, num_prompt=4))
    made.add(sequence(1, num_prompt=4, arrival=1.0))
    step(made)
    taken = pool_of(made).allocate_blocks(pool_of(made).num_free_blocks)
    monkeypatch.setattr(type(pool_of(made)), "may_get_blocks", True)
    while not made.is_stalled:
        step(made)
    assert len(made.running) == 2 and made.num_preemptions == 0
    pool_of(made).free_blocks(taken)
    assert len(step(made)) == 2 and not made.is_stalled


def test_a_pool_that_grows_is_used_up_before_anybody_is_preempted():
    source = FakeSource(16, 4)
    pool = BlockPool(source, num_total_blocks=32, num_total_slots=4, extent_blocks=4, extent_slots=4)
    made = scheduler_over(pool, state().cache)
    for uid in range(2):
        made.add(sequence(uid, num_prompt=4, max_total_tokens=60, num_draft_tokens=0))
    most = 0
    while made.num_preemptions == 0:
        step(made)
        most = max(most, pool.num_used_blocks)
        pool.refill()
    assert most == 16 and len(made.running) == 1
    for left in list(made.running + made.waiting):
        made.remove(left)
    pool.close()


def test_drafts_are_cut_to_the_room_there_is():
    made = scheduler(num_blocks=2, num_slots=1)
    made.add(sequence(0, num_prompt=4, max_total_tokens=8))
    ran = [step(made, num_drafts=3) for _ in range(3)]
    assert ran == [[(0, 0, 4, False)], [(0, 4, 3, True)], [(0, 5, 2, True)]]  # the next token's entry needs room too


def test_memory_that_went_away_in_between_is_waited_for():
    made = scheduler()
    pool = pool_of(made)

    def refuse() -> int:
        raise Unavailable("slots: none")

    allocate_slot, pool.allocate_slot = pool.allocate_slot, refuse
    made.add(sequence(0))
    assert made.next_batch() == [] and len(made.waiting) == 1 and pool.num_used_blocks == 0
    pool.allocate_slot = allocate_slot
    allocate_blocks, pool.allocate_blocks = pool.allocate_blocks, lambda _: refuse()
    assert made.next_batch() == [] and len(made.waiting) == 1 and pool.num_used_slots == 0
    pool.allocate_blocks = allocate_blocks
    assert len(made.next_batch()) == 1


@pytest.mark.parametrize(("num_prompt", "max_total", "expected"), [(4, 6, False), (4, 7, True), (38, 40, False)])
def test_drafting_needs_three_tokens_to_come(num_prompt, max_total, expected):
    assert sequence(0, num_prompt, max_total).uses_draft is expected
