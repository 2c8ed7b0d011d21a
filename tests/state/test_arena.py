from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from qwen35.errors import StateError
from qwen35.state import segments
from qwen35.state.arena import Arena
from qwen35.state.holder import Holder
from qwen35.state.locks import process_start_time
from qwen35.state.manager import Manager
from qwen35.state.segments import arena_name_of_server, files_of, sweep
from tests.state.actor import Actors
from tests.state.tiny import tiny_geometry

GEOMETRY = tiny_geometry()


def open_arena(directory: Path, name: str = "a", **changes: object) -> Arena:
    return Arena.open(name, replace(GEOMETRY, **changes), "f", directory=directory)


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def dead_server_name() -> str:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    name = arena_name_of_server(process.pid)
    process.communicate(b"\n")
    return name


def test_both_sides_see_the_same_bytes(shared_directory: Path):
    first, second = open_arena(shared_directory), open_arena(shared_directory)
    ours, theirs = first.cache_view(), second.cache_view()
    assert float(ours.gated_delta[2].conv.abs().sum()) == 0.0
    ours.gated_delta[2].conv[1] = 3.0
    ours.draft.values[11, 3] = 5.0
    assert float(theirs.gated_delta[2].conv[1].min()) == 3.0 and float(theirs.draft.values[11, 3].max()) == 5.0
    assert not first.close() and not first.close()
    assert names(shared_directory) >= {"a-state", "a-cache"}
    assert second.close() and names(shared_directory) == set()


def test_views_on_another_device_leave_the_arena_without_cache_bytes(shared_directory: Path):
    arena = open_arena(shared_directory)
    cache = arena.cache_view("meta")
    assert cache.draft.keys.device.type == "meta" and cache.draft.keys.shape == (12, 4, 1, 8)
    assert names(shared_directory) == {"a-state"}
    arena.close()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_blocks": 13}, "geometry: num_blocks: expected 13, got 12"),
        (
            {"kv_dtype": "fp8", "num_slots": 2},
            "geometry: kv_dtype: expected fp8, got bfloat16; num_slots: expected 2, got 3",
        ),
    ],
)
def test_other_geometry_is_refused_with_both_values(shared_directory: Path, changes: dict, message: str):
    arena = open_arena(shared_directory)
    with pytest.raises(StateError, match=message):
        open_arena(shared_directory, **changes)
    assert names(shared_directory) == {"a-state"}, "the refused one removes nothing"
    arena.close()


def test_other_fingerprint_and_layout_are_refused(shared_directory: Path):
    arena = open_arena(shared_directory)
    with pytest.raises(StateError, match="fingerprint: expected other, got f"):
        Arena.open("a", GEOMETRY, "other", directory=shared_directory)
    arena.tables.header["layout_version"] = 77
    with pytest.raises(StateError, match="layout: expected version 2, got 77"):
        open_arena(shared_directory)
    arena.close()


@pytest.mark.parametrize("name", ["", "../x", "a/b", ".hidden", "x" * 101])
def test_bad_names(shared_directory: Path, name: str):
    with pytest.raises(StateError, match="arena_name: expected"):
        Arena.open(name, GEOMETRY, "f", directory=shared_directory)


def test_too_large_cache_gives_both_numbers_and_touches_nothing(shared_directory: Path):
    arena = open_arena(shared_directory, block_tokens=1 << 40)
    available = segments.available_bytes(shared_directory)
    with pytest.raises(StateError, match=r"KV blocks and slots: expected at most \d+ bytes .*, got \d+") as error:
        arena.cache_view()
    numbers = [int(word) for word in str(error.value).replace(";", "").split() if word.isdigit()]
    assert abs(numbers[0] - available) < 2**30 and numbers[1] == arena.geometry.cache_bytes
    assert (shared_directory / "a-cache").stat().st_size == 0
    assert arena.close() and names(shared_directory) == set()


def test_too_large_tables_leave_no_file(shared_directory: Path):
    with pytest.raises(StateError, match=r"tables: expected at most \d+ bytes .*, got 200\d+"):
        open_arena(shared_directory, num_blocks=10**12)
    assert names(shared_directory) == set()


def test_four_processes_at_once_make_one_arena(shared_directory: Path, actors: Actors):
    four = [actors.start() for _ in range(4)]
    for actor in four:
        actor.tell("attach", str(shared_directory), "a", GEOMETRY.as_dict())
    assert len({actor.answer() for actor in four}) == 1
    assert sorted(actor.call("register", "llm")["row"] for actor in four) == [0, 1, 2, 3]
    for actor in four:
        actor.tell("detach")
    assert sum(actor.answer() for actor in four) == 1, "exactly one is the last one out"
    assert names(shared_directory) == set()


