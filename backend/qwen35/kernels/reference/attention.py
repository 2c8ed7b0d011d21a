"""Attention over paged keys and values, in tiles of fixed shape.

Keys are cut at absolute KV positions into partitions of 256, merged in ascending order by online softmax; queries go
in tiles of 16 tokens, padded. Each product has one shape, each merge one order, so a query's bits depend on the keys
it may see and on nothing else. A partition that a query may not see at all leaves its running sums as they are, bit
for bit: its maximum is -inf, its weights are exactly 0, the factor of the old sums exactly 1.

Letters: n query tokens of one sequence, q query tiles, M rows of a tile (16 * Hq / Hkv), Hkv KV heads, D head dim,
L partition length (256), P block tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qwen35.kernels.reference.elementwise import compute_dtype
from qwen35.kernels.reference.plan import BatchPlan, SequencePlan
from qwen35.nvfp4 import E4M3_MAX
from qwen35.views import KVView

PARTITION_TOKENS = 256
TILE_TOKENS = 16


def paged_attention(query: Tensor, key: Tensor, value: Tensor, view: KVView, plan: BatchPlan, scale: float) -> Tensor:
    """query [T, Hq, D], key and value [T, Hkv, D] -> [T, Hq, D]; writes keys and values into `view`."""
    index = plan.write_index(view.keys.shape[1])
    _write(view.keys, index, key, view.key_scale)
    _write(view.values, index, value, view.value_scale)
    out = torch.empty_like(query)
    for sequence in plan.sequences:
        if sequence.num_tokens:
            rows = slice(sequence.start, sequence.stop)
            out[rows] = _attend(query[rows], view, sequence, scale)
    return out


def _write(cache: Tensor, index: tuple[Tensor, Tensor], values: Tensor, scale: float) -> None:
    if cache.dtype == torch.float8_e4m3fn:
        scaled = (values.float() / scale).clamp_(-E4M3_MAX, E4M3_MAX).to(cache.dtype)
        cache.view(torch.uint8).index_put_(index, scaled.view(torch.uint8))
    else:
        cache.index_put_(index, values.to(cache.dtype))


def _attend(query: Tensor, view: KVView, sequence: SequencePlan, scale: float) -> Tensor:
    """query [n, Hq, D] of one sequence -> [n, Hq, D]."""
    tiles = _query_tiles(query, view.keys.shape[2], scale)  # [q, Hkv, M, D]
    positions = torch.arange(sequence.kv_start, sequence.kv_start + len(tiles) * TILE_TOKENS, device=query.device)
    positions = positions.view(-1, TILE_TOKENS, 1)  # [q, 16, 1]
    highest = tiles.new_full((*tiles.shape[:3], 1), float("-inf"))  # [q, Hkv, M, 1]
    total = torch.zeros_like(highest)
    mixed = torch.zeros_like(tiles)
    first = sequence.first_kv // PARTITION_TOKENS * PARTITION_TOKENS
    for start in range(first, sequence.kv_stop, PARTITION_TOKENS):
        keys, values = _partition(view, sequence, start, tiles.dtype)
        seeing = slice(max(0, (start - sequence.kv_start) // TILE_TOKENS), None)  # tiles before see none of it
        see_all = sequence.first_kv <= start and start + PARTITION_TOKENS <= sequence.kv_start + 1
        hidden = None if see_all else _hidden(positions[seeing], start, sequence.first_kv)
        _merge(tiles[seeing], keys, values, hidden, highest[seeing], total[seeing], mixed[seeing])
    mixed /= total
    num_tiles, num_kv_heads, _, width = tiles.shape
    mixed = mixed.view(num_tiles, num_kv_heads, TILE_TOKENS, -1, width).transpose(1, 2)  # [q, 16, Hkv, Hq/Hkv, D]
    return mixed.reshape(-1, *query.shape[1:])[: sequence.num_tokens].to(query.dtype)


def _query_tiles(query: Tensor, num_kv_heads: int, scale: float) -> Tensor:
    """query [n, Hq, D] -> scaled, padded, by KV head: [q, Hkv, M, D]; a tile's rows are (token, head of the group)."""
    num_tokens, num_heads, width = query.shape
    padded = query.new_zeros(num_tokens + -num_tokens % TILE_TOKENS, num_heads, width, dtype=compute_dtype(query.dtype))
    padded[:num_tokens] = query
    padded *= scale
    tiles = padded.view(-1, TILE_TOKENS, num_kv_heads, num_heads // num_kv_heads, width).transpose(1, 2)
    return tiles.reshape(tiles.shape[0], num_kv_heads, -1, width)


def _partition(view: KVView, sequence: SequencePlan, start: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Keys [Hkv, D, L] and values [Hkv, L, D] at KV positions start:start + L; zeros where the sequence has none."""
    block_tokens = view.keys.shape[1]
    stop = min(start + PARTITION_TOKENS, sequence.kv_stop)
    blocks = sequence.blocks[start // block_tokens : -(-stop // block_tokens)]
    inside = slice(start % block_tokens, start % block_tokens + stop - start)
    low = max(0, sequence.first_kv - start)

    def gather(cache: Tensor, scale: float) -> Tensor:
        is_fp8 = cache.dtype == torch.float8_e4m3fn
        rows = (cache.view(torch.uint8) if is_fp8 else cache).index_select(0, blocks).flatten(0, 1)[inside]
        rows = rows.view(cache.dtype)[low:]
        rows = rows.to(dtype).mul_(scale) if is_fp8 else rows.to(dtype)
        if len(rows) < PARTITION_TOKENS:
            full = rows.new_zeros(PARTITION_TOKENS, *rows.shape[1:])
            full[low : low + len(rows)] = rows
            rows = full
        return rows.transpose(0, 1)  # [Hkv, L, D]

    return gather(view.keys, view.key_scale).mT, gather(view.values, view.value_scale)


def _hidden(positions: Tensor, start: int, first_kv: int) -> Tensor:
    """What the queries at `positions` [q, 16, 1] may not see of a partition: [q, 1, 16, 1, L] bool."""
    keys = torch.arange(start, start + PARTITION_TOKENS, device=positions.device)  # [L]
    hidden = keys > positions
    if first_kv > start:
        hidden |= keys < first_kv
    return hidden[:, None, :, None, :]


def _merge(
    tiles: Tensor, keys: Tensor, values: Tensor, hidden: Tensor | None, highest: Tensor, total: Tensor, mixed: Tensor
) -> None:
    """One partition into the running maximum and sum [q, Hkv, M, 1] and the running mix [q, Hkv, M, D], in place."""
    num_tiles, num_kv_heads, num_rows, _ = tiles.shape
    scores = tiles.new_empty(num_tiles, num_kv_heads, num_rows, PARTITION_TOKENS)
    for tile, result in zip(tiles, scores, strict=True):
        torch.bmm(tile, keys, out=result)
    if hidden is not None:
        scores.view(num_tiles, num_kv_heads, TILE_TOKENS, -1, PARTITION_TOKENS).masked_fill_(hidden, float("-inf"))
    new_highest = torch.maximum(highest, scores.amax(-1, keepdim=True))
    weights = scores.sub_(new_highest).exp_()
    fade = highest.sub(new_highest).exp_()
    total.mul_(fade).add_(weights.sum(-1, keepdim=True))
    mixed.mul_(fade)
    highest.copy_(new_highest)
    part = torch.empty_like(tiles)
    for tile, result in zip(weights, part, strict=True):
        torch.bmm(tile, values, out=result)
    mixed.add_(part)
