"""A complete random checkpoint in the published layout, small enough to build in every test.

It needs neither transformers nor the project: names and shapes are written out once more here, so that a wrong name
in the loader cannot hide behind the same wrong name in its tests.

    make_tiny_checkpoint(tmp_path, seed=3, layout="per_expert", num_shards=3)

Four layers (three gated delta nets, one full attention), hidden 64, four experts (top 2), two vision blocks, one MTP
layer, 256 byte tokens and Qwen's special tokens. transformers loads it with nothing missing or unexpected but `mtp.*`.
"""

import json
import math
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

Layout = Literal["fused", "per_expert"]

SPECIAL_TOKENS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>",
    "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip
PLAIN_ADDED_TOKENS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
NUM_BYTE_TOKENS = 256
TOKEN_ID = {token: NUM_BYTE_TOKENS + i for i, token in enumerate(SPECIAL_TOKENS + PLAIN_ADDED_TOKENS)}
VOCAB_SIZE = 272
HIDDEN = 64
NUM_LAYERS = 4
LAYER_TYPES = ["linear_attention", "linear_attention", "linear_attention", "full_attention"]
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 4, 2, 32
NUM_KEY_HEADS, NUM_VALUE_HEADS, KEY_HEAD_DIM, VALUE_HEAD_DIM = 2, 4, 16, 16
KEY_DIM, VALUE_DIM = NUM_KEY_HEADS * KEY_HEAD_DIM, NUM_VALUE_HEADS * VALUE_HEAD_DIM
CONV_CHANNELS = 2 * KEY_DIM + VALUE_DIM
CONV_WIDTH = 4
NUM_EXPERTS, TOP_K, EXPERT_WIDTH = 4, 2, 32
VISION_HIDDEN, VISION_DEPTH, VISION_WIDTH, VISION_HEADS, NUM_POSITIONS = 32, 2, 64, 2, 64
MERGED = 4 * VISION_HIDDEN

CHAT_TEMPLATE = """{%- for message in messages -%}
<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content -%}
{% if part.type in ['image', 'image_url'] or part.image is defined %}<|vision_start|><|image_pad|><|vision_end|>
{%- elif part.type == 'video' or part.video is defined %}<|vision_start|><|video_pad|><|vision_end|>
{%- else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking is false %}<think>

</think>

{% else %}<think>
{% endif %}{% endif %}"""


def make_tiny_checkpoint(
    directory: Path,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    layout: Layout = "fused",
    mtp_layout: Layout | None = "per_expert",
    prefix: str = "model.language_model.",
    with_vision: bool = True,
    float32_vectors: bool = False,
    num_shards: int = 1,
) -> Path:
    """Writes a checkpoint directory and returns it.

    layout           of the target's routed experts: "fused" as published, "per_expert" as every ModelOpt export
    mtp_layout       of the draft's; None leaves `mtp.*` out
    prefix           of the language model's names
    float32_vectors  `A_log` and `linear_attn.norm` in float32 while the rest has `dtype`
    num_shards       above 1 writes model-00001-of-…safetensors with an index
    """
    directory.mkdir(parents=True, exist_ok=True)
    tensors = tiny_tensors(
        seed=seed,
        dtype=dtype,
        layout=layout,
        mtp_layout=mtp_layout,
        prefix=prefix,
        with_vision=with_vision,
        float32_vectors=float32_vectors,
    )
    write_shards(directory, tensors, num_shards)
    _write_json(directory / "config.json", tiny_config(dtype, with_draft=mtp_layout is not None))
    _write_json(directory / "generation_config.json", _generation_config())
    _write_json(directory / "preprocessor_config.json", _preprocessor_config())
    _write_tokenizer(directory)
    return directory


