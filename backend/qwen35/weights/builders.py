"""The names and shapes of every tensor, part by part: what a model of a given configuration asks of a `TensorSource`.

Letters: H hidden, V vocabulary, E experts, I expert width, S vision hidden.
"""

from __future__ import annotations

from qwen35.config import FULL_ATTENTION, TextConfig, VisionConfig
from qwen35.nn.weight_types import (
    AffineWeights,
    AttentionWeights,
    DraftWeights,
    ExpertWeights,
    GatedDeltaWeights,
    LanguageWeights,
    LayerWeights,
    MergerWeights,
    MixerWeights,
    MLPWeights,
    MoEWeights,
    NormWeights,
    VisionBlockWeights,
    VisionWeights,
)
from qwen35.weights.names import Layout
from qwen35.weights.source import TensorSource


def language_weights(source: TensorSource, layout: Layout, config: TextConfig) -> LanguageWeights:
    """The target."""
    root, shape = layout.target_root, (config.vocab_size, config.hidden_size)
    embed_tokens = source.embedding(f"{root}embed_tokens.weight", shape)
    layers = tuple(
        _layer(source, f"{root}layers.{index}.", config, kind) for index, kind in enumerate(config.layer_types)
    )
    norm = source.vector(f"{root}norm.weight", (config.hidden_size,))
    if config.tie_word_embeddings and f"{layout.head}.weight" not in source:
        lm_head = embed_tokens if source.dtype is None else embed_tokens.to(source.dtype)
    else:
        lm_head = source.linear(layout.head, shape)
    return LanguageWeights(embed_tokens, layers, norm, lm_head)


def draft_weights(
    source: TensorSource, layout: Layout, config: TextConfig, *, rounds_experts: bool = False
) -> DraftWeights:
    """The MTP head: always one layer of full attention. `rounds_experts`: its dense experts become NVFP4."""
    root, hidden = layout.draft_root, config.hidden_size
    return DraftWeights(
        fc=source.linear(f"{root}fc", (hidden, 2 * hidden)),
        pre_fc_norm_embedding=source.vector(f"{root}pre_fc_norm_embedding.weight", (hidden,)),
        pre_fc_norm_hidden=source.vector(f"{root}pre_fc_norm_hidden.weight", (hidden,)),
        norm=source.vector(f"{root}norm.weight", (hidden,)),
        layer=_layer(source, f"{root}layers.0.", config, FULL_ATTENTION, rounds_experts),
    )


def vision_weights(source: TensorSource, layout: Layout, config: VisionConfig) -> VisionWeights:
    """The vision tower."""
    root, width = layout.vision_root, config.hidden_size
    patch_shape = (config.in_channels, config.temporal_patch_size, config.patch_size, config.patch_size)
    kernel = source.dense(f"{root}patch_embed.proj.weight", (width, *patch_shape))
    merged = width * config.spatial_merge_size**2
    return VisionWeights(
        patch_embed=AffineWeights(kernel.flatten(1), source.dense(f"{root}patch_embed.proj.bias", (width,))),
        pos_embed=source.dense(f"{root}pos_embed.weight", (config.num_position_embeddings, width)),
        blocks=tuple(_vision_block(source, f"{root}blocks.{index}.", config) for index in range(config.depth)),
        merger=MergerWeights(
            norm=_layer_norm(source, f"{root}merger.norm", width),
            linear_fc1=_affine(source, f"{root}merger.linear_fc1", merged, merged),
            linear_fc2=_affine(source, f"{root}merger.linear_fc2", config.out_hidden_size, merged),
        ),
    )


def _layer(
    source: TensorSource, root: str, config: TextConfig, kind: str, rounds_experts: bool = False
) -> LayerWeights:
    build_mixer = _attention if kind == FULL_ATTENTION else _gated_delta
    mixer_root = f"{root}self_attn." if kind == FULL_ATTENTION else f"{root}linear_attn."
    return LayerWeights(
        input_layernorm=source.vector(f"{root}input_layernorm.weight", (config.hidden_size,)),
        post_attention_layernorm=source.vector(f"{root}post_attention_layernorm.weight", (config.hidden_size,)),
        mixer=build_mixer(source, mixer_root, config),
        mlp=_moe(source, f"{root}mlp.", config, rounds_experts),
    )


