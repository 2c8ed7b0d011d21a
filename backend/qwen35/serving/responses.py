"""Emissions of the engine to the outputs of both doors. Pure: named numpy arrays, no Triton objects.

An emission without text (an unfinished character, a token that is not shown) waits for the next one that has some, and
in a request that does not stream every emission waits for the last.
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
class _Pending:
    text: str = ""
    num_tokens: int = 0
    logprobs: list[tuple[TokenLogprob, ...]] = field(default_factory=list)


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
        self._pending = _Pending(text=request.echo)
        self._has_sent = False

    def push(self, emission: Emission) -> Response | None:
        """The response that this emission completes, if it does."""
        pending = self._pending
        pending.text += emission.text
        pending.num_tokens += len(emission.token_ids)
        pending.logprobs += emission.logprobs
        if emission.error is not None and not self._has_sent:
            return Response(error=emission.error, is_final=True)
        if not emission.is_final and not (self._request.stream and pending.text):
            return None
        values = self._values(emission, pending)
        outputs = {name: np.array(v, _TYPES[name]) for name, v in values.items() if name in self._requested}
        self._pending, self._has_sent = _Pending(), True
        return Response(outputs=outputs, is_final=emission.is_final)

    def _values(self, emission: Emission, pending: _Pending) -> dict[str, Any]:
        returns, usage = self._request.returns, emission.usage
        values: dict[str, Any] = {"text_output": [pending.text], "sequence_index": [[0]], "batch_index": [[0]]}
        if returns.finish_reason:
            values["finish_reason"] = [emission.finish_reason or "None"]
        if returns.cumulative_logprob:
            values["cumulative_logprob"] = [emission.cumulative_logprob]
        if returns.logprobs:
            values["logprobs"] = [self._logprobs_json(pending) if self._request.wants_logprobs else "null"]
        if returns.num_input_tokens:
            values["num_input_tokens"] = [usage.num_input_tokens]
        if returns.num_output_tokens:
            values["num_output_tokens"] = [pending.num_tokens]
        if returns.log_probs:
            values["cum_log_probs"] = [emission.cumulative_logprob]
            values["output_log_probs"] = [[candidates[0].logprob for candidates in pending.logprobs]]
        if returns.perf_metrics and emission.is_final:
            values.update(speculation(usage), **kv_blocks(usage, self._block_tokens))
            values.update({f"{name}_time_ns": [emission.times[name]] for name in _TIMES if name in emission.times})
        if emission.error is not None:
            values["error"] = [str(emission.error)]
        return values

    def _logprobs_json(self, pending: _Pending) -> str:
        return json.dumps([self._position(candidates) for candidates in pending.logprobs], ensure_ascii=False)

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


def kv_blocks(usage: Usage, block_tokens: int) -> dict[str, list[int]]:
    """Blocks that the tokens of the request fill, and how many of them came whole from the prefix cache."""
    total = -(-(usage.num_input_tokens + usage.num_output_tokens) // block_tokens)
    reused = usage.num_cached_tokens // block_tokens
    return {
        "kv_cache_alloc_total_blocks": [total],
        "kv_cache_reused_blocks": [reused],
        "kv_cache_alloc_new_blocks": [total - reused],
    }
