import threading
import time

import pytest

from qwen35.engine.prefix import Answer, Query
from qwen35.errors import InvalidArgument
from qwen35.serving.leasing import LeaseKeeper
from qwen35.serving.ticket import Stage
from qwen35.state.extents import HolderRef
from qwen35.state.leases import CANCELLED, CLAIMED, EXPIRED
from qwen35.state.prefix import EntryRef, Hit, Published
from tests.serving.fakes import FakeEngine, make_ticket


class FakeManager:
    def __init__(self):
        self.answers = {}  # lease row -> answer
        self.num_faults = self.num_publish_faults = 0
        self.calls = []  # all but those that failed, in order
        self.claims, self.closes = [], []
        self.gate = threading.Event()
        self.gate.set()

    def claim(self, holder, leases, candidates):
        self.gate.wait(5)
        if self.num_faults:
            self.num_faults -= 1
            raise ConnectionError("state_manager is being reloaded")
        self.claims.append([lease.row for lease in leases])
        self.calls.append("claim")
        hits = [entries and entries[-1] for entries in candidates]
        return [self.answers.get(lease.row, CLAIMED) for lease in leases], hits

    def close(self, holder, leases):
        if self.num_faults:
            self.num_faults -= 1
            raise ConnectionError("state_manager is being reloaded")
        self.closes.append([lease.row for lease in leases])
        self.calls.append("close")
        return len(leases)

    def publish(self, holder, lease, publication):
        if self.num_publish_faults:
            self.num_publish_faults -= 1
            raise ConnectionError("state_manager is being reloaded")
        self.calls.append(("publish", lease.row, publication))
        return Published(EntryRef(7, 7), (1, 2)) if publication == "new" else Published(None)

    def unpin(self, holder, lease, entries):
        self.calls.append(("unpin", lease.row, *entries))
        return len(entries)


class FakeHolder:
    ref = HolderRef(3, 4)

    def cancelled(self, leases):
        return [lease.row == 1 for lease in leases]


class FakeReader:
    """Everybody finds two prefixes, and every entry lists three blocks."""

    def candidates(self, hasher, max_tokens, needs_draft):
        return [EntryRef(8, max_tokens), EntryRef(9, max_tokens)]

    def hit(self, entry):
        return Hit(entry, 5, entry.row, (1, 2, 3), has_draft=True)

    def contains(self, hasher, num_tokens, has_draft):
        return num_tokens == 3


class Looking(FakeEngine):
    def query(self, request):
        if request.uid == 66:
            raise InvalidArgument("prompt: too long")
        return Query(None, 2, needs_draft=True) if request.uid > 50 else None


@pytest.fixture
def kept():
    manager, started, failed, faults = FakeManager(), [], [], []
    keeper = LeaseKeeper(manager, FakeHolder(), FakeReader(), lambda what, error: faults.append(error))
    keeper.hits = {}

    def start(ticket, hit):
        started.append(ticket.uid)
        keeper.hits[ticket.uid] = hit

    keeper.run(Looking(), start, lambda ticket, error: failed.append((ticket.uid, str(error))))
    yield keeper, manager, started, failed, faults
    assert keeper.stop(5)


def wait_for(condition):
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_each_answer_of_the_manager_has_its_outcome(kept):
    keeper, manager, started, failed, _ = kept
    manager.answers = {2: EXPIRED, 3: CANCELLED}
    for uid in (1, 2, 3):
        keeper.claim_soon(make_ticket(uid))
    wait_for(lambda: len(started) + len(failed) == 3)
    assert started == [1]
    assert failed[0][0] == 2 and failed[0][1].startswith("UNAVAILABLE: lease: expected a live one")
    assert failed[1] == (3, "CANCELLED: Request was cancelled")


