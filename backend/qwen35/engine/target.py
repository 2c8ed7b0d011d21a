"""Runs the target over a batch and decides its tokens. Knows pieces and rows, not how the model computes."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import torch
from torch import Tensor

from qwen35.engine.accept import accept
from qwen35.engine.batch import Piece, Target, batch_view, embed, logit_inputs, pending_view
from qwen35.engine.draft_length import Costs
from qwen35.engine.logprobs import token_logprobs
from qwen35.engine.sampler import choose
from qwen35.engine.sequence import Decision, Sequence
from qwen35.errors import InternalError, InvalidArgument, Qwen35Error
from qwen35.kernels.scan import RowScan
from qwen35.views import CacheView

_PROMPT_ROWS = 16  # the reference computes rows in tiles of as many


class TargetRunner:
    """``cache`` is written in place by every run."""

    def __init__(
        self,
        target: Target,
        cache: CacheView,
        device: torch.device,
        costs: Costs,
        row_scan: RowScan | None = None,
    ) -> None:
        """``costs`` learns what steps of decodes alone take. ``row_scan``: for rows of logits, see the sampler."""
        self._costs = costs
        self._scan = row_scan
        self._started = 0.0
        self._target = target
        self._cache = cache
        self._device = device

    def run(self, pieces: SequenceOf[Piece]) -> Tensor:
        """Hidden states after the final norm of all inputs, [T, H]."""
        self._started = self._costs.clock()
        running = [piece for piece in pieces if piece.num_inputs > 0]
        if not running:
            return self._cache.boundary_hidden[:0]
        embeds = embed(running, self._target, self._device)
        return self._target.forward(embeds, batch_view(running, self._device), self._cache)

    def decide(self, pieces: SequenceOf[Piece], hidden: Tensor) -> list[Decision]:
        """One decision a piece: the accepted drafts and the bonus token, the first token after a prompt, or nothing."""
        self._read_prompts(pieces, hidden)
        rows = [piece.sequence.row(piece.drafts[:i]) for piece in pieces for i in range(piece.num_rows)]
        if not rows:
            return [Decision() for _ in pieces]
        logits = self._target.logits(logit_inputs(pieces, hidden))
        choices = choose(logits, rows, self._scan)
        decisions: list[Decision] = []
        first = 0
        for piece in pieces:
            end = first + piece.num_rows
            own = slice(first, end)
            decisions.append(self._decide(piece, logits[own], choices.token_ids[own], choices.is_valid[own]))
            first = end
        if all(piece.num_decided == 1 for piece in pieces):
            self._costs.target.add(sum(piece.num_inputs for piece in pieces), self._costs.clock() - self._started)
        return decisions

    def _decide(self, piece: Piece, logits: Tensor, choices: SequenceOf[int], is_valid: SequenceOf[bool]) -> Decision:
        """``logits`` [k + 1, V], ``choices`` and ``is_valid`` [k + 1]; all empty for a prompt chunk in the middle."""
        if piece.num_rows == 0:
            return Decision()
        if not is_valid[0]:
            return Decision(error=_no_choice(piece.sequence, logits[0]))
        num_valid = (*is_valid, False).index(False)  # a row behind drafts without a choice is decided by the next step
        token_ids = accept(piece.drafts, [int(token_id) for token_id in choices])[:num_valid]
        num_top = piece.sequence.request.sampling.logprobs
        if num_top is None:
            return Decision(token_ids)
        values = logits[: len(token_ids)].float().cpu().numpy()
        return Decision(
            token_ids, tuple(token_logprobs(v, t, num_top, self._scan) for v, t in zip(values, token_ids, strict=True))
        )

    def _read_prompts(self, pieces: SequenceOf[Piece], hidden: Tensor) -> None:
        """Log probabilities of prompt tokens for those who want them, few rows at a time: a whole chunk's logits would
        take hundreds of megabytes. What is computed again after a preemption is not read again."""
        offset = 0
        for piece in pieces:
            sequence, known = piece.sequence, piece.sequence.prompt_logprobs
            shift, num_top = offset - piece.start, sequence.request.sampling.prompt_logprobs or 0
            end = min(piece.end, sequence.num_wanted_prompt_logprobs)
            while len(known) < end:
                first, last = len(known), min(end, len(known) + _PROMPT_ROWS)
                logits = self._target.logits(hidden[first + shift : last + shift]).float().cpu().numpy()
                next_ids = sequence.token_ids[first + 1 : last + 1]
                known += [token_logprobs(row, t, num_top, self._scan) for row, t in zip(logits, next_ids, strict=True)]
            offset += piece.num_inputs

    def materialise(self, sequence: Sequence, position: int) -> None:
        """Brings the gated delta state and the conv window in the sequence's slot to its first ``position`` tokens, a
        place inside the run that was accepted last: whoever copies the slot finds the state that a run of just those
        tokens leaves. Inputs behind ``position`` stay pending, and the sequence goes on as if nothing had happened.

        Raises ValueError for a position that the state has passed, or that has not been computed."""
        applied = sequence.num_computed_tokens - sequence.num_pending
        if not applied <= position <= sequence.num_computed_tokens:
            raise ValueError(
                f"position: expected {applied} to {sequence.num_computed_tokens} (applied and computed tokens), "
                f"got {position}"
            )
        num_inputs = position - applied
        if num_inputs == 0:
            return
        self._target.apply_pending(pending_view(sequence, num_inputs, self._device), self._cache)
        sequence.num_pending -= num_inputs
        for view in self._cache.gated_delta:
            for rows in (view.pending_inputs, view.pending_decay, view.pending_beta):
                own = rows[sequence.slot]
                own[: sequence.num_pending] = own[num_inputs : num_inputs + sequence.num_pending].clone()


def _no_choice(sequence: Sequence, logits: Tensor) -> Qwen35Error:
    """Why there is no token: the model's fault, or that of the request's options. ``logits``: [V], of the target."""
    if not bool(torch.isfinite(logits.max())):
        return InternalError("logits: expected finite values, got NaN or infinity")
    fault = None if sequence.processors is None else sequence.processors.fault
    if fault is not None:
        return InvalidArgument(f"structured_outputs: expected a grammar within the library's limits, got: {fault}")
    return InvalidArgument(
        "sampling: expected options that leave a token to choose, got none left (structured_outputs, "
        "allowed_token_ids, bad_words, min_tokens)"
    )
