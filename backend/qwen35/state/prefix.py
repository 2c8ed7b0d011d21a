"""Prefixes of token sequences: their names (digests), what an llm tells of one, and how it finds one without a lock.

An entry of the prefix cache stands for exactly the first p tokens of a sequence: one slot with the state behind them
and the hidden state of the last, and the KV blocks that cover them. Two sequences with one digest have the same tokens
and the same images at the same places, so their caches hold the same bits. Letters as in `qwen35.views`."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from qwen35.errors import StateError
from qwen35.state.tables import ENTRY_READY, Tables

MAX_CANDIDATES = 4
KEY_BYTES = 16
TOKEN_BYTES = 4

ImageSpan = tuple[str, int, int]  # digest of the content, offset of its first token, number of its tokens


@dataclass(frozen=True)
class EntryRef:
    """Names an entry: its row, which is also its slot, and the generation that the row had."""

    row: int
    generation: int


@dataclass(frozen=True)
class Hit:
    """An entry with all that a reader needs. Valid while it is pinned. Rows behind ``num_tokens`` in the last block may
    be written by somebody else; nothing else is written any more."""

    entry: EntryRef
    num_tokens: int
    slot: int
    block_ids: tuple[int, ...]  # ceil(num_tokens / P)
    has_draft: bool  # the draft's KV entries 1 to num_tokens - 1 are there


@dataclass(frozen=True, eq=False)
class Publication:
    """A committed prefix that its writer offers. ``slot`` holds the state after exactly ``num_tokens`` tokens, nothing
    pending, and their boundary hidden state. Blocks are the writer's or cached ones that it has pinned."""

    num_tokens: int
    digest: tuple[int, int]  # of `PrefixHasher.digest`
    block_ids: tuple[int, ...]  # ceil(num_tokens / P)
    block_keys: np.ndarray  # [num_tokens // P, 2] int64 of `PrefixHasher.block_keys`
    slot: int
    has_draft: bool


@dataclass(frozen=True)
class Published:
    """What became of a publication. With an ``entry``, which is then pinned for the lease, the slot and
    ``taken_blocks`` belong to the cache, the writer's other blocks stay its own. Without one nothing has changed."""

    entry: EntryRef | None
    taken_blocks: tuple[int, ...] = ()

    @property
    def slot_taken(self) -> bool:
        return self.entry is not None


