"""Emissions of the engine to the outputs of both doors. Pure: named numpy arrays, no Triton objects.

An emission without text (an unfinished character, a token that is not shown) waits for the next one that has some, and
in a request that does not stream every emission waits for the last. Of several samples (n > 1) vLLM's door gives one
element each in every response; TensorRT-LLM's door, which is told by its output `sequence_index`, gives each sample
responses of its own.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from qwen35.engine.request import Emission, TokenLogprob, Usage
from qwen35.errors import Qwen35Error
from qwen35.serving.resolved import ResolvedRequest

_TYPES = {
    "text_output": np.object_,
    "finish_reason": np.object_,
    "cumulative_logprob": np.float32,
    "logprobs": np.object_,
    "prompt_logprobs": np.object_,
    "num_input_tokens": np.uint32,
    "num_output_tokens": np.uint32,
    "error": np.object_,
    "cum_log_probs": np.float32,
    "output_log_probs": np.float32,
    "sequence_index": np.int32,
    "batch_index": np.int32,
    "acceptance_rate": np.float32,
    "total_accepted_draft_tokens": np.int32,
    "total_draft_tokens": np.int32,
    "kv_cache_alloc_new_blocks": np.int32,
    "kv_cache_reused_blocks": np.int32,
    "kv_cache_alloc_total_blocks": np.int32,
    "arrival_time_ns": np.int64,
    "first_scheduled_time_ns": np.int64,
    "first_token_time_ns": np.int64,
    "last_token_time_ns": np.int64,
}
_TIMES = ("arrival", "first_scheduled", "first_token", "last_token")


@dataclass(frozen=True)
class Response:
    """Either ``error`` (a Triton error, nothing was sent before it) or ``outputs``; exactly one response is final."""

    outputs: dict[str, np.ndarray] = field(default_factory=dict)
    error: Qwen35Error | None = None
    is_final: bool = False


@dataclass
class _Sample:
    """What has come of one sample and was not sent yet, and its latest emission."""

    index: int
    text: str = ""
    num_tokens: int = 0
    logprobs: list[tuple[TokenLogprob, ...]] = field(default_factory=list)
    prompt_logprobs: list[tuple[TokenLogprob, ...]] = field(default_factory=list)
    usage: Usage = Usage(0, 0, 0, 0)
    finish_reason: str | None = None
    cumulative_logprob: float = 0.0
    times: dict[str, int] = field(default_factory=dict)

    def add(self, emission: Emission) -> None:
        self.text += emission.text
        self.num_tokens += len(emission.token_ids)
        self.logprobs += emission.logprobs
        self.prompt_logprobs += emission.prompt_logprobs
        self.usage, self.finish_reason = emission.usage, emission.finish_reason
        self.cumulative_logprob, self.times = emission.cumulative_logprob, emission.times

    def clear(self) -> None:
        self.text, self.num_tokens, self.logprobs, self.prompt_logprobs = "", 0, [], []


class ResponseBuilder:
    """The responses of one request, in order.

    ``requested``: names of the outputs that somebody reads (an ensemble's map, or a client's choice); others are left
    out. ``decode_token``: token id -> its text.
    """

    def __init__(
        self,
        request: ResolvedRequest,
        requested: Collection[str],
        decode_token: Callable[[int], str],
        block_tokens: int,
    ) -> None:
        self._request = request
        self._requested = frozenset(requested)
        self._decode_token = decode_token
        self._block_tokens = block_tokens
        self._samples = [_Sample(i, text=request.echo) for i in range(request.sampling.n)]
        self._is_split = "sequence_index" in self._requested
        self._has_sent = False
        self._delivered = [sample.usage for sample in self._samples]

    @property
    def delivered(self) -> Usage:
        """Of all samples, as far as responses have told of them."""
        return _total(self._delivered)

    def push(self, emission: Emission) -> Response | None:
        """The response that this emission completes, if it does."""
        sample = self._samples[emission.sample_index]
        sample.add(emission)
        if emission.error is not None and len(self._samples) > 1:  # it may speak for all of them
            sample.usage = self._delivered[sample.index]
        is_end = emission.error is not None or all(one.finish_reason for one in self._samples)
        if emission.error is not None and not self._has_sent:
            return Response(error=emission.error, is_final=True)
        shown = [sample] if self._is_split else self._samples
        is_due = emission.is_final if self._is_split else is_end
        if not is_due and not (self._request.stream and sample.text):
            return None
        values = self._values(shown, is_last=is_due)
        if emission.error is not None:
            values["error"] = [str(emission.error)]
        outputs = {name: np.array(v, _TYPES[name]) for name, v in values.items() if name in self._requested}
        self._has_sent = True
        for one in shown:
            one.clear()
            self._delivered[one.index] = one.usage
        return Response(outputs=outputs, is_final=is_end)

    def _values(self, shown: list[_Sample], *, is_last: bool) -> dict[str, Any]:
        """``is_last``: no further response tells of these samples."""
        returns, usage = self._request.returns, _total([sample.usage for sample in shown])
        values: dict[str, Any] = {
            "text_output": [sample.text for sample in shown],
            "sequence_index": [[shown[0].index]],
            "batch_index": [[0]],
        }
        if returns.finish_reason:
            values["finish_reason"] = [sample.finish_reason or "None" for sample in shown]
        if returns.cumulative_logprob:
            values["cumulative_logprob"] = [sample.cumulative_logprob for sample in shown]
        if returns.logprobs:
            values["logprobs"] = [self._logprobs_json(sample) for sample in shown]
        if returns.num_input_tokens:
            values["num_input_tokens"] = [usage.num_input_tokens]
        if returns.num_output_tokens:
            values["num_output_tokens"] = [sample.num_tokens for sample in shown]
        if self._request.sampling.prompt_logprobs is not None and not self._has_sent:
            of_prompt = [self._position(candidates) for candidates in shown[0].prompt_logprobs]
            values["prompt_logprobs"] = [json.dumps([None, *of_prompt], ensure_ascii=False)]
        if returns.log_probs:
            values["cum_log_probs"] = [shown[0].cumulative_logprob]
            values["output_log_probs"] = [[candidates[0].logprob for candidates in shown[0].logprobs]]
        if returns.perf_metrics and is_last:
            values.update(speculation(usage), **kv_blocks([one.usage for one in shown], self._block_tokens))
            values.update(_times(shown))
        return values

    def _logprobs_json(self, sample: _Sample) -> str:
        if not self._request.wants_logprobs:
            return "null"
        return json.dumps([self._position(candidates) for candidates in sample.logprobs], ensure_ascii=False)

    def _position(self, candidates: tuple[TokenLogprob, ...]) -> dict[str, dict[str, Any]]:
        return {
            str(entry.token_id): {
                "logprob": entry.logprob,
                "rank": entry.rank,
                "decoded_token": self._decode_token(entry.token_id),
            }
            for entry in candidates
        }


def speculation(usage: Usage) -> dict[str, list[float] | list[int]]:
    """acceptance_rate = accepted / drafted; 0 when nothing was drafted."""
    drafted, accepted = usage.num_draft_tokens, usage.num_accepted_draft_tokens
    return {
        "acceptance_rate": [accepted / drafted if drafted else 0.0],
        "total_accepted_draft_tokens": [accepted],
        "total_draft_tokens": [drafted],
    }


def kv_blocks(usages: list[Usage], block_tokens: int) -> dict[str, list[int]]:
    """Blocks that the tokens of the samples fill, and how many of them came whole from the prefix cache."""
    total = sum(-(-(usage.num_input_tokens + usage.num_output_tokens) // block_tokens) for usage in usages)
    reused = sum(usage.num_cached_tokens // block_tokens for usage in usages)
    return {
        "kv_cache_alloc_total_blocks": [total],
        "kv_cache_reused_blocks": [reused],
        "kv_cache_alloc_new_blocks": [total - reused],
    }


def _total(usages: list[Usage]) -> Usage:
    """Of all samples of a request; the prompt is theirs together."""
    return Usage(
        num_input_tokens=max(usage.num_input_tokens for usage in usages),
        num_output_tokens=sum(usage.num_output_tokens for usage in usages),
        num_draft_tokens=sum(usage.num_draft_tokens for usage in usages),
        num_accepted_draft_tokens=sum(usage.num_accepted_draft_tokens for usage in usages),
        num_cached_tokens=max(usage.num_cached_tokens for usage in usages),
    )


def _times(shown: list[_Sample]) -> dict[str, list[int]]:
    """The first of each kind among the samples, but the last of the ends."""
    found: dict[str, list[int]] = {}
    for name in _TIMES:
        times = [sample.times[name] for sample in shown if name in sample.times]
        if times:
            found[f"{name}_time_ns"] = [max(times) if name == "last_token" else min(times)]
    return found
