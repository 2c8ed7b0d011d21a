import os
import signal
import subprocess
import sys
import time

import pytest

from qwen35.state.fence import PATIENCE_SECONDS, Fence, is_stopped
from qwen35.state.holder import Holder
from qwen35.state.local import LocalTables
from qwen35.state.locks import process_start_time
from qwen35.state.manager import Manager
from tests.state.tiny import tiny_geometry


@pytest.fixture
def child():
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield process.pid
    process.kill()
    process.wait()


@pytest.fixture
def arena(child):
    """Tables with one holder, which is the child, and a manager."""
    tables = LocalTables(tiny_geometry())
    holder = Holder.register(tables, "llm")
    row = tables.tables.holders[holder.ref.row : holder.ref.row + 1]
    row["pid"], row["start_time"] = child, process_start_time(child)
    return tables, holder, Manager(tables, unclaimed_lease_seconds=60.0)


def stop(pid):
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + 5.0
    while not is_stopped(pid, process_start_time(pid)):
        assert time.monotonic() < deadline


def looked(tables, after_seconds):
    killed, logged = [], []
    fence = Fence(
        tables.tables,
        logged.append,
        clock=lambda: time.monotonic() + after_seconds,
        kill=lambda pid, number: killed.append((pid, number)),
    )
    assert fence.look() == [pid for pid, _ in killed]
    assert len(logged) == len(killed)
    return killed


def test_a_stopped_holder_dies_once_a_request_has_waited(arena, child):
    tables, _, manager = arena
    manager.open("a", deadline=time.monotonic() + 100)
    stop(child)
    assert looked(tables, 0.0) == []
    assert looked(tables, PATIENCE_SECONDS) == [(child, signal.SIGKILL)]


def test_a_holder_that_runs_is_left_alone(arena):
    tables, _, manager = arena
    manager.open("a", deadline=time.monotonic() + 100)
    assert looked(tables, 10.0) == []


def test_a_stopped_holder_without_a_waiting_request_is_left_alone(arena, child):
    tables, holder, manager = arena
    lease = manager.open("a", deadline=time.monotonic() + 100)
    manager.claim(holder.ref, [lease])
    stop(child)
    assert looked(tables, 10.0) == []


def test_another_process_of_the_same_pid_is_left_alone(arena, child):
    tables, holder, manager = arena
    manager.open("a", deadline=time.monotonic() + 100)
    tables.tables.holders["start_time"][holder.ref.row] += 1
    stop(child)
    assert looked(tables, 10.0) == []


def test_the_thread_looks_by_itself(arena, child):
    tables, _, manager = arena
    fence = Fence(tables.tables, lambda text: None)
    fence.start()
    manager.open("a", deadline=time.monotonic() + 100)
    stop(child)
    deadline = time.monotonic() + 5.0
    while process_start_time(child) is not None:  # until it is gone, or a zombie
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert fence.stop(5.0)
