from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import pytest

from qwen35.errors import StateError
from qwen35.state.extents import Extent, ExtentRef, Need
from qwen35.state.holder import Holder
from qwen35.state.local import LocalState, LocalTables
from qwen35.state.manager import Manager
from qwen35.state.pool import BlockPool, PoolExhausted
from qwen35.state.source import ManagerSource
from tests.state.tiny import tiny_geometry


class FakeSource:
    """Numbers from a range; counts calls."""

    def __init__(self, num_blocks: int, num_slots: int) -> None:
        self.free = {"block": list(range(num_blocks)), "slot": list(range(num_slots))}
        self.calls: list[tuple[int, int]] = []
        self.beats: list[tuple[int, int]] = []
        self.is_under_pressure = False
        self.error: Exception | None = None

    def acquire(self, num_blocks: int, num_slots: int, need: Need) -> Extent | None:
        self.calls.append((num_blocks, num_slots))
        if self.error is not None:
            raise self.error
        if need is Need.WISH and (num_blocks > len(self.free["block"]) or num_slots > len(self.free["slot"])):
            return None
        blocks = [self.free["block"].pop(0) for _ in range(min(num_blocks, len(self.free["block"])))]
        slots = [self.free["slot"].pop(0) for _ in range(min(num_slots, len(self.free["slot"])))]
        return Extent(ExtentRef(0, len(self.calls)), tuple(blocks), tuple(slots)) if blocks or slots else None

    def release(self, extents: Sequence[Extent]) -> None:
        for extent in extents:
            self.free["block"] = sorted([*self.free["block"], *extent.block_ids])
            self.free["slot"] = sorted([*self.free["slot"], *extent.slots])

    def beat(self, num_used_blocks: int, num_used_slots: int) -> None:
        self.beats.append((num_used_blocks, num_used_slots))


def make_pool(source: FakeSource, **options: object) -> BlockPool:
    return BlockPool(source, num_total_blocks=16, num_total_slots=4, extent_blocks=4, extent_slots=2, **options)


def wait_until(condition: Callable[[], bool], seconds: float = 3.0) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.005)
    return condition()


def test_refill_keeps_a_reserve_and_asks_no_more():
    source = FakeSource(16, 4)
    pool = make_pool(source)
    assert (pool.num_free_blocks, pool.num_free_slots) == (0, 0)
    assert pool.refill() and (pool.num_free_blocks, pool.num_free_slots) == (4, 2)
    num_calls = len(source.calls)
    assert not pool.refill() and len(source.calls) == num_calls
    assert pool.allocate_blocks(3) == [0, 1, 2] and pool.allocate_slot() == 0
    assert pool.refill() and pool.num_free_blocks == 5
    assert source.beats[-1] == (3, 1)
    pool.check_integrity()


def test_exhaustion_is_told_and_the_wish_is_met_at_the_next_refill():
    source = FakeSource(16, 4)
    pool = make_pool(source)
    with pytest.raises(PoolExhausted, match=r"blocks: expected 9 free, got 0"):
        pool.allocate_blocks(9)
    assert not pool.can_allocate(9, 3)
    pool.refill()
    assert (pool.num_free_blocks, pool.num_free_slots) == (9, 3)
    assert pool.can_allocate(9, 3) and len(pool.allocate_blocks(9)) == 9


def test_a_wish_over_the_total_takes_all_there_is():
    source = FakeSource(16, 4)
    pool = make_pool(source)
    assert not pool.can_allocate(17)
    pool.refill()
    assert pool.num_free_blocks == 16 and not pool.can_allocate(17)
    source.is_under_pressure = True
    pool.refill()
    assert pool.num_free_blocks == 0, "it's another holder's turn"
    pool.refill()
    assert pool.num_free_blocks == 0, "and stays so"
    source.is_under_pressure = False
    assert not pool.can_allocate(17)
    pool.refill()
    assert pool.num_free_blocks == 16


def test_more_may_come_until_the_source_has_nothing():
    source = FakeSource(8, 4)  # of 16 blocks, somebody else has the others
    pool = make_pool(source)
    assert pool.may_get_blocks and pool.may_get_slots
    pool.refill()
    assert not pool.can_allocate(12) and pool.may_get_blocks
    pool.refill()
    assert pool.num_free_blocks == 4 and not pool.may_get_blocks and pool.may_get_slots
    source.free["block"] += range(8, 12)
    pool.can_allocate(12)
    pool.refill()
    assert pool.num_free_blocks == 12 and pool.may_get_blocks
    [pool.allocate_slot() for _ in range(2)]
    pool.refill()
    assert not pool.may_get_slots, "all there are"


