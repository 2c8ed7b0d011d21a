"""Whatever happens in whatever order, every block, slot and lease has one owner, and in the end all are free."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from qwen35.errors import Cancelled, Unavailable
from qwen35.state.extents import Extent, ExtentTable
from qwen35.state.holder import Holder
from qwen35.state.leases import Lease
from qwen35.state.local import LocalTables
from qwen35.state.manager import Manager
from tests.state.tiny import tiny_geometry

GEOMETRY = tiny_geometry(num_blocks=9, num_slots=3, max_leases=6, max_holders=3)
IDS = st.sampled_from(["a", "b", ""])
PICK = st.integers(0, 10**6)


class World(RuleBasedStateMachine):
    """The manager against a model of plain dictionaries."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.owner = LocalTables(GEOMETRY)
        self.manager = Manager(self.owner, unclaimed_lease_seconds=5.0, clock=lambda: self.now)
        self.holders: list[Holder] = []
        self.extents: list[tuple[Holder, Extent]] = []
        self.open_leases: dict[Lease, tuple[str, float]] = {}  # -> request id, expiry
        self.claimed: dict[Lease, tuple[Holder, str]] = {}
        self.cancelled: set[Lease] = set()
        self.remembered: dict[str, float] = {}
        self.keys = 0

    @precondition(lambda self: len(self.holders) < 2)
    @rule()
    def register(self) -> None:
        self.reap()
        self.holders.append(Holder.register(self.owner, "llm", lambda: self.now))

    @precondition(lambda self: self.holders)
    @rule(pick=PICK, num_blocks=st.integers(0, 10), num_slots=st.integers(0, 4))
    def acquire(self, pick: int, num_blocks: int, num_slots: int) -> None:
        holder = self.holders[pick % len(self.holders)]
        self.keys += 1
        ref = self.manager.acquire(holder.ref, self.keys, num_blocks, num_slots)
        free_blocks, free_slots = 9 - self.num_held("block_ids"), 3 - self.num_held("slots")
        expected = (min(num_blocks, free_blocks), min(num_slots, free_slots))
        if ref is None:
            assert expected == (0, 0)
            return
        extent = ExtentTable(self.owner.tables).contents(ref)
        assert (len(extent.block_ids), len(extent.slots)) == expected
        taken = {block for _, other in self.extents for block in other.block_ids}
        assert not taken & set(extent.block_ids)
        self.extents.append((holder, extent))

    @precondition(lambda self: self.extents)
    @rule(pick=PICK)
    def release(self, pick: int) -> None:
        holder, extent = self.extents.pop(pick % len(self.extents))
        assert self.manager.release(holder.ref, [extent.ref, extent.ref]) == 1

    @rule(request_id=IDS)
    def open(self, request_id: str) -> None:
        try:
            lease = self.manager.open(request_id, deadline=self.now + 100)
        except Cancelled:
            assert self.remembered[request_id] > self.now
        except Unavailable:
            assert len(self.open_leases) + len(self.claimed) == GEOMETRY.max_leases
        else:
            assert self.remembered.get(request_id, 0.0) <= self.now
            self.open_leases[lease] = (request_id, self.now + 5)

    @precondition(lambda self: self.open_leases and self.holders)
    @rule(pick=PICK, pick_holder=PICK)
    def claim(self, pick: int, pick_holder: int) -> None:
        lease = list(self.open_leases)[pick % len(self.open_leases)]
        holder = self.holders[pick_holder % len(self.holders)]
        request_id, expiry = self.open_leases.pop(lease)
        answer, _ = self.manager.claim(holder.ref, [lease])
        self.forget_expired()  # the manager expires all overdue ones with a claim
        if expiry <= self.now:
            assert answer == ["expired"]
        elif lease in self.cancelled:
            assert answer == ["cancelled"]
        else:
            assert answer == ["claimed"]
            self.claimed[lease] = (holder, request_id)

    @precondition(lambda self: self.claimed)
    @rule(pick=PICK)
    def close(self, pick: int) -> None:
        lease = list(self.claimed)[pick % len(self.claimed)]
        holder, _ = self.claimed.pop(lease)
        assert self.manager.close(holder.ref, [lease, lease]) == 1

    @rule(request_id=st.sampled_from(["a", "b"]))
    def cancel(self, request_id: str) -> None:
        hits = {lease for lease, (name, _) in self.open_leases.items() if name == request_id}
        hits |= {lease for lease, (_, name) in self.claimed.items() if name == request_id}
        assert self.manager.cancel(request_id) == len(hits)
        self.cancelled |= hits
        self.remembered[request_id] = self.now + 10

    @rule(seconds=st.floats(0.5, 6))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def reap(self) -> None:
        assert self.manager.reap() == []
        self.forget_expired()

    @precondition(lambda self: self.holders)
    @rule(pick=PICK)
    def finish(self, pick: int) -> None:
        holder = self.remove_holder(pick)
        holder.close()
        assert self.manager.reap() == []
        self.forget_expired()

    @precondition(lambda self: self.holders)
    @rule(pick=PICK)
    def kill(self, pick: int) -> None:
        """The kernel frees the lock, nobody says a word."""
        holder = self.remove_holder(pick)
        holder._lock.release()
        assert [info.row for info in self.manager.reap()] == [holder.ref.row]
        self.forget_expired()

    @rule()
    def reload_manager(self) -> None:
        self.manager = Manager(self.owner, unclaimed_lease_seconds=5.0, clock=lambda: self.now)

    @invariant()
    def conserved(self) -> None:
        self.manager.check_integrity()
        stats = self.manager.stats()
        assert stats.blocks.held == self.num_held("block_ids") == 9 - stats.blocks.free
        assert stats.slots.held == self.num_held("slots") == 3 - stats.slots.free
        assert stats.num_open_leases == len(self.open_leases)
        assert stats.num_claimed_leases == len(self.claimed)
        for lease, (holder, _) in self.claimed.items():
            assert holder.cancelled([lease]) == [lease in self.cancelled]

    def teardown(self) -> None:
        for holder in self.holders:
            holder.close()
        self.now += 1000
        self.manager.reap()
        stats = self.manager.stats()
        assert (stats.blocks.free, stats.slots.free, stats.num_open_leases, stats.num_claimed_leases) == (9, 3, 0, 0)
        assert stats.holders == ()

    def num_held(self, kind: str) -> int:
        return sum(len(getattr(extent, kind)) for _, extent in self.extents)

    def forget_expired(self) -> None:
        self.open_leases = {lease: entry for lease, entry in self.open_leases.items() if entry[1] > self.now}

    def remove_holder(self, pick: int) -> Holder:
        holder = self.holders.pop(pick % len(self.holders))
        self.extents = [entry for entry in self.extents if entry[0] is not holder]
        self.claimed = {lease: entry for lease, entry in self.claimed.items() if entry[0] is not holder}
        return holder


TestWorld = World.TestCase
TestWorld.settings = settings(max_examples=60, stateful_step_count=40, deadline=None, derandomize=True)
