"""The prefix cache through one manager in this process."""

from __future__ import annotations

import numpy as np
import pytest

from qwen35.errors import InvalidArgument, StateError
from qwen35.state.extents import Need
from qwen35.state.holder import Holder
from qwen35.state.pool import PoolExhausted
from qwen35.state.prefix import EntryRef, PrefixHasher, Publication, Published
from tests.state.cached import Cached

TOKENS = tuple(range(100, 120))  # five blocks of four


class TestHasher:
    def test_a_digest_names_tokens_length_and_images(self):
        images = [("aa", 3, 6)], [("ab", 3, 6)], [("aa", 3, 7)], [("aa", 4, 5)]
        digests = set()
        for token_ids, spans in [(TOKENS, ()), (TOKENS[::-1], ()), *((TOKENS, spans) for spans in images)]:
            hasher = PrefixHasher(token_ids, spans, block_tokens=4)
            digests |= {hasher.digest(num_tokens) for num_tokens in range(1, 21)}
        num_before_images = 3 + 3 + 3 + 4
        assert len(digests) == 6 * 20 - num_before_images

    def test_an_image_is_part_of_every_block_that_it_touches_and_of_no_earlier_one(self):
        plain = PrefixHasher(TOKENS, block_tokens=4).block_keys(20)
        image = PrefixHasher(TOKENS, [("aa", 7, 3)], block_tokens=4)
        assert (image.block_keys(20) == plain).all(axis=1).tolist() == [True, False, False, False, False]
        assert image.digest(7) == PrefixHasher(TOKENS, block_tokens=4).digest(7) != image.digest(8)

    @pytest.mark.parametrize("num_first", [1, 3, 4, 7, 19])
    def test_extended_and_whole_sequences_have_the_same_names(self, num_first: int):
        whole = PrefixHasher(TOKENS, [("aa", 2, 9)], block_tokens=4)
        parts = PrefixHasher(TOKENS[:num_first], [("aa", 2, 9)], block_tokens=4)
        parts.digest(num_first)
        for token_id in TOKENS[num_first:]:
            parts.extend([token_id])
        assert [parts.digest(p) for p in range(1, 21)] == [whole.digest(p) for p in range(1, 21)]
        assert np.array_equal(parts.block_keys(19), whole.block_keys(20)[:4])

    def test_names_of_different_salts_differ(self):
        plain, salted = (PrefixHasher(TOKENS, block_tokens=4, salt=salt) for salt in ("", "x"))
        assert plain.digest(3) != salted.digest(3)
        assert not (plain.block_keys(20) == salted.block_keys(20)).any()

    @pytest.mark.parametrize("num_tokens", [0, 21, -1])
    def test_positions_outside_are_refused(self, num_tokens: int):
        with pytest.raises(ValueError, match=f"num_tokens: expected 1 to 20, got {num_tokens}"):
            PrefixHasher(TOKENS, block_tokens=4).digest(num_tokens)


