"""What Triton's metrics endpoint shows of the llm. Triton's own request duration says nothing of a model whose execute
returns at once, so the times to the first token and between tokens are measured here, where the responses leave.

Pure: ``pb_utils`` comes as an argument."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from qwen35.engine.metrics import EngineMetrics
from qwen35.engine.request import Emission
from qwen35.serving.process import ServerProcess
from qwen35.serving.ticket import Ticket

_FIRST_TOKEN_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_GAUGE_SECONDS = 1.0
_INTER_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)


class ServingMetrics:
    """Counters follow what was delivered; gauges what the engine holds now."""

    def __init__(self, pb_utils: Any, labels: dict[str, str], server: ServerProcess) -> None:
        self._pb_utils, self._labels, self._server = pb_utils, labels, server
        self._next_gauges = 0.0
        self._families: list[Any] = []  # a metric dies with its family
        self._first_token = self._histogram(
            "time_to_first_token_seconds", "From the arrival of a request to its first response", _FIRST_TOKEN_SECONDS
        )
        self._inter_token = self._histogram(
            "inter_token_latency_seconds", "Time between responses for each token in them", _INTER_TOKEN_SECONDS
        )
        self._input_tokens = self._counter("input_tokens_total", "Prompt tokens of requests that got a response")
        self._output_tokens = self._counter("output_tokens_total", "Tokens delivered")
        self._drafted = self._counter("draft_tokens_total", "Draft tokens that the target has verified")
        self._accepted = self._counter("accepted_draft_tokens_total", "Draft tokens accepted and delivered")
        self._requests = self._counter("requests_total", "Requests that ended with a finish reason")
        self._failures = self._counter("failed_requests_total", "Requests that ended with an error")
        self._watched = {
            "num_preemptions": self._counter("preemptions_total", "Running requests that gave up their memory"),
            "num_lost_drafts": self._counter("lost_drafts_total", "Requests whose drafting paused for too long to resume"),
        }
        self._seen = dict.fromkeys(self._watched, 0)
        self._running = self._gauge("running_requests", "Requests that hold a slot")
        self._waiting = self._gauge("waiting_requests", "Requests that wait for a slot")

    def sent(self, ticket: Ticket, emission: Emission) -> None:
        """A response left that ends with this emission; ``ticket`` still tells of the one before it."""
        if not self._server.is_alive:
            return
        usage, before = emission.usage, ticket.usage
        num_new_tokens = usage.num_output_tokens - before.num_output_tokens
        if ticket.last_sent is None and num_new_tokens > 0:
            self._first_token.observe((time.time_ns() - ticket.resolved.arrival_unix_ns) / 1e9)
            self._input_tokens.increment(usage.num_input_tokens)
        elif ticket.last_sent is not None and num_new_tokens > 0:
            seconds = (time.monotonic() - ticket.last_sent) / num_new_tokens
            for _ in range(num_new_tokens):
                self._inter_token.observe(seconds)
        self._output_tokens.increment(num_new_tokens)
        self._drafted.increment(usage.num_draft_tokens - before.num_draft_tokens)
        self._accepted.increment(usage.num_accepted_draft_tokens - before.num_accepted_draft_tokens)
        if emission.is_final:
            (self._requests if emission.error is None else self._failures).increment(1)

    def watched(self, metrics: EngineMetrics) -> None:
        if time.monotonic() < self._next_gauges or not self._server.is_alive:
            return
        self._next_gauges = time.monotonic() + _GAUGE_SECONDS
        self._running.set(metrics.num_running_requests)
        self._waiting.set(metrics.num_waiting_requests)
        for name, counter in self._watched.items():
            total = getattr(metrics, name)  # written by the engine's thread meanwhile
            counter.increment(total - self._seen[name])
            self._seen[name] = total

    def _counter(self, name: str, description: str) -> Any:
        return self._metric(name, description, self._pb_utils.MetricFamily.COUNTER)

    def _gauge(self, name: str, description: str) -> Any:
        return self._metric(name, description, self._pb_utils.MetricFamily.GAUGE)

    def _histogram(self, name: str, description: str, buckets: Sequence[float]) -> Any:
        return self._metric(name, description, self._pb_utils.MetricFamily.HISTOGRAM, buckets=list(buckets))

    def _metric(self, name: str, description: str, kind: Any, **options: Any) -> Any:
        family = self._pb_utils.MetricFamily(name=f"qwen35_{name}", description=description, kind=kind)
        self._families.append(family)
        return family.Metric(labels=self._labels, **options)
