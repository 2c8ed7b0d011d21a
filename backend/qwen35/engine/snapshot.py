"""What a sequence has in the caches, copied to the host and back: bit for bit, with everything that is still open.

Knows where the bytes of a sequence lie, neither why they are moved nor for how long they are kept.

Letters as in ``qwen35.views``; N computed tokens, E draft entries, R pending inputs, U undrafted inputs, H hidden."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from qwen35.engine.sequence import Sequence
from qwen35.errors import StateError
from qwen35.views import CacheView

_Index: TypeAlias = tuple[Tensor | int | slice, ...]
_KV = ("keys", "values")
_STATE = ("recurrent", "conv")
_PENDING = ("pending_inputs", "pending_decay", "pending_beta")


@dataclass(frozen=True)
class Snapshot:
    """A sequence at a step boundary. Its counters mean what those of ``Sequence`` mean. Blocks and slot have no numbers
    here: it can be restored into others, of another block size too."""

    num_computed_tokens: int
    num_pending: int
    num_drafted_tokens: int
    is_draft_lost: bool
    drafts: tuple[int, ...]
    # attention{i}.keys and .values [N, Hkv, D]; draft.keys and .values [E, Hkv, D], the unused entry 0 included;
    # gated_delta{i}.recurrent [Hv, Dk, Dv], .conv [Cc, W - 1], .pending_inputs [R, Cc], .pending_decay and
    # .pending_beta [R, Hv]; undrafted [U, H]
    tensors: Mapping[str, Tensor]

    @classmethod
    def take(cls, cache: CacheView, sequence: Sequence) -> Snapshot:
        """Copies to the host; the sequence must hold its blocks and its slot, and does not change."""
        tensors = {name: cached[index].cpu() for name, cached, index in _rows(cache, sequence)}
        tensors |= {name: cached[index].to("cpu", copy=True) for name, cached, index in _slot_parts(cache, sequence)}
        if sequence.undrafted:
            tensors["undrafted"] = torch.cat(sequence.undrafted).cpu()
        return cls(
            sequence.num_computed_tokens,
            sequence.num_pending,
            sequence.num_drafted_tokens,
            sequence.is_draft_lost,
            sequence.drafts,
            tensors,
        )

    def restore(self, cache: CacheView, sequence: Sequence) -> None:
        """Writes into the blocks and the slot that the sequence holds now, and sets its counters. The caches have the
        layers, shapes and types of those that it was taken from (``check``). One that was taken where nobody drafted
        leaves holes in the draft's cache: then the sequence drafts no more."""
        sequence.num_computed_tokens, sequence.num_pending = self.num_computed_tokens, self.num_pending
        sequence.num_drafted_tokens, sequence.drafts = self.num_drafted_tokens, self.drafts[: sequence.max_draft_tokens]
        device = cache.attention[0].keys.device
        sequence.undrafted = [self.tensors["undrafted"].to(device)] if "undrafted" in self.tensors else []
        num_known = self.num_drafted_tokens + sequence.num_undrafted_tokens
        sequence.is_draft_lost = self.is_draft_lost or num_known < self.num_computed_tokens
        for name, cached, index in itertools.chain(_rows(cache, sequence), _slot_parts(cache, sequence)):
            if name in self.tensors:
                cached[index] = self.tensors[name].to(device)

    def check(self, cache: CacheView) -> None:
        """For a snapshot from elsewhere: raises StateError where the caches have other layers, shapes or types, or
        where its tensors are not those that its counters tell of."""
        expected = {name: _kind(tensor, shape) for name, tensor, shape in self._expected(cache)}
        got = {name: _kind(tensor, tensor.shape) for name, tensor in self.tensors.items()}
        names = {*expected, *(name for name in got if not name.startswith(("draft", "undrafted")))}
        for name in sorted(names):
            if expected.get(name) != got.get(name):
                raise StateError(f"session: {name}: expected {expected.get(name)}, got {got.get(name)}")
        num_open = cache.gated_delta[0].pending_inputs.shape[1] if cache.gated_delta else self.num_pending
        if self.num_pending > num_open:
            raise StateError(
                f"session: num_draft_tokens: expected at least {self.num_pending - 1} (inputs of the last verify are "
                f"still open), got {num_open - 1}"
            )

    def _expected(self, cache: CacheView) -> Iterator[tuple[str, Tensor, tuple[int, ...]]]:
        """Name of a tensor, one of its type, and its shape."""
        layers = [(f"attention{i}", view, self.num_computed_tokens) for i, view in enumerate(cache.attention)]
        if cache.draft is not None and self.num_drafted_tokens:
            layers.append(("draft", cache.draft, self.num_drafted_tokens + 1))
        for layer, view, num_rows in layers:
            for part in _KV:
                yield f"{layer}.{part}", getattr(view, part), (num_rows, *getattr(view, part).shape[2:])
        for i, view in enumerate(cache.gated_delta):
            for part in _STATE:
                yield f"gated_delta{i}.{part}", getattr(view, part), getattr(view, part).shape[1:]
            for part in _PENDING:
                shape = (self.num_pending, *getattr(view, part).shape[2:])
                yield f"gated_delta{i}.{part}", getattr(view, part), shape
        if "undrafted" in self.tensors:
            num_undrafted = self.num_computed_tokens - self.num_drafted_tokens
            yield "undrafted", cache.boundary_hidden, (num_undrafted, cache.boundary_hidden.shape[1])

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


def num_snapshot_bytes(cache: CacheView, sequence: Sequence) -> int:
    """``num_bytes`` of a snapshot that would be taken now."""
    rows = (len(index[0]) * cached[0, 0].nbytes for _, cached, index in _rows(cache, sequence))
    parts = (cached[index].nbytes for _, cached, index in _slot_parts(cache, sequence))
    return sum(rows) + sum(parts) + sum(hidden.nbytes for hidden in sequence.undrafted)


def _rows(cache: CacheView, sequence: Sequence) -> Iterator[tuple[str, Tensor, _Index]]:
    """Name, tensor of the caches and where in it they lie: keys and values of computed tokens, and the draft's, entries
    up to ``num_drafted_tokens``."""
    num_entries = sequence.num_drafted_tokens + 1 if sequence.num_drafted_tokens else 0
    layers = [(f"attention{i}", view, sequence.num_computed_tokens) for i, view in enumerate(cache.attention)]
    layers += [] if cache.draft is None else [("draft", cache.draft, num_entries)]
    block_ids = torch.tensor(sequence.block_ids, dtype=torch.int64, device=cache.attention[0].keys.device)
    for layer, view, num_rows in layers:
        position = torch.arange(num_rows, device=block_ids.device)
        block_tokens = view.keys.shape[1]
        index = (block_ids[position // block_tokens], position % block_tokens)
        for part in _KV:
            yield f"{layer}.{part}", getattr(view, part), index


def _slot_parts(cache: CacheView, sequence: Sequence) -> Iterator[tuple[str, Tensor, _Index]]:
    """The same of what lies in the slot."""
    assert sequence.slot is not None, "a sequence without a slot has nothing in the caches"
    for i, view in enumerate(cache.gated_delta):
        for part in _STATE:
            yield f"gated_delta{i}.{part}", getattr(view, part), (sequence.slot,)
        for part in _PENDING:
            yield f"gated_delta{i}.{part}", getattr(view, part), (sequence.slot, slice(sequence.num_pending))


def _kind(tensor: Tensor, shape: tuple[int, ...]) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(shape)}"
