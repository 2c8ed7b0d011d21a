"""Measurements that anyone can repeat: `python -m perf.NAME` from the repository's root."""
