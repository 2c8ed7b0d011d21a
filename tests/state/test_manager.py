from __future__ import annotations

import signal
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from qwen35.errors import Cancelled, DeadlineExceeded, InvalidArgument, StateError, Unavailable
from qwen35.state.arena import Arena
from qwen35.state.extents import ExtentRef, ExtentTable, HolderRef, Need
from qwen35.state.holder import Holder
from qwen35.state.leases import Lease
from qwen35.state.local import LocalTables
from qwen35.state.manager import Manager
from qwen35.state.source import ManagerSource, RemoteManager
from tests.state.actor import Actor, Actors
from tests.state.tiny import tiny_geometry

GEOMETRY = tiny_geometry()


class Clock:
    """Time by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Local:
    """A manager and a holder in this process, with time by hand."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.owner = LocalTables(GEOMETRY)
        self.manager = Manager(self.owner, unclaimed_lease_seconds=5.0, clock=self.clock)
        self.holder = self.new_holder()

    def new_holder(self) -> Holder:
        return Holder.register(self.owner, "llm", self.clock)

    def open(self, request_id: str = "r", seconds: float = 60.0, arrival: float | None = None) -> Lease:
        return self.manager.open(request_id, deadline=self.clock.now + seconds, arrival=arrival)

    def claim(self, lease: Lease) -> str:
        return self.manager.claim(self.holder.ref, [lease])[0][0]


class TestLeases:
    def test_open_claim_close(self):
        local = Local()
        lease = local.open()
        assert local.manager.stats().num_open_leases == 1
        assert local.claim(lease) == local.claim(lease) == "claimed"
        assert local.manager.stats().num_claimed_leases == 1
        assert local.manager.close(local.holder.ref, [lease, lease]) == 1
        assert local.claim(lease) == "expired"
        stats = local.manager.stats()
        assert (stats.num_open_leases, stats.num_claimed_leases) == (0, 0)

    def test_unclaimed_lease_expires_and_a_claimed_one_does_not(self):
        local = Local()
        late, claimed = local.open(), local.open()
        assert local.claim(claimed) == "claimed"
        local.clock.now += 4.9
        local.manager.reap()
        assert local.manager.stats().num_open_leases == 1
        local.clock.now += 0.2
        assert local.claim(late) == "expired", "a claim never revives an expired lease"
        local.clock.now += 1000.0
        local.manager.reap()
        stats = local.manager.stats()
        assert (stats.num_open_leases, stats.num_claimed_leases, stats.num_expired_leases) == (0, 1, 1)

    def test_a_row_used_again_does_not_answer_to_the_old_lease(self):
        local = Local()
        old = local.open("old")
        local.manager.close(None, [old])
        new = local.open("new")
        assert (old.row, old.generation) != (new.row, new.generation) and old.row == new.row
        assert local.claim(old) == "expired" and local.claim(new) == "claimed"
        assert local.manager.close(local.holder.ref, [old]) == 0
        local.manager.cancel("new")
        assert local.holder.cancelled([old, new]) == [False, True]

    def test_a_passed_deadline_is_refused_and_a_near_one_shortens_the_time_to_claim(self):
        local = Local()
        with pytest.raises(DeadlineExceeded, match=r"deadline: expected a time to come, got 1\.000 s ago"):
            local.open(seconds=-1.0)
        lease = local.open(seconds=2.0)
        local.clock.now += 2.1
        assert local.claim(lease) == "expired"

    def test_no_row_left(self):
        local = Local()
        leases = [local.open() for _ in range(GEOMETRY.max_leases)]
        with pytest.raises(Unavailable, match="leases: expected fewer than 8 requests at a time"):
            local.open()
        local.manager.close(None, leases[:1])
        local.open()

    def test_another_holder_can_neither_claim_nor_close(self):
        local = Local()
        lease, other = local.open(), local.new_holder()
        local.claim(lease)
        assert local.manager.claim(other.ref, [lease]) == (["expired"], [None])
        assert local.manager.close(other.ref, [lease]) == local.manager.close(None, [lease]) == 0
        assert local.manager.stats().num_claimed_leases == 1

    @pytest.mark.parametrize("lease", [Lease(-1, 1), Lease(10**6, 1), Lease(0, 10**9)])
    def test_a_lease_that_never_was(self, lease: Lease):
        local = Local()
        local.open()
        assert local.claim(lease) == "expired" and local.manager.close(local.holder.ref, [lease]) == 0

    def test_unknown_holder(self):
        local = Local()
        for ref in (HolderRef(3, 1), HolderRef(-1, 0), HolderRef(0, 2), HolderRef(99, 1)):
            with pytest.raises(StateError, match="holder: expected a registered one"):
                local.manager.claim(ref, [])


