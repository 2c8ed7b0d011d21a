"""What is read from /proc about a server's processes."""

import mmap
import os
import secrets
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from build.processes import (
    mapped_shared_memory,
    processes_of_user,
    session_members,
    shared_memory_with_prefix,
    wait_until,
)


@pytest.fixture
def session() -> Iterator[subprocess.Popen]:
    """A session of three processes: a shell, its `sleep`, and one that has lost its parent."""
    script = "(sleep 60 & exec sleep 0) ; sleep 60"
    leader = subprocess.Popen(["bash", "-c", f"{script}; true"], start_new_session=True)
    assert wait_until(lambda: len(session_members(leader.pid)) == 2, 5)
    yield leader
    for process in session_members(leader.pid):
        process.kill()
    leader.kill()
    leader.wait()


def test_members_of_a_session_outlive_their_leader(session: subprocess.Popen):
    members = session_members(session.pid)
    assert session.pid not in {member.pid for member in members}
    session.kill()
    session.wait()
    assert sorted(session_members(session.pid), key=lambda each: each.pid) == sorted(members, key=lambda each: each.pid)
    members[0].kill()
    assert wait_until(lambda: not members[0].is_alive, 5)
    assert members[1].is_alive


def test_zombie_and_reused_pid_are_not_alive():
    child = subprocess.Popen(["sleep", "0"])
    own = next(process for process in processes_of_user() if process.pid == os.getpid())
    assert own.is_alive
    assert not type(own)(own.pid, own.start_ticks + 1).is_alive
    ended = [process for process in processes_of_user() if process.pid == child.pid]
    assert wait_until(lambda: not any(process.is_alive for process in ended), 5)  # a zombie until wait()
    child.wait()


def test_mapped_and_prefixed_shared_memory():
    prefix = f"qwen35-test-{secrets.token_hex(4)}-"
    first, second = (Path("/dev/shm", prefix + name) for name in ("first", "second"))
    own = next(process for process in processes_of_user() if process.pid == os.getpid())
    try:
        for path in (first, second):
            path.write_bytes(b"bytes")
        with first.open("r+b") as handle, mmap.mmap(handle.fileno(), 0):
            mapped = mapped_shared_memory([own])
            assert first in mapped and second not in mapped
            assert shared_memory_with_prefix([prefix]) == {first, second}
            first.unlink()
            assert first not in mapped_shared_memory([own])  # mapped still, but without a name
    finally:
        for path in (first, second):
            path.unlink(missing_ok=True)


def test_wait_until_gives_up():
    begin = time.monotonic()
    assert not wait_until(lambda: False, 0.1, 0.01)
    assert 0.1 <= time.monotonic() - begin < 2
