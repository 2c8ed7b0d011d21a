"""A target and a draft that are tables, over real caches, blocks and slots.

The hidden state of a token is a hash of everything up to it, and the hash picks a row from a table of random logits:
one wrong, missing or repeated input changes all that follows. The target keeps its tokens in paged KV and a hash in the
GDN slot, and asserts at every pass that both tell the same story. The draft keeps pairs in its own KV and asserts that
they form the chain of decided tokens. So a wrong block, slot, pending count or pairing fails at once and by name.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Literal, TypeVar

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from qwen35.engine.engine import Engine
from qwen35.engine.local_store import LocalStore
from qwen35.engine.request import Emission, Request, SamplingParams
from qwen35.settings import Settings
from qwen35.state.geometry import Geometry
from qwen35.state.leases import Lease
from qwen35.state.local import LocalState
from qwen35.state.prefix import EntryRef, Publication
from qwen35.views import BatchView, CacheView, GatedDeltaView

# Byte-level pieces: letters, some with a space, two halves of "é", two parts of "€", a stray byte; then specials.
PIECES = [*"abcdefghijklmnop", "Ġ", "Ġthe", "ab", "cd", "Ã", "©", "âĤ", "¬", "ÿ", "Ċ"]
SPECIALS = ["<eos>", "<image>", "<video>", "<end>"]
MARKUP = ["<think>", "</think>"]
EOS, IMAGE, VIDEO, END, THINK, THINK_END = range(len(PIECES), len(PIECES) + len(SPECIALS) + len(MARKUP))
VOCAB_SIZE = 32
BLOCK_TOKENS = 4
_MODULUS = 67108859  # the largest prime below 2^26: products stay exact in float64
_FACTOR = 48271

T = TypeVar("T", Tensor, float)
DraftKind = Literal["right", "wrong", "mixed"]


def tokenizer() -> Tokenizer:
    made = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(PIECES)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(text, special=True) for text in SPECIALS])
    made.add_tokens([AddedToken(text, special=False) for text in MARKUP])
    return made


def chain(hashes: T, contents: T) -> T:
    """One more token behind each hash, in exact float64 integers."""
    return (hashes * _FACTOR + contents + 1.0) % _MODULUS


class FakeTarget:
    """Hidden [T, 2]: the hash, and 0 ("true logits")."""

    def __init__(self, *, seed: int = 0, num_rows: int = 997, scale: float = 2.0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.table = torch.randn(num_rows, VOCAB_SIZE, generator=generator) * scale
        self.table[:, [IMAGE, VIDEO]] = -30.0
        self.batches: list[BatchView] = []
        self.num_logit_rows = 0

    def embed(self, token_ids: Tensor) -> Tensor:
        return torch.stack([token_ids.double(), torch.zeros(len(token_ids), dtype=torch.float64)], dim=1)

    def forward(self, embeds: Tensor, batch: BatchView, cache: CacheView) -> Tensor:
        self.batches.append(batch)
        hidden = torch.zeros_like(embeds)
        for s in range(len(batch.slots)):
            start, end = batch.cu_tokens[s : s + 2].tolist()
            hidden[start:end, 0] = self._run(embeds[start:end, 0], batch, s, cache)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        self.num_logit_rows += len(hidden)
        rows = self.table[hidden[:, 0].long() % len(self.table)]
        worst = torch.nn.functional.one_hot(rows.argmin(dim=1), VOCAB_SIZE) * 1000.0
        return torch.where(hidden[:, 1:] > 0, worst, rows)

    def apply_pending(self, batch: BatchView, cache: CacheView) -> None:
        layer = cache.gated_delta[0]
        for slot, num_pending in zip(batch.slots.tolist(), batch.num_pending.tolist(), strict=True):
            self._apply(layer, slot, num_pending)

    @staticmethod
    def _apply(layer: GatedDeltaView, slot: int, num_pending: int) -> None:
        state = layer.recurrent[slot, 0, 0]  # hash, number of tokens applied
        for content in layer.pending_inputs[slot, :num_pending, 0].tolist():
            state.copy_(torch.tensor([chain(state[0].item(), content), state[1].item() + 1], dtype=torch.float64))

    def _run(self, contents: Tensor, batch: BatchView, s: int, cache: CacheView) -> Tensor:
        kv_start, slot, num_pending = (int(x[s]) for x in (batch.kv_start, batch.slots, batch.num_pending))
        layer, keys = cache.gated_delta[0], cache.attention[0].keys
        state = layer.recurrent[slot, 0, 0]  # hash, number of tokens applied
        if kv_start == 0 and num_pending == 0:
            state.zero_()
        self._apply(layer, slot, num_pending)
        *_, from_keys = itertools.accumulate(read(keys, batch, s, 0, kv_start), chain, initial=0.0)
        assert [from_keys, kv_start] == state.tolist(), "KV and GDN state disagree about the tokens so far"
        _, *hashes = itertools.accumulate(contents.tolist(), chain, initial=from_keys)
        write(keys, batch, s, kv_start, contents)
        if batch.defer[s]:
            layer.pending_inputs[slot, : len(contents), 0] = contents
        else:
            state.copy_(torch.tensor([hashes[-1], kv_start + len(contents)], dtype=torch.float64))
        return torch.tensor(hashes, dtype=torch.float64)


class FakeDraft:
    """Output [T, 2]: the hash that the target would have ("right" for ever), and a flag that spoils the logits."""

    def __init__(self, kind: DraftKind) -> None:
        self.kind = kind
        self.num_passes = 0
        self.batches: list[BatchView] = []

    def forward(self, embeds: Tensor, hidden: Tensor, batch: BatchView, cache: CacheView) -> Tensor:
        self.num_passes += 1
        self.batches.append(batch)
        hashes = chain(hidden[:, 0], embeds[:, 0])
        for s in range(len(batch.slots)):
            start, end = batch.cu_tokens[s : s + 2].tolist()
            self._store(hashes[start:end], embeds[start:end, 0], batch, s, cache)
        is_spoilt = {"right": hashes < 0, "wrong": hashes >= 0, "mixed": hashes % 3 == 0}[self.kind]
        return torch.stack([hashes, is_spoilt.double()], dim=1)

    def _store(self, hashes: Tensor, contents: Tensor, batch: BatchView, s: int, cache: CacheView) -> None:
        """Entry j: key the hash of tokens 0..j, value the content of token j."""
        assert batch.first_kv[s] == 1
        kv_start, view = int(batch.kv_start[s]), cache.draft
        end = kv_start + len(hashes)
        write(view.keys, batch, s, kv_start, hashes)
        write(view.values, batch, s, kv_start, contents)
        first = read(cache.attention[0].keys, batch, s, 0, 1)
        expected = list(itertools.accumulate(first + read(view.values, batch, s, 1, end), chain, initial=0.0))[2:]
        assert read(view.keys, batch, s, 1, end) == expected, "the draft's entries are not the chain of decided tokens"


def read(store: Tensor, batch: BatchView, s: int, start: int, end: int) -> list[float]:
    position = torch.arange(start, end)
    return store[batch.block_table[s, position // BLOCK_TOKENS], position % BLOCK_TOKENS, 0, 0].tolist()


def write(store: Tensor, batch: BatchView, s: int, start: int, values: Tensor) -> None:
    position = torch.arange(start, start + len(values))
    store[batch.block_table[s, position // BLOCK_TOKENS], position % BLOCK_TOKENS, 0, 0] = values


def config(max_context_tokens: int = 512) -> SimpleNamespace:
    return SimpleNamespace(
        text=SimpleNamespace(vocab_size=VOCAB_SIZE, max_position_embeddings=max_context_tokens),
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        eos_token_ids=frozenset({EOS}),
    )


def state(
    *, num_blocks: int = 64, num_slots: int = 4, num_draft_tokens: int = 3, num_checkpoints: int = 0
) -> LocalState:
    geometry = Geometry(
        num_blocks=num_blocks,
        block_tokens=BLOCK_TOKENS,
        num_slots=num_slots + num_checkpoints,
        num_checkpoints=num_checkpoints,
        max_context_tokens=512,
        num_attention_layers=1,
        has_draft=True,
        num_gated_delta_layers=1,
        hidden_size=2,
        num_kv_heads=1,
        head_dim=1,
        num_value_heads=1,
        key_head_dim=1,
        value_head_dim=2,
        conv_channels=1,
        conv_width=4,
        max_pending=num_draft_tokens + 1,
        dtype="float64",
        kv_dtype="float64",
        state_dtype="float64",
        max_leases=4096,
    )
    made = LocalState(geometry)
    for layer in (*made.cache.attention, made.cache.draft):
        layer.keys.fill_(math.nan)  # an entry that was never written spoils every hash
        layer.values.fill_(math.nan)
    return made


class Rig:
    """An engine over fakes, with everything that a test wants to look at."""

    def __init__(
        self,
        *,
        num_draft_tokens: int = 3,
        draft: DraftKind | None = "mixed",
        target: FakeTarget | None = None,
        num_blocks: int = 64,
        num_slots: int = 4,
        num_checkpoints: int = 0,
        interval_tokens: int = 10_000,
        num_late_steps: int = 0,
        max_batch_tokens: int = 64,
        max_context_tokens: int = 512,
        max_queued_requests: int = 64,
        **settings: object,
    ) -> None:
        """With ``num_checkpoints`` the prefix cache is on, and each request has a lease as in ``LLM``."""
        self.state = state(
            num_blocks=num_blocks,
            num_slots=num_slots,
            num_draft_tokens=num_draft_tokens,
            num_checkpoints=num_checkpoints,
        )
        self.target = target or FakeTarget()
        self.draft = FakeDraft(draft) if draft and num_draft_tokens else None
        resolved = Settings(
            num_draft_tokens=num_draft_tokens,
            block_tokens=BLOCK_TOKENS,
            num_slots=num_slots,
            num_checkpoints=num_checkpoints,
            max_batch_tokens=max_batch_tokens,
            max_queued_requests=max_queued_requests,
            **settings,
        )
        self.store = LateStore(self.state, num_late_steps)
        self.leases: dict[int, Lease] = {}
        self.engine = Engine(
            self.target,
            self.draft,
            self.state.pool,
            self.state.cache,
            tokenizer(),
            config(max_context_tokens),
            resolved,
            store=self.store if num_checkpoints else None,
        )
        self.engine._checkpoints._landmarks._interval_tokens = interval_tokens
        self.emissions: dict[int, list[Emission]] = {}

    def run(self, requests: Sequence[Request] = (), max_steps: int = 2000) -> dict[int, list[Emission]]:
        """Submits, then steps until nothing is left; the pool must be whole again."""
        for request in requests:
            self.submit(request)
        for _ in range(max_steps):
            if not self.engine.has_work:
                break
            self.step()
        assert not self.engine.has_work, f"unfinished after {max_steps} steps"
        self.store.finish(self.engine)
        self.check_pool()
        return self.emissions

    def submit(self, request: Request) -> None:
        lease, hit = self.store.open(self.engine.query(request))
        self.leases[request.uid] = lease
        self.engine.submit(replace(request, lease=lease), hit=hit)

    def step(self) -> list[Emission]:
        emissions = self.engine.step()
        self.store.tick()
        for uid in [uid for uid in self.leases if not self.engine.is_live(uid)]:
            self.store.close(self.leases.pop(uid))
        for emission in emissions:
            self.emissions.setdefault(emission.uid, []).append(emission)
        return emissions

    def check_pool(self) -> None:
        pool = self.state.pool
        pool.check_integrity()
        assert (pool.num_used_blocks, pool.num_used_slots) == (0, 0)
        check_whole(self.state)

    def token_ids(self, uid: int = 0) -> tuple[int, ...]:
        return tuple(token_id for emission in self.emissions[uid] for token_id in emission.token_ids)

    def text(self, uid: int = 0) -> str:
        return "".join(emission.text for emission in self.emissions[uid])

    def final(self, uid: int = 0) -> Emission:
        *others, last = self.emissions[uid]
        assert last.is_final and not any(emission.is_final for emission in others)
        return last


class LateStore(LocalStore):
    """Does everything ``num_late_steps`` steps after it was asked, in order, as a thread of its own would."""

    def __init__(self, state: LocalState, num_late_steps: int) -> None:
        super().__init__(state.manager, state.reader, state.holder)
        self._num_late_steps = num_late_steps
        self._queue: deque[tuple[int, Callable[[], None]]] = deque()
        self._step = 0

    def close(self, lease: Lease) -> None:
        self._put(lambda: super(LateStore, self).close(lease))

    def publish(self, lease: Lease, publication: Publication) -> None:
        self._put(lambda: super(LateStore, self).publish(lease, publication))

    def unpin(self, lease: Lease, entry: EntryRef) -> None:
        self._put(lambda: super(LateStore, self).unpin(lease, entry))

    def tick(self) -> None:
        self._step += 1
        while self._queue and self._queue[0][0] <= self._step:
            self._queue.popleft()[1]()

    def finish(self, engine: Engine) -> None:
        """Everything that is under way, and what the engine makes of the answers."""
        for _ in range(2 * self._num_late_steps + 2):
            self.tick()
            engine.step()

    def _put(self, action: Callable[[], None]) -> None:
        self._queue.append((self._step + self._num_late_steps, action))
        if self._num_late_steps == 0:
            self._queue.popleft()[1]()


def check_whole(state: LocalState) -> None:
    """Nobody has a request: every block and slot is free or cached, no lease, no pin."""
    stats = state.manager.stats()
    state.manager.check_integrity()
    for counts, free in ((stats.blocks, state.pool.num_free_blocks), (stats.slots, state.pool.num_free_slots)):
        assert free == counts.held and counts.free + counts.held + counts.cached == counts.total
    assert (stats.num_open_leases, stats.num_claimed_leases, stats.prefix.num_pins) == (0, 0, 0)


def request(
    token_ids: Sequence[int] = (0, 1, 2),
    *,
    uid: int = 0,
    image_embeds: Tensor | None = None,
    positions: Tensor | None = None,
    deadline: float = math.inf,
    priority: int = 0,
    arrival: float = 0.0,
    seed: int = 0,
    **sampling: object,
) -> Request:
    return Request(
        uid=uid,
        request_id="",
        token_ids=tuple(token_ids),
        positions=torch.arange(len(token_ids)).expand(3, -1) if positions is None else positions,
        image_embeds=torch.empty(0, 2) if image_embeds is None else image_embeds,
        sampling=SamplingParams(**{"temperature": 0.0, "max_tokens": 8, **sampling}),
        seed=seed,
        deadline=deadline,
        priority=priority,
        arrival=arrival,
    )
