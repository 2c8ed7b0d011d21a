"""What the host must know of a batch: one record a sequence, read from the tensors once for all layers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from qwen35.views import BatchView


@dataclass(frozen=True)
class SequencePlan:
    """Half-open token range ``start:stop`` of the batch, and the numbers of one sequence."""

    start: int
    stop: int
    kv_start: int
    first_kv: int
    slot: int
    num_pending: int
    defer: bool
    blocks: Tensor  # [max_blocks] int64

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start

    @property
    def kv_stop(self) -> int:
        """KV length after this batch."""
        return self.kv_start + self.num_tokens

    @property
    def is_fresh(self) -> bool:
        """Nothing was ever applied to its gated delta state."""
        return self.kv_start == 0 and self.num_pending == 0


@dataclass(frozen=True)
class BatchPlan:
    """All sequences, and where each token's key and value go."""

    sequences: tuple[SequencePlan, ...]
    kv_positions: Tensor  # [T] int64
    token_blocks: Tensor  # [T, max_blocks], block table row of each token's sequence

    def write_index(self, block_tokens: int) -> tuple[Tensor, Tensor]:
        """(block id [T], row in the block [T]) of each token."""
        column = (self.kv_positions // block_tokens).unsqueeze(1)
        return self.token_blocks.gather(1, column).squeeze(1), self.kv_positions % block_tokens


def plan_batch(batch: BatchView) -> BatchPlan:
    """Reads a batch on the host. Raises ValueError for a token before the first KV position that it may see."""
    bounds = batch.cu_tokens.tolist()
    sequences = tuple(
        SequencePlan(*numbers)
        for numbers in zip(
            bounds[:-1],
            bounds[1:],
            batch.kv_start.tolist(),
            batch.first_kv.tolist(),
            batch.slots.tolist(),
            batch.num_pending.tolist(),
            batch.defer.tolist(),
            batch.block_table.unbind(0),
            strict=True,
        )
    )
    for sequence in sequences:
        if sequence.num_tokens and sequence.kv_start < sequence.first_kv:
            raise ValueError(f"kv_start: expected at least first_kv ({sequence.first_kv}), got {sequence.kv_start}")
    num_tokens = batch.cu_tokens.diff()  # [S]
    offset = torch.repeat_interleave(batch.kv_start - batch.cu_tokens[:-1], num_tokens, output_size=bounds[-1])  # [T]
    return BatchPlan(
        sequences,
        torch.arange(bounds[-1], device=offset.device) + offset,
        torch.repeat_interleave(batch.block_table, num_tokens, dim=0, output_size=bounds[-1]),
    )
