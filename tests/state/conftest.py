from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.state.actor import Actors


@pytest.fixture
def shared_directory() -> Iterator[Path]:
    """A folder of its own in shared memory, gone after the test."""
    path = Path(tempfile.mkdtemp(prefix="qwen35test-", dir="/dev/shm"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def actors() -> Iterator[Actors]:
    """Starts processes that end with the test."""
    actors = Actors()
    yield actors
    actors.end()
