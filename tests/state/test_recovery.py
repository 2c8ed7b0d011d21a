"""A manager that dies at any line of an operation leaves nothing that the next one does not bring in order, and the
holder that asks again gets what it would have got."""

from __future__ import annotations

import pytest

from qwen35.state.extents import Need
from qwen35.state.manager import Manager
from qwen35.state.prefix import Published
from tests.state.cached import Cached
from tests.state.killing import killed_at

TOKENS = tuple(range(100, 120))
MAX_LINES = 400


class Scene:
    """Two published prefixes with a common block, one of them in use; a writer about to publish; a full arena."""

    def __init__(self) -> None:
        self.cached = cached = Cached(num_slots=4, num_checkpoints=3)
        self.manager, self.holder = cached.manager, cached.holder
        done, self.reading = cached.write(TOKENS[:10]), cached.write((*TOKENS[:4], 1, 2))
        self.old, self.used = cached.publish(done, 10).entry, cached.publish(self.reading, 6).entry
        cached.end(done)
        self.writer = cached.write((*TOKENS[:9], 5, 6))
        cached.publish(self.writer, 9)
        cached.pool.allocate_blocks(cached.pool.num_free_blocks)
        self.slot = cached.pool.allocate_slot()
        self.publication = cached.publication(self.writer, 11, self.slot)
        self.lease = cached.manager.open("r", deadline=cached.now + 60)
        self.published: Published | None = None

    def publish(self) -> None:
        self.published = self.manager.publish(self.holder, self.writer.lease, self.publication)

    def acquire(self) -> None:
        self.manager.acquire(self.holder, 77, 1, 0, Need.WISH)

    def claim(self) -> None:
        self.manager.claim(self.holder, [self.lease], [[self.old]])

    def unpin(self) -> None:
        self.manager.unpin(self.holder, self.reading.lease, [self.used])

    def close(self) -> None:
        self.manager.close(self.holder, [self.reading.lease])

    def look(self) -> object:
        """Who has each block and slot (nobody, the cache, a holder), what is cached and in use, the last answer."""
        tables, prefix = self.cached.reader._tables, self.manager.stats().prefix
        owners = [owner.clip(-1, 1).tolist() for owner in (tables.block_owner, tables.slot_owner)]
        entries = [tables.entries[name].tolist() for name in ("state", "num_tokens", "has_draft")]
        answer = None if self.published is None else (self.published.slot_taken, self.published.taken_blocks)
        return owners, entries, prefix.num_pins, answer

    def reload(self) -> None:
        self.manager = Manager(self.cached.state._owner, unclaimed_lease_seconds=5.0, clock=lambda: self.cached.now)


@pytest.mark.parametrize("name", ["publish", "acquire", "claim", "unpin", "close"])
def test_a_manager_that_dies_at_any_line_is_no_loss(name: str):
    plain = Scene()
    getattr(plain, name)()
    line, is_killed = 0, True
    while is_killed:
        line += 1
        scene = Scene()
        is_killed = killed_at(line, getattr(scene, name))
        scene.reload()
        scene.manager.check_integrity()
        getattr(scene, name)()
        assert scene.look() == plain.look(), f"line {line}"
        scene.manager.check_integrity()
    assert 10 < line < MAX_LINES


@pytest.mark.parametrize("name", ["publish", "acquire", "claim"])
def test_a_holder_that_dies_with_the_manager_leaves_cached_blocks_and_free_ones(name: str):
    line, is_killed, num_entries = 0, True, set()
    while is_killed:
        line += 1
        scene = Scene()
        is_killed = killed_at(line, getattr(scene, name))
        scene.cached.state.holder._lock.release()
        scene.reload()
        assert len(scene.manager.reap()) == 1
        scene.manager.check_integrity()
        stats = scene.manager.stats()
        assert stats.blocks.held == stats.slots.held == stats.prefix.num_pins == stats.num_claimed_leases == 0
        num_entries.add(stats.prefix.num_entries)
    assert num_entries == {"publish": {3, 4}, "acquire": {2, 3}, "claim": {3}}[name]
