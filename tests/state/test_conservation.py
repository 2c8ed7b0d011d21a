"""Whatever happens in whatever order, every block, slot and lease has one owner, what is cached keeps its contents, and
in the end all that is not cached is free."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from qwen35.errors import Cancelled, Unavailable
from qwen35.state.extents import ExtentRef, ExtentTable, Need
from qwen35.state.holder import Holder
from qwen35.state.leases import Lease
from qwen35.state.local import LocalTables
from qwen35.state.manager import Manager
from qwen35.state.prefix import EntryRef, Hit, PrefixHasher, PrefixReader, Publication
from tests.state.killing import killed_at
from tests.state.tiny import tiny_geometry

NUM_BLOCKS, NUM_SLOTS, BLOCK_TOKENS = 10, 5, 4
GEOMETRY = tiny_geometry(num_blocks=NUM_BLOCKS, num_slots=NUM_SLOTS, num_checkpoints=4, max_leases=6, max_holders=3)
PROMPTS = tuple((1, 2, 3, 4, 5)[:shared] + tuple(range(10 * shared, 10 * shared + 12)) for shared in (0, 2, 4, 5))
NUM_STEPS = 150
WEIGHTS = {
    "register": 4, "acquire": 12, "release": 2, "open": 10, "claim": 14, "write": 20, "publish": 20, "unpin_old": 4,
    "close": 6, "cancel": 0.5, "pass_time": 0.5, "reap": 1, "finish": 0.2, "kill": 0.5, "reload_manager": 1,
}  # fmt: skip


@dataclass
class Share:
    """An extent of a holder as the model has it: without what the cache has taken."""

    holder: Holder
    ref: ExtentRef
    blocks: set[int]
    slots: set[int]


@dataclass
class Writer:
    """A claimed lease and the sequence that it writes."""

    holder: Holder
    request_id: str
    prompt: tuple[int, ...]
    drafts: bool
    num_tokens: int = 0
    blocks: list[int] = field(default_factory=list)
    base: EntryRef | None = None
    pins: set[EntryRef] = field(default_factory=set)


class World:
    """The manager against a model of plain dictionaries, and the contents of every block. A step that has nobody to do
    it does nothing."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.now = 0.0
        self.owner = LocalTables(GEOMETRY)
        self.reader = PrefixReader(self.owner.tables)
        self.reload_manager()
        self.holders: list[Holder] = []
        self.shares: list[Share] = []
        self.open_leases: dict[Lease, tuple[str, float]] = {}  # -> request id, expiry
        self.writers: dict[Lease, Writer] = {}
        self.cancelled: set[Lease] = set()
        self.remembered: dict[str, float] = {}
        self.entries: dict[EntryRef, tuple[Hit, tuple[int, ...]]] = {}  # those not known to be evicted: their tokens
        self.rows: dict[int, list[tuple[int, bool] | None]] = {}  # block -> token and "with the draft's half" by row
        self.keys = 0

    def run(self) -> None:
        for name in self.draw.choices(list(WEIGHTS), list(WEIGHTS.values()), k=NUM_STEPS):
            getattr(self, name)()
            self.check_tables()
            self.check_contents()
        self.end()

    def register(self) -> None:
        if len(self.holders) < 2:
            self.reap()
            self.holders.append(Holder.register(self.owner, "llm", lambda: self.now))

    def acquire(self) -> None:
        if not self.holders:
            return
        holder, need = self.draw.choice(self.holders), self.draw.choice(list(Need))
        num_blocks, num_slots = self.draw.choice((0, 1, 2, 4, 11)), self.draw.choice((0, 1, 1, 2, 5))
        self.keys += 1
        expected = self.expected_grant(num_blocks, num_slots, need)
        ref = self.despite_death(lambda: self.manager.acquire(holder.ref, self.keys, num_blocks, num_slots, need))
        self.forget_evicted()
        if ref is None:
            assert expected == (0, 0)
            return
        extent = ExtentTable(self.owner.tables).contents(ref)
        assert (len(extent.block_ids), len(extent.slots)) == expected
        share = Share(holder, ref, set(extent.block_ids), set(extent.slots))
        assert not any(share.blocks & other.blocks or share.slots & other.slots for other in self.shares)
        assert not share.blocks & self.cached_blocks
        self.rows.update({block: [None] * BLOCK_TOKENS for block in share.blocks})
        self.shares.append(share)

    def release(self) -> None:
        used = {block for writer in self.writers.values() for block in writer.blocks}
        idle = [share for share in self.shares if not share.blocks & used]
        if idle:
            share = self.draw.choice(idle)
            self.shares.remove(share)
            assert self.manager.release(share.holder.ref, [share.ref, share.ref]) == 1

    def open(self) -> None:
        request_id = self.draw.choice(("a", "b", ""))
        try:
            lease = self.manager.open(request_id, deadline=self.now + 100)
        except Cancelled:
            assert self.remembered[request_id] > self.now
        except Unavailable:
            assert len(self.open_leases) + len(self.writers) == GEOMETRY.max_leases
        else:
            assert self.remembered.get(request_id, 0.0) <= self.now
            self.open_leases[lease] = (request_id, self.now + 5)

    def claim(self) -> None:
        if not self.open_leases or not self.holders:
            return
        lease, holder = self.draw.choice(list(self.open_leases)), self.draw.choice(self.holders)
        prompt, drafts = self.draw.choice(PROMPTS), self.draw.random() < 0.7
        request_id, expiry = self.open_leases.pop(lease)
        candidates = self.reader.candidates(PrefixHasher(prompt, block_tokens=BLOCK_TOKENS), len(prompt), drafts)
        lengths = [hit.num_tokens for hit, tokens in self.entries.values()
                   if prompt[: len(tokens)] == tokens and hit.has_draft >= drafts]  # fmt: skip
        assert [self.entries[entry][0].num_tokens for entry in candidates] == sorted(lengths, reverse=True)[:4]
        num_deaths = self.counts["deaths"]
        claims, hits = self.despite_death(lambda: self.manager.claim(holder.ref, [lease], [candidates]))
        self.forget_expired()  # the manager expires all overdue ones with a claim
        if expiry <= self.now:
            assert (claims, hits) == (["expired"], [None])
        elif lease in self.cancelled:
            assert hits == [None]
            assert claims == ["cancelled"] or (claims == ["expired"] and self.counts["deaths"] > num_deaths)
        else:
            assert (claims, hits) == (["claimed"], candidates[:1] or [None])
            self.writers[lease] = writer = Writer(holder, request_id, prompt, drafts)
            if candidates:
                self.start_from(lease, writer, self.reader.hit(candidates[0]))

    def start_from(self, lease: Lease, writer: Writer, hit: Hit) -> None:
        """Full blocks shared, the last one copied; without room for the copy the hit is given up."""
        writer.pins.add(hit.entry)
        num_rows = hit.num_tokens % BLOCK_TOKENS
        spare = self.spare_blocks(writer.holder)
        if num_rows and not spare:
            self.unpin(lease, hit.entry)
            return
        writer.base, writer.num_tokens, writer.blocks = hit.entry, hit.num_tokens, list(hit.block_ids)
        if num_rows:
            self.rows[spare[0]][:num_rows] = self.rows[writer.blocks[-1]][:num_rows]
            writer.blocks[-1] = spare[0]

    def write(self) -> None:
        if not self.writers:
            return
        writer = self.draw.choice(list(self.writers.values()))
        end = min(writer.num_tokens + self.draw.randint(1, 9), len(writer.prompt))
        for position in range(writer.num_tokens, end):
            if position == len(writer.blocks) * BLOCK_TOKENS:
                spare = self.spare_blocks(writer.holder)
                if not spare:
                    return
                writer.blocks.append(spare[0])
            row = (writer.prompt[position], writer.drafts)
            self.rows[writer.blocks[-1]][position % BLOCK_TOKENS] = row
            writer.num_tokens += 1

    def publish(self) -> None:
        ready = [
            (lease, writer, share)
            for lease, writer in self.writers.items()
            for share in self.shares
            if writer.num_tokens and share.holder is writer.holder and share.slots
        ]
        if not ready:
            return
        lease, writer, share = self.draw.choice(ready)
        num_least = self.entries[writer.base][0].num_tokens if writer.base else 1
        num_tokens = max(writer.num_tokens - self.draw.choice((0, 0, 0, 1, 3)), num_least)
        slot = min(share.slots)
        publication = self.publication(writer, num_tokens, slot, writer.drafts and self.draw.random() < 0.8)
        tokens = writer.prompt[:num_tokens]
        is_known = any(
            entry_tokens == tokens and hit.has_draft >= publication.has_draft
            for hit, entry_tokens in self.entries.values()
        )
        own = {block for other in self.shares if other.holder is writer.holder for block in other.blocks}
        published = self.despite_death(lambda: self.manager.publish(writer.holder.ref, lease, publication))
        assert published.slot_taken != is_known
        assert set(published.taken_blocks) <= own & set(publication.block_ids)
        if published.entry is None:
            return
        for other in self.shares:
            other.blocks -= set(published.taken_blocks)
            other.slots -= {slot}
        self.shares = [other for other in self.shares if other.blocks or other.slots]
        hit = self.reader.hit(published.entry)
        self.entries[published.entry] = (hit, tokens)
        assert {block for block in publication.block_ids if block not in own} <= set(hit.block_ids)
        writer.pins.add(published.entry)
        if writer.base and self.draw.random() < 0.7:
            self.unpin(lease, writer.base)
        writer.base = published.entry

    def publication(self, writer: Writer, num_tokens: int, slot: int, has_draft: bool) -> Publication:
        hasher = PrefixHasher(writer.prompt, block_tokens=BLOCK_TOKENS)
        blocks = tuple(writer.blocks[: -(-num_tokens // BLOCK_TOKENS)])
        keys = hasher.block_keys(num_tokens)
        return Publication(num_tokens, hasher.digest(num_tokens), blocks, keys, slot, has_draft)

    def unpin_old(self) -> None:
        """All but the base, which covers every cached block that the sequence uses."""
        if self.writers:
            lease, writer = self.draw.choice(list(self.writers.items()))
            old = [entry for entry in writer.pins if entry != writer.base]
            self.despite_death(lambda: self.manager.unpin(writer.holder.ref, lease, old))
            writer.pins -= set(old)

    def close(self) -> None:
        if self.writers:
            lease = self.draw.choice(list(self.writers))
            writer, num_deaths = self.writers.pop(lease), self.counts["deaths"]
            num_closed = self.despite_death(lambda: self.manager.close(writer.holder.ref, [lease, lease]))
            assert num_closed == 1 or self.counts["deaths"] > num_deaths

    def cancel(self) -> None:
        request_id = self.draw.choice(("a", "b"))
        hits = {lease for lease, (name, _) in self.open_leases.items() if name == request_id}
        hits |= {lease for lease, writer in self.writers.items() if writer.request_id == request_id}
        assert self.manager.cancel(request_id) == len(hits)
        self.cancelled |= hits
        self.remembered[request_id] = self.now + 10

    def pass_time(self) -> None:
        self.now += self.draw.uniform(0.5, 6)

    def reap(self) -> None:
        assert self.manager.reap() == []
        self.forget_expired()

    def finish(self) -> None:
        if self.holders:
            self.remove_holder().close()
            self.reap()

    def kill(self) -> None:
        """The kernel frees the lock, nobody says a word."""
        if self.holders:
            holder = self.remove_holder()
            holder._lock.release()
            assert [info.row for info in self.manager.reap()] == [holder.ref.row]
            self.forget_expired()

    def reload_manager(self) -> None:
        self.manager = Manager(self.owner, unclaimed_lease_seconds=5.0, clock=lambda: self.now)

    def check_tables(self) -> None:
        self.manager.check_integrity()
        stats = self.manager.stats()
        for counts, kind, total, num_cached in (
            (stats.blocks, "blocks", NUM_BLOCKS, len(self.cached_blocks)),
            (stats.slots, "slots", NUM_SLOTS, len(self.entries)),
        ):
            held = sum(len(getattr(share, kind)) for share in self.shares)
            assert (counts.held, counts.cached, counts.free) == (held, num_cached, total - held - num_cached)
        assert stats.num_open_leases == len(self.open_leases)
        assert stats.num_claimed_leases == len(self.writers)
        assert stats.prefix.num_pins == sum(len(writer.pins) for writer in self.writers.values())
        assert stats.prefix.num_refused == 0
        for lease, writer in self.writers.items():
            assert writer.holder.cancelled([lease]) == [lease in self.cancelled]

    def check_contents(self) -> None:
        """Whoever reads an entry, or goes on with his own sequence, finds the tokens that were written."""
        for hit, tokens in self.entries.values():
            assert self.reader.hit(hit.entry) == hit
            self.check_rows(hit.block_ids, tokens, hit.has_draft)
        for writer in self.writers.values():
            self.check_rows(writer.blocks, writer.prompt[: writer.num_tokens], writer.drafts)

    def check_rows(self, blocks: list[int] | tuple[int, ...], tokens: tuple[int, ...], has_draft: bool) -> None:
        for position, token in enumerate(tokens):
            row = self.rows[blocks[position // BLOCK_TOKENS]][position % BLOCK_TOKENS]
            assert row is not None and row[0] == token and row[1] >= has_draft

    def end(self) -> None:
        for holder in self.holders:
            holder.close()
        self.now += 1000
        self.manager.reap()
        stats = self.manager.stats()
        for name in ("published", "evicted", "hits"):
            self.counts[name] = getattr(stats.prefix, f"num_{name}")
        assert (stats.num_open_leases, stats.num_claimed_leases, stats.prefix.num_pins) == (0, 0, 0)
        assert stats.blocks.held == stats.slots.held == 0 and stats.holders == ()
        last = Holder.register(self.owner, "llm", lambda: self.now)
        assert self.manager.acquire(last.ref, 1, NUM_BLOCKS, NUM_SLOTS, Need.WISH) is not None
        last.close()
        self.manager.reap()
        stats = self.manager.stats()
        assert (stats.blocks.free, stats.slots.free, stats.prefix.num_entries) == (NUM_BLOCKS, NUM_SLOTS, 0)

    @property
    def cached_blocks(self) -> set[int]:
        return {block for hit, _ in self.entries.values() for block in hit.block_ids}

    def despite_death(self, call: Callable[[], Any]) -> Any:
        """The answer of ``call``, before which the manager may have died in the middle of the same."""
        if self.draw.random() < 0.5:
            return call()
        answers: list[Any] = []
        if not killed_at(self.draw.randint(1, 120), lambda: answers.append(call())):
            return answers[0]
        self.reload_manager()
        self.counts["deaths"] += 1
        return call()

    def expected_grant(self, num_blocks: int, num_slots: int, need: Need) -> tuple[int, int]:
        held = [sum(len(getattr(share, kind)) for share in self.shares) for kind in ("blocks", "slots")]
        free = NUM_BLOCKS - held[0] - len(self.cached_blocks), NUM_SLOTS - held[1] - len(self.entries)
        pinned = {entry for writer in self.writers.values() for entry in writer.pins}
        kept = {block for entry in pinned for block in self.entries[entry][0].block_ids}
        possible = NUM_BLOCKS - held[0] - len(kept), NUM_SLOTS - held[1] - len(pinned)
        fits = num_blocks <= free[0] and num_slots <= free[1]
        fits |= need is not Need.SPARE and num_blocks <= possible[0] and num_slots <= possible[1]
        if fits:
            return num_blocks, num_slots
        return (0, 0) if need is Need.WISH else (min(num_blocks, free[0]), min(num_slots, free[1]))

    def spare_blocks(self, holder: Holder) -> list[int]:
        used = {block for writer in self.writers.values() for block in writer.blocks}
        own = {block for share in self.shares if share.holder is holder for block in share.blocks}
        return sorted(own - used)

    def unpin(self, lease: Lease, entry: EntryRef) -> None:
        writer = self.writers[lease]
        assert self.manager.unpin(writer.holder.ref, lease, [entry, entry]) == 1
        writer.pins.remove(entry)

    def forget_expired(self) -> None:
        self.open_leases = {lease: entry for lease, entry in self.open_leases.items() if entry[1] > self.now}

    def forget_evicted(self) -> None:
        """What the cache gave up; nothing that a writer uses."""
        pinned = {entry for writer in self.writers.values() for entry in writer.pins}
        rows = self.owner.tables.entries
        standing = {entry for entry in self.entries
                    if rows["state"][entry.row] != 0 and rows["generation"][entry.row] == entry.generation}  # fmt: skip
        assert pinned <= standing
        self.entries = {entry: self.entries[entry] for entry in self.entries if entry in standing}

    def remove_holder(self) -> Holder:
        holder = self.draw.choice(self.holders)
        self.holders.remove(holder)
        self.shares = [share for share in self.shares if share.holder is not holder]
        self.writers = {lease: writer for lease, writer in self.writers.items() if writer.holder is not holder}
        return holder


@pytest.mark.parametrize("first_seed", range(0, 60, 20))
def test_nothing_is_lost_or_used_twice(first_seed: int):
    counts: Counter[str] = Counter()
    for seed in range(first_seed, first_seed + 20):
        world = World(seed)
        try:
            world.run()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}") from error
        counts.update(world.counts)
    assert min(counts[name] for name in ("deaths", "published", "evicted", "hits")) > 20, counts
