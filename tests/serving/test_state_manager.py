"""The adapter over a fake of Triton's module and a real arena."""

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from qwen35.serving.process import settings_of
from qwen35.state.arena import Arena
from qwen35.state.extents import ExtentRef, ExtentTable
from qwen35.state.holder import Holder
from qwen35.state.leases import Lease
from qwen35.state.operations import publication_to_json
from qwen35.state.prefix import PrefixHasher, PrefixReader, Publication
from qwen35.state.segments import SHARED_MEMORY
from tests.serving.fake_triton import Request, load_model, model_args, text

CHECKPOINT = Path(__file__).parents[2] / "build" / "demo" / "checkpoint"


class Gauge:
    value, num_calls = None, 0

    def set(self, value):
        self.value = value
        self.num_calls += 1

    def increment(self, value):
        assert value > 0
        self.set((self.value or 0) + value)


class Family:
    GAUGE, COUNTER = "gauge", "counter"
    gauges: dict[str, Gauge] = {}

    def __init__(self, name, description, kind):
        assert (kind == self.COUNTER) == name.endswith("_total") and description
        self.name = name

    def Metric(self, labels):
        return self.gauges.setdefault(".".join([self.name, *labels.values()]), Gauge())


class Served:
    """One state_manager of one server."""

    def __init__(self, module: ModuleType, name: str) -> None:
        self.module, self.name, self.control = module, name, []
        module.pb_utils.MetricFamily = Family
        module.pb_utils.unload_model = lambda model: self.control.append(("unload", model))
        module.pb_utils.load_model = lambda model: self.control.append(("load", model))
        self.model = self.start()

    def start(self, unclaimed_lease_seconds: float = 60.0):
        Family.gauges = {}
        options = {"arena_name": self.name, "checkpoint": CHECKPOINT, "kv_cache_bytes": 1 << 20}
        args = model_args(
            "state_manager", heartbeat_seconds=0.02, unclaimed_lease_seconds=unclaimed_lease_seconds, **options
        )
        self.settings = settings_of(args)
        model = self.module.TritonPythonModel()
        model.initialize(args)
        return model

    def infer(self, **inputs):
        """Outputs as JSON by name, or the error."""
        tensors = {name: value if isinstance(value, np.ndarray) else text(value) for name, value in inputs.items()}
        (response,) = self.model.execute([Request(tensors)])
        if response.failure is not None:
            return str(response.failure)
        return {name: json.loads(tensor.as_numpy()[0]) for name, tensor in response.outputs.items()}

    def operate(self, operation: str, **message):
        return self.infer(operation=operation, request=json.dumps(message))

    def open(self, request_id: str = "7") -> Lease:
        request = {"uid": "ab", "request_id": request_id, "deadline_unix_ns": time.time_ns() + 10**10}
        answer = self.infer(request=json.dumps(request), token_ids=np.zeros(3, np.int32))
        assert list(answer) == ["lease"]
        return Lease(**answer["lease"])

    def attach(self) -> Arena:
        return Arena.open(self.name, self.model._arena.geometry, self.module.contents_of(self.settings))

    @property
    def files(self) -> list[Path]:
        return list(SHARED_MEMORY.glob(f"{self.name}-*"))


@pytest.fixture
def served(monkeypatch) -> Iterator[Served]:
    served = Served(load_model(monkeypatch, "state_manager"), f"qwen35test-{os.getpid()}-{time.time_ns()}")
    yield served
    served.model.finalize()
    assert served.files == []


def wait_until(condition) -> bool:
    end = time.monotonic() + 3
    while not condition() and time.monotonic() < end:
        time.sleep(0.005)
    return condition()


def test_open_is_the_default_and_every_other_operation_answers_in_result(served):
    lease = served.open()
    assert served.operate("cancel", request_id="7") == {"result": {"cancelled": 1}}
    stats = served.operate("stats")["result"]
    assert (stats["num_open_leases"], stats["blocks"]["free"]) == (1, stats["blocks"]["total"])
    assert served.infer(operation="stats") == {"result": stats}
    assert served.operate("close", leases=[vars(lease)]) == {"result": {"closed": 1}}


def test_errors_begin_with_a_code_and_name_the_field(served):
    error = served.infer(operation="explode")
    assert error.startswith("INVALID_ARG: operation: expected one of open, claim,") and error.endswith("got 'explode'")
    assert served.infer() == "INVALID_ARG: deadline_unix_ns: expected an integer of 64 bits, got None"
    assert served.infer(request="{") == "INVALID_ARG: request: expected a JSON object, got '{'"
    assert served.infer(request="[]") == "INVALID_ARG: request: expected a JSON object, got []"
    assert served.operate("cancel", request_id="") == "INVALID_ARG: request_id: expected a non-empty string, got ''"
    broken = np.array([b"\xff"], np.object_)
    assert served.infer(request=broken).startswith("INVALID_ARG: request: expected UTF-8 text")


def test_each_of_a_batch_is_answered_though_one_is_wrong(served):
    requests = [Request({"operation": text(name)}) for name in ("stats", "nonsense", "check")]
    responses = served.model.execute(requests)
    assert [response.failure is None for response in responses] == [True, False, True]


