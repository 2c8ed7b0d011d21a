"""A model in this process, without a server: for tests, benchmarks and people who debug.

llm = LLM("build/demo/checkpoint", num_draft_tokens=3)
[answer] = llm.generate([[{"role": "user", "content": "What is a list?"}]], SamplingParams(temperature=0.0))
print(answer.text, answer.num_accepted_draft_tokens)
"""

from __future__ import annotations

import math
import secrets
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

import torch

from qwen35.config import ModelConfig
from qwen35.devices import select_device, select_dtype
from qwen35.engine.engine import Engine
from qwen35.engine.loading import load_engine
from qwen35.engine.local_store import LocalStore
from qwen35.engine.request import Emission, ImageSpan, Request, SamplingParams, TokenLogprob
from qwen35.engine.session import Session
from qwen35.engine.session_file import load_session, save_session
from qwen35.errors import InvalidArgument
from qwen35.kernels.identity import arithmetic_of
from qwen35.kernels.select import select_ops
from qwen35.nn.vision import VisionTower
from qwen35.prompt.encoder import ImageEncoder
from qwen35.prompt.processor import PromptProcessor, resolve_local
from qwen35.prompt.types import Prompt, PromptLimits
from qwen35.settings import Settings
from qwen35.state.fingerprint import fingerprint
from qwen35.state.geometry import Geometry
from qwen35.state.leases import Lease
from qwen35.state.local import LocalState
from qwen35.weights.loader import load_vision

# Text (special tokens are parsed), token ids, or chat messages. Images in messages: PIL image, bytes, path, data URI.
PromptInput: TypeAlias = str | Sequence[int] | Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Completion:
    """What one sample of a prompt gave."""

    text: str
    token_ids: tuple[int, ...]  # an EOS or stop token that ended the text is the last one
    finish_reason: str  # "stop" or "length"
    num_input_tokens: int
    num_draft_tokens: int  # verified by the target
    num_accepted_draft_tokens: int
    num_cached_tokens: int = 0  # of the input: an earlier request had computed them
    logprobs: tuple[tuple[TokenLogprob, ...], ...] = ()  # one entry a token when sampling.logprobs is set
    cumulative_logprob: float = 0.0  # 0 unless sampling.logprobs is set
    # Of the prompt's second token on when sampling.prompt_logprobs is set; with the first of n samples.
    prompt_logprobs: tuple[tuple[TokenLogprob, ...], ...] = ()