class TestCancel:
    def test_hits_every_live_request_of_the_id(self):
        local = Local()
        leases = [local.open("7"), local.open("7"), local.open("8")]
        for lease in leases[1:]:
            local.claim(lease)
        assert local.manager.cancel("7") == 2
        assert local.holder.cancelled(leases) == [True, True, False]
        assert local.claim(leases[0]) == "cancelled", "one that nobody has claimed yet ends here"
        assert local.manager.stats().num_open_leases == 0

    def test_is_remembered_for_one_still_on_its_way(self):
        local = Local()
        assert local.manager.cancel("7") == 0
        local.clock.now += 9.9
        with pytest.raises(Cancelled):
            local.open("7")
        with pytest.raises(Cancelled):
            local.open("7", arrival=99.0)
        local.open("7", arrival=100.1), local.open("8")
        local.clock.now += 0.2
        local.open("7")

    def test_empty_id(self):
        local = Local()
        lease = local.open("")
        with pytest.raises(InvalidArgument, match="request_id: expected a non-empty string"):
            local.manager.cancel("")
        assert local.holder.cancelled([lease]) == [False] and local.holder.cancelled([]) == []

    def test_more_cancels_than_are_remembered(self):
        local = Local()
        for number in range(300):
            local.clock.now += 0.001
            local.manager.cancel(f"id {number}")
        with pytest.raises(Cancelled):
            local.open("id 299")
        local.open("id 0")