def test_a_fault_of_ours_shows_no_traceback(served, monkeypatch):
    monkeypatch.setattr(served.model._operations, "run", lambda *_: 1 / 0)
    assert served.infer(operation="stats") == "INTERNAL: state_manager: the operation failed with ZeroDivisionError"


def test_gauges_follow_the_tables(served):
    served.model.finalize()
    served.model = served.start(unclaimed_lease_seconds=0.5)
    served.open()
    assert wait_until(lambda: Family.gauges["qwen35_state_leases.open"].value == 1)
    assert wait_until(lambda: Family.gauges["qwen35_state_leases.open"].value == 0), "it expires unclaimed"
    values = {name: gauge.value for name, gauge in Family.gauges.items()}
    geometry = served.model._arena.geometry
    assert (values["qwen35_state_blocks.free"], values["qwen35_state_slots.free"]) == (geometry.num_blocks, 16 + 16)
    assert Family.gauges["qwen35_state_blocks.free"].num_calls == 1, "a value that stays is not sent again"
    assert values["qwen35_state_blocks.held"] == values["qwen35_state_blocks.cached"] == 0


def test_a_published_prefix_outlives_the_llm_and_is_counted(served):
    arena = served.attach()
    holder, lease = Holder.register(arena, "llm_0_0"), served.open()
    served.operate("claim", holder=vars(holder.ref), leases=[vars(lease)])
    extent = served.operate("acquire", holder=vars(holder.ref), key=1, num_blocks=2, num_slots=1)["result"]["extent"]
    contents = ExtentTable(arena.tables).contents(ExtentRef(**extent))
    hasher = PrefixHasher(range(20), block_tokens=16)
    publication = Publication(
        20, hasher.digest(20), contents.block_ids, hasher.block_keys(20), contents.slots[0], has_draft=True
    )
    message = {"lease": vars(lease), "publication": publication_to_json(publication)}
    answer = served.operate("publish", holder=vars(holder.ref), **message)["result"]
    assert answer["taken_blocks"] == list(contents.block_ids)
    holder._lock.release()  # as the kernel does for a killed process
    assert wait_until(lambda: served.operate("stats")["result"]["blocks"]["held"] == 0)
    successor, lease = Holder.register(arena, "llm_0_0"), served.open()
    candidates = PrefixReader(arena.tables).candidates(PrefixHasher(range(30), block_tokens=16), 30, needs_draft=True)
    hit = served.operate(
        "claim", holder=vars(successor.ref), leases=[vars(lease)], candidates=[[vars(entry) for entry in candidates]]
    )
    assert hit["result"] == {"claims": ["claimed"], "hits": [answer["entry"]]}
    names = ("entries", "pins", "hits_total", "lookups_total", "hit_tokens_total", "published_total")
    assert wait_until(
        lambda: [Family.gauges[f"qwen35_prefix_cache_{name}"].value for name in names] == [1, 1, 1, 1, 20, 1]
    )
    geometry = arena.geometry
    num_bytes = 2 * geometry.block_bytes + geometry.slot_bytes
    assert Family.gauges["qwen35_prefix_cache_bytes"].value == num_bytes
    assert Family.gauges["qwen35_state_blocks.cached"].value == 2
    assert Family.gauges["qwen35_prefix_cache_evictions_total"].value is None
    successor.close()
    arena.close()


def test_a_dead_llm_is_unloaded_and_loaded_again(served):
    arena = served.attach()
    holder = Holder.register(arena, "llm_0_0")
    assert served.operate("acquire", holder=vars(holder.ref), key=1, num_blocks=3, num_slots=1)["result"]["extent"]
    assert served.operate("stats")["result"]["blocks"]["held"] == 3
    holder._lock.release()  # as the kernel does for a killed process
    assert wait_until(lambda: served.control == [("unload", "llm"), ("load", "llm")])
    assert served.operate("stats")["result"]["blocks"]["held"] == 0
    arena.close()


def test_a_reloaded_manager_finds_leases_and_holders(served):
    arena = served.attach()
    holder = Holder.register(arena, "llm_0_0")
    lease = served.open()
    served.operate("acquire", holder=vars(holder.ref), key=1, num_blocks=3, num_slots=1)
    served.model.finalize()
    assert served.files, "the llm still uses the arena"
    served.model = served.start()
    assert served.operate("claim", holder=vars(holder.ref), leases=[vars(lease)])["result"]["claims"] == ["claimed"]
    assert served.operate("cancel", request_id="7")["result"] == {"cancelled": 1}
    assert holder.cancelled([lease]) == [True]
    assert served.operate("stats")["result"]["blocks"]["held"] == 3 and served.control == []
    holder.close()
    arena.close()


def test_two_servers_side_by_side(served, monkeypatch):
    other = Served(load_model(monkeypatch, "state_manager"), f"{served.name}b")
    served.open("1")
    assert other.operate("cancel", request_id="1") == {"result": {"cancelled": 0}}
    other.model.finalize()
    assert other.files == [] and served.operate("check") == {"result": {"ok": True}}
