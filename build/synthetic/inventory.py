"""Every tensor of a synthetic checkpoint: names, types and shapes of a layout, values by recipe.

Matrices are normal with the shape's deviation, routers with 0.1, embeddings with 1; norms vary a little around what
leaves their input as it is; decays and rates of the gated delta net have the range of trained ones.

Names and shapes are written out once more here: a wrong one in the loader cannot hide behind the same one here.

Letters: N output features, K input features, E experts, I expert width, H hidden.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from build.synthetic.layouts import Layout
from build.synthetic.values import INPUT_AMAX, Values, floats, fp8_scale, nvfp4_global_scale
from build.synthetic.writer import Entry
from qwen35.config import FULL_ATTENTION, ModelConfig, TextConfig, VisionConfig
from qwen35.nvfp4 import BLOCK_WIDTH, E2M1_MAX, E4M3_MAX
from qwen35.weights.scheme import Kind

_ROOT = "model.language_model."
_ROUTER_STD, _EMBEDDING_STD, _NORM_STD = 0.1, 1.0, 0.02


@dataclass(frozen=True)
class Recipe:
    """What values come from: the shape's deviation, and whether NVFP4 weights are the rounded dense ones of the seed
    (slow) or drawn packed (at the speed of a disk)."""

    values: Values
    matrix_std: float
    rounds_dense: bool = False


def entries_of(config: ModelConfig, layout: Layout, recipe: Recipe) -> list[Entry]:
    """In the order in which they are written."""
    text, parts = config.text, _Parts(layout, recipe)
    entries = [parts.dense(f"{_ROOT}embed_tokens.weight", (text.vocab_size, text.hidden_size), _EMBEDDING_STD)]
    for index, kind in enumerate(text.layer_types):
        entries += _layer(parts, f"{_ROOT}layers.{index}.", text, kind)
    entries.append(parts.norm(f"{_ROOT}norm.weight", text.hidden_size))
    entries += parts.linear("lm_head", (text.vocab_size, text.hidden_size), layout.kind("lm_head"))
    draft = _Parts(Layout(has_fused_experts=layout.has_fused_draft), recipe)
    if text.mtp_num_hidden_layers:
        entries += _draft(draft, text)
    if config.vision is not None:
        entries += _vision(draft, config.vision)
    return entries


def target_kinds(config: ModelConfig, layout: Layout) -> dict[str, Kind]:
    """Kind of every linear layer of the target by module name, experts one by one."""
    text, kinds = config.text, {}
    for index, kind in enumerate(text.layer_types):
        root = f"{_ROOT}layers.{index}."
        if kind == FULL_ATTENTION:
            kinds |= _named(f"{root}self_attn.", ("q_proj", "k_proj", "v_proj", "o_proj"), layout.kind("attention"))
        else:
            kinds |= _named(f"{root}linear_attn.", ("in_proj_qkv", "in_proj_z", "out_proj"), layout.kind("gated_delta"))
            kinds |= _named(f"{root}linear_attn.", ("conv1d", "in_proj_a", "in_proj_b"), Kind.DENSE)
        kinds |= _named(f"{root}mlp.", ("gate", "shared_expert_gate"), Kind.DENSE)
        shared, routed = layout.kind("shared_expert"), layout.kind("experts")
        kinds |= _named(f"{root}mlp.shared_expert.", _PROJECTIONS, shared)
        for expert in range(text.num_experts):
            kinds |= _named(f"{root}mlp.experts.{expert}.", _PROJECTIONS, routed)
    return kinds | {"lm_head": layout.kind("lm_head")}


_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def _named(root: str, names: tuple[str, ...], kind: Kind) -> dict[str, Kind]:
    return {root + name: kind for name in names}


class _Parts:
    """Entries of single modules."""

    def __init__(self, layout: Layout, recipe: Recipe) -> None:
        self.layout = layout
        self._recipe, self._values = recipe, recipe.values

    def dense(self, name: str, shape: tuple[int, ...], std: float | None = None, mean: float = 0.0) -> Entry:
        """Seeded by the module's name, the one that it has in every layout."""
        std, module = std or self._recipe.matrix_std, name.removesuffix(".weight")
        return Entry(name, "BF16", shape, lambda: self._values.normal(module, math.prod(shape), std, mean))

    def fused(self, name: str, modules: list[str], shape: tuple[int, ...]) -> Entry:
        """[E, N, K] of the values of `modules`, one after the other."""
        num_values, std = math.prod(shape) // len(modules), self._recipe.matrix_std
        return Entry(
            name,
            "BF16",
            shape,
            lambda: chain.from_iterable(self._values.normal(module, num_values, std) for module in modules),
        )

    def norm(self, name: str, width: int, mean: float = 0.0) -> Entry:
        return self.dense(name, (width,), _NORM_STD, mean)

    def linear(self, module: str, shape: tuple[int, int], kind: Kind, factor: float = 1.0) -> list[Entry]:
        """Weight [N, K] and the scales of its kind; `factor` multiplies the global scale."""
        if kind is Kind.DENSE:
            return [self.dense(f"{module}.weight", shape)]
        std = self._recipe.matrix_std
        if kind is Kind.FP8:
            return [
                Entry(f"{module}.weight", "F8_E4M3", shape, lambda: self._values.e4m3(module, math.prod(shape))),
                _scalar(f"{module}.weight_scale", fp8_scale(std)),
                _scalar(f"{module}.input_scale", INPUT_AMAX / E4M3_MAX),
            ]
        entries = [*self._packed(module, shape, std)]
        entries.append(_scalar(f"{module}.weight_scale_2", factor * nvfp4_global_scale(std)))
        if kind is Kind.NVFP4:
            entries.append(_scalar(f"{module}.input_scale", INPUT_AMAX / (E2M1_MAX * E4M3_MAX)))
        return entries

    def _packed(self, module: str, shape: tuple[int, int], std: float) -> Iterator[Entry]:
        (num_rows, width), num_values, values = shape, math.prod(shape), self._values

        def codes() -> Iterator[np.ndarray]:
            if self._recipe.rounds_dense:
                return values.rounded(module, num_values, std, scales=False)
            return values.packed_codes(module, num_values)

        def scales() -> Iterator[np.ndarray]:
            if self._recipe.rounds_dense:
                return values.rounded(module, num_values, std, scales=True)
            return values.block_scales(module, num_values)

        yield Entry(f"{module}.weight", "U8", (num_rows, width // 2), codes)
        yield Entry(f"{module}.weight_scale", "F8_E4M3", (num_rows, width // BLOCK_WIDTH), scales)


def _layer(parts: _Parts, root: str, config: TextConfig, kind: str) -> Iterator[Entry]:
    yield parts.norm(f"{root}input_layernorm.weight", config.hidden_size)
    yield parts.norm(f"{root}post_attention_layernorm.weight", config.hidden_size)
    yield from (_attention if kind == FULL_ATTENTION else _gated_delta)(parts, root, config)
    yield from _moe(parts, f"{root}mlp.", config)


def _attention(parts: _Parts, layer: str, config: TextConfig) -> Iterator[Entry]:
    root, kind, hidden = f"{layer}self_attn.", parts.layout.kind("attention"), config.hidden_size
    query, keys = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    yield from parts.linear(f"{root}q_proj", (2 * query, hidden), kind)
    yield from parts.linear(f"{root}k_proj", (keys, hidden), kind)
    yield from parts.linear(f"{root}v_proj", (keys, hidden), kind)
    yield from parts.linear(f"{root}o_proj", (hidden, query), kind)
    yield parts.norm(f"{root}q_norm.weight", config.head_dim)
    yield parts.norm(f"{root}k_norm.weight", config.head_dim)


def _gated_delta(parts: _Parts, layer: str, config: TextConfig) -> Iterator[Entry]:
    root, kind, hidden = f"{layer}linear_attn.", parts.layout.kind("gated_delta"), config.hidden_size
    key_dim = config.linear_num_key_heads * config.linear_key_head_dim
    num_heads, head_dim = config.linear_num_value_heads, config.linear_value_head_dim
    channels = 2 * key_dim + num_heads * head_dim
    yield from parts.linear(f"{root}in_proj_qkv", (channels, hidden), kind)
    yield from parts.linear(f"{root}in_proj_z", (num_heads * head_dim, hidden), kind)
    yield parts.dense(f"{root}in_proj_a.weight", (num_heads, hidden))
    yield parts.dense(f"{root}in_proj_b.weight", (num_heads, hidden))
    yield parts.dense(f"{root}conv1d.weight", (channels, 1, config.linear_conv_kernel_dim), 0.5)
    yield parts.dense(f"{root}dt_bias", (num_heads,), 1.0, mean=-2.0)
    rates = torch.linspace(1, 16, num_heads).log()  # decays of every speed
    if parts.layout.has_float32_vectors:
        yield _exact(f"{root}A_log", rates)
        yield _exact(f"{root}norm.weight", torch.ones(head_dim))
    else:
        yield _exact(f"{root}A_log", rates.bfloat16())
        yield parts.norm(f"{root}norm.weight", head_dim, mean=1.0)
    yield from parts.linear(f"{root}out_proj", (hidden, num_heads * head_dim), kind)


def _moe(parts: _Parts, root: str, config: TextConfig) -> Iterator[Entry]:
    hidden, kind = config.hidden_size, parts.layout.kind("shared_expert")
    yield parts.dense(f"{root}gate.weight", (config.num_experts, hidden), _ROUTER_STD)
    yield parts.dense(f"{root}shared_expert_gate.weight", (1, hidden))
    yield from _mlp(parts, f"{root}shared_expert.", config.shared_expert_intermediate_size, hidden, kind)
    experts, width = [f"{root}experts.{expert}." for expert in range(config.num_experts)], config.moe_intermediate_size
    if not parts.layout.has_fused_experts:
        for expert in experts:
            yield from _mlp(parts, expert, width, hidden, parts.layout.kind("experts"))
        return
    halves = [f"{expert}{half}_proj" for expert in experts for half in ("gate", "up")]
    yield parts.fused(f"{root}experts.gate_up_proj", halves, (len(experts), 2 * width, hidden))
    downs = [f"{expert}down_proj" for expert in experts]
    yield parts.fused(f"{root}experts.down_proj", downs, (len(experts), hidden, width))


def _mlp(parts: _Parts, root: str, width: int, hidden: int, kind: Kind) -> Iterator[Entry]:
    yield from parts.linear(f"{root}gate_proj", (width, hidden), kind)
    yield from parts.linear(f"{root}up_proj", (width, hidden), kind, parts.layout.up_scale)
    yield from parts.linear(f"{root}down_proj", (hidden, width), kind)


def _draft(parts: _Parts, config: TextConfig) -> Iterator[Entry]:
    yield parts.dense("mtp.fc.weight", (config.hidden_size, 2 * config.hidden_size))
    for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        yield parts.norm(f"mtp.{name}.weight", config.hidden_size)
    yield from _layer(parts, "mtp.layers.0.", config, FULL_ATTENTION)


def _vision(parts: _Parts, config: VisionConfig) -> Iterator[Entry]:
    root, width, inner = "model.visual.", config.hidden_size, config.intermediate_size
    merged = width * config.spatial_merge_size**2
    patch = (config.in_channels, config.temporal_patch_size, config.patch_size, config.patch_size)
    yield from _affine(parts, f"{root}patch_embed.proj", (width, *patch))
    yield parts.dense(f"{root}pos_embed.weight", (config.num_position_embeddings, width))
    for index in range(config.depth):
        block = f"{root}blocks.{index}."
        yield from _layer_norm(parts, f"{block}norm1", width)
        yield from _layer_norm(parts, f"{block}norm2", width)
        yield from _affine(parts, f"{block}attn.qkv", (3 * width, width))
        yield from _affine(parts, f"{block}attn.proj", (width, width))
        yield from _affine(parts, f"{block}mlp.linear_fc1", (inner, width))
        yield from _affine(parts, f"{block}mlp.linear_fc2", (width, inner))
    yield from _layer_norm(parts, f"{root}merger.norm", width)
    yield from _affine(parts, f"{root}merger.linear_fc1", (merged, merged))
    yield from _affine(parts, f"{root}merger.linear_fc2", (config.out_hidden_size, merged))


def _affine(parts: _Parts, module: str, shape: tuple[int, ...]) -> Iterator[Entry]:
    yield parts.dense(f"{module}.weight", shape)
    yield parts.dense(f"{module}.bias", (shape[0],), _NORM_STD)


def _layer_norm(parts: _Parts, module: str, width: int) -> Iterator[Entry]:
    yield parts.norm(f"{module}.weight", width, mean=1.0)
    yield parts.dense(f"{module}.bias", (width,), _NORM_STD)


def _scalar(name: str, value: float) -> Entry:
    return _exact(name, torch.tensor(value, dtype=torch.float32))


def _exact(name: str, tensor: Tensor) -> Entry:
    dtype = "F32" if tensor.dtype == torch.float32 else "BF16"
    return Entry(name, dtype, tuple(tensor.shape), lambda: iter((floats(tensor),)))