def tiny_tensors(
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    layout: Layout = "fused",
    mtp_layout: Layout | None = "per_expert",
    prefix: str = "model.language_model.",
    with_vision: bool = True,
    float32_vectors: bool = False,
) -> dict[str, Tensor]:
    """All tensors by name; the values of one seed are the same in every layout."""
    random = _Random(seed)
    tensors = {
        f"{prefix}embed_tokens.weight": random.matrix(VOCAB_SIZE, HIDDEN, std=1.0),
        "lm_head.weight": random.matrix(VOCAB_SIZE, HIDDEN),
        f"{prefix}norm.weight": random.vector(HIDDEN),
    }
    for index, kind in enumerate(LAYER_TYPES):
        tensors |= _prefixed(f"{prefix}layers.{index}.", _layer(random, kind, layout))
    if with_vision:
        tensors |= _prefixed("model.visual.", _vision(random))
    if mtp_layout is not None:
        tensors |= _prefixed("mtp.", _draft(random, mtp_layout))
    keep_float32 = ("A_log", "linear_attn.norm.weight") if float32_vectors else ()
    return {name: value if name.endswith(keep_float32) else value.to(dtype) for name, value in tensors.items()}


def write_shards(directory: Path, tensors: dict[str, Tensor], num_shards: int = 1) -> None:
    """Writes model.safetensors, or `num_shards` files and their index."""
    if num_shards == 1:
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        return
    names = sorted(tensors)
    weight_map = {}
    for shard in range(num_shards):
        file_name = f"model-{shard + 1:05d}-of-{num_shards:05d}.safetensors"
        part = {name: tensors[name] for name in names[shard::num_shards]}
        save_file(part, directory / file_name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file_name)
    total_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    _write_json(directory / "model.safetensors.index.json", index)