class TestExtents:
    def test_acquire_grants_what_there_is(self):
        local = Local()
        first = local.manager.acquire(local.holder.ref, 1, 10, 1)
        second = local.manager.acquire(local.holder.ref, 2, 10, 1)
        assert len(ExtentTable(local.owner.tables).contents(second).block_ids) == 2
        assert local.manager.acquire(local.holder.ref, 3, 1, 0) is None
        assert local.manager.release(local.holder.ref, [first, second, first]) == 2
        local.manager.check_integrity()
        assert local.manager.stats().blocks.free == 12

    def test_a_repeated_question_gets_the_same_extent(self):
        local = Local()
        first = local.manager.acquire(local.holder.ref, 1, 4, 0)
        assert local.manager.acquire(local.holder.ref, 1, 4, 0) == first
        assert local.manager.stats().blocks.held == 4

    def test_only_the_holder_releases(self):
        local = Local()
        other = local.new_holder()
        ref = local.manager.acquire(local.holder.ref, 1, 4, 1)
        bad = [ExtentRef(ref.row, ref.generation + 1), ExtentRef(-1, 1), ExtentRef(999, 1)]
        assert local.manager.release(other.ref, [ref]) == local.manager.release(local.holder.ref, bad) == 0
        assert local.manager.stats().blocks.held == 4

    def test_finished_holder_gives_all_back_and_is_not_reported_dead(self):
        local = Local()
        local.manager.acquire(local.holder.ref, 1, 4, 1)
        lease = local.open()
        local.claim(lease)
        local.holder.close()
        local.holder.close()
        with pytest.raises(StateError, match="holder: expected a registered one"):
            local.manager.acquire(local.holder.ref, 2, 1, 0)
        assert local.manager.reap() == []
        stats = local.manager.stats()
        assert (stats.blocks.free, stats.slots.free, stats.num_claimed_leases, stats.holders) == (12, 3, 0, ())
        assert local.new_holder().ref == HolderRef(0, 2)

    def test_a_wish_in_vain_presses_the_others_for_a_while(self):
        local = Local()
        first, second = (ManagerSource(local.manager, local.owner, local.new_holder(), local.clock) for _ in range(2))
        local.manager.acquire(local.holder.ref, 1, 11, 0)
        assert first.acquire(2, 0, Need.RESERVE).block_ids == (11,) and not second.is_under_pressure
        assert first.acquire(1, 0, Need.RESERVE) is None and not second.is_under_pressure
        assert first.acquire(1, 0, Need.WISH) is None
        assert second.is_under_pressure and not first.is_under_pressure
        local.clock.now += 2.1
        assert not second.is_under_pressure

    def test_holders_press_in_turns(self):
        local = Local()
        first, second = (ManagerSource(local.manager, local.owner, local.new_holder(), local.clock) for _ in range(2))
        ref = local.manager.acquire(local.holder.ref, 1, 12, 0)
        whose = []
        for _ in range(100):
            first.acquire(7, 0, Need.WISH), second.acquire(7, 0, Need.WISH)
            whose.append((second.is_under_pressure, first.is_under_pressure).index(True))
            local.clock.now += 0.1
        assert [whose[0], whose[25], whose[45], whose[65]] == [0, 1, 0, 1] and 40 <= sum(whose) <= 60
        local.manager.release(local.holder.ref, [ref])
        assert second.acquire(7, 0, Need.WISH) is not None and first.acquire(7, 0, Need.WISH) is None
        assert second.is_under_pressure

    def test_a_wish_is_met_whole_or_not_at_all(self):
        local = Local()
        local.manager.acquire(local.holder.ref, 1, 8, 0)
        assert local.manager.acquire(local.holder.ref, 2, 5, 0, Need.WISH) is None
        assert local.manager.stats().blocks.free == 4
        ref = local.manager.acquire(local.holder.ref, 2, 4, 0, Need.WISH)
        assert len(ExtentTable(local.owner.tables).contents(ref).block_ids) == 4

    def test_no_row_for_another_holder(self):
        local = Local()
        for _ in range(GEOMETRY.max_holders - 1):
            local.new_holder()
        with pytest.raises(StateError, match="holders: expected a free row, got 4"):
            local.new_holder()

    @pytest.mark.parametrize("damage", ["owner", "holder", "empty"])
    def test_integrity_check_sees_damage(self, damage: str):
        local = Local()
        ref = local.manager.acquire(local.holder.ref, 1, 4, 1)
        local.manager.check_integrity()
        tables = local.owner.tables
        if damage == "owner":
            tables.block_owner[9] = 7
        elif damage == "holder":
            tables.extents["holder_generation"][ref.row] += 1
        else:
            tables.block_owner[:] = 0
            tables.slot_owner[:] = 0
        with pytest.raises(StateError, match="expected"):
            local.manager.check_integrity()


class LossyManager:
    """Does what it is asked and loses every second answer."""

    def __init__(self, manager: Manager) -> None:
        self.manager = manager
        self.num_calls = 0

    def call(self, message: dict) -> dict:
        self.num_calls += 1
        holder = HolderRef(**message["holder"])
        ref = self.manager.acquire(holder, message["key"], message["num_blocks"], message["num_slots"])
        if self.num_calls % 2:
            raise ConnectionError("the answer was lost")
        return {"extent": None if ref is None else asdict(ref)}


def test_a_lost_answer_loses_no_block():
    local = Local()
    source = ManagerSource(RemoteManager(LossyManager(local.manager).call), local.owner, local.holder, local.clock)
    with pytest.raises(ConnectionError):
        source.acquire(4, 0)
    assert source.acquire(5, 0).block_ids == (0, 1, 2, 3)
    with pytest.raises(ConnectionError):
        source.acquire(4, 1)
    assert source.acquire(4, 1).block_ids == (4, 5, 6, 7)
    assert local.manager.stats().blocks.held == 8