class TestPublishAndHit:
    def test_what_is_published_is_found_by_its_exact_tokens(self):
        cached = Cached()
        writer = cached.write(TOKENS)
        published = cached.publish(writer, 10)
        assert published.taken_blocks == tuple(writer.block_ids[:3]) and published.slot_taken
        cached.check()
        cached.end(writer)
        assert cached.find(TOKENS[:9]) == cached.find((*TOKENS[:9], 5, 6)) == cached.find(TOKENS, max_tokens=9) == []
        lease, hit = cached.hit((*TOKENS[:10], 5, 6))
        assert (hit.entry, hit.num_tokens, hit.slot) == (published.entry, 10, published.entry.row)
        assert hit.block_ids == tuple(writer.block_ids[:3]) and hit.has_draft
        prefix = cached.manager.stats().prefix
        assert (prefix.num_lookups, prefix.num_hits, prefix.num_hit_tokens, prefix.num_pins) == (1, 1, 10, 1)
        cached.manager.close(cached.holder, [lease])
        assert cached.manager.stats().prefix.num_pins == 0
        cached.check()

    def test_candidates_come_longest_first_and_four_at_most(self):
        cached = Cached(num_slots=8, num_checkpoints=7)
        writer = cached.write(TOKENS)
        entries = [cached.publish(writer, num_tokens).entry for num_tokens in (3, 4, 9, 14, 20)]
        assert cached.find(TOKENS) == entries[:0:-1]
        assert cached.find(TOKENS, max_tokens=13) == entries[2::-1]
        assert cached.find(TOKENS[:4]) == entries[1::-1]
        cached.check()

    def test_entries_of_one_sequence_share_its_blocks(self):
        cached = Cached()
        writer = cached.write(TOKENS)
        taken = [cached.publish(writer, num_tokens).taken_blocks for num_tokens in (6, 7, 16)]
        assert taken == [tuple(writer.block_ids[:2]), (), tuple(writer.block_ids[2:4])]
        stats = cached.manager.stats()
        assert (stats.blocks.cached, stats.slots.cached, stats.prefix.num_entries) == (4, 3, 3)
        geometry = cached.state.geometry
        assert stats.prefix.cached_bytes == 4 * geometry.block_bytes + 3 * geometry.slot_bytes
        cached.check()

    def test_the_same_prefix_again_takes_nothing(self):
        cached = Cached()
        first, second = cached.write(TOKENS), cached.write(TOKENS)
        entry = cached.publish(first, 10).entry
        assert cached.publish(second, 10) == Published(None, ())
        assert cached.find(TOKENS) == [entry]
        cached.end(first), cached.end(second)
        cached.check()
        assert cached.pool.num_used_blocks == 0

    def test_full_blocks_with_the_same_content_are_kept_once(self):
        cached = Cached()
        first, second = cached.write(TOKENS[:8]), cached.write((*TOKENS[:8], 7, 8))
        cached.publish(first, 8)
        published = cached.publish(second, 10)
        assert published.taken_blocks == (second.block_ids[2],)
        listed = cached.reader.hit(published.entry).block_ids
        assert listed == (*first.block_ids, second.block_ids[2])
        cached.end(first), cached.end(second)
        assert cached.manager.stats().blocks.cached == 3
        cached.check()

    def test_a_last_block_that_is_filled_later_serves_both_entries(self):
        cached = Cached(num_blocks=16, max_context_tokens=64)
        writer = cached.write(TOKENS[:6])
        cached.publish(writer, 6)
        cached.extend(writer, (1, 2, 3))
        published = cached.publish(writer, 9)
        assert published.taken_blocks == (writer.block_ids[2],)
        other = cached.write((*TOKENS[:6], 1, 2, 3, 4, 5))
        assert cached.publish(other, 11).taken_blocks == (other.block_ids[2],), "its full blocks are known"
        cached.check()

    def test_an_entry_without_the_drafts_half_serves_only_those_that_do_not_draft(self):
        cached = Cached()
        writer = cached.write(TOKENS)
        bare = cached.publish(writer, 10, has_draft=False).entry
        assert cached.find(TOKENS) == [] and cached.find(TOKENS, needs_draft=False) == [bare]
        assert not cached.reader.contains(writer.hasher, 10, True) and cached.reader.contains(writer.hasher, 10, False)
        assert cached.publish(writer, 10, has_draft=False).entry is None
        full = cached.publish(writer, 10)
        assert full.taken_blocks == () and cached.find(TOKENS, needs_draft=False) == [full.entry, bare]
        other = cached.write(TOKENS[:8])
        assert cached.publish(other, 8).taken_blocks == (), "the blocks got their draft's half meanwhile"
        cached.check()

    def test_blocks_without_the_drafts_half_are_not_listed_by_an_entry_that_has_it(self):
        cached = Cached()
        first, second = cached.write(TOKENS[:8]), cached.write((*TOKENS[:8], 7, 8))
        cached.publish(first, 8, has_draft=False)
        assert cached.publish(second, 10).taken_blocks == tuple(second.block_ids)
        cached.check()

    def test_the_same_publication_again_gets_the_same_answer(self):
        cached = Cached()
        writer = cached.write(TOKENS)
        cached.publish(writer, 6)
        slot = cached.pool.allocate_slot()
        publication = cached.publication(writer, 16, slot)
        first = cached.manager.publish(cached.holder, writer.lease, publication)
        assert cached.manager.publish(cached.holder, writer.lease, publication) == first
        assert first.taken_blocks == tuple(writer.block_ids[2:4])
        other, _ = cached.lease()
        assert not cached.manager.publish(cached.holder, other, publication).slot_taken, "another lease's"

    def test_a_repeated_claim_keeps_its_hit_and_counts_once(self):
        cached = Cached()
        writer = cached.write(TOKENS)
        short, long = (cached.publish(writer, num_tokens).entry for num_tokens in (6, 10))
        lease = cached.manager.open("r", deadline=cached.now + 60)
        for candidates in ([long, short], [long, short], [short, long]):
            assert cached.manager.claim(cached.holder, [lease], [candidates]) == (["claimed"], [long])
        prefix = cached.manager.stats().prefix
        assert (prefix.num_lookups, prefix.num_hits, prefix.num_hit_tokens) == (1, 1, 10)
        cached.check()

    def test_a_candidate_that_is_gone_gives_way_to_the_next(self):
        cached = Cached()
        writer = cached.write(TOKENS)
        short = cached.publish(writer, 6).entry
        gone = [EntryRef(short.row, short.generation + 1), EntryRef(99, 1), EntryRef(-1, short.generation)]
        assert cached.lease([*gone, short])[1] == short
        assert cached.lease(gone)[1] is None and cached.lease([])[1] is None and cached.lease(None)[1] is None
        assert cached.manager.stats().prefix.num_lookups == 3, "None looks for nothing"
        with pytest.raises(StateError, match="entry: expected a pinned one"):
            cached.reader.hit(gone[0])


