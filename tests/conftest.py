"""Applies to every test: one thread for torch, set before anything imports it.

The tests' matrices are tiny; a second thread only spins, and on a busy machine makes them ten times slower."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

NUM_SCHEDULES = 100


def pytest_addoption(parser):
    parser.addoption(
        "--schedules",
        type=int,
        default=NUM_SCHEDULES,
        help=f"random schedules of tests/engine/test_differential.py (default {NUM_SCHEDULES})",
    )


def pytest_generate_tests(metafunc):
    if "schedule_seed" in metafunc.fixturenames:
        metafunc.parametrize("schedule_seed", range(metafunc.config.getoption("schedules")))
