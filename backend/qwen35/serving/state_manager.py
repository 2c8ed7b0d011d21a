"""The Triton model ``state_manager``: the manager of the arena behind STRING tensors. Not decoupled, never waits.

Inputs:  operation STRING [1], default "open"; request STRING [1], a JSON object (see `qwen35.state.operations`);
         token_ids INT32 [-1], the prompt, which it does not read: the llm looks its prefixes up itself
Outputs: lease STRING [1] of "open", result STRING [1] of every other operation, both JSON
Errors:  ``CODE: field: expected …, got …``"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import triton_python_backend_utils as pb_utils

from qwen35.config import ModelConfig
from qwen35.errors import InternalError, InvalidArgument, Qwen35Error
from qwen35.serving.process import ServerProcess, prepare_process, settings_of
from qwen35.serving.shared_state import contents_of
from qwen35.serving.tensors import text_of, text_tensor, triton_error
from qwen35.state import segments
from qwen35.state.arena import Arena
from qwen35.state.fence import Fence
from qwen35.state.geometry import Geometry
from qwen35.state.manager import Manager
from qwen35.state.operations import Operations
from qwen35.state.stats import Stats
from qwen35.state.watch import Watch

WATCHED_MODEL = "llm"
STOP_SECONDS = 2.0
_PREFIX_GAUGES = {  # name in `PrefixStats`: the metric's
    "num_entries": ("entries", "Cached prefixes"),
    "num_pins": ("pins", "Uses of cached prefixes by requests"),
    "cached_bytes": ("bytes", "KV blocks and slots of cached prefixes"),
}
_PREFIX_COUNTERS = {
    "num_lookups": ("lookups_total", "Requests that looked for a cached prefix"),
    "num_hits": ("hits_total", "Requests that found one"),
    "num_hit_tokens": ("hit_tokens_total", "Prompt tokens in the prefixes found"),
    "num_published": ("published_total", "Prefixes that were cached"),
    "num_refused": ("refused_total", "Prefixes offered that the tables did not allow"),
    "num_evicted": ("evictions_total", "Cached prefixes that gave way"),
}


class TritonPythonModel:
    """Adapter: tensors to JSON and back, Triton's model control and metrics for the watch."""

    def initialize(self, args: Mapping[str, str]) -> None:
        prepare_process()
        server = ServerProcess()
        settings = settings_of(args)
        for name in segments.sweep():
            pb_utils.Logger.log_info(f"state_manager: removed {name}-*, left by a server that is dead")
        geometry = Geometry.derive(ModelConfig.from_directory(settings.checkpoint), settings)
        self._arena = Arena.open(settings.arena_name, geometry, contents_of(settings))
        manager = Manager(
            self._arena,
            unclaimed_lease_seconds=settings.unclaimed_lease_seconds,
            prefix_cache_bytes=settings.prefix_cache_bytes,
        )
        self._operations = Operations(manager)
        self._gauges = Gauges(server)
        log = partial(_log, server)
        self._fence = Fence(self._arena.tables, log)
        self._watch = Watch(
            manager,
            period_seconds=settings.heartbeat_seconds,
            reload=reload_watched_model,
            on_stats=self._gauges.show,
            log=log,
        )
        self._watch.start()
        self._fence.start()
        server.when_gone(self.finalize)
        parts = ", ".join(f"{name} {num_bytes}" for name, num_bytes in geometry.bytes_by_part().items())
        pb_utils.Logger.log_info(f"state_manager: arena {self._arena.name}, bytes: {parts}")

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        return [self._respond(request) for request in requests]

    def finalize(self) -> None:
        self._fence.stop(STOP_SECONDS)
        self._watch.stop(STOP_SECONDS)
        self._arena.close()

    def _respond(self, request: Any) -> Any:
        try:
            operation = _text_input(request, "operation") or "open"
            answer = self._operations.run(operation, _json_input(request))
        except Exception as error:
            return _refusal(error)
        output = "lease" if operation == "open" else "result"
        return pb_utils.InferenceResponse([text_tensor(pb_utils, output, json.dumps(answer))])