def tiny_config(dtype: torch.dtype = torch.bfloat16, *, with_draft: bool = True) -> dict:
    """config.json."""
    return {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "dtype": str(dtype).removeprefix("torch."),
        "image_token_id": TOKEN_ID["<|image_pad|>"],
        "model_type": "qwen3_5_moe",
        "text_config": {
            "attention_bias": False,
            "attention_dropout": 0.0,
            "attn_output_gate": True,
            "dtype": str(dtype).removeprefix("torch."),
            "eos_token_id": TOKEN_ID["<|endoftext|>"],
            "full_attention_interval": 4,
            "head_dim": HEAD_DIM,
            "hidden_act": "silu",
            "hidden_size": HIDDEN,
            "initializer_range": 0.02,
            "layer_types": LAYER_TYPES,
            "linear_conv_kernel_dim": CONV_WIDTH,
            "linear_key_head_dim": KEY_HEAD_DIM,
            "linear_num_key_heads": NUM_KEY_HEADS,
            "linear_num_value_heads": NUM_VALUE_HEADS,
            "linear_value_head_dim": VALUE_HEAD_DIM,
            "mamba_ssm_dtype": "float32",
            "max_position_embeddings": 512,
            "model_type": "qwen3_5_moe_text",
            "moe_intermediate_size": EXPERT_WIDTH,
            "mtp_num_hidden_layers": 1 if with_draft else 0,
            "mtp_use_dedicated_embeddings": False,
            "num_attention_heads": NUM_HEADS,
            "num_experts": NUM_EXPERTS,
            "num_experts_per_tok": TOP_K,
            "num_hidden_layers": NUM_LAYERS,
            "num_key_value_heads": NUM_KV_HEADS,
            "output_router_logits": False,
            "partial_rotary_factor": 0.25,
            "rms_norm_eps": 1e-06,
            "rope_parameters": {
                "mrope_interleaved": True,
                "mrope_section": [2, 1, 1],
                "partial_rotary_factor": 0.25,
                "rope_theta": 10000,
                "rope_type": "default",
            },
            "router_aux_loss_coef": 0.001,
            "shared_expert_intermediate_size": EXPERT_WIDTH,
            "tie_word_embeddings": False,
            "use_cache": True,
            "vocab_size": VOCAB_SIZE,
        },
        "tie_word_embeddings": False,
        "transformers_version": "5.24.0",
        "video_token_id": TOKEN_ID["<|video_pad|>"],
        "vision_config": {
            "deepstack_visual_indexes": [],
            "depth": VISION_DEPTH,
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_size": VISION_HIDDEN,
            "in_channels": 3,
            "initializer_range": 0.02,
            "intermediate_size": VISION_WIDTH,
            "model_type": "qwen3_5_moe_vision",
            "num_heads": VISION_HEADS,
            "num_position_embeddings": NUM_POSITIONS,
            "out_hidden_size": HIDDEN,
            "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
        "vision_end_token_id": TOKEN_ID["<|vision_end|>"],
        "vision_start_token_id": TOKEN_ID["<|vision_start|>"],
    }


class _Random:
    """Seeded values: matrices keep the scale of their input, zero-centred norms and vectors are small but not zero."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def matrix(self, *shape: int, std: float | None = None) -> Tensor:
        fan_in = math.prod(shape[1:]) if len(shape) != 3 else shape[-1]
        return torch.randn(*shape, generator=self.generator) * (std or fan_in**-0.5)

    def vector(self, width: int, *, mean: float = 0.0, std: float = 0.1) -> Tensor:
        return mean + std * torch.randn(width, generator=self.generator)


def _layer(random: _Random, kind: str, layout: Layout) -> dict[str, Tensor]:
    mixer = _attention(random) if kind == "full_attention" else _gated_delta(random)
    return {
        "input_layernorm.weight": random.vector(HIDDEN),
        "post_attention_layernorm.weight": random.vector(HIDDEN),
        **mixer,
        **_prefixed("mlp.", _moe(random, layout)),
    }


def _attention(random: _Random) -> dict[str, Tensor]:
    return {
        "self_attn.q_proj.weight": random.matrix(NUM_HEADS * HEAD_DIM * 2, HIDDEN),
        "self_attn.k_proj.weight": random.matrix(NUM_KV_HEADS * HEAD_DIM, HIDDEN),
        "self_attn.v_proj.weight": random.matrix(NUM_KV_HEADS * HEAD_DIM, HIDDEN),
        "self_attn.o_proj.weight": random.matrix(HIDDEN, NUM_HEADS * HEAD_DIM),
        "self_attn.q_norm.weight": random.vector(HEAD_DIM),
        "self_attn.k_norm.weight": random.vector(HEAD_DIM),
    }


def _gated_delta(random: _Random) -> dict[str, Tensor]:
    return {
        "linear_attn.in_proj_qkv.weight": random.matrix(CONV_CHANNELS, HIDDEN),
        "linear_attn.in_proj_z.weight": random.matrix(VALUE_DIM, HIDDEN),
        "linear_attn.in_proj_a.weight": random.matrix(NUM_VALUE_HEADS, HIDDEN),
        "linear_attn.in_proj_b.weight": random.matrix(NUM_VALUE_HEADS, HIDDEN),
        "linear_attn.conv1d.weight": random.matrix(CONV_CHANNELS, 1, CONV_WIDTH),
        "linear_attn.A_log": torch.rand(NUM_VALUE_HEADS, generator=random.generator) * math.log(16.0),
        "linear_attn.dt_bias": random.vector(NUM_VALUE_HEADS, mean=-2.0, std=1.0),
        "linear_attn.norm.weight": random.vector(VALUE_HEAD_DIM, mean=1.0),
        "linear_attn.out_proj.weight": random.matrix(HIDDEN, VALUE_DIM),
    }


def _moe(random: _Random, layout: Layout) -> dict[str, Tensor]:
    gate_up = random.matrix(NUM_EXPERTS, 2 * EXPERT_WIDTH, HIDDEN)
    down = random.matrix(NUM_EXPERTS, HIDDEN, EXPERT_WIDTH)
    return {
        "gate.weight": random.matrix(NUM_EXPERTS, HIDDEN, std=0.5),
        "shared_expert.gate_proj.weight": random.matrix(EXPERT_WIDTH, HIDDEN),
        "shared_expert.up_proj.weight": random.matrix(EXPERT_WIDTH, HIDDEN),
        "shared_expert.down_proj.weight": random.matrix(HIDDEN, EXPERT_WIDTH),
        "shared_expert_gate.weight": random.matrix(1, HIDDEN),
        **_prefixed("experts.", _experts(gate_up, down, layout)),
    }


def _experts(gate_up: Tensor, down: Tensor, layout: Layout) -> dict[str, Tensor]:
    if layout == "fused":
        return {"gate_up_proj": gate_up, "down_proj": down}
    tensors = {}
    for expert in range(NUM_EXPERTS):
        gate, up = gate_up[expert].chunk(2)
        tensors[f"{expert}.gate_proj.weight"] = gate.clone()
        tensors[f"{expert}.up_proj.weight"] = up.clone()
        tensors[f"{expert}.down_proj.weight"] = down[expert].clone()
    return tensors


def _draft(random: _Random, layout: Layout) -> dict[str, Tensor]:
    return {
        "fc.weight": random.matrix(HIDDEN, 2 * HIDDEN),
        "pre_fc_norm_embedding.weight": random.vector(HIDDEN),
        "pre_fc_norm_hidden.weight": random.vector(HIDDEN),
        "norm.weight": random.vector(HIDDEN),
        **_prefixed("layers.0.", _layer(random, "full_attention", layout)),
    }


def _vision(random: _Random) -> dict[str, Tensor]:
    tensors = {
        **_affine(random, "patch_embed.proj", VISION_HIDDEN, 3, 2, 16, 16),
        "pos_embed.weight": random.matrix(NUM_POSITIONS, VISION_HIDDEN, std=0.1),
        **_layer_norm(random, "merger.norm", VISION_HIDDEN),
        **_affine(random, "merger.linear_fc1", MERGED, MERGED),
        **_affine(random, "merger.linear_fc2", HIDDEN, MERGED),
    }
    for index in range(VISION_DEPTH):
        block = {
            **_layer_norm(random, "norm1", VISION_HIDDEN),
            **_layer_norm(random, "norm2", VISION_HIDDEN),
            **_affine(random, "attn.qkv", 3 * VISION_HIDDEN, VISION_HIDDEN),
            **_affine(random, "attn.proj", VISION_HIDDEN, VISION_HIDDEN),
            **_affine(random, "mlp.linear_fc1", VISION_WIDTH, VISION_HIDDEN),
            **_affine(random, "mlp.linear_fc2", VISION_HIDDEN, VISION_WIDTH),
        }
        tensors |= _prefixed(f"blocks.{index}.", block)
    return tensors


def _affine(random: _Random, name: str, *shape: int) -> dict[str, Tensor]:
    return {f"{name}.weight": random.matrix(*shape), f"{name}.bias": random.vector(shape[0])}


def _layer_norm(random: _Random, name: str, width: int) -> dict[str, Tensor]:
    return {f"{name}.weight": random.vector(width, mean=1.0), f"{name}.bias": random.vector(width)}


def _prefixed(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {prefix + name: tensor for name, tensor in tensors.items()}


def _generation_config() -> dict:
    return {
        "bos_token_id": TOKEN_ID["<|endoftext|>"],
        "do_sample": False,
        "eos_token_id": [TOKEN_ID["<|im_end|>"], TOKEN_ID["<|endoftext|>"]],
        "pad_token_id": TOKEN_ID["<|endoftext|>"],
    }


def _preprocessor_config() -> dict:
    return {
        "image_mean": [0.5, 0.5, 0.5],
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "image_std": [0.5, 0.5, 0.5],
        "merge_size": 2,
        "patch_size": 16,
        "processor_class": "Qwen3VLProcessor",
        "size": {"longest_edge": 128 * 128, "shortest_edge": 32 * 32},
        "temporal_patch_size": 2,
    }


def _write_tokenizer(directory: Path) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    for token in TOKEN_ID:
        tokenizer.add_tokens([AddedToken(token, special=token in SPECIAL_TOKENS, normalized=False)])
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "add_bos_token": False,
        "add_prefix_space": False,
        "additional_special_tokens": list(SPECIAL_TOKENS[1:]),
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "model_max_length": 512,
        "pad_token": "<|endoftext|>",
        "tokenizer_class": "PreTrainedTokenizerFast",
        "image_token": "<|image_pad|>",
        "video_token": "<|video_pad|>",
        "vision_bos_token": "<|vision_start|>",
        "vision_eos_token": "<|vision_end|>",
    }
    _write_json(directory / "tokenizer_config.json", config)
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE)


def _write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
