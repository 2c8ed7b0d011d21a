"""Proposes drafts with the MTP head, and keeps its keys and values complete.

The draft's entry j holds the pair (h[j-1], x[j]): the target's hidden state before token j, and token j, at the rotary
position of j - 1. An entry depends on its own prefix alone; entry 0 does not exist.
    first pass   every input that the target has run and kept, [a, b): entries [a + 1, b + 1), all of decided tokens.
    Entry b
                 looks one token ahead: the next prompt token (its image embedding too), or the token just decided.
    later passes one entry a sequence: the draft before, and the draft's own output in place of the target's hidden
    state.
                 The next first pass overwrites them.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import Protocol

import torch
from torch import Tensor

from qwen35.engine.batch import Piece, Target, batch_view, embed
from qwen35.engine.sampler import choose
from qwen35.engine.sequence import Sequence
from qwen35.views import BatchView, CacheView


class Draft(Protocol):
    """The MTP head (``nn.draft.DraftModel``)."""

    def forward(self, embeds: Tensor, hidden: Tensor, batch: BatchView, cache: CacheView) -> Tensor:
        """[T, H], [T, H] -> hidden states after the draft's norm [T, H]."""
        ...


class Drafter:
    """``cache`` is written in place by every pass. Embeddings and logits are the target's."""

    def __init__(self, draft: Draft, target: Target, cache: CacheView, device: torch.device) -> None:
        self._draft = draft
        self._target = target
        self._cache = cache
        self._device = device

    def propose(self, pieces: SequenceOf[Piece], hidden: Tensor) -> None:
        """Sets ``drafts`` of the sequences that decode. Called after commit; ``hidden``: [T, H] of the pieces'
        inputs."""
        passes, kept = _first_pass(pieces)
        if not passes:
            return
        output = self._run(passes, hidden[torch.tensor(kept, device=self._device)])
        last = torch.tensor([piece.num_inputs for piece in passes]).cumsum(0) - 1
        self._propose([piece.sequence for piece in passes], output[last.to(self._device)])

    def _propose(self, sequences: list[Sequence], output: Tensor) -> None:
        """``output``: [S, H], the draft's output at each sequence's last decided token."""
        sequences, output = self._those_that_want_more(sequences, output)
        while sequences:
            choices = choose(self._target.logits(output), [sequence.row(sequence.drafts) for sequence in sequences])
            for sequence, token_id in zip(sequences, choices.token_ids.tolist(), strict=True):
                sequence.drafts += (token_id,)
            sequences, output = self._those_that_want_more(sequences, output)
            if sequences:
                output = self._run([_later_pass(sequence) for sequence in sequences], output)

    def _those_that_want_more(self, sequences: list[Sequence], output: Tensor) -> tuple[list[Sequence], Tensor]:
        wanting = [i for i, sequence in enumerate(sequences) if _wants_more(sequence)]
        return [sequences[i] for i in wanting], output[torch.tensor(wanting, dtype=torch.int64, device=self._device)]

    def _run(self, passes: SequenceOf[Piece], hidden: Tensor) -> Tensor:
        embeds = embed(passes, self._target, self._device)
        return self._draft.forward(embeds, hidden, batch_view(passes, self._device), self._cache)


def _first_pass(pieces: SequenceOf[Piece]) -> tuple[list[Piece], list[int]]:
    """The draft's pieces, and the indices among the target's inputs whose hidden states they pair with."""
    passes: list[Piece] = []
    kept: list[int] = []
    offset = 0
    for piece in pieces:
        sequence = piece.sequence
        num_kept = sequence.num_computed_tokens - piece.start
        if sequence.uses_draft and not sequence.is_finished:
            passes.append(Piece(sequence, piece.start + 1, num_decided=num_kept, is_draft_pass=True))
            kept.extend(range(offset, offset + num_kept))
        offset += piece.num_inputs
    return passes, kept


def _later_pass(sequence: Sequence) -> Piece:
    """The entry of the last draft, right behind those of the decided tokens and the drafts before it."""
    start = len(sequence.token_ids) + len(sequence.drafts) - 1
    return Piece(sequence, start, num_decided=0, drafts=sequence.drafts[-1:], is_draft_pass=True)


def _wants_more(sequence: Sequence) -> bool:
    return not sequence.is_prefilling and len(sequence.drafts) < sequence.num_wanted_drafts
