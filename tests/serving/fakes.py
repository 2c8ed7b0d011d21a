"""Fakes around the threads of the llm: an engine that says what it is told, leases without a manager, clients."""

import threading
import time
from collections import defaultdict, deque

import torch

from qwen35.engine.metrics import EngineMetrics
from qwen35.engine.request import Emission, Request, SamplingParams, Usage
from qwen35.serving.resolved import ResolvedRequest, Returns
from qwen35.serving.responses import ResponseBuilder
from qwen35.serving.ticket import Ticket
from qwen35.state.leases import Lease

OUTPUTS = ("text_output", "finish_reason", "error")


class FakeReply:
    def __init__(self, fails=False):
        self.responses = []
        self.cancelled = False
        self.fails = fails
        self.done = threading.Event()

    def send(self, response):
        if self.fails:
            raise BrokenPipeError("client is gone")
        self.responses.append(response)
        if response.is_final:
            self.done.set()

    def is_cancelled(self):
        return self.cancelled

    @property
    def text(self):
        return "".join(r.outputs["text_output"][0] for r in self.responses if r.outputs)

    @property
    def error(self):
        last = self.responses[-1]
        return str(last.error) if last.error else last.outputs.get("error", [None])[0]


class FakeEngine:
    """Each live request gets a letter of ``text`` a step, then "stop". ``faults`` are raised by steps."""

    def __init__(self, text="abc"):
        self.metrics = EngineMetrics()
        self.text = text
        self.submitted, self.aborted = [], []
        self.resumed, self.restored = [], []
        self.sessions = {}  # by uid, for the last emission
        self.faults = deque()
        self.refusal = None
        self._live = defaultdict(int)
        self._aborts = {}
        self._changed = threading.Condition()

    def resume(self, session, request):
        self.resumed.append((session, request.uid))
        self.submit(request, None)

    def query(self, request):
        return None

    def notify(self):
        pass

    def is_live(self, uid):
        with self._changed:
            return uid in self._live

    def submit(self, request, session, hit=None):
        if self.refusal:
            raise self.refusal
        with self._changed:
            if session is not None:
                self.restored.append((session, request.uid))
            self.submitted.append(request.uid)
            self._live[request.uid] = 0
            self._changed.notify_all()

    def abort(self, uid, error):
        with self._changed:
            if uid in self._live:
                self.aborted.append(uid)
                self._aborts[uid] = error
                self._changed.notify_all()

    def wait(self, timeout_seconds):
        with self._changed:
            if not self._live:
                self._changed.wait(timeout_seconds)

    def step(self):
        with self._changed:
            if self._live and self.faults:
                raise self.faults.popleft()
            emissions = [self._advance(uid) for uid in list(self._live)]
        time.sleep(0.001)
        return emissions

    def _advance(self, uid):
        index = self._live[uid]
        usage = Usage(2, index + 1, 0, 0)
        if uid in self._aborts:
            del self._live[uid]
            return Emission(uid, usage, error=self._aborts.pop(uid))
        self._live[uid] += 1
        is_last = index + 1 == len(self.text)
        if is_last:
            del self._live[uid]
        session = self.sessions.get(uid) if is_last else None
        reason = "stop" if is_last else None
        return Emission(uid, usage, (index,), self.text[index], finish_reason=reason, session=session)


class EndlessEngine(FakeEngine):
    """Never finishes by itself."""

    def _advance(self, uid):
        if uid in self._aborts:
            return super()._advance(uid)
        self._live[uid] += 1
        return Emission(uid, Usage(2, self._live[uid], 0, 0), (1,), "x")


class FakeLeasing:
    """Claims at once, unless held back; remembers what was closed."""

    def __init__(self):
        self.service = None
        self.holds = False
        self.waiting, self.closed, self.flags = [], [], set()

    def claim_soon(self, ticket):
        if self.holds:
            self.waiting.append(ticket)
        else:
            self.service.start(ticket)

    def close_soon(self, lease):
        self.closed.append(lease)

    def cancelled(self, leases):
        return [lease in self.flags for lease in leases]


class FakeSessions:
    """Keeps what is saved; ``failure`` is raised instead, ``gate`` is waited for."""

    def __init__(self):
        self.saved = {}
        self.failure = None
        self.gate = threading.Event()
        self.gate.set()

    def save(self, name, session):
        assert self.gate.wait(10.0)
        if self.failure:
            raise self.failure
        self.saved[name] = session


class FakeObserver:
    def __init__(self):
        self.num_sent = 0

    def sent(self, ticket, emission):
        self.num_sent += 1

    def watched(self, metrics):
        pass


def make_ticket(uid, reply=None, deadline_seconds=60.0, stream=True, n=1):
    sampling = SamplingParams(n=n)
    resolved = ResolvedRequest(f"{uid:016x}", "client", sampling, 0, stream, Returns(finish_reason=True), False, 0, 0)
    deadline = time.monotonic() + deadline_seconds
    request = Request(uid, "client", (1, 2), torch.zeros(3, 2), torch.zeros(0, 4), sampling, 0, deadline)
    builder = ResponseBuilder(resolved, OUTPUTS, str, block_tokens=16)
    return Ticket(resolved, request, Lease(uid, uid), builder, reply or FakeReply())
