"""Triton model `llm`: takes prepared requests, streams their answers. A thin adapter around `service.Service`."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from typing import Any

import triton_python_backend_utils as pb_utils

from qwen35.config import ModelConfig
from qwen35.devices import select_device
from qwen35.engine.loading import load_engine
from qwen35.engine.request import Request
from qwen35.engine.session import Session
from qwen35.errors import InvalidArgument, StateError, Unavailable
from qwen35.serving.leasing import LeaseKeeper
from qwen35.serving.metrics import ServingMetrics
from qwen35.serving.process import ServerProcess, prepare_process, settings_of
from qwen35.serving.resolved import ResolvedRequest
from qwen35.serving.responses import ResponseBuilder
from qwen35.serving.service import Service
from qwen35.serving.sessions import SessionStore
from qwen35.serving.shared_state import SharedState, contents_of
from qwen35.serving.tensors import TritonReply, log_fault, text_input, text_tensor, torch_input
from qwen35.serving.ticket import Ticket, monotonic_of
from qwen35.state.leases import Lease
from qwen35.state.prefix import PrefixReader

STATE_MANAGER = "state_manager"
STOP_SECONDS = 2.0  # for each kind of thread at finalize


class TritonPythonModel:
    """Decoupled. Inputs: `request` STRING [1] (JSON), `token_ids` INT32 [N], `positions` INT32 [3, N], `embeds` BF16
    [M, H], `lease` STRING [1] (JSON). Responses: as many as the request streams, or one; the last has the final flag.

    `execute` enqueues and returns. No call to the state manager is made before the first request, nor at finalize.
    """

    def initialize(self, args: dict[str, str]) -> None:
        prepare_process()
        self._server = ServerProcess()
        settings = settings_of(args)
        config = ModelConfig.from_directory(settings.checkpoint)
        self._settings = settings
        self._sessions = SessionStore(settings.session_directory, settings.session_bytes, contents_of(settings))
        self._state = SharedState.attach(settings, config, args["model_instance_name"], self._call_state_manager)
        try:
            if not self._state.holder.wait_for_predecessors(settings.request_timeout_seconds):
                raise StateError("llm: expected the unloaded instance to end, got it alive with its weights in memory")
            cache = self._state.arena.cache_view(str(select_device(settings.device)))
            reader = PrefixReader(self._state.arena.tables)
            self._keeper = LeaseKeeper(self._state.manager, self._state.holder, reader, self._on_fault)
            self._engine = load_engine(settings, config, self._state.pool, cache, self._keeper)
        except BaseException:
            self._state.close()
            raise
        self._service = Service(
            self._engine,
            self._keeper,
            ServingMetrics(pb_utils, {"model": args["model_name"]}, self._server),
            self._sessions,
            max_live_requests=settings.max_queued_requests + settings.num_slots,
            on_fault=self._on_fault,
        )
        self._start_lock, self._is_started = threading.Lock(), False
        self._server.when_gone(self._state.close)

    def execute(self, requests: list[Any]) -> None:
        self._start_once()
        for request in requests:
            reply = TritonReply(pb_utils, request, self._server)
            try:
                self._submit(request, reply)
            except Exception as error:
                reply.refuse(error, "llm")

    def finalize(self) -> None:
        """Makes no call and waits for no other process: that one may be gone before us."""
        self._state.holder.announce_end()  # if a thread hangs: the end of this process is no reason to reload it
        has_ended = self._service.stop(STOP_SECONDS)
        closing = threading.Thread(target=self._state.pool.close, args=(False,), daemon=True)
        closing.start()
        self._keeper.stop(STOP_SECONDS)
        closing.join(STOP_SECONDS)
        if has_ended:  # else a thread may still write: the blocks are free when this process has ended
            self._state.close()

    def _call_state_manager(self, message: dict[str, Any]) -> dict[str, Any]:
        """By any thread. Raises Unavailable when the manager does, or there is no server."""
        if not self._server.is_alive:
            raise Unavailable(f"{STATE_MANAGER}: expected a server to reach it through, got one that is dead")
        return call_state_manager(message)

    def _on_fault(self, what: str, error: BaseException) -> None:
        log_fault(pb_utils, self._server, f"llm: {what}", error)

    def _start_once(self) -> None:
        """Threads that call the state manager start here: a call from initialize is refused by Triton."""
        with self._start_lock:
            if self._is_started:
                return
            self._is_started = True
            self._state.pool.start(self._settings.heartbeat_seconds, lambda error: self._on_fault("block pool", error))
            self._keeper.run(self._engine, self._service.start, self._service.fail)
            self._service.run()

    def _submit(self, request: Any, reply: TritonReply) -> None:
        lease = _lease_of(text_input(pb_utils, request, "lease"))
        try:
            self._service.submit(self._ticket(request, lease, reply))
        except Exception:
            self._keeper.close_soon(lease)
            raise

    def _ticket(self, request: Any, lease: Lease, reply: TritonReply) -> Ticket:
        resolved = _resolved_of(text_input(pb_utils, request, "request"))
        session = self._session(resolved)
        if resolved.is_continued and session is not None:
            return self._continued(request, resolved, session, lease, reply)
        engine_request = Request(
            uid=int(resolved.uid, 16),
            request_id=resolved.request_id,
            token_ids=tuple(torch_input(pb_utils, request, "token_ids").tolist()),
            positions=torch_input(pb_utils, request, "positions").long(),
            image_embeds=torch_input(pb_utils, request, "embeds"),
            sampling=resolved.sampling,
            seed=resolved.seed,
            deadline=monotonic_of(resolved.deadline_unix_ns),
            priority=resolved.priority,
            arrival=monotonic_of(resolved.arrival_unix_ns),
            wants_session=bool(resolved.save_session),
            images=resolved.images,
            lease=lease,
            cache_salt=self._state.prefix_salt,
        )
        return Ticket(resolved, engine_request, lease, self._builder(request, resolved), reply, session)

    def _session(self, resolved: ResolvedRequest) -> Session | None:
        """The one to restore. Raises for names that can't be restored or saved."""
        if resolved.save_session:
            self._sessions.check("save_session")
        return self._sessions.load(resolved.restore_session) if resolved.restore_session else None

    def _continued(
        self, request: Any, resolved: ResolvedRequest, session: Session, lease: Lease, reply: TritonReply
    ) -> Ticket:
        """The text of a session goes on, for up to max_tokens more."""
        going_on = session.request_on(
            uid=int(resolved.uid, 16),
            deadline=monotonic_of(resolved.deadline_unix_ns),
            arrival=monotonic_of(resolved.arrival_unix_ns),
            max_new_tokens=resolved.sampling.max_tokens,
            wants_session=bool(resolved.save_session),
        )
        going_on = replace(
            going_on,
            request_id=resolved.request_id,
            priority=resolved.priority,
            lease=lease,
            cache_salt=self._state.prefix_salt,
        )
        resolved = replace(resolved, wants_logprobs=going_on.sampling.logprobs is not None)
        ticket = Ticket(resolved, going_on, lease, self._builder(request, resolved), reply, session)
        ticket.usage = session.usage  # what earlier responses have told
        return ticket

    def _builder(self, request: Any, resolved: ResolvedRequest) -> ResponseBuilder:
        names = request.requested_output_names()
        return ResponseBuilder(resolved, names, self._engine.vocabulary.token_text, self._settings.block_tokens)


def call_state_manager(message: dict[str, Any]) -> dict[str, Any]:
    """One operation by BLS. Raises Unavailable with the manager's message."""
    request = pb_utils.InferenceRequest(
        model_name=STATE_MANAGER,
        requested_output_names=["result"],
        inputs=[
            text_tensor(pb_utils, "operation", message["operation"]),
            text_tensor(pb_utils, "request", json.dumps(message)),
        ],
    )
    response = request.exec()
    if response.has_error():
        raise Unavailable(f"{STATE_MANAGER}: {message['operation']} failed: {response.error().message()}")
    return json.loads(pb_utils.get_output_tensor_by_name(response, "result").as_numpy()[0])


def _lease_of(text: str) -> Lease:
    try:
        return Lease(**json.loads(text))
    except (ValueError, TypeError) as error:
        raise InvalidArgument.field("lease", "a lease of the state manager", text) from error


def _resolved_of(text: str) -> ResolvedRequest:
    try:
        return ResolvedRequest.from_json(text)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidArgument.field("request", "a request as the vision encoder makes it", text) from error
