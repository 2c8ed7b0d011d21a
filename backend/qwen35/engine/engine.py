"""The loop: schedule, run the target, decide, commit, draft, emit. Knows neither Triton nor who owns the memory.

Any thread may submit and abort; one thread steps. Whatever happens, every sample of a submitted request gets exactly
one final emission."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from qwen35.config import ModelConfig
from qwen35.engine.admission import Admission
from qwen35.engine.batch import Piece, Target
from qwen35.engine.checkpoints import Checkpoints
from qwen35.engine.detokenizer import Vocabulary
from qwen35.engine.draft import Draft, Drafter
from qwen35.engine.draft_length import AdaptiveLengths, Costs, FixedLengths
from qwen35.engine.landmarks import Landmarks
from qwen35.engine.ledger import Pool
from qwen35.engine.memory import Memory
from qwen35.engine.metrics import EngineMetrics
from qwen35.engine.prefix import PrefixStore, Query
from qwen35.engine.request import Emission, Request
from qwen35.engine.scheduler import Scheduler
from qwen35.engine.sequence import Decision, Sequence
from qwen35.engine.session import Session
from qwen35.engine.swap import Swap
from qwen35.engine.target import TargetRunner
from qwen35.errors import Cancelled, DeadlineExceeded, InternalError, InvalidArgument, Qwen35Error, Unavailable
from qwen35.kernels.scan import RowScan
from qwen35.settings import Settings
from qwen35.state.prefix import Hit
from qwen35.views import CacheView

_LOGGER = logging.getLogger(__name__)


class Engine:
    """Serves many requests with one target and one draft.

    The loop of its owner: ``while alive: engine.wait(0.05); deliver(engine.step())``, at the end
    ``deliver(engine.shutdown(…))``."""

    def __init__(
        self,
        target: Target,
        draft: Draft | None,
        pool: Pool,
        cache: CacheView,
        tokenizer: Any,
        config: ModelConfig,
        settings: Settings,
        row_scan: RowScan | None = None,
        draft_logits: Callable[[Tensor], Tensor] | None = None,
        store: PrefixStore | None = None,
    ) -> None:
        """``draft``: None turns drafting off. ``pool`` hands out block and slot numbers of ``cache``. ``tokenizer``:
        anything that ``Vocabulary`` takes. ``row_scan``: makes sampling from large vocabularies quicker.
        ``draft_logits``: the drafts' own head, in place of the target's. ``store``: None turns the prefix cache off."""
        device = cache.attention[0].keys.device
        num_draft_tokens = settings.num_draft_tokens if draft is not None else 0
        self.vocabulary = Vocabulary(tokenizer)
        self.metrics = EngineMetrics()
        self._max_queued_requests = settings.max_queued_requests
        self._admission = Admission(
            self.vocabulary,
            vocab_size=config.text.vocab_size,
            eos_token_ids=config.eos_token_ids,
            placeholder_token_ids=frozenset(t for t in (config.image_token_id, config.video_token_id) if t is not None),
            max_context_tokens=settings.max_context_tokens or config.text.max_position_embeddings,
            block_tokens=settings.block_tokens,
            num_total_blocks=pool.num_total_blocks,
            num_draft_tokens=num_draft_tokens,
        )
        self._cache = cache
        costs = Costs()
        self._store = store
        self._swap = Swap(cache, settings.swap_bytes)
        self._target = TargetRunner(target, cache, device, costs, row_scan)
        memory = Memory(pool, block_tokens=settings.block_tokens, max_sequences=settings.num_slots)
        self._checkpoints = Checkpoints(
            memory, store, Landmarks.over(cache, self.vocabulary), self._target, cache, self.metrics
        )
        self._scheduler = Scheduler(memory, self._checkpoints, self._swap, max_batch_tokens=settings.max_batch_tokens)
        self._drafter: Drafter | None = None
        if draft is not None and num_draft_tokens:
            self._drafter = Drafter(
                draft,
                target,
                cache,
                device,
                lengths=AdaptiveLengths(costs) if settings.draft_length == "adaptive" else FixedLengths(),
                costs=costs,
                metrics=self.metrics,
                max_undrafted_tokens=settings.max_undrafted_tokens,
                row_scan=row_scan,
                logits=draft_logits or target.logits,
            )
        self._changed = threading.Condition()
        self._inbox: deque[Sequence] = deque()  # this and the next two are guarded by _changed
        self._aborts: dict[int, Qwen35Error] = {}
        self._refusal: Qwen35Error | None = None
        self._live: dict[int, list[Sequence]] = {}  # by uid, the samples that go on; written under _changed

    def query(self, request: Request) -> Query | None:
        """Any thread. What to look for in the store on behalf of a request, before it is submitted; None: nothing.
        Raises InvalidArgument."""
        return None if self._store is None else self._admission.query(request)

    def submit(self, request: Request, session: Session | None = None, hit: Hit | None = None) -> None:
        """Any thread. What the prompt begins with need not be computed: ``session`` brings it, or ``hit``, which was
        found in the store and is pinned for the request's lease. Raises InvalidArgument, Unavailable (queue full,
        engine shut down), StateError, and then emits nothing."""
        samples = [self._admission.sequence(replace(request, sample_index=i)) for i in range(request.sampling.n)]
        self._checkpoints.admit(samples, None if session is not None else hit)
        if session is not None:
            self._begin_with(session, samples)
        self._enqueue(request, samples)

    def resume(self, session: Session, request: Request) -> None:
        """Any thread. Goes on behind all that the session has decided; ``request``: from ``session.request_on``. Raises
        as ``submit``."""
        sequence = self._admission.sequence(request)
        self._checkpoints.admit([sequence], None)
        session.check_open(sequence)
        if session.snapshot is not None:
            session.snapshot.check(self._cache)
        sequence.replay(session.progress)
        sequence.brought = session.snapshot
        self._enqueue(request, [sequence])

    def save(self, uid: int) -> Session:
        """By the stepping thread, between two steps: a live request as it is; it goes on. Raises InvalidArgument when
        there is none, or one of several samples."""
        with self._changed:
            samples = list(self._live.get(uid, ()))
        if len(samples) != 1 or samples[0].request.sampling.n != 1:
            raise InvalidArgument.field("uid", "a live request of one sample", uid)
        return self._session(samples[0])

    def _session(self, sequence: Sequence) -> Session:
        return Session(sequence.request, sequence.progress, self._swap.snapshot(sequence))

    def _begin_with(self, session: Session, samples: list[Sequence]) -> None:
        sequence = samples[0]
        if len(samples) > 1 or sequence.request.sampling.prompt_logprobs is not None:
            raise InvalidArgument("restore_session: expected neither n above 1 nor prompt_logprobs with it")
        session.check_prefix_of(sequence)
        if session.snapshot is not None:
            session.snapshot.check(self._cache)
            sequence.brought = replace(session.snapshot, drafts=())
            sequence.num_cached_tokens = session.num_computed_tokens

    def _enqueue(self, request: Request, samples: list[Sequence]) -> None:
        num_samples = len(samples)
        with self._changed:
            if self._refusal is not None:
                raise self._refusal
            num_queued = len(self._inbox) + len(self._scheduler.waiting)
            if num_queued + num_samples > self._max_queued_requests:
                raise Unavailable(
                    f"queue: expected at most {self._max_queued_requests} waiting samples, got {num_queued} and "
                    f"{num_samples} of this request; try again later"
                )
            if request.uid in self._live:
                raise InvalidArgument.field("uid", "an id that no live request has", request.uid)
            self._live[request.uid] = list(samples)
            self._inbox.extend(samples)
            self._changed.notify_all()

    def is_live(self, uid: int) -> bool:
        """Any thread. Whether memory may still be read or written on behalf of a request."""
        with self._changed:
            return uid in self._live

    def abort(self, uid: int, error: Qwen35Error | None = None) -> None:
        """Any thread. The request ends with ``error`` (default: Cancelled) at the next step; without effect once it
        has ended."""
        with self._changed:
            if uid in self._live:
                self._aborts.setdefault(uid, error or Cancelled())
                self._changed.notify_all()

    @property
    def has_work(self) -> bool:
        """Whether any request has not had its final emission."""
        return bool(self._live)

    def wait(self, timeout_seconds: float) -> None:
        """Returns at once when a step has something to run, else on a submit or an abort, or after the timeout
        (requests that wait for memory are looked at again then)."""
        with self._changed:
            can_run = self._scheduler.running and not self._scheduler.is_stalled
            if not (self._inbox or self._aborts or can_run):
                self._changed.wait(timeout_seconds)

    def notify(self) -> None:
        """Any thread: ends a ``wait``, because there is memory again or the owner has something else to do."""
        with self._changed:
            self._changed.notify_all()

    @torch.inference_mode()
    def step(self) -> list[Emission]:
        """One round of the loop, by one thread. A round that throws ends the requests it ran with an error."""
        emissions = self._emit(self._take_in())
        pieces: list[Piece] = []
        try:
            self._checkpoints.settle()
            pieces = self._scheduler.next_batch()
            if pieces:
                hidden = self._target.run(pieces)
                self._commit(pieces, self._target.decide(pieces, hidden))
                if self._drafter is not None:
                    self._drafter.propose(pieces, hidden)
                self._checkpoints.take(pieces, hidden)
        except Exception as error:
            self._fail([piece.sequence for piece in pieces] or self._live_sequences(), error)
        return emissions + self._emit(list(self._scheduler.running + self._scheduler.waiting))

    def shutdown(self, error: Qwen35Error) -> list[Emission]:
        """By the stepping thread: refuses further requests and ends all others with ``error``."""
        with self._changed:
            self._refusal = error
        self._take_in()
        sequences = self._live_sequences()
        for sequence in sequences:
            sequence.error = sequence.error or error
        return self._emit(sequences)

    def _take_in(self) -> list[Sequence]:
        """Moves submitted requests to the scheduler; returns those that were aborted or are past their deadline."""
        with self._changed:
            while self._inbox:
                self._scheduler.add(self._inbox.popleft())
            aborts, self._aborts = self._aborts, {}
        now = time.monotonic()
        ended: list[Sequence] = []
        for sequence in self._live_sequences():
            if sequence.request.uid in aborts:
                sequence.error = aborts[sequence.request.uid]
            elif sequence.request.deadline < now:
                sequence.error = DeadlineExceeded(_deadline_message(sequence))
            if sequence.is_finished:
                ended.append(sequence)
        return ended

    def _live_sequences(self) -> list[Sequence]:
        with self._changed:  # submit() adds from other threads
            return [sequence for samples in self._live.values() for sequence in samples]

    def _commit(self, pieces: Iterable[Piece], decisions: Iterable[Decision]) -> None:
        """KV length, GDN state and conv window of each sequence: together."""
        metrics = self.metrics
        metrics.num_steps += 1
        for piece, decision in zip(pieces, decisions, strict=True):
            before = piece.sequence.usage
            metrics.num_target_tokens += piece.num_inputs
            piece.sequence.commit(
                decision,
                start=piece.start,
                num_inputs=piece.num_inputs,
                drafts=piece.drafts,
                is_deferred=piece.is_deferred,
            )
            after = piece.sequence.usage
            is_first = before.num_output_tokens == 0 < after.num_output_tokens
            metrics.num_prompt_tokens += after.num_input_tokens if is_first else 0
            metrics.num_output_tokens += after.num_output_tokens - before.num_output_tokens
            metrics.num_draft_tokens += after.num_draft_tokens - before.num_draft_tokens
            metrics.num_accepted_draft_tokens += after.num_accepted_draft_tokens - before.num_accepted_draft_tokens
        self._checkpoints.mark(pieces)

    def _fail(self, sequences: Iterable[Sequence], error: Exception) -> None:
        """Ends ``sequences`` with an error whose message names the fault; the traceback goes to the log alone."""
        _LOGGER.error("engine step failed", exc_info=error)
        is_shown = isinstance(error, Qwen35Error)
        shown = error if is_shown else InternalError(f"engine: a step failed with {type(error).__name__}")
        for sequence in sequences:
            if not sequence.is_finished:
                sequence.error = shown

    def _emit(self, sequences: Iterable[Sequence]) -> list[Emission]:
        """What is new of each sequence; finished ones give back their memory and are forgotten."""
        emissions: list[Emission] = []
        for sequence in sequences:
            emission = sequence.take_emission()
            if emission is not None:
                if sequence.request.wants_session and emission.finish_reason is not None:
                    emission = replace(emission, session=self._session(sequence))
                emissions.append(emission)
            if sequence.is_finished:
                self._forget(sequence)
        self.metrics.num_waiting_requests = len(self._scheduler.waiting)
        self.metrics.num_running_requests = len(self._scheduler.running)
        self.metrics.num_preemptions = self._scheduler.num_preemptions
        self.metrics.num_dropped_tokens = self._scheduler.num_dropped_tokens
        self.metrics.num_swapped_out_tokens = self._swap.num_saved_tokens
        self.metrics.num_swapped_in_tokens = self._swap.num_restored_tokens
        self.metrics.num_swapped_bytes = self._swap.num_bytes
        return emissions

    def _forget(self, sequence: Sequence) -> None:
        self._scheduler.remove(sequence)
        with self._changed:
            samples = self._live[sequence.request.uid]
            samples.remove(sequence)
            if not samples:
                del self._live[sequence.request.uid]
            elif sequence.error is not None and not all(other.is_finished for other in samples):
                self._aborts.setdefault(sequence.request.uid, sequence.error)  # the others end at the next step
        if sequence.error is None:
            self.metrics.num_finished_requests += 1
        else:
            self.metrics.num_failed_requests += 1


def _deadline_message(sequence: Sequence) -> str:
    allowed = sequence.request.deadline - sequence.request.arrival
    is_waiting = sequence.slot is None and sequence.num_generated_tokens == 0
    state = "waiting" if is_waiting else f"after {sequence.num_generated_tokens} tokens"
    return f"deadline: expected the request to finish within {allowed:.1f} s, it was still {state}"
