"""Live servers for the tests: one for the whole session on the demo checkpoint, and more on demand.

Everything below tests/server/ carries the marker `server`.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from build import repository
from build.server import Server

_HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _HERE in item.path.parents:
            item.add_marker(pytest.mark.server)


@pytest.fixture(scope="session")
def nvfp4_checkpoint() -> Path:
    """The demo checkpoint, quantised to NVFP4 (cached in the clone)."""
    return repository.prepare(repository.DEMO_CHECKPOINT)


@pytest.fixture(scope="session")
def server(nvfp4_checkpoint: Path) -> Iterator[Server]:
    """The server that well-behaved tests share: NVFP4 demo checkpoint, default settings, ports of its own.

    A test that sends what Triton's core refuses, or that kills processes, takes `server_factory`: after the one no
    model unloads any more, after the other no request is answered.
    """
    with Server(checkpoint=nvfp4_checkpoint) as running:
        yield running


@pytest.fixture
def server_factory(nvfp4_checkpoint: Path) -> Iterator[Callable[..., Server]]:
    """Starts servers of the test's own: `server_factory(settings={"num_draft_tokens": "0"})`, arguments of `Server`.

    All are stopped at the end of the test; one that leaves processes or shared memory behind fails it, unless the test
    has called `stop()` itself and judged the report.
    """
    started: list[Server] = []

    def start(**arguments: Any) -> Server:
        arguments.setdefault("checkpoint", nvfp4_checkpoint)
        server = Server(**arguments)
        started.append(server.start())
        return server

    yield start
    unjudged = [server for server in started if server.report is None]
    reports = [server.stop() for server in unjudged]
    assert all(report.is_clean for report in reports), reports
