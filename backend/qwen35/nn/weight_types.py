"""What the model is built from: frozen records of weights, named as the checkpoint names them.

These types know neither files nor names on disk: `weights` fills them from a checkpoint, tests from random tensors.
A `LinearWeight` is a dense tensor, an `NVFP4Tensor` or an `FP8Tensor`, always [N, K] (output features, input features).
Norms and the vectors of the gated delta net are float32; every other dense tensor has the type asked for at loading.

Letters: H hidden, V vocabulary, N output features, K input features, E experts, I expert width, D head dimension,
C channels of the convolution (2*key_dim + value_dim), U value heads, W convolution width, S vision hidden,
P features of one vision patch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor

from qwen35.nvfp4 import LinearWeight


@dataclass(frozen=True)
class MLPWeights:
    """Gated MLP (the shared expert)."""

    gate_proj: LinearWeight  # [I, H]
    up_proj: LinearWeight  # [I, H]
    down_proj: LinearWeight  # [H, I]


@dataclass(frozen=True)
class ExpertWeights:
    """The routed experts of one layer, each part one stack; gate and up may differ in their scales."""

    gate_proj: LinearWeight  # [E, I, H]
    up_proj: LinearWeight  # [E, I, H]
    down_proj: LinearWeight  # [E, H, I]


@dataclass(frozen=True)
class MoEWeights:
    """Router, routed experts, shared expert and its sigmoid gate."""

    gate: Tensor  # router [E, H]
    experts: ExpertWeights
    shared_expert: MLPWeights
    shared_expert_gate: Tensor  # [1, H]


@dataclass(frozen=True)
class AttentionWeights:
    """Full attention with a query gate interleaved per head: q_proj rows are heads * (D query + D gate)."""

    q_proj: LinearWeight  # [heads * 2D, H]
    k_proj: LinearWeight  # [kv_heads * D, H]
    v_proj: LinearWeight  # [kv_heads * D, H]
    o_proj: LinearWeight  # [H, heads * D]
    q_norm: Tensor  # [D] float32, zero-centred: (1 + w)
    k_norm: Tensor  # [D] float32, zero-centred
    k_scale: Tensor | None = None  # [] float32, scale of an FP8 key cache
    v_scale: Tensor | None = None  # [] float32


@dataclass(frozen=True)
class GatedDeltaWeights:
    """Gated delta net. The rows of in_proj_qkv are query, key, value."""

    in_proj_qkv: LinearWeight  # [C, H]
    in_proj_z: LinearWeight  # [value_dim, H]
    in_proj_a: LinearWeight  # [U, H]
    in_proj_b: LinearWeight  # [U, H]
    conv1d: Tensor  # [C, 1, W], no bias
    A_log: Tensor  # [U] float32
    dt_bias: Tensor  # [U] float32
    norm: Tensor  # [value head dimension] float32, plain w
    out_proj: LinearWeight  # [H, value_dim]


MixerWeights: TypeAlias = AttentionWeights | GatedDeltaWeights


@dataclass(frozen=True)
class LayerWeights:
    """One decoder layer."""

    input_layernorm: Tensor  # [H] float32, zero-centred
    post_attention_layernorm: Tensor  # [H] float32, zero-centred
    mixer: MixerWeights
    mlp: MoEWeights


@dataclass(frozen=True)
class LanguageWeights:
    """The target. `embed_tokens` keeps the checkpoint's type: on a CPU it is the mapped file, read row by row."""

    embed_tokens: Tensor  # [V, H]
    layers: tuple[LayerWeights, ...]
    norm: Tensor  # [H] float32, zero-centred
    lm_head: LinearWeight  # [V, H]


@dataclass(frozen=True)
class DraftWeights:
    """The MTP head: one full-attention layer of its own, embedding and head of the target."""

    fc: LinearWeight  # [H, 2H], the embedding's half first
    pre_fc_norm_embedding: Tensor  # [H] float32, zero-centred
    pre_fc_norm_hidden: Tensor  # [H] float32, zero-centred
    norm: Tensor  # [H] float32, zero-centred
    layer: LayerWeights


@dataclass(frozen=True)
class NormWeights:
    """LayerNorm with bias."""

    weight: Tensor  # [S] float32
    bias: Tensor  # [S] float32


@dataclass(frozen=True)
class AffineWeights:
    """Linear layer with bias."""

    weight: LinearWeight  # [N, K]
    bias: Tensor  # [N]


@dataclass(frozen=True)
class VisionBlockWeights:
    """One block of the vision tower: attn.qkv, attn.proj, mlp.linear_fc1, mlp.linear_fc2."""

    norm1: NormWeights
    norm2: NormWeights
    qkv: AffineWeights  # [3S, S]
    proj: AffineWeights  # [S, S]
    linear_fc1: AffineWeights  # [vision intermediate, S]
    linear_fc2: AffineWeights  # [S, vision intermediate]


@dataclass(frozen=True)
class MergerWeights:
    """Joins merge * merge patches into one embedding of the language model."""

    norm: NormWeights  # [S]
    linear_fc1: AffineWeights  # [4S, 4S]
    linear_fc2: AffineWeights  # [H, 4S]


@dataclass(frozen=True)
class VisionWeights:
    """The vision tower. `patch_embed` is the 3-D convolution as a matrix [S, P], P = (channel, time, row, column)."""

    patch_embed: AffineWeights  # [S, P]
    pos_embed: Tensor  # [positions, S]
    blocks: tuple[VisionBlockWeights, ...]
    merger: MergerWeights
