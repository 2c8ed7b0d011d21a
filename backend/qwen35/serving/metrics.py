"""What Triton's metrics endpoint shows of the llm. Triton's own request duration says nothing of a model whose execute
returns at once, so the times to the first token and between tokens are measured here, where the responses leave.

Each call of a Triton metric is an exchange with the server's process, which dies if this one is killed amid it. So the
sender only notes what happened, and once a second everything is told at once. ``pb_utils`` comes as an argument.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from qwen35.engine.metrics import EngineMetrics
from qwen35.engine.request import Emission
from qwen35.serving.process import ServerProcess
from qwen35.serving.ticket import Ticket

PERIOD_SECONDS = 1.0
_COUNTERS = {
    "input_tokens_total": "Prompt tokens of requests that got a response",
    "cached_tokens_total": "Of those, tokens whose computation an earlier request had left in the prefix cache",
    "output_tokens_total": "Tokens delivered",
    "draft_tokens_total": "Draft tokens that the target has verified",
    "accepted_draft_tokens_total": "Draft tokens accepted and delivered",
    "requests_total": "Requests that ended with a finish reason",
    "failed_requests_total": "Requests that ended with an error",
}
_ENGINE_TOTALS = {  # the engine's name, ours
    "num_preemptions": ("preemptions_total", "Running requests that gave up their memory for another"),
    "num_swapped_out_tokens": ("swapped_out_tokens_total", "Tokens whose state preemption copied to the host"),
    "num_swapped_in_tokens": ("swapped_in_tokens_total", "Tokens whose state came back from there"),
    "num_checkpoints": ("checkpoints_total", "States of sequences that the prefix cache has taken"),
    "num_skipped_checkpoints": ("skipped_checkpoints_total", "States that it was not offered for want of a free slot"),
    "num_lost_drafts": ("lost_drafts_total", "Requests whose drafting paused for too long to resume"),
}
_GAUGES = {
    "running_requests": "Requests that hold a slot",
    "waiting_requests": "Requests that wait for a slot",
    "swapped_bytes": "Host memory that holds the state of preempted requests",
}
_HISTOGRAMS = {
    "time_to_first_token_seconds": (
        "From the arrival of a request to its first response",
        (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
    ),
    "inter_token_latency_seconds": (
        "Time since the response before, divided by the tokens of this one; one sample a response",
        (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5),
    ),
}


class ServingMetrics:
    """Counters follow what was delivered, gauges show what the engine holds. ``sent`` and ``watched`` each belong to
    one thread."""

    def __init__(self, pb_utils: Any, labels: dict[str, str], server: ServerProcess) -> None:
        self._pb_utils, self._labels, self._server = pb_utils, labels, server
        self._families: list[Any] = []  # a metric dies with its family
        kinds = pb_utils.MetricFamily
        self._counters = {name: self._metric(name, text, kinds.COUNTER) for name, text in _COUNTERS.items()}
        self._totals = {name: self._metric(*metric, kinds.COUNTER) for name, metric in _ENGINE_TOTALS.items()}
        self._told = dict.fromkeys(self._totals, 0)
        self._gauges = {name: self._metric(name, text, kinds.GAUGE) for name, text in _GAUGES.items()}
        self._histograms = {
            name: self._metric(name, text, kinds.HISTOGRAM, buckets) for name, (text, buckets) in _HISTOGRAMS.items()
        }
        self._shown: dict[str, int] = {}  # gauge -> the value that the server has
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()  # this and the next: noted, not told yet
        self._samples: list[tuple[str, float]] = []
        self._next_time = 0.0

    def sent(self, ticket: Ticket, emission: Emission) -> None:
        """A response left that ends with this emission; ``ticket`` still tells of the one before it."""
        usage, before = emission.usage, ticket.usage
        num_new_tokens = usage.num_output_tokens - before.num_output_tokens
        counts = {
            "output_tokens_total": num_new_tokens,
            "draft_tokens_total": usage.num_draft_tokens - before.num_draft_tokens,
            "accepted_draft_tokens_total": usage.num_accepted_draft_tokens - before.num_accepted_draft_tokens,
        }
        if emission.is_final:
            counts["requests_total" if emission.error is None else "failed_requests_total"] = 1
        samples = []
        if ticket.last_sent is None and num_new_tokens > 0:
            counts["input_tokens_total"] = usage.num_input_tokens
            counts["cached_tokens_total"] = usage.num_cached_tokens
            seconds = (time.time_ns() - ticket.resolved.arrival_unix_ns) / 1e9
            samples.append(("time_to_first_token_seconds", seconds))
        elif ticket.last_sent is not None and num_new_tokens > 0:
            seconds = (time.monotonic() - ticket.last_sent) / num_new_tokens
            samples.append(("inter_token_latency_seconds", seconds))
        with self._lock:
            self._counts.update(counts)
            self._samples += samples

    def watched(self, metrics: EngineMetrics) -> None:
        """To be called often; tells the server once a second."""
        now = time.monotonic()
        if now < self._next_time or not self._server.is_alive:
            return
        self._next_time = now + PERIOD_SECONDS
        with self._lock:
            counts, self._counts = self._counts, Counter()
            samples, self._samples = self._samples, []
        for name, count in counts.items():
            if count:
                self._counters[name].increment(count)
        for name, counter in self._totals.items():
            total = getattr(metrics, name)  # the engine's thread may go on counting
            if total != self._told[name]:
                counter.increment(total - self._told[name])
                self._told[name] = total
        for name, seconds in samples:
            self._histograms[name].observe(seconds)
        self._show("running_requests", metrics.num_running_requests)
        self._show("waiting_requests", metrics.num_waiting_requests)
        self._show("swapped_bytes", metrics.num_swapped_bytes)

    def _show(self, name: str, value: int) -> None:
        if self._shown.get(name) != value:
            self._gauges[name].set(value)
            self._shown[name] = value

    def _metric(self, name: str, description: str, kind: Any, buckets: Sequence[float] | None = None) -> Any:
        family = self._pb_utils.MetricFamily(name=f"qwen35_{name}", description=description, kind=kind)
        self._families.append(family)
        options = {} if buckets is None else {"buckets": list(buckets)}
        return family.Metric(labels=self._labels, **options)
