"""Causal convolution and the gated delta rule over state slots, with rollback by replay.

One recurrence for prefill, verify and decode: token after token, every product of one shape. The state is read once and
written once a step. After a verify the state still stands before its inputs; the next step applies the accepted ones
first, their convolution recomputed from the columns before them, and arrives at the bits of a run without drafts.

    S <- exp(g) S;   u = beta (v - S^T k);   S <- S + k u^T;   o = S^T q        (Yang et al., arXiv 2412.06464)

Letters: T tokens, N rows of all sequences (columns before, pending, new), n rows of one sequence (pending, new),
Cc conv channels, W conv width, Hk/Hv key/value heads, Dk/Dv their dims.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from qwen35.kernels.reference.elementwise import l2_norm, silu
from qwen35.kernels.reference.plan import BatchPlan, SequencePlan
from qwen35.views import GatedDeltaView


def gated_delta(
    inputs: Tensor, decay: Tensor, beta: Tensor, taps: Tensor, view: GatedDeltaView, plan: BatchPlan
) -> Tensor:
    """inputs [T, Cc], decay and beta [T, Hv], taps [W, Cc] -> [T, Hv, Dv] float32; updates `view`."""
    inputs = inputs.to(view.conv.dtype)
    beta = beta.to(view.pending_beta.dtype)
    columns = [_columns(inputs, view, sequence) for sequence in plan.sequences]  # each [W - 1 + pending + new, Cc]
    gates = [_gates(decay, beta, view, sequence) for sequence in plan.sequences]
    steps = _steps(_convolve(columns, taps), gates, view, len(taps) - 1)
    out = decay.new_empty(len(inputs), *view.recurrent.shape[1::2], dtype=torch.float32)  # [T, Hv, Dv]
    for sequence, column, step in zip(plan.sequences, columns, steps, strict=True):
        _run(sequence, column, step, view, out[sequence.start : sequence.stop])
        if sequence.defer:
            _keep_pending(sequence, inputs, decay, beta, view)
    return out


def _columns(inputs: Tensor, view: GatedDeltaView, sequence: SequencePlan) -> Tensor:
    """Inputs of the convolution: the W - 1 before, the accepted pending ones, the new ones, [rows, Cc]."""
    before = view.conv[sequence.slot].t()  # [W - 1, Cc]
    if sequence.is_fresh:
        before = torch.zeros_like(before)
    pending = view.pending_inputs[sequence.slot, : sequence.num_pending]
    return torch.cat((before, pending, inputs[sequence.start : sequence.stop]))


def _gates(decay: Tensor, beta: Tensor, view: GatedDeltaView, sequence: SequencePlan) -> tuple[Tensor, Tensor]:
    """Log decay and beta of the pending and the new inputs, each [pending + new, Hv] float32."""
    slot, count, rows = sequence.slot, sequence.num_pending, slice(sequence.start, sequence.stop)
    return (
        torch.cat((view.pending_decay[slot, :count], decay[rows])),
        torch.cat((view.pending_beta[slot, :count], beta[rows])).float(),
    )


def _convolve(columns: list[Tensor], taps: Tensor) -> Tensor:
    """All sequences in one row [N, Cc] -> silu of the convolution [N - W + 1, Cc] float32.

    The last W - 1 rows of a sequence look into the next one; nobody reads them."""
    line = torch.cat(columns).float()
    num_rows = len(line) - len(taps) + 1
    mixed = line[:num_rows] * taps[0]
    for offset in range(1, len(taps)):
        mixed += line[offset : offset + num_rows] * taps[offset]
    return silu(mixed)


@dataclass(frozen=True)
class _Steps:
    """What the recurrence of one sequence reads, one row a token; beta is already in the first row of readers."""

    readers: Tensor  # [n, Hv, 2, Dk]: beta * k, q
    keys: Tensor  # [n, Hv, Dk, 1]
    values: Tensor  # [n, Hv, 1, Dv]: beta * v
    decay: Tensor  # [n, Hv, 1, 1]
    overlap: Tensor  # [n, Hv, 1]: q . k


def _steps(
    mixed: Tensor, gates: list[tuple[Tensor, Tensor]], view: GatedDeltaView, num_before: int
) -> Iterator[_Steps]:
    """Splits the convolved rows [N - W + 1, Cc] by sequence; the heads' arithmetic is done for all rows at once."""
    _, num_heads, key_width, value_width = view.recurrent.shape
    counts = [len(decay) for decay, _ in gates]
    bounds = [0]
    for count in counts[:-1]:
        bounds.append(bounds[-1] + count + num_before)
    rows = torch.cat([mixed[low : low + count] for low, count in zip(bounds, counts, strict=True)])  # [n of all, Cc]
    decay = torch.cat([decay for decay, _ in gates]).exp_()[:, :, None, None]
    beta = torch.cat([beta for _, beta in gates])[:, :, None]  # [n, Hv, 1]
    key_dim = (rows.shape[1] - num_heads * value_width) // 2
    query, key, value = rows.split((key_dim, key_dim, num_heads * value_width), 1)
    query = _per_value_head(query, key_width, num_heads) * key_width**-0.5
    key = _per_value_head(key, key_width, num_heads)  # [n, Hv, Dk]
    value = value.unflatten(1, (num_heads, value_width)) * beta
    every = (
        torch.stack((key * beta, query), 2), key.unsqueeze(-1), value.unsqueeze(2), decay, (query * key).sum(-1, True),
    )  # fmt: skip
    return (_Steps(*parts) for parts in zip(*(tensor.split(counts) for tensor in every), strict=True))


