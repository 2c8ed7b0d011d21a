from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.state.actor import Actor


@pytest.fixture
def shared_directory() -> Iterator[Path]:
    """A folder of its own in shared memory, gone after the test."""
    path = Path(tempfile.mkdtemp(prefix="qwen35test-", dir="/dev/shm"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def start_actor() -> Iterator[Callable[[], Actor]]:
    """Starts processes that end with the test."""
    actors: list[Actor] = []

    def start() -> Actor:
        actors.append(Actor())
        return actors[-1]

    yield start
    for actor in actors:
        actor.end()
