import threading
import time

import pytest

from qwen35.serving.leasing import LeaseKeeper
from qwen35.serving.ticket import Stage
from qwen35.state.extents import HolderRef
from qwen35.state.leases import CANCELLED, CLAIMED, EXPIRED
from tests.serving.fakes import make_ticket


class FakeManager:
    def __init__(self):
        self.answers = {}  # lease row -> answer
        self.num_faults = 0
        self.claims, self.closes = [], []
        self.gate = threading.Event()
        self.gate.set()

    def claim(self, holder, leases):
        self.gate.wait(5)
        if self.num_faults:
            self.num_faults -= 1
            raise ConnectionError("state_manager is being reloaded")
        self.claims.append([lease.row for lease in leases])
        return [self.answers.get(lease.row, CLAIMED) for lease in leases], [None] * len(leases)

    def close(self, holder, leases):
        if self.num_faults:
            self.num_faults -= 1
            raise ConnectionError("state_manager is being reloaded")
        self.closes.append([lease.row for lease in leases])
        return len(leases)


class FakeHolder:
    ref = HolderRef(3, 4)

    def cancelled(self, leases):
        return [lease.row == 1 for lease in leases]


@pytest.fixture
def kept():
    manager, started, failed, faults = FakeManager(), [], [], []
    keeper = LeaseKeeper(manager, FakeHolder(), lambda what, error: faults.append(error))
    keeper.run(lambda ticket: started.append(ticket.uid), lambda ticket, error: failed.append((ticket.uid, str(error))))
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
    wait_for(lambda: not keeper._to_claim)
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
    keeper = LeaseKeeper(manager, FakeHolder(), lambda what, error: None)
    keeper.run(lambda ticket: None, lambda ticket, error: None)
    keeper.claim_soon(make_ticket(1))
    time.sleep(0.02)
    assert not keeper.stop(0.05)
    manager.gate.set()
