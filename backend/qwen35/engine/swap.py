"""Host copies of sequences that wait: what a preempted one had computed, or what a saved session brings along.

Bounded in bytes: what does not fit is not kept, and the sequence is computed again, to the same bits."""

from __future__ import annotations

from qwen35.engine.sequence import Sequence
from qwen35.engine.snapshot import Snapshot, num_snapshot_bytes
from qwen35.views import CacheView


class Swap:
    """Belongs to the engine's thread. ``cache`` is written in place by ``restore``."""

    def __init__(self, cache: CacheView, max_bytes: int) -> None:
        """``max_bytes``: of all copies that ``save`` makes; 0: it makes none."""
        self._cache = cache
        self._max_bytes = max_bytes
        self._snapshots: dict[Sequence, Snapshot] = {}
        self.num_bytes = 0  # of copies that are kept now
        self.num_saved_tokens = 0
        self.num_restored_tokens = 0

    def save(self, sequence: Sequence) -> bool:
        """Copies what the sequence has in the caches, while it still holds its memory; False where the copy does not
        fit, or there is nothing to copy."""
        num_bytes = num_snapshot_bytes(self._cache, sequence)
        if sequence.num_computed_tokens == 0 or self.num_bytes + num_bytes > self._max_bytes:
            return False
        self._keep(sequence, Snapshot.take(self._cache, sequence))
        self.num_saved_tokens += sequence.num_computed_tokens
        return True

    def holds(self, sequence: Sequence) -> bool:
        """Whether ``restore`` has something to copy."""
        return sequence in self._snapshots or sequence.brought is not None

    def restore(self, sequence: Sequence) -> None:
        """Into the memory that the sequence has got; without a copy it stays as it is, at its first token."""
        snapshot = self.drop(sequence)
        if snapshot is not None:
            self.num_restored_tokens += snapshot.num_computed_tokens
        snapshot, sequence.brought = snapshot or sequence.brought, None
        if snapshot is not None:
            snapshot.restore(self._cache, sequence)

    def snapshot(self, sequence: Sequence) -> Snapshot | None:
        """What the sequence has computed, in the caches or in a copy; None: nothing."""
        if sequence.slot is None:
            return self._snapshots.get(sequence) or sequence.brought
        return Snapshot.take(self._cache, sequence) if sequence.num_computed_tokens else None

    def drop(self, sequence: Sequence) -> Snapshot | None:
        """Forgets the copy; returns it."""
        snapshot = self._snapshots.pop(sequence, None)
        self.num_bytes -= 0 if snapshot is None else snapshot.num_bytes
        return snapshot

    def _keep(self, sequence: Sequence, snapshot: Snapshot) -> None:
        self._snapshots[sequence] = snapshot
        self.num_bytes += snapshot.num_bytes
