"""Caches and batches for tests of kernels and model: plain tensors, filled with garbage where nothing may be read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qwen35.config import TextConfig
from qwen35.views import BatchView, CacheView, GatedDeltaView, KVView

BLOCK_TOKENS = 16
MAX_PENDING = 6


def garbage(*shape: int, dtype: torch.dtype) -> Tensor:
    """NaN everywhere: whatever reads it shows."""
    if dtype == torch.float8_e4m3fn:
        return torch.full(shape, 0x7F, dtype=torch.uint8).view(dtype)
    return torch.full(shape, float("nan"), dtype=dtype)


def kv_view(num_blocks: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> KVView:
    shape = (num_blocks, BLOCK_TOKENS, num_kv_heads, head_dim)
    return KVView(garbage(*shape, dtype=dtype), garbage(*shape, dtype=dtype))


def gated_delta_view(config: TextConfig, num_slots: int, dtype: torch.dtype) -> GatedDeltaView:
    heads, channels = config.linear_num_value_heads, config.conv_dim
    return GatedDeltaView(
        recurrent=garbage(
            num_slots, heads, config.linear_key_head_dim, config.linear_value_head_dim, dtype=torch.float32
        ),
        conv=garbage(num_slots, channels, config.linear_conv_kernel_dim - 1, dtype=dtype),
        pending_inputs=garbage(num_slots, MAX_PENDING, channels, dtype=dtype),
        pending_decay=garbage(num_slots, MAX_PENDING, heads, dtype=torch.float32),
        pending_beta=garbage(num_slots, MAX_PENDING, heads, dtype=torch.float32),
    )


def cache_view(
    config: TextConfig,
    *,
    num_blocks: int = 64,
    num_slots: int = 8,
    dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype | None = None,
) -> CacheView:
    kv = (num_blocks, config.num_key_value_heads, config.head_dim, kv_dtype or dtype)
    return CacheView(
        attention=tuple(kv_view(*kv) for _ in range(config.num_full_attention_layers)),
        gated_delta=tuple(gated_delta_view(config, num_slots, dtype) for _ in range(config.num_gated_delta_layers)),
        draft=kv_view(*kv),
        boundary_hidden=garbage(num_slots, config.hidden_size, dtype=dtype),
    )


@dataclass
class Piece:
    """One sequence of a batch: `num_tokens` new tokens at KV position `kv_start`."""

    num_tokens: int
    kv_start: int
    slot: int
    blocks: Sequence[int]
    num_pending: int = 0
    defer: bool = False
    first_kv: int = 0
    positions: Tensor | None = None  # [3, num_tokens]; None: the KV position on all three axes


def batch_view(*sequences: Piece) -> BatchView:
    def column(name: str, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.tensor([getattr(sequence, name) for sequence in sequences], dtype=dtype)

    width = max(len(sequence.blocks) for sequence in sequences)
    table = torch.zeros(len(sequences), width, dtype=torch.int64)
    for row, sequence in zip(table, sequences, strict=True):
        row[: len(sequence.blocks)] = torch.tensor(list(sequence.blocks))
    return BatchView(
        cu_tokens=torch.cat((torch.zeros(1, dtype=torch.int64), column("num_tokens").cumsum(0))),
        positions=torch.cat([_positions(sequence) for sequence in sequences], 1),
        kv_start=column("kv_start"),
        first_kv=column("first_kv"),
        block_table=table,
        slots=column("slot"),
        num_pending=column("num_pending"),
        defer=column("defer", torch.bool),
    )


def _positions(sequence: Piece) -> Tensor:
    if sequence.positions is not None:
        return sequence.positions
    first = sequence.kv_start - sequence.first_kv
    return torch.arange(first, first + sequence.num_tokens).expand(3, -1)