class TestProcesses:
    """An llm in another process, the manager in this one."""

    @pytest.fixture
    def arena(self, shared_directory: Path, actors: Actors):
        arena = Arena.open("a", GEOMETRY, "f", directory=shared_directory)
        yield arena
        actors.end()  # so that this process is the last one out
        assert arena.close() and not list(shared_directory.iterdir())

    @pytest.fixture
    def manager(self, arena: Arena) -> Manager:
        return Manager(arena, unclaimed_lease_seconds=0.1)

    @pytest.fixture
    def llm(self, arena: Arena, shared_directory: Path, actors: Actors):
        return self.start_llm(shared_directory, actors)

    @staticmethod
    def start_llm(directory: Path, actors: Actors) -> Actor:
        actor = actors.start()
        actor.call("attach", str(directory), "a", GEOMETRY.as_dict())
        actor.call("register", "llm_0")
        return actor

    def test_killed_holder(self, manager: Manager, llm: Actor):
        llm.call("acquire", 1, 5, 2)
        lease = manager.open("r", deadline=time.monotonic() + 60)
        assert llm.call("claim", asdict(lease)) == ["claimed"]
        assert manager.reap() == [] and manager.stats().blocks.held == 5
        llm.signal(signal.SIGKILL)
        died = manager.reap()
        assert [(info.instance, info.pid) for info in died] == [("llm_0", llm.process.pid)]
        stats = manager.stats()
        assert (stats.blocks.free, stats.slots.free, stats.num_claimed_leases) == (12, 3, 0)
        assert (stats.num_dead_holders, stats.num_reclaimed_extents) == (1, 1)
        assert manager.reap() == [], "a death is reported once"
        manager.check_integrity()

    def test_need_reclaims_from_the_dead_and_reap_still_reports_them(
        self, manager: Manager, llm: Actor, shared_directory: Path, actors: Actors
    ):
        llm.call("acquire", 1, 12, 3)
        llm.signal(signal.SIGKILL)
        other = self.start_llm(shared_directory, actors)
        assert other.call("acquire", 1, 12, 3)["block_ids"] == list(range(12))
        assert [info.pid for info in manager.reap()] == [llm.process.pid]

    def test_stopped_holder_keeps_its_bytes(self, manager: Manager, llm: Actor):
        extent = llm.call("acquire", 1, 5, 2)
        claimed, open_ = (manager.open("r", deadline=time.monotonic() + 60) for _ in range(2))
        llm.call("claim", asdict(claimed))
        llm.signal(signal.SIGSTOP)
        time.sleep(0.15)  # past the expiry of leases
        assert manager.reap() == []
        stats = manager.stats()
        assert (stats.blocks.held, stats.slots.held) == (5, 2)
        assert (stats.num_claimed_leases, stats.num_open_leases, stats.num_expired_leases) == (1, 0, 1)
        assert stats.holders[0].heartbeat_age_seconds >= 0.15
        manager.cancel("r")
        llm.signal(signal.SIGCONT)
        assert llm.call("is_cancelled", asdict(claimed)) is True
        assert llm.call("is_cancelled", asdict(open_)) is False
        assert llm.call("release", extent["ref"]) == 1
        assert manager.stats().blocks.free == 12

    def test_a_stopped_holder_that_is_killed_gives_back(self, manager: Manager, llm: Actor):
        llm.call("acquire", 1, 5, 2)
        llm.signal(signal.SIGSTOP)
        llm.signal(signal.SIGKILL)
        assert len(manager.reap()) == 1 and manager.stats().blocks.free == 12

    def test_a_holder_that_ends_without_a_word_is_dead(self, manager: Manager, llm: Actor):
        llm.call("acquire", 1, 5, 2)
        llm.process.stdin.close()
        llm.process.wait()
        assert len(manager.reap()) == 1

    def test_a_new_manager_finds_everything_as_it_was(self, arena: Arena, manager: Manager, llm: Actor):
        extent = llm.call("acquire", 1, 5, 2)
        lease = manager.open("r", deadline=time.monotonic() + 60)
        llm.call("claim", asdict(lease))
        before = manager.stats()
        again = Manager(arena, unclaimed_lease_seconds=5.0)
        assert again.stats().blocks == before.blocks and again.stats().num_claimed_leases == 1
        assert again.cancel("r") == 1 and llm.call("is_cancelled", asdict(lease)) is True
        assert llm.call("release", extent["ref"]) == 1 and manager.stats().blocks.free == 12

    def test_a_manager_killed_in_the_middle_is_undone(self, manager: Manager, llm: Actor):
        llm.tell("die_holding_manager_lock")
        llm.process.wait()
        assert manager.stats().blocks.held == 0, "three blocks were marked, their extent never finished"
        manager.check_integrity()
        assert len(manager.reap()) == 1

    @pytest.mark.parametrize(("step", "num_cached"), [("_with_cached_ones", 0), ("_finish_publication", 3)])
    def test_a_manager_killed_amid_a_publication_loses_no_block(
        self, manager: Manager, llm: Actor, shared_directory: Path, actors: Actors, step: str, num_cached: int
    ):
        extent = llm.call("acquire", 1, 5, 2)
        lease = asdict(manager.open("r", deadline=time.monotonic() + 60))
        llm.call("claim", lease)
        llm.tell("die_publishing", lease, extent, 10, step)
        llm.process.wait()
        manager.check_integrity()
        assert len(manager.reap()) == 1
        manager.check_integrity()
        stats = manager.stats()
        assert (stats.blocks.held, stats.prefix.num_pins) == (0, 0)
        assert (stats.blocks.cached, stats.prefix.num_entries) == (num_cached, num_cached > 0)

    def test_a_prefix_outlives_its_llm(
        self, arena: Arena, manager: Manager, llm: Actor, shared_directory: Path, actors: Actors
    ):
        extent = llm.call("acquire", 1, 12, 2)
        lease = asdict(manager.open("r", deadline=time.monotonic() + 60))
        llm.call("claim", lease)
        published = llm.call("publish", lease, extent, 10)
        assert published["taken_blocks"] == extent["block_ids"][:3]
        successor = self.start_llm(shared_directory, actors)
        assert successor.call("find", 12) == [published["entry"]], "and other instances see it"
        assert successor.call("acquire", 1, 4, 0) is None, "while it is in use it stays"
        llm.signal(signal.SIGKILL)
        assert len(successor.call("acquire", 2, 9, 0)["block_ids"]) == 9
        assert successor.call("find", 12) == [published["entry"]]
        assert len(successor.call("acquire", 3, 3, 0)["block_ids"]) == 3, "nobody uses it any more"
        assert successor.call("find", 12) == [] and len(manager.reap()) == 1
        manager.check_integrity()

    def test_a_stopped_manager_is_not_waited_for_for_ever(self, arena: Arena, manager: Manager):
        lock = arena.new_lock("manager")
        assert lock.try_acquire()
        start = time.monotonic()
        with pytest.raises(Unavailable, match="manager lock: expected it within 2.0 s"):
            manager.stats()
        assert time.monotonic() - start < 3.0
        lock.release()
        manager.stats()

    def test_two_managers_at_once(self, manager: Manager, llm: Actor):
        """The other process acquires and releases while this one does leases and looks."""
        lease = None
        for key in range(60):
            llm.tell("acquire", key, 1 + key % 12, key % 4)
            lease = manager.open("x", deadline=time.monotonic() + 60)
            manager.check_integrity()
            extent = llm.answer()
            llm.tell("release", extent["ref"])
            manager.close(None, [lease])
            manager.check_integrity()
            assert llm.answer() == 1
        assert manager.stats().blocks.free == 12
