import time
from contextlib import contextmanager
from dataclasses import replace

import pytest

from qwen35.errors import Cancelled, InternalError, InvalidArgument, StateError, Unavailable
from qwen35.serving import service as service_module
from qwen35.serving.service import MAX_FAILED_STEPS, WATCH_SECONDS, Service
from tests.serving.fakes import (
    EndlessEngine,
    FakeEngine,
    FakeLeasing,
    FakeObserver,
    FakeReply,
    FakeSessions,
    make_ticket,
)

WAIT = 5.0


@contextmanager
def running(engine=None, max_live_requests=100):
    leasing, faults, sessions = FakeLeasing(), [], FakeSessions()
    service = Service(
        engine or FakeEngine(),
        leasing,
        FakeObserver(),
        sessions,
        max_live_requests=max_live_requests,
        on_fault=lambda what, error: faults.append((what, error)),
    )
    leasing.service, service.faults, service.leases = service, faults, leasing
    service.sessions = sessions
    service.run()
    yield service
    assert service.stop(WAIT)


def finished(service, *tickets):
    for ticket in tickets:
        assert ticket.reply.done.wait(WAIT), f"no final response for {ticket.uid}"
    deadline = time.monotonic() + WAIT
    while service.num_live_requests and time.monotonic() < deadline:
        time.sleep(0.001)


def wait_for(condition):
    deadline = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_requests_stream_in_order_and_end_once():
    with running() as service:
        tickets = [make_ticket(uid) for uid in range(20)]
        for ticket in tickets:
            service.submit(ticket)
        finished(service, *tickets)
        time.sleep(0.02)
    for ticket in tickets:
        assert [r.outputs["text_output"][0] for r in ticket.reply.responses] == ["a", "b", "c"]
        assert [r.is_final for r in ticket.reply.responses] == [False, False, True]
    assert sorted(lease.row for lease in service.leases.closed) == list(range(20))
    assert service.faults == []


def test_without_streaming_there_is_one_response():
    with running() as service:
        ticket = make_ticket(1, stream=False)
        service.submit(ticket)
        finished(service, ticket)
    (response,) = ticket.reply.responses
    assert (response.outputs["text_output"][0], response.is_final) == ("abc", True)


@pytest.mark.parametrize("how", ["client", "flag"])
def test_a_cancelled_request_ends_through_the_engine(how):
    engine = EndlessEngine()
    with running(engine) as service:
        ticket, other = make_ticket(1), make_ticket(2)
        service.submit(ticket)
        service.submit(other)
        wait_for(lambda: len(ticket.reply.responses) > 3)
        if how == "client":
            ticket.reply.cancelled = True
        else:
            service.leases.flags.add(ticket.lease)
        finished_ticket = ticket.reply.done.wait(WAIT)
        assert finished_ticket
        assert engine.aborted == [1]
        assert service.leases.closed == [ticket.lease]
        assert not other.reply.done.is_set()
    assert ticket.reply.error == "CANCELLED: Request was cancelled"
    assert other.reply.error.startswith("UNAVAILABLE")  # stopped


def test_cancel_before_the_claim_never_reaches_the_engine():
    engine = FakeEngine()
    with running(engine) as service:
        service.leases.holds = True
        ticket = make_ticket(1)
        service.submit(ticket)
        ticket.reply.cancelled = True
        finished(service, ticket)
        service.start(ticket)  # the claim's answer comes too late
        time.sleep(0.02)
    assert engine.submitted == []
    assert ticket.reply.error == "CANCELLED: Request was cancelled"
    assert service.leases.closed == [ticket.lease]


def test_a_claim_without_answer_ends_in_time(monkeypatch):
    monkeypatch.setattr(service_module, "CLAIM_SECONDS", 0.05)
    with running() as service:
        service.leases.holds = True
        ticket = make_ticket(1)
        service.submit(ticket)
        finished(service, ticket)
    assert ticket.reply.error.startswith("UNAVAILABLE: lease: expected a claim within")


def test_a_deadline_ends_a_running_request():
    with running(EndlessEngine()) as service:
        ticket = make_ticket(1, deadline_seconds=0.1)
        service.submit(ticket)
        finished(service, ticket)
    assert ticket.reply.error.startswith("DEADLINE_EXCEEDED: deadline")