def test_a_wish_that_is_not_repeated_is_forgotten(monkeypatch: pytest.MonkeyPatch):
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    source = FakeSource(16, 4)
    pool = make_pool(source)
    assert not pool.can_allocate(20)
    now[0] += 2.1
    pool.refill()
    assert pool.num_free_blocks == 4
    assert not pool.can_allocate(20)
    pool.refill()
    assert pool.num_free_blocks == 16


def test_failed_allocation_takes_nothing():
    pool = make_pool(FakeSource(16, 4))
    pool.refill()
    with pytest.raises(PoolExhausted):
        pool.allocate_blocks(5)
    assert pool.num_free_blocks == 4
    pool.allocate_slot(), pool.allocate_slot()
    with pytest.raises(PoolExhausted, match="slots: expected 1 free, got 0"):
        pool.allocate_slot()


def test_idle_extents_go_back_at_once_under_pressure():
    source = FakeSource(16, 4)
    pool = make_pool(source)
    pool.can_allocate(16)
    pool.refill()
    blocks = pool.allocate_blocks(16)
    pool.free_blocks(blocks[8:])
    pool.refill()
    assert len(source.free["block"]) == 0, "idle for a moment only"
    source.is_under_pressure = True
    pool.refill()
    assert pool.num_free_blocks == 8 and len(source.free["block"]) == 0, "one extent of 16: still in use"
    pool.free_blocks(blocks[:8])
    pool.refill()
    assert len(source.free["block"]) == 16, "and the reserve with them"
    source.is_under_pressure = False
    pool.refill()
    assert pool.num_free_blocks == 4
    pool.close()
    assert source.free == {"block": list(range(16)), "slot": list(range(4))}


def test_idle_extents_of_a_grown_pool_go_back():
    source = FakeSource(16, 4)
    pool = make_pool(source)
    taken: list[int] = []
    for _ in range(4):
        pool.refill()
        taken += pool.allocate_blocks(4)
    pool.free_blocks(taken)
    assert not pool.can_allocate(17, 0) and not pool.can_allocate(0, 3)
    source.is_under_pressure = True
    pool.refill()
    assert pool.num_free_blocks == 0 and len(source.free["block"]) == 16
    pool.check_integrity()


@pytest.mark.parametrize("bad", [[3], [0, 0], [99]])
def test_double_or_foreign_free_is_an_error(bad: list[int]):
    pool = make_pool(FakeSource(16, 4))
    pool.refill()
    pool.allocate_blocks(2)
    with pytest.raises(StateError, match="expected one that is in use"):
        pool.free_blocks(bad)
    with pytest.raises(StateError, match="slot 1"):
        pool.free_slot(1)


def test_close_refuses_while_something_is_in_use():
    pool = make_pool(FakeSource(16, 4))
    pool.refill()
    blocks = pool.allocate_blocks(1)
    with pytest.raises(StateError, match="got 1 blocks and 0 slots"):
        pool.close()
    pool.free_blocks(blocks)
    pool.close()


def test_thread_refills_wakes_the_engine_and_survives_errors():
    source, refilled, errors = FakeSource(16, 4), threading.Event(), []
    source.error = ConnectionError("no manager")
    pool = make_pool(source, on_refill=refilled.set)
    pool.start(0.02, errors.append)
    assert wait_until(lambda: len(errors) > 0)
    source.error = None
    assert refilled.wait(3) and pool.num_free_blocks == 4
    assert not pool.can_allocate(10) and wait_until(lambda: pool.can_allocate(10))
    pool.close()
    assert source.free["block"] == list(range(16))


def test_an_empty_source_is_not_hammered():
    source = FakeSource(0, 0)
    pool = make_pool(source)
    pool.start(5.0, on_error=lambda error: None)
    end = time.monotonic() + 0.3
    while time.monotonic() < end:
        pool.can_allocate(1, 1)
        time.sleep(0.001)
    pool.close()
    assert 4 <= len(source.calls) <= 40