class TestRefused:
    @pytest.mark.parametrize(
        ("changes", "error"),
        [
            ({"num_tokens": 0}, "num_tokens: expected 1 to 40, got 0"),
            ({"num_tokens": 41}, "num_tokens: expected 1 to 40, got 41"),
            ({"block_ids": (0, 1)}, "block_ids: expected 3 different numbers below 12"),
            ({"block_ids": (0, 1, 1)}, "block_ids: expected 3 different"),
            ({"block_ids": (0, 1, 12)}, "block_ids: expected 3 different"),
            ({"block_ids": (0, 1, -1)}, "block_ids: expected 3 different"),
            ({"block_keys": np.ones((3, 2), np.int64)}, r"block_keys: expected shape \(2, 2\), got \(3, 2\)"),
            ({"slot": 4}, "slot: expected a number below 4, got 4"),
            ({"slot": -1}, "slot: expected a number below 4, got -1"),
        ],
    )
    def test_malformed_ones_name_the_field(self, changes: dict, error: str):
        cached = Cached()
        writer = cached.write(TOKENS)
        made = vars(cached.publication(writer, 10, cached.pool.allocate_slot())) | changes
        with pytest.raises(InvalidArgument, match=error):
            cached.manager.publish(cached.holder, writer.lease, Publication(**made))
        cached.check()

    @pytest.mark.parametrize(
        "what", ["free block", "free slot", "foreign block", "cached slot", "cached block", "last block"]
    )
    def test_what_is_not_the_holders_is_not_taken(self, what: str):
        cached = Cached(num_slots=5, num_checkpoints=4)
        tables = cached.reader._tables
        writer, other = cached.write(TOKENS), cached.write((1, 2, 3, 4, 5))
        cached.publish(other, 5)
        publication = cached.publication(writer, 10, cached.pool.allocate_slot())
        made, before = vars(publication), cached.manager.stats().blocks
        if what == "free block":
            tables.block_owner[writer.block_ids[1]] = 0
        elif what == "free slot":
            tables.slot_owner[publication.slot] = 0
        elif what == "foreign block":
            tables.extents["holder"] += 1
        elif what == "cached slot":
            made["slot"] = cached.find((1, 2, 3, 4, 5))[0].row
        elif what == "cached block":
            made["block_ids"] = (other.block_ids[0], *writer.block_ids[1:3])
        else:
            made["block_ids"] = (*writer.block_ids[:2], other.block_ids[1])
        published = cached.manager.publish(cached.holder, writer.lease, Publication(**made))
        assert published == Published(None, ()) and not published.slot_taken
        assert cached.manager.stats().prefix.num_refused == 1
        assert cached.manager.stats().blocks.cached == before.cached

    def test_without_a_live_lease_or_without_checkpoints_nothing_is_published(self):
        cached = Cached()
        writer = cached.write(TOKENS)
        cached.manager.close(cached.holder, [writer.lease])
        assert cached.publish(writer, 10).entry is None
        off = Cached(num_checkpoints=0)
        writer = off.write(TOKENS)
        assert off.publish(writer, 10).entry is None and off.find(TOKENS) == []
        off.check()


