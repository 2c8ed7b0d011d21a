"""The llm's threads and what passes between them. Pure: no Triton objects, no BLS; the adapter is in ``llm``.

    execute  -> submit()          registers a ticket, asks the leasing thread to claim its lease
    leasing  -> start() / fail()  claimed: into the engine; refused: an error
    engine   one thread owns the engine: step(), emissions to the sender
    sender   one thread turns emissions into responses, in order; the final one closes the lease
    sessions one thread writes the session that a last emission brings, and then passes it on to the sender
    watch    one thread looks for cancelled clients, cancel flags and deadlines; it never waits for another process

A ticket ends in one place, the sender, by an error or the end of its last sample: so each client gets exactly one
final response.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from qwen35.engine.metrics import EngineMetrics
from qwen35.engine.request import Emission, Request
from qwen35.engine.session import Session
from qwen35.errors import Cancelled, DeadlineExceeded, InternalError, InvalidArgument, Qwen35Error, Unavailable
from qwen35.serving.responses import Response
from qwen35.serving.ticket import Stage, Ticket
from qwen35.state.leases import Lease
from qwen35.state.prefix import Hit

IDLE_SECONDS = 0.02  # of the engine's thread; a request wakes it earlier, memory that came back does not
WATCH_SECONDS = 0.02
CLAIM_SECONDS = 5.0  # for the state manager to answer
DEADLINE_GRACE_SECONDS = 10.0  # for the engine to end what is late
REPLY_WATCH_SECONDS = 0.25  # asking Triton about a client costs an exchange with the server's process
MAX_FAILED_STEPS = 3  # one after the other; then the engine is given up


class Engine(Protocol):
    """What the service needs of ``engine.Engine``. ``wait`` and ``step`` are called by one thread, the others
    by any. ``step`` ends what it can't go on with by an error; one that throws has lost its way."""

    @property
    def metrics(self) -> EngineMetrics: ...

    def submit(self, request: Request, session: Session | None, hit: Hit | None) -> None: ...

    def resume(self, session: Session, request: Request) -> None: ...

    def abort(self, uid: int, error: Qwen35Error) -> None: ...

    def is_live(self, uid: int) -> bool:
        """Whether anything may still be read or written in the name of the request's lease."""
        ...

    def wait(self, timeout_seconds: float) -> None: ...

    def step(self) -> list[Emission]: ...


class Leasing(Protocol):
    """Claims and closes leases in the background; ``cancelled`` reads the shared tables, without a call."""

    def claim_soon(self, ticket: Ticket) -> None: ...

    def close_soon(self, lease: Lease) -> None: ...

    def cancelled(self, leases: list[Lease]) -> list[bool]: ...


class Sessions(Protocol):
    """Where sessions are kept (see ``sessions``)."""

    def save(self, name: str, session: Session) -> None: ...


class Observer(Protocol):
    """Counts what was delivered (see ``metrics``)."""

    def sent(self, ticket: Ticket, emission: Emission) -> None: ...

    def watched(self, metrics: EngineMetrics) -> None: ...