def test_local_state_hands_out_everything():
    state = LocalState(tiny_geometry())
    assert (state.pool.num_free_blocks, state.pool.num_free_slots) == (12, 3)
    assert state.pool.allocate_blocks(12) == list(range(12))
    assert [state.pool.allocate_slot() for _ in range(3)] == [0, 1, 2]
    state.manager.check_integrity()
    counts = state.manager.stats().blocks
    assert (counts.total, counts.free, counts.held, counts.cached) == (12, 0, 12, 0)
    state.pool.free_blocks(range(12))
    for slot in range(3):
        state.pool.free_slot(slot)
    state.close()
    assert state.manager.stats().blocks.free == 12 and state.manager.stats().slots.free == 3
    assert float(state.cache.gated_delta[0].recurrent.abs().sum()) == 0.0


class Instances:
    """Two pools over one manager, driven by hand, with a clock of their own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **geometry: object) -> None:
        self.now = 1000.0
        monkeypatch.setattr(time, "monotonic", self.clock)
        owner = LocalTables(tiny_geometry(num_blocks=16, **geometry))
        self.manager = Manager(owner, unclaimed_lease_seconds=5.0, clock=self.clock)
        holders = [Holder.register(owner, "llm", self.clock) for _ in range(2)]
        self.pools = [
            BlockPool(
                ManagerSource(self.manager, owner, holder, self.clock),
                num_total_blocks=16,
                num_total_slots=3,
                extent_blocks=4,
            )
            for holder in holders
        ]

    def clock(self) -> float:
        return self.now

    def run(self, wants: dict[int, int], seconds: float) -> dict[int, list[int]]:
        """Each pool asks for its number of blocks, every 50 ms, until it has got them; those are then in use."""
        got: dict[int, list[int]] = {}
        end = self.now + seconds
        while self.now < end and len(got) < len(wants):
            for index, count in wants.items():
                pool = self.pools[index]
                if index not in got and pool.can_allocate(count):
                    got[index] = pool.allocate_blocks(count)
            for pool in self.pools:
                pool.refill()
            self.manager.check_integrity()
            self.now += 0.05
        return got


@pytest.mark.parametrize("wants", [(9, 9), (16, 16), (12, 6), (5, 16)])
def test_two_instances_that_wait_for_more_than_half_get_it_one_after_the_other(monkeypatch, wants: tuple[int, int]):
    both = Instances(monkeypatch)
    for pool in both.pools:
        pool.can_allocate(16)
        pool.refill()
        pool.refill()
    got = both.run(dict(enumerate(wants)), seconds=4)
    (first,) = got
    both.pools[first].free_blocks(got[first])
    other = 1 - first
    assert len(both.run({other: wants[other]}, seconds=4)[other]) == wants[other]


def test_what_runs_grows_while_another_instance_waits_for_much(monkeypatch: pytest.MonkeyPatch):
    both = Instances(monkeypatch)
    blocks = both.run({0: 5}, seconds=1)[0]
    for number in range(6, 9):
        got = both.run({0: 1, 1: 12}, seconds=0.5)
        assert list(got) == [0], f"block {number} of what runs; the other one can't be met"
        blocks += got[0]
    both.pools[0].free_blocks(blocks)
    assert list(both.run({1: 12}, seconds=3)) == [1]


def test_transferred_items_leave_the_pool_and_empty_extents_with_them():
    source = FakeSource(16, 4)
    pool = make_pool(source)
    pool.refill()
    blocks, slot = pool.allocate_blocks(4), pool.allocate_slot()
    pool.transfer(blocks[:3], [slot])
    pool.check_integrity()
    assert (pool.num_used_blocks, pool.num_free_blocks, pool.num_used_slots) == (1, 0, 0)
    pool.transfer(blocks[3:])
    with pytest.raises(StateError, match="block 0: expected one that is in use"):
        pool.transfer([0])
    with pytest.raises(StateError, match="block 0: expected one that is in use"):
        pool.free_blocks([0])
    pool.refill()
    assert pool.num_free_blocks == 4
    pool.close()
    assert source.free["block"] == list(range(4, 16)), "what the cache has is not given back by the pool"


def test_an_extent_of_which_the_rest_is_idle_goes_back():
    source = FakeSource(4, 4)
    pool = make_pool(source)
    pool.refill()
    blocks = pool.allocate_blocks(4)
    pool.free_blocks(blocks[2:])
    pool.transfer(blocks[:2])
    source.is_under_pressure = True
    pool.refill()
    assert pool.num_free_blocks == 0
    pool.check_integrity()
