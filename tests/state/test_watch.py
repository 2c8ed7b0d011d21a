from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from qwen35.state.holder import Holder
from qwen35.state.local import LocalTables
from qwen35.state.manager import Manager, Stats
from qwen35.state.watch import Backoff, Watch
from tests.state.tiny import tiny_geometry


def wait_until(condition: Callable[[], bool], seconds: float = 3.0) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.002)
    return condition()


class NoDelay(Backoff):
    def delay(self) -> float:
        return 0.0


class Watched:
    """A watch over one holder, with a reload that counts."""

    def __init__(self, num_failures: int = 0) -> None:
        self.owner = LocalTables(tiny_geometry())
        self.manager = Manager(self.owner, unclaimed_lease_seconds=0.05)
        self.holder = Holder.register(self.owner, "llm_0")
        self.log: list[str] = []
        self.stats: list[Stats] = []
        self.num_reloads = 0
        self.num_failures = num_failures
        self.gate = threading.Event()
        self.gate.set()
        self.watch = Watch(
            self.manager,
            period_seconds=0.01,
            reload=self.reload,
            on_stats=self.stats.append,
            log=self.log.append,
            backoff=NoDelay(),
        )

    def reload(self) -> None:
        self.gate.wait(5)
        self.num_reloads += 1
        if self.num_reloads <= self.num_failures:
            raise RuntimeError("explicit model control is off")

    def kill(self) -> None:
        self.holder._lock.release()


def test_a_death_reloads_once():
    watched = Watched()
    watched.manager.acquire(watched.holder.ref, 1, 5, 1)
    watched.watch.start()
    assert wait_until(lambda: len(watched.stats) > 2) and watched.num_reloads == 0
    watched.kill()
    assert wait_until(lambda: watched.num_reloads == 1)
    time.sleep(0.05)
    assert watched.num_reloads == 1 and watched.watch.stop(2.0)
    assert watched.stats[-1].blocks.free == 12
    assert watched.log[0].startswith("llm_0 (pid ") and "died" in watched.log[0]


def test_an_end_in_order_reloads_nothing():
    watched = Watched()
    watched.watch.start()
    watched.holder.close()
    assert wait_until(lambda: bool(watched.stats) and watched.stats[-1].holders == ())
    assert watched.watch.stop(2.0) and watched.num_reloads == 0 and watched.log == []


def test_a_death_after_the_successor_has_come_reloads_nothing():
    watched = Watched()
    successor = Holder.register(watched.owner, "llm_0")
    watched.watch.start()
    watched.kill()
    assert wait_until(lambda: bool(watched.log) and len(watched.stats[-1].holders) == 1)
    assert watched.watch.stop(2.0) and watched.num_reloads == 0
    assert watched.log[0].endswith("free again; its successor runs")
    successor.close()


def test_a_death_while_another_instance_lives_reloads():
    watched = Watched()
    Holder.register(watched.owner, "llm_1")
    watched.watch.start()
    watched.kill()
    assert wait_until(lambda: watched.num_reloads == 1) and watched.watch.stop(2.0)


def test_an_announced_end_is_no_death_but_holds_until_it_comes():
    watched = Watched()
    watched.manager.acquire(watched.holder.ref, 1, 5, 1)
    watched.holder.announce_end()
    watched.watch.start()
    assert wait_until(lambda: len(watched.stats) > 2)
    assert watched.stats[-1].blocks.held == 5 and watched.stats[-1].holders[0].is_done
    watched.kill()
    assert wait_until(lambda: watched.stats[-1].blocks.held == 0)
    assert watched.watch.stop(2.0) and watched.num_reloads == 0 and watched.log == []


def test_a_failed_reload_is_tried_again():
    watched = Watched(num_failures=2)
    watched.watch.start()
    watched.kill()
    assert wait_until(lambda: watched.num_reloads == 3)
    time.sleep(0.03)
    assert watched.watch.stop(2.0) and watched.num_reloads == 3
    assert watched.log.count("reload: explicit model control is off") == 2


def test_leases_expire_while_a_reload_hangs():
    watched = Watched()
    watched.gate.clear()
    watched.watch.start()
    watched.kill()
    assert wait_until(lambda: bool(watched.log))
    watched.manager.open("r", deadline=time.monotonic() + 60)
    assert wait_until(lambda: watched.stats[-1].num_expired_leases == 1)
    assert not watched.watch.stop(0.05), "the reload still hangs"
    watched.gate.set()


def test_the_reaper_survives_a_manager_that_fails(monkeypatch: pytest.MonkeyPatch):
    watched = Watched()
    reap, faults = watched.manager.reap, [OSError("no lock")]

    def failing_reap() -> list:
        if faults:
            raise faults.pop()
        return reap()

    monkeypatch.setattr(watched.manager, "reap", failing_reap)
    watched.watch.start()
    assert wait_until(lambda: len(watched.stats) > 0)
    assert watched.log == ["reaper: no lock"] and watched.watch.stop(2.0)


def test_backoff_grows_to_a_minute_and_starts_anew_after_calm():
    now = [0.0]
    backoff = Backoff(lambda: now[0])
    delays = []
    for _ in range(9):
        delays.append(backoff.delay())
        now[0] += delays[-1] + 0.1
    assert delays == [0, 1, 2, 4, 8, 16, 32, 60, 60]
    now[0] += 121
    assert backoff.delay() == 0
