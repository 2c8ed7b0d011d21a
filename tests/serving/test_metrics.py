from types import SimpleNamespace

from qwen35.engine.metrics import EngineMetrics
from qwen35.engine.request import Emission, Usage
from qwen35.errors import InternalError
from qwen35.serving.metrics import ServingMetrics
from qwen35.serving.process import ServerProcess
from tests.serving.fakes import make_ticket


class FakeMetric:
    def __init__(self):
        self.value, self.observed = 0, []

    def increment(self, value):
        assert value >= 0
        self.value += value

    def set(self, value):
        self.value = value

    def observe(self, value):
        self.observed.append(value)


class FakeFamily:
    COUNTER, GAUGE, HISTOGRAM = "counter", "gauge", "histogram"
    metrics = {}

    def __init__(self, name, description, kind):
        self.name, self.kind = name, kind

    def Metric(self, labels, buckets=None):
        assert (buckets is not None) == (self.kind == self.HISTOGRAM)
        assert labels == {"model": "llm"}
        return self.metrics.setdefault(self.name.removeprefix("qwen35_"), FakeMetric())


def test_counters_follow_what_was_delivered():
    FakeFamily.metrics, server = {}, ServerProcess()
    observer = ServingMetrics(SimpleNamespace(MetricFamily=FakeFamily), {"model": "llm"}, server)
    ticket = make_ticket(1)
    for usage, finish in ((Usage(9, 1, 0, 0, 6), None), (Usage(9, 4, 3, 2, 6), None), (Usage(9, 5, 6, 2), "stop")):
        observer.sent(ticket, Emission(1, usage, finish_reason=finish))
        ticket.usage, ticket.last_sent = usage, 0.0
    observer.sent(make_ticket(2), Emission(2, Usage(9, 0, 0, 0), error=InternalError("x")))
    assert all(metric.value == 0 for metric in FakeFamily.metrics.values()), "nothing is told at once"
    observer.watched(EngineMetrics())
    values = {name: metric.value for name, metric in FakeFamily.metrics.items()}
    assert values["input_tokens_total"] == 9
    assert values["cached_tokens_total"] == 6
    assert values["output_tokens_total"] == 5
    assert (values["draft_tokens_total"], values["accepted_draft_tokens_total"]) == (6, 2)
    assert (values["requests_total"], values["failed_requests_total"]) == (1, 1)
    assert len(FakeFamily.metrics["time_to_first_token_seconds"].observed) == 1
    assert len(FakeFamily.metrics["inter_token_latency_seconds"].observed) == 2
    observer.watched(EngineMetrics())
    assert FakeFamily.metrics["output_tokens_total"].value == 5


def test_nothing_is_sent_to_a_dead_server(monkeypatch):
    FakeFamily.metrics, server = {}, ServerProcess()
    monkeypatch.setattr(server, "_pid", -1)
    observer = ServingMetrics(SimpleNamespace(MetricFamily=FakeFamily), {"model": "llm"}, server)
    observer.watched(EngineMetrics(num_running_requests=3))
    observer.sent(make_ticket(1), Emission(1, Usage(9, 1, 0, 0)))
    assert FakeFamily.metrics["running_requests"].value == FakeFamily.metrics["output_tokens_total"].value == 0


def test_gauges_show_what_the_engine_holds():
    FakeFamily.metrics, server = {}, ServerProcess()
    observer = ServingMetrics(SimpleNamespace(MetricFamily=FakeFamily), {"model": "llm"}, server)
    observer.watched(EngineMetrics(num_running_requests=3, num_waiting_requests=7, num_swapped_bytes=9))
    names = ("running_requests", "waiting_requests", "swapped_bytes")
    assert [FakeFamily.metrics[name].value for name in names] == [3, 7, 9]


def test_totals_of_the_engine_are_counted_once():
    FakeFamily.metrics = {}
    observer = ServingMetrics(SimpleNamespace(MetricFamily=FakeFamily), {"model": "llm"}, ServerProcess())
    for num_preemptions in (0, 2, 2, 5):
        observer._next_time = 0.0
        observer.watched(EngineMetrics(num_preemptions=num_preemptions, num_lost_drafts=1))
    assert FakeFamily.metrics["lost_drafts_total"].value == 1
    assert FakeFamily.metrics["preemptions_total"].value == 5