def _per_value_head(rows: Tensor, key_width: int, num_heads: int) -> Tensor:
    """[n, Hk * Dk] -> normalised [n, Hv, Dk]; consecutive value heads share a key head."""
    heads = l2_norm(rows.unflatten(1, (-1, key_width)))
    return heads.repeat_interleave(num_heads // heads.shape[1], 1) if heads.shape[1] != num_heads else heads


def _run(sequence: SequencePlan, columns: Tensor, steps: _Steps, view: GatedDeltaView, out: Tensor) -> None:
    """Applies pending and new inputs, writes state and window once, fills out [T_s, Hv, Dv]."""
    slot, count = sequence.slot, sequence.num_pending
    state = view.recurrent[slot].clone()
    if sequence.is_fresh:
        state.zero_()
    num_inputs = len(steps.keys)
    reads = torch.empty_like(steps.readers[..., :1].expand(*steps.readers.shape[:3], out.shape[-1]))  # [n, Hv, 2, Dv]
    updates = torch.empty_like(steps.values)
    num_before = view.conv.shape[-1]
    _recur(state, steps, reads, updates, 0, count)
    num_applied = count if sequence.defer else num_inputs
    if sequence.defer:
        view.recurrent[slot] = state
    _recur(state, steps, reads, updates, count, num_inputs)
    if not sequence.defer:
        view.recurrent[slot] = state
    view.conv[slot] = columns[num_applied : num_applied + num_before].t()
    new = slice(count, None)
    torch.add(reads[new, :, 1], steps.overlap[new] * updates[new, :, 0], out=out)


def _recur(state: Tensor, steps: _Steps, reads: Tensor, updates: Tensor, start: int, stop: int) -> None:
    """Tokens start:stop into state [Hv, Dk, Dv] in place. reads row 0: beta S^T k, row 1: S^T q before the update."""
    window = slice(start, stop)
    parts = (steps.decay, steps.readers, steps.keys, steps.values, reads, updates)
    for decay, reader, key, value, read, update in zip(*(part[window] for part in parts), strict=True):
        state.mul_(decay)
        torch.bmm(reader, state, out=read)
        torch.sub(value, read[:, :1], out=update)
        state.baddbmm_(key, update)


def _keep_pending(sequence: SequencePlan, inputs: Tensor, decay: Tensor, beta: Tensor, view: GatedDeltaView) -> None:
    slot, count, rows = sequence.slot, sequence.num_tokens, slice(sequence.start, sequence.stop)
    if count > view.pending_inputs.shape[1]:
        raise ValueError(
            f"deferred inputs of slot {slot}: expected at most {view.pending_inputs.shape[1]} "
            f"(largest draft length + 1), got {count}"
        )
    view.pending_inputs[slot, :count] = inputs[rows]
    view.pending_decay[slot, :count] = decay[rows]
    view.pending_beta[slot, :count] = beta[rows]