def test_a_deadline_holds_even_when_the_engine_does_not_come_back(monkeypatch):
    monkeypatch.setattr(service_module, "DEADLINE_GRACE_SECONDS", 0.05)
    engine = EndlessEngine()
    engine.abort = lambda uid, error: None
    with running(engine) as service:
        ticket = make_ticket(1, deadline_seconds=0.05)
        service.submit(ticket)
        finished(service, ticket)
    assert ticket.reply.error.startswith("DEADLINE_EXCEEDED: deadline")


def test_what_the_engine_refuses_is_the_answer():
    engine = FakeEngine()
    engine.refusal = InvalidArgument("prompt: expected 1 to 3 tokens, got 9")
    with running(engine) as service:
        ticket = make_ticket(1)
        service.submit(ticket)
        finished(service, ticket)
    assert ticket.reply.error == "INVALID_ARG: prompt: expected 1 to 3 tokens, got 9"
    assert service.leases.closed == [ticket.lease]


def test_a_step_that_throws_ends_what_ran_and_the_next_request_works():
    engine = EndlessEngine()
    with running(engine) as service:
        first = make_ticket(1)
        service.submit(first)
        wait_for(lambda: len(first.reply.responses) > 2)
        engine.faults.append(RuntimeError("secret detail"))
        finished(service, first)
        assert first.reply.error.startswith("INTERNAL: engine: a step failed with RuntimeError")
        assert "secret" not in first.reply.error
        wait_for(lambda: engine.aborted == [1])
        second = make_ticket(2)
        service.submit(second)
        wait_for(lambda: len(second.reply.responses) > 2)


def test_an_engine_that_goes_on_throwing_is_given_up():
    engine = EndlessEngine()
    engine.abort = lambda uid, error: None  # it forgets nothing, so each step throws
    engine.faults.extend(RuntimeError() for _ in range(MAX_FAILED_STEPS))
    with running(engine) as service:
        ticket = make_ticket(1)
        service.submit(ticket)
        finished(service, ticket)
        wait_for(lambda: len(service.faults) == MAX_FAILED_STEPS)
        time.sleep(0.02)
        with pytest.raises(Unavailable, match="steps in a row failed; reload the model"):
            service.submit(make_ticket(2))


def test_a_client_that_can_not_be_reached_stops_its_request_only():
    engine = EndlessEngine()
    with running(engine) as service:
        broken, other = make_ticket(1, FakeReply(fails=True)), make_ticket(2)
        service.submit(broken)
        service.submit(other)
        wait_for(lambda: service.num_live_requests == 1)
        num_responses = len(other.reply.responses)
        wait_for(lambda: len(other.reply.responses) > num_responses)
    assert broken.lease in service.leases.closed
    assert engine.aborted == [1]


def test_a_response_that_can_not_be_made_is_an_error_for_its_client():
    with running() as service:
        ticket = make_ticket(1, stream=False)
        ticket.builder.push = lambda emission: 1 / 0
        service.submit(ticket)
        finished(service, ticket)
    assert ticket.reply.error == "INTERNAL: response: ZeroDivisionError"


def test_the_queue_is_bounded_and_ids_are_unique():
    with running(EndlessEngine(), max_live_requests=2) as service:
        service.submit(make_ticket(1))
        with pytest.raises(InvalidArgument, match="request.uid"):
            service.submit(make_ticket(1))
        service.submit(make_ticket(2))
        with pytest.raises(Unavailable, match="queue: expected fewer than 2"):
            service.submit(make_ticket(3))


def test_a_thread_that_dies_leaves_no_client_waiting():
    with running(EndlessEngine()) as service:
        ticket = make_ticket(1)
        service.submit(ticket)
        service.leases.cancelled = lambda leases: 1 / 0  # ends the watch thread
        finished(service, ticket)
        assert ticket.reply.error.startswith("INTERNAL: llm-watch: the thread ended by ZeroDivisionError")
        with pytest.raises(Unavailable):
            service.submit(make_ticket(2))