class Service:
    """Owns the tickets between ``submit`` and their final response."""

    def __init__(
        self,
        engine: Engine,
        leasing: Leasing,
        observer: Observer,
        sessions: Sessions,
        *,
        max_live_requests: int,
        on_fault: Callable[[str, BaseException], None],
    ) -> None:
        """``on_fault`` is told of everything that must not happen, with the exception; it must not raise."""
        self._engine = engine
        self._leasing = leasing
        self._observer = observer
        self._sessions = sessions
        self._max_live_requests = max_live_requests
        self._on_fault = on_fault
        self._lock = threading.Lock()
        self._tickets: dict[int, Ticket] = {}
        self._broken: Qwen35Error | None = None
        self._emissions: queue.SimpleQueue[Emission | None] = queue.SimpleQueue()
        self._unsaved: queue.SimpleQueue[Emission | None] = queue.SimpleQueue()
        self._lingering: deque[Ticket] = deque()  # ended, but the engine has not let go of them
        self._stopping = threading.Event()
        bodies = {
            "engine": self._run_engine,
            "sender": self._run_sender,
            "sessions": self._run_sessions,
            "watch": self._run_watch,
        }
        self._threads = [
            threading.Thread(target=self._guarded, args=(body,), name=f"llm-{name}", daemon=True)
            for name, body in bodies.items()
        ]

    @property
    def num_live_requests(self) -> int:
        with self._lock:
            return len(self._tickets)

    def run(self) -> None:
        for thread in self._threads:
            thread.start()

    def submit(self, ticket: Ticket) -> None:
        """Take a request. Raises Unavailable when the queue is full or the engine was given up."""
        with self._lock:
            if self._broken is not None:
                raise Unavailable(self._broken.message)
            if self._stopping.is_set():
                raise Unavailable("llm: expected a running model, got one that is being unloaded")
            if len(self._tickets) >= self._max_live_requests:
                raise Unavailable(
                    f"queue: expected fewer than {self._max_live_requests} live requests; try again later"
                )
            if ticket.uid in self._tickets:
                raise InvalidArgument.field("request.uid", "an id that is not in use", f"{ticket.uid:016x}")
            self._tickets[ticket.uid] = ticket
        self._leasing.claim_soon(ticket)

    def start(self, ticket: Ticket, hit: Hit | None = None) -> None:
        """The lease is ours, and ``hit`` pinned: into the engine, unless the ticket has ended meanwhile."""
        with self._lock:
            if ticket.stage is not Stage.WAITING:
                return
            ticket.stage = Stage.RUNNING
        try:
            if ticket.resolved.is_continued and ticket.session is not None:
                self._engine.resume(ticket.session, ticket.request)
            else:
                self._engine.submit(ticket.request, ticket.session, hit)
        except Qwen35Error as error:
            self._end(ticket, error)
        except Exception as error:
            self._on_fault("submit", error)
            self._end(ticket, InternalError(f"submit: {type(error).__name__}"))

    def fail(self, ticket: Ticket, error: Qwen35Error) -> None:
        """End a ticket by an error: through the engine when it has it, so that its memory is freed first."""
        with self._lock:
            stage = ticket.stage
        if stage is Stage.WAITING:
            self._end(ticket, error)
        elif stage is Stage.RUNNING:
            self._engine.abort(ticket.uid, error)

    def stop(self, timeout_seconds: float) -> bool:
        """End every live request with UNAVAILABLE and the threads. False when one did not end in time."""
        self._stopping.set()
        self._give_up(Unavailable("llm: the model was unloaded while the request ran"))
        self._emissions.put(None)
        self._unsaved.put(None)
        deadline = time.monotonic() + timeout_seconds
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _end(self, ticket: Ticket, error: Qwen35Error) -> None:
        with self._lock:
            if ticket.stage is Stage.ENDING:
                return
            ticket.stage = Stage.ENDING
        self._emissions.put(Emission(ticket.uid, ticket.usage, error=error))

    def _give_up(self, error: Qwen35Error) -> None:
        """No request will be taken any more, and all live ones end now, whatever the engine does."""
        with self._lock:
            self._broken = self._broken or error
            tickets = list(self._tickets.values())
        for ticket in tickets:
            self._end(ticket, error)

    def _guarded(self, body: Callable[[], None]) -> None:
        """A thread that dies must not leave clients waiting."""
        try:
            body()
        except Exception as error:
            name = threading.current_thread().name
            self._on_fault(name, error)
            self._give_up(InternalError(f"{name}: the thread ended by {type(error).__name__}; reload the model"))

    def _run_engine(self) -> None:
        num_failed_steps = 0
        while not self._stopping.is_set():
            self._engine.wait(IDLE_SECONDS)
            try:
                emissions = self._engine.step()
                num_failed_steps = 0
            except Exception as error:
                self._on_fault("engine step", error)
                num_failed_steps += 1
                self._fail_running(error, is_last=num_failed_steps >= MAX_FAILED_STEPS)
                continue
            for emission in emissions:
                (self._emissions if emission.session is None else self._unsaved).put(emission)

    def _fail_running(self, error: Exception, *, is_last: bool) -> None:
        """The step threw: nothing of what ran can be trusted. The next requests run, unless it goes on throwing."""
        failure = InternalError(f"engine: a step failed with {type(error).__name__}; the request was given up")
        if is_last:
            self._give_up(Unavailable(f"engine: {MAX_FAILED_STEPS} steps in a row failed; reload the model"))
        with self._lock:
            running = [ticket for ticket in self._tickets.values() if ticket.stage is not Stage.WAITING]
        for ticket in running:
            self._end(ticket, failure)
            self._engine.abort(ticket.uid, failure)

    def _run_sender(self) -> None:
        while True:
            emission = self._emissions.get()
            if emission is None:
                return
            with self._lock:
                ticket = self._tickets.get(emission.uid)
                is_end = ticket is not None and ticket.is_ended_by(emission)
                if is_end:
                    ticket.stage = Stage.ENDING
                    del self._tickets[emission.uid]
            if ticket is not None:
                self._deliver(ticket, emission, is_end)

    def _deliver(self, ticket: Ticket, emission: Emission, is_end: bool) -> None:
        try:
            response = self._response(ticket, emission, is_end)
            if response is not None:
                ticket.reply.send(response)
                finish_reason = emission.finish_reason if is_end else None
                told = replace(emission, usage=ticket.builder.delivered, finish_reason=finish_reason)
                self._observer.sent(ticket, told)
                ticket.usage, ticket.last_sent = told.usage, time.monotonic()
        except Exception as error:  # of one client: the others go on
            self._on_fault("sender", error)
            self.fail(ticket, Cancelled("response: expected to be delivered, got no way to the client"))
        if is_end:
            self._close(ticket)

    def _close(self, ticket: Ticket) -> None:
        """The lease goes when the engine has let go of all that it pins: with the last emission, but for a request that
        ended by an error of one sample, or without the engine."""
        if self._engine.is_live(ticket.uid):
            self._lingering.append(ticket)
        else:
            self._leasing.close_soon(ticket.lease)

    def _response(self, ticket: Ticket, emission: Emission, is_end: bool) -> Response | None:
        """The end of a request gives a final response even when it can't be put into words."""
        try:
            return ticket.builder.push(emission)
        except Exception as error:
            if not is_end:
                raise
            self._on_fault("response", error)
            return Response(error=InternalError(f"response: {type(error).__name__}"), is_final=True)

    def _run_sessions(self) -> None:
        """The client's final response comes when the file is there; one that can't be written is an error."""
        while (emission := self._unsaved.get()) is not None:
            with self._lock:
                ticket = self._tickets.get(emission.uid)
            if ticket is not None:
                self._emissions.put(self._saved(ticket, emission))

    def _saved(self, ticket: Ticket, emission: Emission) -> Emission:
        try:
            self._sessions.save(ticket.resolved.save_session, emission.session)
            return replace(emission, session=None)
        except Qwen35Error as error:
            failure = error
        except Exception as error:
            self._on_fault("session", error)
            failure = InternalError(f"save_session: {type(error).__name__}")
        return replace(emission, session=None, finish_reason=None, error=failure)

    def _run_watch(self) -> None:
        next_replies = 0.0
        while not self._stopping.wait(WATCH_SECONDS):
            now = time.monotonic()
            with self._lock:
                live = [ticket for ticket in self._tickets.values() if ticket.stage is not Stage.ENDING]
            self._observer.watched(self._engine.metrics)
            running = [ticket for ticket in live if ticket.stage is Stage.RUNNING]
            flags = self._leasing.cancelled([ticket.lease for ticket in running])
            cancelled = [ticket for ticket, is_set in zip(running, flags, strict=True) if is_set]
            if now >= next_replies:
                next_replies = now + REPLY_WATCH_SECONDS
                cancelled += [ticket for ticket in live if ticket.reply.is_cancelled()]
            for ticket in cancelled:
                self.fail(ticket, Cancelled())
            for ticket in live:
                self._watch_times(ticket, now)
            for _ in range(len(self._lingering)):
                self._close(self._lingering.popleft())

    def _watch_times(self, ticket: Ticket, now: float) -> None:
        """The engine watches deadlines too; here they hold for what it has not got yet, or does not come back from."""
        late = DeadlineExceeded("deadline: expected the request to end before it, got no end")
        if now > ticket.request.deadline + DEADLINE_GRACE_SECONDS:
            self._end(ticket, late)
        elif now > ticket.request.deadline:
            self.fail(ticket, late)
        elif ticket.stage is Stage.WAITING and now > ticket.submitted + CLAIM_SECONDS:
            self.fail(ticket, Unavailable(f"lease: expected a claim within {CLAIM_SECONDS} s, got no answer"))
