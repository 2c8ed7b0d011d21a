"""An llm's side of the prefix cache for tests: a local state, leases, and publications made of what its pool gives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from qwen35.state.leases import Lease
from qwen35.state.local import LocalState
from qwen35.state.prefix import EntryRef, Hit, PrefixHasher, Publication, Published
from tests.state.tiny import tiny_geometry


@dataclass
class Writer:
    """One sequence: its tokens, its blocks (own or of a hit) and its lease."""

    lease: Lease
    hasher: PrefixHasher
    block_ids: list[int] = field(default_factory=list)
    own: set[int] = field(default_factory=set)


class Cached:
    """Publishes and looks up; gives taken blocks and slots out of the pool."""

    def __init__(self, prefix_cache_bytes: int = 0, **geometry: object) -> None:
        self.now = 100.0
        self.state = LocalState(
            tiny_geometry(**{"num_slots": 4, "num_checkpoints": 3} | geometry),
            prefix_cache_bytes=prefix_cache_bytes,
            clock=lambda: self.now,
        )
        self.manager, self.pool, self.reader = self.state.manager, self.state.pool, self.state.reader
        self.holder = self.state.holder.ref

    def lease(self, candidates: Sequence[EntryRef] | None = None) -> tuple[Lease, EntryRef | None]:
        lease = self.manager.open("r", deadline=self.now + 60)
        claims, hits = self.manager.claim(self.holder, [lease], [candidates])
        assert claims == ["claimed"]
        return lease, hits[0]

    def write(self, token_ids: Sequence[int], images: Sequence[tuple[str, int, int]] = ()) -> Writer:
        """A sequence without a hit, with blocks for all its tokens."""
        block_tokens = self.state.geometry.block_tokens
        hasher = PrefixHasher(token_ids, images, block_tokens=block_tokens)
        blocks = self.pool.allocate_blocks(-(-len(token_ids) // block_tokens))
        return Writer(self.lease()[0], hasher, blocks, set(blocks))

    def extend(self, writer: Writer, token_ids: Sequence[int]) -> None:
        writer.hasher.extend(token_ids)
        num_blocks = -(-writer.hasher.num_tokens // self.state.geometry.block_tokens)
        blocks = self.pool.allocate_blocks(num_blocks - len(writer.block_ids))
        writer.block_ids += blocks
        writer.own |= set(blocks)

    def publication(self, writer: Writer, num_tokens: int, slot: int, has_draft: bool = True) -> Publication:
        num_blocks = -(-num_tokens // self.state.geometry.block_tokens)
        return Publication(
            num_tokens=num_tokens,
            digest=writer.hasher.digest(num_tokens),
            block_ids=tuple(writer.block_ids[:num_blocks]),
            block_keys=writer.hasher.block_keys(num_tokens),
            slot=slot,
            has_draft=has_draft,
        )

    def publish(self, writer: Writer, num_tokens: int, has_draft: bool = True) -> Published:
        slot = self.pool.allocate_slot()
        published = self.manager.publish(
            self.holder, writer.lease, self.publication(writer, num_tokens, slot, has_draft)
        )
        if published.slot_taken:
            self.pool.transfer(published.taken_blocks, [slot])
            writer.own -= set(published.taken_blocks)
        else:
            self.pool.free_slot(slot)
        return published

    def end(self, writer: Writer) -> None:
        self.pool.free_blocks(writer.own)
        self.manager.close(self.holder, [writer.lease])

    def find(self, token_ids: Sequence[int], max_tokens: int = 10**6, needs_draft: bool = True) -> list[EntryRef]:
        hasher = PrefixHasher(token_ids, block_tokens=self.state.geometry.block_tokens)
        return self.reader.candidates(hasher, max_tokens, needs_draft)

    def hit(self, token_ids: Sequence[int]) -> tuple[Lease, Hit | None]:
        lease, entry = self.lease(self.find(token_ids))
        return lease, None if entry is None else self.reader.hit(entry)

    def check(self) -> None:
        """The tables agree, and the pool holds what they say it does."""
        self.manager.check_integrity()
        self.pool.check_integrity()
        stats = self.manager.stats()
        assert stats.blocks.held == self.pool.num_free_blocks + self.pool.num_used_blocks
        assert stats.slots.held == self.pool.num_free_slots + self.pool.num_used_slots