def test_stop_ends_every_client():
    with running(EndlessEngine()) as service:
        tickets = [make_ticket(uid) for uid in range(5)]
        for ticket in tickets:
            service.submit(ticket)
    for ticket in tickets:
        assert ticket.reply.done.is_set()
        assert ticket.reply.error == "UNAVAILABLE: llm: the model was unloaded while the request ran"
    with pytest.raises(Unavailable):
        service.submit(make_ticket(9))


class SamplingEngine(FakeEngine):
    """Two samples of each request, one a letter shorter than the other."""

    def _advance(self, uid):
        emission = super()._advance(uid)
        return [emission, replace(emission, sample_index=1, finish_reason=None if emission.is_final else "stop")]

    def step(self):
        index = dict(self._live)
        emissions = [e for both in super().step() for e in both]
        return [e for e in emissions if e.sample_index == 0 or index[e.uid] == 0]


def test_a_request_of_two_samples_ends_with_the_later_one():
    ticket = make_ticket(1, n=2)
    with running(SamplingEngine()) as service:
        service.submit(ticket)
        finished(service, ticket)
        assert service.num_live_requests == 0
    assert [r.outputs["text_output"].tolist() for r in ticket.reply.responses] == [
        ["a", ""], ["", "a"], ["b", ""], ["c", ""]
    ]  # fmt: skip
    assert ticket.reply.responses[-1].outputs["finish_reason"].tolist() == ["stop", "stop"]
    assert [r.is_final for r in ticket.reply.responses] == [False, False, False, True]
    assert service.leases.closed == [ticket.lease]
    assert service.faults == []


def with_names(ticket, **names):
    return replace(ticket, resolved=replace(ticket.resolved, **names))


def test_the_final_response_comes_when_the_session_is_written():
    engine = FakeEngine()
    with running(engine) as service:
        keeper, other = with_names(make_ticket(1), save_session="mine"), make_ticket(2)
        engine.sessions[1] = "session"
        service.sessions.gate.clear()
        service.submit(keeper)
        service.submit(other)
        finished_others = other.reply.done.wait(WAIT)
        assert finished_others and not keeper.reply.done.is_set(), "others do not wait for the disk"
        service.sessions.gate.set()
        finished(service, keeper)
        assert (keeper.reply.text, service.sessions.saved) == ("abc", {"mine": "session"})


@pytest.mark.parametrize(("failure", "message"), [
    (StateError("save_session: no room"), "save_session: no room"),
    (RuntimeError("secret detail"), "INTERNAL: save_session: RuntimeError"),
])  # fmt: skip
def test_a_session_that_can_not_be_written_is_an_error_after_the_text(failure, message):
    engine = FakeEngine()
    with running(engine) as service:
        engine.sessions[1], service.sessions.failure = "session", failure
        ticket = with_names(make_ticket(1), save_session="mine")
        service.submit(ticket)
        finished(service, ticket)
        assert ticket.reply.text == "abc" and message in ticket.reply.error and "secret" not in ticket.reply.error
        assert len(service.faults) == isinstance(failure, RuntimeError)
        service.faults.clear()


def test_sessions_reach_the_engine_as_prefix_or_to_go_on():
    engine = FakeEngine()
    with running(engine) as service:
        prefix = replace(make_ticket(1), session="first")
        going_on = replace(with_names(make_ticket(2), is_continued=True), session="second")
        for ticket in (prefix, going_on):
            service.submit(ticket)
        finished(service, prefix, going_on)
    assert (engine.restored, engine.resumed) == ([("first", 1)], [("second", 2)])


def test_a_lease_is_closed_when_the_engine_has_let_go_of_it():
    """An error of one sample ends a request before its other samples."""
    engine = EndlessEngine()
    with running(engine) as service:
        ticket, leasing = make_ticket(1), service.leases
        service.submit(ticket)
        wait_for(lambda: engine.submitted == [1])
        service._end(ticket, InternalError("one of the samples"))
        assert ticket.reply.done.wait(5)
        time.sleep(3 * WATCH_SECONDS)
        assert leasing.closed == [] and engine.is_live(1)
        engine.abort(1, Cancelled())
        wait_for(lambda: leasing.closed == [ticket.lease])