def test_attach_and_leave_many_times_at_once(shared_directory: Path, actors: Actors):
    three = [actors.start() for _ in range(3)]
    for round_number in range(20):
        for actor in three:
            actor.tell("attach", str(shared_directory), "a", GEOMETRY.as_dict())
            actor.tell("detach")
        for actor in three:
            actor.answer(), actor.answer()
        assert names(shared_directory) == set(), round_number


def test_a_killed_process_leaves_a_warm_arena_for_the_next(shared_directory: Path, actors: Actors):
    first = actors.start()
    generation = first.call("attach", str(shared_directory), "a", GEOMETRY.as_dict())
    assert first.call("fill_cache", 7) == 0
    first.signal(signal.SIGKILL)
    arena = open_arena(shared_directory)
    assert int(arena.tables.header["generation"]) == generation
    assert float(arena.cache_view().draft.keys[1].min()) == 7.0
    assert arena.close() and names(shared_directory) == set()


def test_what_the_dead_left_is_made_anew_when_it_does_not_fit(shared_directory: Path, actors: Actors):
    first = actors.start()
    first.call("attach", str(shared_directory), "a", GEOMETRY.as_dict())
    first.call("fill_cache", 7)
    first.signal(signal.SIGKILL)
    arena = open_arena(shared_directory, num_blocks=20)
    assert names(shared_directory) == {"a-state"}
    assert arena.cache_view().draft.keys.shape[0] == 20 and float(arena.cache_view().draft.keys.abs().sum()) == 0.0
    arena.close()


def test_a_closed_arena_makes_no_new_file(shared_directory: Path):
    arena = open_arena(shared_directory)
    manager = Manager(arena, unclaimed_lease_seconds=1)
    arena.close()
    with pytest.raises(StateError, match="arena a: expected it attached, got it closed"):
        manager.reap()
    assert names(shared_directory) == set()


def test_a_half_made_arena_is_finished_by_the_next(shared_directory: Path):
    (shared_directory / "a-state").write_bytes(b"\0" * 5000)
    arena = open_arena(shared_directory)
    Manager(arena, unclaimed_lease_seconds=1).check_integrity()
    assert arena.close()


def test_a_leaving_process_keeps_the_arena_of_the_others(shared_directory: Path, actors: Actors):
    arena, other = open_arena(shared_directory), actors.start()
    other.call("attach", str(shared_directory), "a", GEOMETRY.as_dict())
    assert other.call("detach") is False
    assert names(shared_directory) == {"a-state"}
    assert arena.close()


class TestSweep:
    def test_dead_servers_go_live_ones_stay(self, shared_directory: Path):
        dead, live = dead_server_name(), arena_name_of_server(os.getpid())
        for name in (dead, live):
            for suffix in ("state", "cache", "manager.lock", "holder0.lock"):
                (shared_directory / f"{name}-{suffix}").touch()
        (shared_directory / "other-file").touch()
        assert sweep(shared_directory) == [dead]
        assert names(shared_directory) == {
            f"{live}-{s}" for s in ("state", "cache", "manager.lock", "holder0.lock")
        } | {"other-file"}

    def test_an_arena_in_use_stays_though_its_server_is_dead(self, shared_directory: Path, actors: Actors):
        name, stub = dead_server_name(), actors.start()
        stub.call("attach", str(shared_directory), name, GEOMETRY.as_dict())
        assert sweep(shared_directory) == []
        stub.signal(signal.SIGKILL)
        assert sweep(shared_directory) == [name] and names(shared_directory) == set()

    def test_a_pid_used_again_does_not_protect(self, shared_directory: Path):
        name = f"qwen35-{os.getpid()}-{process_start_time(os.getpid()) - 1}"
        (shared_directory / f"{name}-cache").touch()
        assert sweep(shared_directory) == [name] and names(shared_directory) == set()

    def test_a_name_that_begins_with_another_is_not_touched(self, shared_directory: Path):
        (shared_directory / "b-1-state").touch()
        arena = open_arena(shared_directory, "b")
        assert [path.name for path in files_of(shared_directory, "b")] == ["b-state"]
        assert arena.close() and names(shared_directory) == {"b-1-state"}


def test_a_new_llm_waits_for_the_old_one(shared_directory: Path, actors: Actors):
    old = actors.start()
    old.call("attach", str(shared_directory), "a", GEOMETRY.as_dict())
    old.call("register", "llm_0")
    old.call("announce_end")
    arena = open_arena(shared_directory)
    holder = Holder.register(arena, "llm_0")
    assert [info.pid for info in holder.predecessors()] == [old.process.pid]
    assert not holder.wait_for_predecessors(0.05)
    old.signal(signal.SIGKILL)
    start = time.monotonic()
    assert holder.wait_for_predecessors(5.0) and time.monotonic() - start < 1.0
    assert Holder.register(arena, "llm_1").predecessors() == []
    holder.close()
    arena.close()