class Gauges:
    """What the metrics endpoint shows of the arena.

    A gauge is told changes only: a call holds the interpreter's lock until the server answers, for ever if it dies.
    """

    def __init__(self, server: ServerProcess) -> None:
        self._server = server
        self._families: list[Any] = []  # a metric dies with its family
        self._shown: dict[int, int] = {}  # id of a metric -> its value
        states = ("free", "held", "cached")
        self._blocks = self._gauges("state_blocks", "KV blocks by owner", states)
        self._slots = self._gauges("state_slots", "GDN slots by owner", states)
        self._leases = self._gauges("state_leases", "Requests between open and close", ("open", "claimed"))
        family = pb_utils.MetricFamily
        self._prefix_gauges = {name: self._metric(*about, family.GAUGE) for name, about in _PREFIX_GAUGES.items()}
        self._prefix_counters = {name: self._metric(*about, family.COUNTER) for name, about in _PREFIX_COUNTERS.items()}

    def show(self, stats: Stats) -> None:
        if not self._server.is_alive:
            return
        for gauges, counts in ((self._blocks, stats.blocks), (self._slots, stats.slots)):
            for state, gauge in gauges.items():
                self._set(gauge, getattr(counts, state))
        self._set(self._leases["open"], stats.num_open_leases)
        self._set(self._leases["claimed"], stats.num_claimed_leases)
        for name, gauge in self._prefix_gauges.items():
            self._set(gauge, getattr(stats.prefix, name))
        for name, counter in self._prefix_counters.items():
            self._count_up(counter, getattr(stats.prefix, name))

    def _set(self, gauge: Any, value: int) -> None:
        if self._shown.get(id(gauge)) != value:
            gauge.set(value)
            self._shown[id(gauge)] = value

    def _count_up(self, counter: Any, total: int) -> None:
        """What the arena has counted before this process came is counted once more: a counter begins at 0."""
        shown = self._shown.get(id(counter), 0)
        if total != shown:
            counter.increment(total - shown)
            self._shown[id(counter)] = total

    def _gauges(self, name: str, description: str, states: Sequence[str]) -> dict[str, Any]:
        family = pb_utils.MetricFamily(name=f"qwen35_{name}", description=description, kind=pb_utils.MetricFamily.GAUGE)
        self._families.append(family)
        return {state: family.Metric(labels={"state": state}) for state in states}

    def _metric(self, name: str, description: str, kind: Any) -> Any:
        family = pb_utils.MetricFamily(name=f"qwen35_prefix_cache_{name}", description=description, kind=kind)
        self._families.append(family)
        return family.Metric(labels={})


def _log(server: ServerProcess, text: str) -> None:
    if server.is_alive:
        pb_utils.Logger.log_warn(f"state_manager: {text}")


def reload_watched_model() -> None:
    """Triton never restarts a stub that died: unload, then load. Works in explicit model control only."""
    pb_utils.Logger.log_warn(f"state_manager: reloading {WATCHED_MODEL}")
    pb_utils.unload_model(WATCHED_MODEL)
    pb_utils.load_model(WATCHED_MODEL)
    pb_utils.Logger.log_warn(f"state_manager: {WATCHED_MODEL} is loaded again")


def _refusal(error: Exception) -> Any:
    """An error response; a fault of ours tells the client its name, the log the rest."""
    if not isinstance(error, Qwen35Error):
        pb_utils.Logger.log_error(f"state_manager: {error!r}")
        error = InternalError(f"state_manager: the operation failed with {type(error).__name__}")
    return pb_utils.InferenceResponse([], triton_error(pb_utils, error))


def _text_input(request: Any, name: str) -> str | None:
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    values = [] if tensor is None else tensor.as_numpy().reshape(-1)
    return text_of(name, values[0]) if len(values) else None


def _json_input(request: Any) -> object:
    text = _text_input(request, "request") or "{}"
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument.field("request", "a JSON object", text) from error