class LLM:
    """Calls may come from several threads; they run one after the other."""

    def __init__(self, checkpoint: str | Path, num_draft_tokens: int = 3, **settings: Any) -> None:
        """``checkpoint``: a directory, any layout that the server takes. ``settings``: fields of ``Settings``.

        Raises CheckpointError and ConfigError.
        """
        self.settings = Settings(checkpoint=str(checkpoint), num_draft_tokens=num_draft_tokens, **settings)
        self.config = ModelConfig.from_directory(checkpoint)
        self._device = select_device(self.settings.device)
        self._state = LocalState(
            Geometry.derive(self.config, self.settings),
            self._device,
            prefix_cache_bytes=self.settings.prefix_cache_bytes,
        )
        self._store = LocalStore(self._state.manager, self._state.reader, self._state.holder)
        self.engine: Engine = load_engine(self.settings, self.config, self._state.pool, self._state.cache, self._store)
        limits = PromptLimits(
            max_context_tokens=self.settings.max_context_tokens or self.config.text.max_position_embeddings,
            max_image_bytes=self.settings.max_image_bytes,
            max_image_pixels=self.settings.max_image_pixels,
        )
        self._processor = PromptProcessor(checkpoint, self.config, limits)
        self._lock = threading.Lock()
        self._num_requests = 0
        self._leases: dict[int, Lease] = {}  # by uid, of requests that the engine may have

    def generate(
        self,
        prompts: Sequence[PromptInput],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[Completion]:
        """One completion a prompt (``sampling.n`` of them), in order; the prompts run side by side. ``sampling``: for
        all prompts, or one for each. ``tools`` and ``template_kwargs`` go to the chat template.

        Raises the first request's error; nothing of the others goes on running.
        """
        if isinstance(prompts, (str, Mapping)):
            raise InvalidArgument.field("prompts", "a list of prompts", prompts)
        shared = SamplingParams() if sampling is None else sampling
        options = [shared] * len(prompts) if isinstance(shared, SamplingParams) else list(shared)
        if len(options) != len(prompts):
            raise InvalidArgument.field("sampling", f"one for each of {len(prompts)} prompts", len(options))
        with self._lock:
            first_uid, self._num_requests = self._num_requests, self._num_requests + len(prompts)
            waiting = deque(enumerate(zip(prompts, options, strict=True), start=first_uid))
            emissions = {(first_uid + i, k): [] for i, one in enumerate(options) for k in range(one.n)}
            try:
                self._run(waiting, emissions, tools, template_kwargs)
            except BaseException:
                self._stop({uid for uid, _ in emissions})
                raise
        return [_completion(news) for news in emissions.values()]

    def pause(self, prompt: PromptInput, sampling: SamplingParams, num_tokens: int) -> Session:
        """Generates ``num_tokens`` tokens, or a few more (accepted drafts), and stops there: what is left to do, as a
        record. Fewer when the text ends before."""
        with self._lock:
            uid, self._num_requests = self._num_requests, self._num_requests + 1
            request = self._request(uid, self._prompt(prompt, None, None), sampling)
            self._submit(replace(request, wants_session=True))
            try:
                return self._session_after(uid, num_tokens)
            finally:
                self._stop([uid])

    def _session_after(self, uid: int, num_tokens: int) -> Session:
        while True:
            for emission in self.engine.step():
                if emission.error is not None:
                    raise emission.error
                if emission.session is not None:
                    return emission.session
                num_tokens -= len(emission.token_ids)
            if num_tokens <= 0:
                return self.engine.save(uid)

    def resume(self, session: Session, max_new_tokens: int | None = None) -> Completion:
        """Goes on behind a session, to the bits that would have followed. ``max_new_tokens``: None: as many in all as
        the session's request asked for. The completion tells of the new tokens; counts are those of the whole text.

        Raises InvalidArgument for a text that has ended, StateError for a session that does not fit this model."""
        with self._lock:
            uid, self._num_requests = self._num_requests, self._num_requests + 1
            request = session.request_on(
                uid=uid, deadline=math.inf, arrival=time.monotonic(), max_new_tokens=max_new_tokens
            )
            self._leases[uid], _ = self._store.open(None)
            self.engine.resume(session, replace(request, lease=self._leases[uid]))
            emissions: dict[tuple[int, int], list[Emission]] = {(uid, request.sample_index): []}
            try:
                self._run(deque(), emissions, None, None, num_live=1)
            except BaseException:
                self._stop([uid])
                raise
        return _completion(emissions[uid, request.sample_index])

    def save(self, session: Session, path: str | Path) -> None:
        """Writes a session to a file, whole or not at all."""
        save_session(session, Path(path), self._fingerprint)

    def load(self, path: str | Path) -> Session:
        """Raises StateError for a file that is damaged, or comes from another checkpoint or program."""
        return load_session(Path(path), self._fingerprint)

    @cached_property
    def _fingerprint(self) -> str:
        return fingerprint(Path(self.settings.checkpoint), arithmetic_of(self.settings, self._device))

    def close(self) -> None:
        """Gives the cache back; StateError when a block is still in use."""
        self._state.close()

    def _run(
        self,
        waiting: deque[tuple[int, tuple[PromptInput, SamplingParams]]],
        emissions: dict[tuple[int, int], list[Emission]],
        tools: Sequence[Mapping[str, Any]] | None,
        template_kwargs: Mapping[str, Any] | None,
        num_live: int = 0,
    ) -> None:
        """Prompts are prepared shortly before their turn: images of thousands of them need not be in memory at once."""
        max_live = min(2 * self.settings.num_slots, self.settings.max_queued_requests)
        while waiting or num_live:
            while waiting and num_live < max_live:
                uid, (prompt, sampling) = waiting.popleft()
                self._submit(self._request(uid, self._prompt(prompt, tools, template_kwargs), sampling))
                num_live += sampling.n
            for emission in self.engine.step():
                if emission.error is not None:
                    raise emission.error
                emissions[emission.uid, emission.sample_index].append(emission)
                num_live -= emission.is_final
            self._close_leases()

    def _submit(self, request: Request) -> None:
        lease, hit = self._store.open(self.engine.query(request))
        self._leases[request.uid] = lease
        self.engine.submit(replace(request, lease=lease), hit=hit)

    def _close_leases(self) -> None:
        """Of requests that have ended."""
        for uid in [uid for uid in self._leases if not self.engine.is_live(uid)]:
            self._store.close(self._leases.pop(uid))

    def _stop(self, uids: Iterable[int]) -> None:
        for uid in uids:
            self.engine.abort(uid)
        while self.engine.has_work:
            self.engine.step()
        self._close_leases()

    def _prompt(
        self,
        prompt: PromptInput,
        tools: Sequence[Mapping[str, Any]] | None,
        template_kwargs: Mapping[str, Any] | None,
    ) -> Prompt:
        if isinstance(prompt, str):
            return self._processor.from_text(prompt)
        if len(prompt) > 0 and isinstance(prompt[0], Mapping):
            return self._processor.from_messages(prompt, tools, template_kwargs, resolve=resolve_local)
        return self._processor.from_token_ids(prompt)

    def _request(self, uid: int, prompt: Prompt, sampling: SamplingParams) -> Request:
        no_rows = torch.empty(0, self.config.text.hidden_size)
        return Request(
            uid=uid,
            request_id=str(uid),
            token_ids=prompt.token_ids,
            positions=prompt.positions,
            image_embeds=self._images.embed(prompt) if prompt.images else no_rows,
            sampling=sampling,
            seed=secrets.randbits(64) if sampling.seed is None else sampling.seed,
            deadline=math.inf,
            arrival=time.monotonic(),
            images=tuple(ImageSpan(image.digest, image.offset, image.num_tokens) for image in prompt.images),
        )

    @cached_property
    def _images(self) -> ImageEncoder:
        """Loaded at the first image."""
        dtype = select_dtype(self.settings.dtype)
        weights, _ = load_vision(self.settings.checkpoint, self.config, device=self._device, dtype=dtype)
        tower = VisionTower(self.config.vision, weights, select_ops(self.settings, self._device))
        return ImageEncoder(tower, self.settings.image_cache_bytes)


def _completion(news: Sequence[Emission]) -> Completion:
    last = news[-1]
    return Completion(
        text="".join(emission.text for emission in news),
        token_ids=tuple(token_id for emission in news for token_id in emission.token_ids),
        finish_reason=last.finish_reason,
        num_input_tokens=last.usage.num_input_tokens,
        num_draft_tokens=last.usage.num_draft_tokens,
        num_accepted_draft_tokens=last.usage.num_accepted_draft_tokens,
        num_cached_tokens=last.usage.num_cached_tokens,
        logprobs=tuple(entry for emission in news for entry in emission.logprobs),
        cumulative_logprob=last.cumulative_logprob,
        prompt_logprobs=tuple(entry for emission in news for entry in emission.prompt_logprobs),
    )