class PrefixHasher:
    """Names the prefixes of one sequence: a chain of 128-bit digests over its blocks, made as far as it is asked for.

    An image's digest and place are part of every block that it touches. Not thread-safe. Names of different ``salt``
    never meet: a process whose blocks nobody else can read needs one of its own."""

    def __init__(
        self, token_ids: Sequence[int], images: Sequence[ImageSpan] = (), *, block_tokens: int, salt: str = ""
    ) -> None:
        self._block_tokens = block_tokens
        self._tokens = bytearray(np.asarray(token_ids, "<i4").tobytes())
        root = hashlib.blake2b(salt.encode(), digest_size=KEY_BYTES).digest()
        self._chain = bytearray(root)  # key of the empty prefix, then one for each full block
        self._images: dict[int, list[tuple[int, bytes]]] = defaultdict(list)  # block -> offset, name of an image in it
        for digest, offset, num_tokens in sorted(images, key=lambda image: image[1]):
            name = hashlib.blake2b(f"{digest} {offset} {num_tokens}".encode(), digest_size=KEY_BYTES).digest()
            for block in range(offset // block_tokens, -(-(offset + num_tokens) // block_tokens)):
                self._images[block].append((offset, name))

    @property
    def num_tokens(self) -> int:
        return len(self._tokens) // TOKEN_BYTES

    def extend(self, token_ids: Sequence[int]) -> None:
        """Tokens that were generated."""
        self._tokens += np.asarray(token_ids, "<i4").tobytes()

    def digest(self, num_tokens: int) -> tuple[int, int]:
        """Name of the first ``num_tokens`` tokens: two integers of 64 bits."""
        self._require(num_tokens)
        block = num_tokens // self._block_tokens
        self._advance(block)
        last = self._contents(block, num_tokens)
        made = hashlib.blake2b(
            self._chain[block * KEY_BYTES : (block + 1) * KEY_BYTES] + num_tokens.to_bytes(8, "little") + last,
            digest_size=KEY_BYTES,
            person=b"prefix",
        ).digest()
        return int.from_bytes(made[:8], "little", signed=True), int.from_bytes(made[8:], "little", signed=True)

    def block_keys(self, num_tokens: int) -> np.ndarray:
        """[num_tokens // P, 2] int64: names of the full blocks, each with everything before it."""
        self._require(num_tokens)
        num_blocks = num_tokens // self._block_tokens
        self._advance(num_blocks)
        return np.frombuffer(bytes(self._chain[KEY_BYTES : (num_blocks + 1) * KEY_BYTES]), "<i8").reshape(-1, 2)

    def _advance(self, num_blocks: int) -> None:
        """The chain over the first ``num_blocks`` blocks, which are full."""
        num_bytes, images, blake2b = self._block_tokens * TOKEN_BYTES, self._images, hashlib.blake2b
        chain, key = self._chain, bytes(self._chain[-KEY_BYTES:])
        tokens = memoryview(self._tokens)
        for block in range(len(chain) // KEY_BYTES - 1, num_blocks):
            made = blake2b(key, digest_size=KEY_BYTES, person=b"block")
            made.update(tokens[block * num_bytes : (block + 1) * num_bytes])
            if block in images:
                made.update(self._names(block, (block + 1) * self._block_tokens))
            key = made.digest()
            chain += key

    def _contents(self, block: int, end: int) -> bytes:
        """Tokens of a block before position ``end``, and the images among them."""
        first = block * self._block_tokens * TOKEN_BYTES
        return bytes(self._tokens[first : end * TOKEN_BYTES]) + self._names(block, end)

    def _names(self, block: int, end: int) -> bytes:
        return b"".join(name for offset, name in self._images.get(block, ()) if offset < end)

    def _require(self, num_tokens: int) -> None:
        if not 1 <= num_tokens <= self.num_tokens:
            raise ValueError(f"num_tokens: expected 1 to {self.num_tokens}, got {num_tokens}")


class PrefixReader:
    """Looks into the entries without a lock. What it finds may be gone a moment later: only a pin holds an entry."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables

    def candidates(self, hasher: PrefixHasher, max_tokens: int, needs_draft: bool) -> list[EntryRef]:
        """Up to `MAX_CANDIDATES` entries that are prefixes of the sequence with at most ``max_tokens`` tokens, the
        longest first."""
        ready, rows = self._ready(needs_draft)
        fits = rows["num_tokens"] <= min(max_tokens, hasher.num_tokens)
        ready, rows = ready[fits], rows[fits]
        found: list[EntryRef] = []
        for index in np.lexsort((-rows["has_draft"], -rows["num_tokens"])):
            row = rows[index]
            if hasher.digest(int(row["num_tokens"])) == (row["digest_low"], row["digest_high"]):
                found.append(EntryRef(int(ready[index]), int(row["generation"])))
                if len(found) == MAX_CANDIDATES:
                    break
        return found

    def contains(self, hasher: PrefixHasher, num_tokens: int, has_draft: bool) -> bool:
        """Whether an entry of exactly so many tokens is there, with the draft's half if that is asked for."""
        low, high = hasher.digest(num_tokens)
        _, rows = self._ready(has_draft)
        return bool(np.any((rows["digest_low"] == low) & (rows["digest_high"] == high)))

    def hit(self, entry: EntryRef) -> Hit:
        """What a pinned entry holds; `StateError` when it isn't there any more."""
        row = self._tables.entries[entry.row]
        if row["state"] != ENTRY_READY or row["generation"] != entry.generation:
            raise StateError(f"entry: expected a pinned one, got row {entry.row} of generation {entry.generation}")
        num_tokens = int(row["num_tokens"])
        num_blocks = -(-num_tokens // self._tables.geometry.block_tokens)
        block_ids = tuple(self._tables.entry_blocks[entry.row, :num_blocks].tolist())
        return Hit(entry, num_tokens, entry.row, block_ids, bool(row["has_draft"]))

    def _ready(self, needs_draft: bool) -> tuple[np.ndarray, np.ndarray]:
        """Numbers and copies of the rows of ready entries, each read whole: a writer changes the generation first."""
        entries = self._tables.entries
        before = entries["generation"].copy()
        rows = entries.copy()
        is_whole = (before == rows["generation"]) & (before == entries["generation"])
        chosen = np.flatnonzero(is_whole & (rows["state"] == ENTRY_READY) & (rows["has_draft"] >= needs_draft))
        return chosen, rows[chosen]
