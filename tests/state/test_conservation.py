"""Whatever happens in whatever order, every block, slot and lease has one owner, what is cached keeps its contents, and
in the end all that is not cached is free."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

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
IDS = st.sampled_from(["a", "b", ""])
PICK = st.integers(0, 10**6)
KILL = st.one_of(st.just(0), st.integers(1, 120))  # the line at which the manager dies; 0: it lives


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


class World(RuleBasedStateMachine):
    """The manager against a model of plain dictionaries, and the contents of every block."""

    def __init__(self) -> None:
        super().__init__()
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

    @precondition(lambda self: len(self.holders) < 2)
    @rule()
    def register(self) -> None:
        self.reap()
        self.holders.append(Holder.register(self.owner, "llm", lambda: self.now))

    @precondition(lambda self: self.holders)
    @rule(pick=PICK, num_blocks=st.integers(0, 11), num_slots=st.integers(0, 5), need=st.sampled_from(Need), line=KILL)
    def acquire(self, pick: int, num_blocks: int, num_slots: int, need: Need, line: int) -> None:
        holder = self.holders[pick % len(self.holders)]
        self.keys += 1
        expected = self.expected_grant(num_blocks, num_slots, need)
        ref = self.despite_death(line, lambda: self.manager.acquire(holder.ref, self.keys, num_blocks, num_slots, need))
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

    @precondition(lambda self: self.shares)
    @rule(pick=PICK)
    def release(self, pick: int) -> None:
        share = self.shares[pick % len(self.shares)]
        if share.blocks & {block for writer in self.writers.values() for block in writer.blocks}:
            return
        self.shares.remove(share)
        assert self.manager.release(share.holder.ref, [share.ref, share.ref]) == 1

    @rule(request_id=IDS)
    def open(self, request_id: str) -> None:
        try:
            lease = self.manager.open(request_id, deadline=self.now + 100)
        except Cancelled:
            assert self.remembered[request_id] > self.now
        except Unavailable:
            assert len(self.open_leases) + len(self.writers) == GEOMETRY.max_leases
        else:
            assert self.remembered.get(request_id, 0.0) <= self.now
            self.open_leases[lease] = (request_id, self.now + 5)

    @precondition(lambda self: self.open_leases and self.holders)
    @rule(pick=PICK, prompt=st.sampled_from(PROMPTS), drafts=st.booleans(), line=KILL)
    def claim(self, pick: int, prompt: tuple[int, ...], drafts: bool, line: int) -> None:
        lease = list(self.open_leases)[pick % len(self.open_leases)]
        holder = self.holders[pick % len(self.holders)]
        request_id, expiry = self.open_leases.pop(lease)
        hasher = PrefixHasher(prompt, block_tokens=BLOCK_TOKENS)
        candidates = self.reader.candidates(hasher, len(prompt), drafts)
        lengths = [hit.num_tokens for hit, tokens in self.entries.values()
                   if prompt[: len(tokens)] == tokens and hit.has_draft >= drafts]  # fmt: skip
        assert [self.entries[entry][0].num_tokens for entry in candidates] == sorted(lengths, reverse=True)[:4]
        claims, hits = self.despite_death(line, lambda: self.manager.claim(holder.ref, [lease], [candidates]))
        self.forget_expired()  # the manager expires all overdue ones with a claim
        if expiry <= self.now:
            assert (claims, hits) == (["expired"], [None])
        elif lease in self.cancelled:
            assert claims == (["cancelled"] if not line else claims) and hits == [None]
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

    @precondition(lambda self: self.writers)
    @rule(pick=PICK, num_tokens=st.integers(1, 9))
    def write(self, pick: int, num_tokens: int) -> None:
        writer = list(self.writers.values())[pick % len(self.writers)]
        for position in range(writer.num_tokens, min(writer.num_tokens + num_tokens, len(writer.prompt))):
            if position == len(writer.blocks) * BLOCK_TOKENS:
                spare = self.spare_blocks(writer.holder)
                if not spare:
                    return
                writer.blocks.append(spare[0])
            row = (writer.prompt[position], writer.drafts)
            self.rows[writer.blocks[-1]][position % BLOCK_TOKENS] = row
            writer.num_tokens += 1

    @precondition(lambda self: any(writer.num_tokens for writer in self.writers.values()))
    @rule(pick=PICK, back=st.sampled_from([0, 0, 1, 3]), has_draft=st.booleans(), keeps_base=st.booleans(), line=KILL)
    def publish(self, pick: int, back: int, has_draft: bool, keeps_base: bool, line: int) -> None:
        lease, writer = [item for item in self.writers.items() if item[1].num_tokens][
            pick % sum(writer.num_tokens > 0 for writer in self.writers.values())
        ]
        share = next((s for s in self.shares if s.holder is writer.holder and s.slots), None)
        num_tokens = max(writer.num_tokens - back, self.entries[writer.base][0].num_tokens if writer.base else 1)
        if share is None:
            return
        slot = min(share.slots)
        publication = self.publication(writer, num_tokens, slot, has_draft and writer.drafts)
        tokens = writer.prompt[:num_tokens]
        is_known = any(
            entry_tokens == tokens and hit.has_draft >= publication.has_draft
            for hit, entry_tokens in self.entries.values()
        )
        own = {block for other in self.shares if other.holder is writer.holder for block in other.blocks}
        published = self.despite_death(line, lambda: self.manager.publish(writer.holder.ref, lease, publication))
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
        if writer.base and not keeps_base:
            self.unpin(lease, writer.base)
        writer.base = published.entry

    def publication(self, writer: Writer, num_tokens: int, slot: int, has_draft: bool) -> Publication:
        hasher = PrefixHasher(writer.prompt, block_tokens=BLOCK_TOKENS)
        blocks = tuple(writer.blocks[: -(-num_tokens // BLOCK_TOKENS)])
        keys = hasher.block_keys(num_tokens)
        return Publication(num_tokens, hasher.digest(num_tokens), blocks, keys, slot, has_draft)

    @precondition(lambda self: self.writers)
    @rule(pick=PICK, line=KILL)
    def unpin_old(self, pick: int, line: int) -> None:
        """All but the base, which covers every cached block that the sequence uses."""
        lease = list(self.writers)[pick % len(self.writers)]
        writer = self.writers[lease]
        old = [entry for entry in writer.pins if entry != writer.base]
        self.despite_death(line, lambda: self.manager.unpin(writer.holder.ref, lease, old))
        writer.pins -= set(old)

    @precondition(lambda self: self.writers)
    @rule(pick=PICK, line=KILL)
    def close(self, pick: int, line: int) -> None:
        lease = list(self.writers)[pick % len(self.writers)]
        writer = self.writers.pop(lease)
        num_closed = self.despite_death(line, lambda: self.manager.close(writer.holder.ref, [lease, lease]))
        assert num_closed == 1 or line

    @rule(request_id=st.sampled_from(["a", "b"]))
    def cancel(self, request_id: str) -> None:
        hits = {lease for lease, (name, _) in self.open_leases.items() if name == request_id}
        hits |= {lease for lease, writer in self.writers.items() if writer.request_id == request_id}
        assert self.manager.cancel(request_id) == len(hits)
        self.cancelled |= hits
        self.remembered[request_id] = self.now + 10

    @rule(seconds=st.floats(0.5, 6))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def reap(self) -> None:
        assert self.manager.reap() == []
        self.forget_expired()

    @precondition(lambda self: self.holders)
    @rule(pick=PICK)
    def finish(self, pick: int) -> None:
        holder = self.remove_holder(pick)
        holder.close()
        assert self.manager.reap() == []
        self.forget_expired()

    @precondition(lambda self: self.holders)
    @rule(pick=PICK)
    def kill(self, pick: int) -> None:
        """The kernel frees the lock, nobody says a word."""
        holder = self.remove_holder(pick)
        holder._lock.release()
        assert [info.row for info in self.manager.reap()] == [holder.ref.row]
        self.forget_expired()

    @rule()
    def reload_manager(self) -> None:
        self.manager = Manager(self.owner, unclaimed_lease_seconds=5.0, clock=lambda: self.now)

    @invariant()
    def conserved(self) -> None:
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

    @invariant()
    def contents_stand(self) -> None:
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

    def teardown(self) -> None:
        for holder in self.holders:
            holder.close()
        self.now += 1000
        self.manager.reap()
        stats = self.manager.stats()
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

    def despite_death(self, line: int, call: Callable[[], object]) -> object:
        """The answer of ``call``, before which the manager may have died in the middle of the same."""
        if line and killed_at(line, call):
            self.reload_manager()
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

    def remove_holder(self, pick: int) -> Holder:
        holder = self.holders.pop(pick % len(self.holders))
        self.shares = [share for share in self.shares if share.holder is not holder]
        self.writers = {lease: writer for lease, writer in self.writers.items() if writer.holder is not holder}
        return holder


TestWorld = World.TestCase
TestWorld.settings = settings(max_examples=60, stateful_step_count=50, deadline=None, derandomize=True)
