"""What one pass runs: pieces of sequences, and the tensors that the model's mathematics wants for them.

Letters: S pieces, T tokens of all pieces, H hidden, R rows of logits."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from qwen35.engine.sequence import Sequence
from qwen35.views import BatchView, CacheView


class Target(Protocol):
    """The language model (``nn.language.LanguageModel``)."""

    def embed(self, token_ids: Tensor) -> Tensor:
        """[T] int64 -> [T, H]."""
        ...

    def forward(self, embeds: Tensor, batch: BatchView, cache: CacheView) -> Tensor:
        """[T, H] -> hidden states after the final norm [T, H]."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, H] -> [R, V] float32."""
        ...

    def apply_pending(self, batch: BatchView, cache: CacheView) -> None:
        """For a batch without tokens: accepted pending inputs go into the gated delta states."""
        ...


@dataclass(frozen=True)
class Piece:
    """Inputs of one sequence in one pass: its tokens [start, end), which are also their KV positions.

    The first ``num_decided`` are the sequence's own, the last ones ``drafts``. In the draft's passes entry j pairs
    token j with the hidden state of token j - 1 and has the rotary position of that.
    """

    sequence: Sequence
    start: int
    num_decided: int
    drafts: tuple[int, ...] = ()
    is_deferred: bool = False  # a verify: how many inputs the GDN state takes is known after acceptance
    is_draft_pass: bool = False

    @property
    def num_inputs(self) -> int:
        return self.num_decided + len(self.drafts)

    @property
    def end(self) -> int:
        return self.start + self.num_inputs

    @property
    def token_ids(self) -> list[int]:
        return self.sequence.token_ids[self.start : self.start + self.num_decided] + list(self.drafts)

    @property
    def rotary_positions(self) -> Tensor:
        shift = 1 if self.is_draft_pass else 0
        return self.sequence.rotary_positions(self.start - shift, self.end - shift)

    @property
    def num_rows(self) -> int:
        """Positions whose logits are needed: the golden token's and each draft's, the last prompt token's (which need
        not be among the inputs), or none."""
        is_complete = self.start + self.num_decided == len(self.sequence.token_ids)
        return 1 + len(self.drafts) if is_complete else 0


def batch_view(pieces: SequenceOf[Piece], device: torch.device) -> BatchView:
    """One entry a piece, in order; all pieces belong to the same pass (target or draft)."""
    numbers = np.array([_numbers(piece) for piece in pieces])  # [S, 6]
    bounds = np.zeros(len(pieces) + 1, np.int64)
    numbers[:, 0].cumsum(out=bounds[1:])
    kv_start, first_kv, slots, num_pending, defer = torch.from_numpy(numbers[:, 1:].T.copy()).to(device).unbind(0)
    positions = [piece.rotary_positions for piece in pieces]
    return BatchView(
        cu_tokens=torch.from_numpy(bounds).to(device),
        positions=(positions[0] if len(positions) == 1 else torch.cat(positions, dim=1)).to(device),
        kv_start=kv_start,
        first_kv=first_kv,
        block_table=_block_table(pieces).to(device),
        slots=slots,
        num_pending=num_pending,
        defer=defer.bool(),
    )


def _numbers(piece: Piece) -> tuple[int, ...]:
    """Inputs, KV start, first KV position, slot, pending inputs, deferral."""
    sequence, is_draft = piece.sequence, piece.is_draft_pass
    num_pending = 0 if is_draft else sequence.num_pending
    return piece.num_inputs, piece.start, is_draft, sequence.slot or 0, num_pending, piece.is_deferred


def pending_view(sequence: Sequence, num_inputs: int, device: torch.device) -> BatchView:
    """A pass of one sequence without tokens, that applies the first ``num_inputs`` of its pending inputs."""
    position = sequence.num_computed_tokens - sequence.num_pending + num_inputs

    def integers(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    return BatchView(
        cu_tokens=integers(0, 0),
        positions=torch.empty(3, 0, dtype=torch.int64, device=device),
        kv_start=integers(position),
        first_kv=integers(0),
        block_table=integers(*sequence.block_ids).unsqueeze(0),
        slots=integers(sequence.slot or 0),
        num_pending=integers(num_inputs),
        defer=torch.zeros(1, dtype=torch.bool, device=device),
    )


def _block_table(pieces: SequenceOf[Piece]) -> Tensor:
    table = np.zeros((len(pieces), max(len(piece.sequence.block_ids) for piece in pieces)), np.int64)
    for row, piece in zip(table, pieces, strict=True):
        row[: len(piece.sequence.block_ids)] = piece.sequence.block_ids
    return torch.from_numpy(table)


def embed(pieces: SequenceOf[Piece], target: Target, device: torch.device) -> Tensor:
    """[T, H]: the target's embeddings, with the image's own at placeholder tokens of the prompt."""
    token_ids = [token_id for piece in pieces for token_id in piece.token_ids]
    embeds = target.embed(torch.tensor(token_ids, dtype=torch.int64, device=device))
    offset = 0
    for piece in pieces:
        indices = piece.sequence.placeholder_indices
        if len(indices):
            first, last = torch.searchsorted(indices, torch.tensor([piece.start, piece.end])).tolist()
            rows = (indices[first:last] - piece.start + offset).to(device)
            embeds[rows] = piece.sequence.request.image_embeds[first:last].to(embeds)
        offset += piece.num_inputs
    return embeds


def logit_inputs(pieces: SequenceOf[Piece], hidden: Tensor) -> Tensor:
    """[R, H]: the hidden states whose logits are needed, piece by piece, out of all inputs' [T, H]. A piece without
    inputs stands at the end of a cached prompt, whose last hidden state was stored."""
    stored = [piece.sequence.boundary for piece in pieces if piece.num_inputs == 0]
    rows: list[int] = []
    offset, next_stored = 0, len(hidden)
    for piece in pieces:
        offset += piece.num_inputs
        if piece.num_inputs == 0:
            rows.append(next_stored)
            next_stored += 1
        else:
            rows.extend(range(offset - piece.num_rows, offset))
    return torch.cat([hidden, *stored])[rows] if stored else hidden[rows]