class TestEviction:
    def test_the_least_recently_used_goes_when_the_pool_needs_room(self):
        cached = Cached()
        writers = [cached.write((number, *TOKENS[:7])) for number in range(3)]  # two blocks each, of twelve
        entries = [cached.publish(writer, 8).entry for writer in writers]
        for writer in writers:
            cached.end(writer)
        cached.manager.close(cached.holder, [cached.hit((0, *TOKENS))[0]])
        assert cached.pool.num_free_blocks == 6
        taken = cached.pool.allocate_blocks(7)
        assert cached.manager.stats().prefix.num_evicted == 1
        assert cached.find((0, *TOKENS)) == entries[:1] and cached.find((1, *TOKENS)) == []
        cached.pool.free_blocks(taken)
        taken = cached.pool.allocate_blocks(12)
        assert cached.manager.stats().prefix.num_entries == 0 and cached.manager.stats().slots.cached == 0
        cached.pool.free_blocks(taken)
        cached.check()

    def test_a_slot_is_enough_to_evict_for(self):
        cached = Cached()
        writer = cached.write(TOKENS)
        for num_tokens in (4, 8, 12):
            cached.publish(writer, num_tokens)
        cached.end(writer)
        assert [cached.pool.allocate_slot() for _ in range(4)]
        assert cached.manager.stats().prefix.num_entries == 0 and cached.manager.stats().blocks.cached == 0
        with pytest.raises(PoolExhausted):
            cached.pool.allocate_slot()

    def test_pinned_ones_stay(self):
        cached = Cached()
        writer = cached.write(TOKENS[:8])
        entry = cached.publish(writer, 8).entry
        assert not cached.pool.can_allocate(11) and not cached.pool.may_get_blocks
        lease, hit = cached.hit(TOKENS)
        cached.end(writer)
        assert hit.entry == entry and not cached.pool.can_allocate(11)
        assert cached.manager.unpin(cached.holder, lease, [entry, entry]) == 1
        assert cached.pool.can_allocate(11) and cached.find(TOKENS) == []
        cached.check()

    def test_a_block_goes_with_the_last_entry_that_lists_it(self):
        cached = Cached()
        writer = cached.write(TOKENS)
        cached.publish(writer, 6), cached.publish(writer, 16)
        cached.end(writer)
        cached.manager.close(cached.holder, [cached.hit(TOKENS[:6])[0]])  # now the long one is older
        assert cached.manager.stats().blocks.cached == 4 and cached.pool.can_allocate(10)
        assert cached.manager.stats().blocks.cached == 2 and len(cached.find(TOKENS)) == 1
        cached.check()

    def test_pins_of_the_dead_hold_nothing(self):
        cached = Cached()
        writer = cached.write(TOKENS)
        cached.publish(writer, 20)
        other = Holder.register(cached.state._owner, "other", lambda: cached.now)
        cached.state.holder._lock.release()  # as the kernel does for a killed process
        assert cached.manager.acquire(other.ref, 1, 12, 4, Need.WISH) is not None
        cached.manager.check_integrity()

    def test_the_bound_in_bytes(self):
        geometry = Cached().state.geometry
        cached = Cached(2 * geometry.slot_bytes + 5 * geometry.block_bytes)
        writers = [cached.write((number, *TOKENS[:7])) for number in range(3)]
        for writer in writers:
            assert cached.publish(writer, 8).slot_taken
        assert cached.manager.stats().prefix.num_entries == 3, "in use"
        cached.end(writers[1])
        assert cached.find((1, *TOKENS)) == [] and len(cached.find((0, *TOKENS))) == 1
        cached.check()

    def test_a_used_prefix_survives_its_sequence_and_its_pool(self):
        cached = Cached()
        writer = cached.write(TOKENS)
        cached.publish(writer, 10)
        cached.end(writer)
        cached.state.close()
        cached.manager.reap()
        stats = cached.manager.stats()
        assert (stats.blocks.cached, stats.blocks.free, stats.slots.cached, stats.slots.free) == (3, 9, 1, 3)
        cached.manager.check_integrity()
