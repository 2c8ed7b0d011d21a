"""Runs the target over a batch and decides its tokens. Knows pieces and rows, not how the model computes."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import torch
from torch import Tensor

from qwen35.engine.accept import accept
from qwen35.engine.batch import Piece, Target, batch_view, embed, logit_rows
from qwen35.engine.draft_length import Costs
from qwen35.engine.logprobs import token_logprobs
from qwen35.engine.sampler import choose
from qwen35.engine.sequence import Decision
from qwen35.errors import InternalError
from qwen35.views import CacheView


class TargetRunner:
    """``cache`` is written in place by every run."""

    def __init__(self, target: Target, cache: CacheView, device: torch.device, costs: Costs) -> None:
        """``costs`` learns what steps of decodes alone take."""
        self._costs = costs
        self._started = 0.0
        self._target = target
        self._cache = cache
        self._device = device

    def run(self, pieces: SequenceOf[Piece]) -> Tensor:
        """Hidden states after the final norm of all inputs, [T, H]."""
        self._started = self._costs.clock()
        embeds = embed(pieces, self._target, self._device)
        return self._target.forward(embeds, batch_view(pieces, self._device), self._cache)

    def decide(self, pieces: SequenceOf[Piece], hidden: Tensor) -> list[Decision]:
        """One decision a piece: the accepted drafts and the bonus token, the first token after a prompt, or nothing."""
        rows = [piece.sequence.row(piece.drafts[:i]) for piece in pieces for i in range(piece.num_rows)]
        if not rows:
            return [Decision() for _ in pieces]
        logits = self._target.logits(hidden[logit_rows(pieces).to(self._device)])
        choices = choose(logits, rows)
        decisions: list[Decision] = []
        first = 0
        for piece in pieces:
            end = first + piece.num_rows
            own = slice(first, end)
            decisions.append(_decide(piece, logits[own], choices.token_ids[own], choices.is_valid[own]))
            first = end
        if all(piece.num_decided == 1 for piece in pieces):
            self._costs.target.add(sum(piece.num_inputs for piece in pieces), self._costs.clock() - self._started)
        return decisions


def _decide(piece: Piece, logits: Tensor, choices: SequenceOf[int], is_valid: SequenceOf[bool]) -> Decision:
    """``logits`` [k + 1, V], ``choices`` and ``is_valid`` [k + 1]; all empty for a prompt chunk in the middle."""
    if piece.num_rows == 0:
        return Decision()
    token_ids = accept(piece.drafts, [int(token_id) for token_id in choices])
    if not all(is_valid[: len(token_ids)]):
        return Decision(error=InternalError("logits: expected finite values, got NaN, infinity or all banned"))
    num_top = piece.sequence.request.sampling.logprobs
    if num_top is None:
        return Decision(token_ids)
    values = logits[: len(token_ids)].float().cpu().numpy()
    return Decision(token_ids, tuple(token_logprobs(v, t, num_top) for v, t in zip(values, token_ids, strict=True)))
