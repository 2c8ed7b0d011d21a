"""Applies to every test: one thread for torch, set before anything imports it.

The tests' matrices are tiny; a second thread only spins, and on a busy machine makes them ten times slower."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
