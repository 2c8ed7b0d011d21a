"""Tensors over the cache bytes: a `CacheView` of one flat byte tensor.

Knows shapes from the geometry; neither where the bytes come from nor who owns a block or slot. Letters as in
`qwen35.views`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from qwen35.state.geometry import Geometry, Region
from qwen35.views import CacheView, GatedDeltaView, KVView

TORCH_DTYPES = {
    "fp8": torch.float8_e4m3fn,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "float64": torch.float64,
}


def view_of_bytes(flat: Tensor, geometry: Geometry, kv_scales: Sequence[tuple[float, float]] = ()) -> CacheView:
    """A `CacheView` whose tensors alias ``flat`` ([geometry.cache_bytes] uint8, any device).

    ``kv_scales``: (key, value) scales of an FP8 cache, one pair for each attention layer, the draft's last; empty: 1.
    """
    if flat.dtype != torch.uint8 or flat.numel() != geometry.cache_bytes:
        raise ValueError(f"cache bytes: expected {geometry.cache_bytes} of uint8, got {flat.numel()} of {flat.dtype}")
    num_kv_layers = geometry.num_attention_layers + geometry.has_draft
    scales = list(kv_scales) or [(1.0, 1.0)] * num_kv_layers
    if len(scales) != num_kv_layers:
        raise ValueError(f"kv_scales: expected {num_kv_layers} pairs, got {len(scales)}")
    tensors = {region.name: _tensor(flat, region) for region in geometry.regions}
    names = [f"attention{layer}" for layer in range(geometry.num_attention_layers)]
    names += ["draft"] if geometry.has_draft else []
    layers = [
        KVView(tensors[f"{name}.keys"], tensors[f"{name}.values"], *scale)
        for name, scale in zip(names, scales, strict=True)
    ]
    parts = ("recurrent", "conv", "pending_inputs", "pending_decay", "pending_beta")
    gated_delta = tuple(
        GatedDeltaView(**{part: tensors[f"gated_delta{layer}.{part}"] for part in parts})
        for layer in range(geometry.num_gated_delta_layers)
    )
    draft = layers.pop() if geometry.has_draft else None
    boundary_hidden = tensors["boundary_hidden"]
    return CacheView(attention=tuple(layers), gated_delta=gated_delta, draft=draft, boundary_hidden=boundary_hidden)


def _tensor(flat: Tensor, region: Region) -> Tensor:
    part = flat[region.offset_bytes : region.offset_bytes + region.num_bytes]
    return part.view(TORCH_DTYPES[region.dtype]).view(region.shape)