def test_calls_are_made_in_batches(kept):
    keeper, manager, started, _, _ = kept
    manager.gate.clear()
    keeper.claim_soon(make_ticket(0))
    wait_for(lambda: not keeper._inbox)
    for uid in range(1, 10):
        keeper.claim_soon(make_ticket(uid))
        keeper.close_soon(make_ticket(100 + uid).lease)
    manager.gate.set()
    wait_for(lambda: len(started) == 10 and sum(map(len, manager.closes)) == 9)
    assert manager.claims == [[0], list(range(1, 10))]


def test_a_call_without_answer_is_made_again(kept):
    keeper, manager, started, _, faults = kept
    manager.num_faults = 2
    keeper.claim_soon(make_ticket(1))
    keeper.close_soon(make_ticket(2).lease)
    wait_for(lambda: started == [1] and manager.closes == [[2]])
    assert len(faults) == 2


def test_a_ticket_that_ended_meanwhile_is_not_claimed(kept):
    keeper, manager, started, failed, _ = kept
    manager.num_faults = 1
    ticket = make_ticket(1)
    keeper.claim_soon(ticket)
    wait_for(lambda: manager.num_faults == 0)
    ticket.stage = Stage.ENDING
    keeper.close_soon(ticket.lease)
    wait_for(lambda: manager.closes == [[1]])
    assert (manager.claims, started, failed) == ([], [], [])


def test_cancel_flags_are_read_without_a_call(kept):
    keeper, manager, *_ = kept
    assert keeper.cancelled([make_ticket(1).lease, make_ticket(2).lease]) == [True, False]
    assert manager.claims == []


def test_stop_reports_a_call_that_hangs():
    manager = FakeManager()
    manager.gate.clear()
    keeper = LeaseKeeper(manager, FakeHolder(), FakeReader(), lambda what, error: None)
    keeper.run(Looking(), lambda ticket, hit: None, lambda ticket, error: None)
    keeper.claim_soon(make_ticket(1))
    time.sleep(0.02)
    assert not keeper.stop(0.05)
    manager.gate.set()


def test_a_claim_looks_for_prefixes_and_brings_the_one_that_was_pinned(kept):
    keeper, _, started, _, _ = kept
    for uid in (1, 51, 66):  # looks for nothing; finds; is refused later, by the engine
        keeper.claim_soon(make_ticket(uid))
    wait_for(lambda: len(started) == 3)
    assert keeper.hits == {1: None, 51: Hit(EntryRef(9, 2), 5, 9, (1, 2, 3), has_draft=True), 66: None}


def test_what_was_published_first_is_there_for_the_next_claim(kept):
    keeper, manager, started, _, _ = kept
    manager.gate.clear()
    keeper.claim_soon(make_ticket(0))
    wait_for(lambda: not keeper._inbox)
    lease = make_ticket(1).lease
    keeper.publish(lease, "new")
    keeper.close_soon(lease)
    keeper.publish(lease, "known")
    keeper.claim_soon(make_ticket(2))
    keeper.unpin(lease, EntryRef(7, 7))
    manager.gate.set()
    wait_for(lambda: started == [0, 2] and manager.closes)
    updates = [("publish", 1, "new"), ("publish", 1, "known"), ("unpin", 1, EntryRef(7, 7))]
    assert manager.calls == ["claim", *updates, "claim", "close"]
    assert keeper.answers() == [Answer(Published(EntryRef(7, 7), (1, 2)), (1, 2, 3)), Answer(Published(None))]
    assert keeper.answers() == [] and keeper.contains(None, 3, True)


def test_a_publication_without_answer_holds_up_closes_alone(kept):
    keeper, manager, started, _, faults = kept
    manager.num_publish_faults = 3
    lease = make_ticket(1).lease
    keeper.publish(lease, "new")
    keeper.close_soon(lease)
    keeper.claim_soon(make_ticket(2))
    wait_for(lambda: manager.closes == [[1]])
    assert started == [2] and len(faults) == 3
    assert manager.calls == ["claim", ("publish", 1, "new"), "close"]