def _attention(source: TensorSource, root: str, config: TextConfig) -> MixerWeights:
    hidden, head_dim = config.hidden_size, config.head_dim
    query_width, kv_width = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
    return AttentionWeights(
        q_proj=source.linear(f"{root}q_proj", (2 * query_width, hidden)),
        k_proj=source.linear(f"{root}k_proj", (kv_width, hidden)),
        v_proj=source.linear(f"{root}v_proj", (kv_width, hidden)),
        o_proj=source.linear(f"{root}o_proj", (hidden, query_width)),
        q_norm=source.vector(f"{root}q_norm.weight", (head_dim,)),
        k_norm=source.vector(f"{root}k_norm.weight", (head_dim,)),
        k_scale=source.optional_scalar(f"{root}k_proj.k_scale"),
        v_scale=source.optional_scalar(f"{root}v_proj.v_scale"),
    )


def _gated_delta(source: TensorSource, root: str, config: TextConfig) -> MixerWeights:
    hidden, num_heads, value_dim = config.hidden_size, config.linear_num_value_heads, config.value_dim
    return GatedDeltaWeights(
        in_proj_qkv=source.linear(f"{root}in_proj_qkv", (config.conv_dim, hidden)),
        in_proj_z=source.linear(f"{root}in_proj_z", (value_dim, hidden)),
        in_proj_a=source.linear(f"{root}in_proj_a", (num_heads, hidden)),
        in_proj_b=source.linear(f"{root}in_proj_b", (num_heads, hidden)),
        conv1d=source.dense(f"{root}conv1d.weight", (config.conv_dim, 1, config.linear_conv_kernel_dim)),
        A_log=source.vector(f"{root}A_log", (num_heads,)),
        dt_bias=source.vector(f"{root}dt_bias", (num_heads,)),
        norm=source.vector(f"{root}norm.weight", (config.linear_value_head_dim,)),
        out_proj=source.linear(f"{root}out_proj", (hidden, value_dim)),
    )


def _moe(source: TensorSource, root: str, config: TextConfig, rounds_experts: bool) -> MoEWeights:
    hidden, width = config.hidden_size, config.shared_expert_intermediate_size
    return MoEWeights(
        gate=source.dense(f"{root}gate.weight", (config.num_experts, hidden)),
        experts=_experts(source, f"{root}experts.", config, rounds_experts),
        shared_expert=MLPWeights(
            gate_proj=source.linear(f"{root}shared_expert.gate_proj", (width, hidden)),
            up_proj=source.linear(f"{root}shared_expert.up_proj", (width, hidden)),
            down_proj=source.linear(f"{root}shared_expert.down_proj", (hidden, width)),
        ),
        shared_expert_gate=source.dense(f"{root}shared_expert_gate.weight", (1, hidden)),
    )


def _experts(source: TensorSource, root: str, config: TextConfig, rounds_dense: bool) -> ExpertWeights:
    """Either layout. With neither on disk the fused names, the published ones, are those that are missing."""
    hidden, width, num_experts = config.hidden_size, config.moe_intermediate_size, config.num_experts
    if any(f"{root}{expert}.gate_proj.weight" in source for expert in range(num_experts)):
        shapes = {"gate_proj": (width, hidden), "up_proj": (width, hidden), "down_proj": (hidden, width)}
        return ExpertWeights(
            **{
                name: source.expert_stack(
                    [f"{root}{expert}.{name}" for expert in range(num_experts)], shape, rounds_dense=rounds_dense
                )
                for name, shape in shapes.items()
            }
        )
    up_shape, down_shape = (num_experts, width, hidden), (num_experts, hidden, width)
    gate, up = source.fused_stack(f"{root}gate_up_proj", up_shape, num_parts=2, rounds_dense=rounds_dense)
    (down,) = source.fused_stack(f"{root}down_proj", down_shape, rounds_dense=rounds_dense)
    return ExpertWeights(gate, up, down)


def _vision_block(source: TensorSource, root: str, config: VisionConfig) -> VisionBlockWeights:
    width, inner = config.hidden_size, config.intermediate_size
    return VisionBlockWeights(
        norm1=_layer_norm(source, f"{root}norm1", width),
        norm2=_layer_norm(source, f"{root}norm2", width),
        qkv=_affine(source, f"{root}attn.qkv", 3 * width, width),
        proj=_affine(source, f"{root}attn.proj", width, width),
        linear_fc1=_affine(source, f"{root}mlp.linear_fc1", inner, width),
        linear_fc2=_affine(source, f"{root}mlp.linear_fc2", width, inner),
    )


def _layer_norm(source: TensorSource, name: str, width: int) -> NormWeights:
    return NormWeights(source.vector(f"{name}.weight", (width,)), source.vector(f"{name}.bias", (width,)))


def _affine(source: TensorSource, module: str, num_rows: int, width: int) -> AffineWeights:
    return AffineWeights(source.linear(module, (num_rows, width)), source.dense(f"{module}.bias", (num_rows,)))
