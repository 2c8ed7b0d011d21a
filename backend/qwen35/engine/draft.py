"""Proposes drafts with the MTP head, and keeps its keys and values complete.

The draft's entry j holds the pair (h[j-1], x[j]): the target's hidden state before token j, and token j, at the rotary
position of j - 1. An entry depends on its own prefix alone; entry 0 does not exist.
    first pass   every input that the target has run and kept, [a, b): entries [a + 1, b + 1), all of decided tokens.
                 Entry b looks one token ahead: the next prompt token (or image embedding), or the one just decided.
    later passes one entry a sequence: the draft before, and the draft's own output in place of the target's hidden
                 state. The next first pass overwrites them.
While a sequence pauses (draft_length 0) the hidden states of its inputs are kept, and the next first pass begins where
the last one ended: no entry is ever missing, and what is proposed then is what would have been without the pause.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from typing import Protocol

import torch
from torch import Tensor

from qwen35.engine.batch import Piece, Target, batch_view, embed
from qwen35.engine.draft_length import Costs, DraftLengths
from qwen35.engine.metrics import EngineMetrics
from qwen35.engine.sampler import choose
from qwen35.engine.sequence import Sequence
from qwen35.kernels.scan import RowScan
from qwen35.views import BatchView, CacheView


class Draft(Protocol):
    """The MTP head (``nn.draft.DraftModel``)."""

    def forward(self, embeds: Tensor, hidden: Tensor, batch: BatchView, cache: CacheView) -> Tensor:
        """[T, H], [T, H] -> hidden states after the draft's norm [T, H]."""
        ...


class Drafter:
    """``cache`` is written in place by every pass. Embeddings are the target's."""

    def __init__(
        self,
        draft: Draft,
        target: Target,
        cache: CacheView,
        device: torch.device,
        *,
        lengths: DraftLengths,
        costs: Costs,
        metrics: EngineMetrics,
        max_undrafted_tokens: int,
        row_scan: RowScan | None = None,
        logits: Callable[[Tensor], Tensor],
    ) -> None:
        """``max_undrafted_tokens``: hidden states kept for a sequence that pauses; with more it drafts no more.
        ``row_scan``: for rows of logits, see the sampler. ``logits``: [R, H] -> [R, V], -inf: not drafted."""
        self._draft = draft
        self._target = target
        self._cache = cache
        self._device = device
        self._lengths = lengths
        self._costs = costs
        self._metrics = metrics
        self._max_undrafted_tokens = max_undrafted_tokens
        self._scan = row_scan
        self._logits = logits

    def propose(self, pieces: SequenceOf[Piece], hidden: Tensor) -> None:
        """Sets ``drafts`` of the sequences that decode. Called after commit; ``hidden``: [T, H] of the pieces'
        inputs."""
        self._choose_lengths(pieces)
        passes, rows = self._first_pass(pieces, hidden)
        inputs = torch.cat(rows) if rows else hidden[:0]
        while passes:
            passes, inputs = self._pass(passes, inputs)

    def _choose_lengths(self, pieces: SequenceOf[Piece]) -> None:
        decoding: list[Sequence] = []
        for piece in pieces:
            sequence = piece.sequence
            if piece.drafts:
                num_accepted = sequence.num_computed_tokens - piece.start - 1
                self._lengths.observe(sequence, len(piece.drafts), num_accepted)
            if sequence.uses_draft and not (sequence.is_prefilling or sequence.is_finished):
                decoding.append(sequence)
        self._lengths.choose(decoding)

    def _first_pass(self, pieces: SequenceOf[Piece], hidden: Tensor) -> tuple[list[Piece], list[Tensor]]:
        """The draft's pieces, and the hidden states that each of them pairs with, [n, H]. Those of sequences that pause
        are kept, but for their prompts': a prompt is drafted as it is computed. So is what goes into a checkpoint."""
        passes: list[Piece] = []
        rows: list[Tensor] = []
        offset = 0
        for piece in pieces:
            sequence, start = piece.sequence, offset
            offset += piece.num_inputs
            if not sequence.keeps_draft:
                continue
            own = hidden[start : start + sequence.num_computed_tokens - piece.start]
            if sequence.is_finished and not sequence.lacks_draft_entries:
                if sequence.request.wants_session:
                    self._keep(sequence, own)
                continue
            if _may_pause(piece):
                self._keep(sequence, own)
                continue
            first, end = sequence.num_drafted_tokens, sequence.num_computed_tokens
            passes.append(Piece(sequence, first + 1, num_decided=end - first, is_draft_pass=True))
            rows += [*sequence.undrafted, own]
            sequence.num_drafted_tokens, sequence.undrafted = end, []
        return passes, rows

    def _keep(self, sequence: Sequence, hidden: Tensor) -> None:
        if sequence.num_undrafted_tokens + len(hidden) <= self._max_undrafted_tokens:
            sequence.undrafted.append(hidden.clone())  # the step's own tensor may be large
            return
        sequence.undrafted, sequence.is_draft_lost = [], True
        self._metrics.num_lost_drafts += 1

    def _pass(self, passes: SequenceOf[Piece], hidden: Tensor) -> tuple[list[Piece], Tensor]:
        """One pass over [T, H] and one more draft for whom it ends at the last token so far. Returns the next pass."""
        started = self._costs.clock()
        num_inputs = [piece.num_inputs for piece in passes]
        last = torch.tensor(num_inputs).cumsum(0) - 1
        output = self._run(passes, hidden)[last.to(self._device)]
        sequences, output = _those_that_want_more([piece.sequence for piece in passes], output)
        if sequences:
            rows = [sequence.row(sequence.drafts) for sequence in sequences]
            choices = choose(self._logits(output), rows, self._scan)
            for sequence, token_id in zip(sequences, choices.token_ids.tolist(), strict=True):
                sequence.drafts += (token_id,)
            self._costs.draft.add(sum(num_inputs), self._costs.clock() - started)
            sequences, output = _those_that_want_more(sequences, output)
        return [_later_pass(sequence) for sequence in sequences], output

    def _run(self, passes: SequenceOf[Piece], hidden: Tensor) -> Tensor:
        embeds = embed(passes, self._target, self._device)
        return self._draft.forward(embeds, hidden, batch_view(passes, self._device), self._cache)


def _may_pause(piece: Piece) -> bool:
    sequence = piece.sequence
    is_decode = piece.num_inputs > 0 and piece.start >= sequence.num_prompt_tokens
    return is_decode and sequence.draft_length == 0 and not sequence.lacks_draft_entries


def _those_that_want_more(sequences: list[Sequence], output: Tensor) -> tuple[list[Sequence], Tensor]:
    """``output``: [S, H], the draft's output at each sequence's last token so far."""
    wanting = [i for i, sequence in enumerate(sequences) if _wants_more(sequence)]
    return [sequences[i] for i in wanting], output[torch.tensor(wanting, dtype=torch.int64, device=output.device)]


def _later_pass(sequence: Sequence) -> Piece:
    """The entry of the last draft, right behind those of the decided tokens and the drafts before it."""
    start = len(sequence.token_ids) + len(sequence.drafts) - 1
    return Piece(sequence, start, num_decided=0, drafts=sequence.drafts[-1:], is_draft_pass=True)


def _wants_more(sequence: Sequence) -> bool:
    if sequence.is_prefilling or sequence.is_finished:
        return False
    return len(sequence.drafts) < sequence.num_wanted_drafts
