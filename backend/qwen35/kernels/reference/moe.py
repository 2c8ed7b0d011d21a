"""Router and routed experts.

Each expert's rows are gathered, padded to tiles of 16, and multiplied tile by tile; a token's results are then added in
ascending expert id. Letters: T tokens, k experts a token, E experts, H hidden, I expert width, R padded rows.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from qwen35.kernels.reference.dense import DenseWeights
from qwen35.kernels.reference.elementwise import compute_dtype, silu
from qwen35.kernels.reference.linear import TILE_ROWS, quantize_activation, tiles_of
from qwen35.nvfp4 import LinearWeight


def choose(logits: Tensor, num_experts_per_tok: int) -> tuple[Tensor, Tensor]:
    """Router logits [T, E] float32 -> expert ids [T, k] ascending and their weights [T, k]; ties to the lowest id."""
    probabilities = logits.softmax(-1)
    top, ids = probabilities.sort(stable=True, dim=-1, descending=True)
    top, ids = top[:, :num_experts_per_tok].contiguous(), ids[:, :num_experts_per_tok]
    top /= top.sum(-1, keepdim=True)
    ids, order = ids.sort(-1)
    return ids, top.gather(1, order)


def moe_experts(
    dense: DenseWeights,
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    projections: tuple[LinearWeight, LinearWeight, LinearWeight],
    activations: str,
) -> Tensor:
    """x [T, H], experts and weights [T, k], projections gate, up [E, I, H] and down [E, H, I] -> [T, H]."""
    gate_proj, up_proj, down_proj = projections
    token_of_row, row_of_choice, tile_experts = _arrange(experts, gate_proj.shape[0])
    dtype = compute_dtype(x.dtype)
    rows = x.to(dtype).index_select(0, token_of_row)  # [R, H]
    gate = _multiply(dense, rows, gate_proj, tile_experts, activations)  # [R, I]
    up = _multiply(dense, rows, up_proj, tile_experts, activations)
    inner = silu(gate).mul_(up).to(x.dtype).to(dtype)
    results = _multiply(dense, inner, down_proj, tile_experts, activations)  # [R, H]
    chosen = results.index_select(0, row_of_choice).view(*experts.shape, -1) * weights.unsqueeze(-1)  # [T, k, H]
    total = chosen[:, 0]
    for rank in range(1, experts.shape[1]):
        total = total + chosen[:, rank]
    return total.to(x.dtype)


def _arrange(experts: Tensor, num_experts: int) -> tuple[Tensor, Tensor, list[int]]:
    """(token of each padded row [R], row of each choice [T * k], expert of each tile); padding repeats token 0."""
    # The tiles' experts are needed on the host anyway, and there numpy's calls cost a third of torch's.
    flat = experts.reshape(-1).cpu().numpy()
    order = flat.argsort(kind="stable")
    counts = np.bincount(flat, minlength=num_experts)
    num_tiles = -(-counts // TILE_ROWS)
    # From an expert's first row among the sorted ones to its first padded row.
    shifts = (num_tiles.cumsum() - num_tiles) * TILE_ROWS - (counts.cumsum() - counts)
    rows = np.arange(len(flat)) + shifts[flat[order]]
    row_of_choice = np.empty_like(order)
    row_of_choice[order] = rows
    token_of_row = np.zeros(int(num_tiles.sum()) * TILE_ROWS, dtype=np.int64)
    token_of_row[rows] = order // experts.shape[1]
    tile_experts = np.arange(num_experts).repeat(num_tiles).tolist()
    on_device = [torch.from_numpy(index).to(experts.device) for index in (token_of_row, row_of_choice)]
    return *on_device, tile_experts


def _multiply(
    dense: DenseWeights, rows: Tensor, stack: LinearWeight, tile_experts: list[int], activations: str
) -> Tensor:
    """rows [R, K], each tile times its expert's matrix of stack [E, N, K] -> [R, N]."""
    rows = _quantize(rows, stack, tile_experts, activations)
    out = rows.new_empty(len(rows), stack.shape[1])
    for expert, tile, result in zip(tile_experts, tiles_of(rows), tiles_of(out), strict=True):
        torch.mm(tile, dense.matrix(stack, rows.dtype, expert=expert), out=result)
    return out


def _quantize(rows: Tensor, stack: LinearWeight, tile_experts: list[int], activations: str) -> Tensor:
    scale = getattr(stack, "input_scale", None)
    if scale is not None and scale.ndim:
        scale = scale[torch.tensor(tile_experts, device=scale.device)]  # [tiles]
    tiles = rows.view(len(tile_experts), TILE_ROWS, -1)
    return quantize_activation(tiles, stack, activations, scale).view_as(rows)
