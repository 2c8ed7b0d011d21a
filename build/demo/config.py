"""Sizes and configuration files of the demo checkpoint (Qwen3_5MoeForConditionalGeneration, published layout)."""

import json
from pathlib import Path

CHECKPOINT_DIR = Path(__file__).parent / "checkpoint"
WORK_DIR = Path(__file__).parents[2] / ".cache" / "demo-train"  # state of the training stages

NUM_BPE_TOKENS = 990
SPECIAL_TOKENS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>",
    "<|box_start|>", "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>",
    "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip
PLAIN_ADDED_TOKENS = (
    "<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>",
    "<|repo_name|>", "<|file_sep|>", "<tool_response>", "</tool_response>", "<think>", "</think>",
)  # fmt: skip
VOCAB_SIZE = 1024
TOKEN_ID = {token: NUM_BPE_TOKENS + i for i, token in enumerate(SPECIAL_TOKENS + PLAIN_ADDED_TOKENS)}

VISION_WIDTH = 128
PATCH = 16
MERGE = 2
TEMPORAL_PATCH = 2
MIN_PIXELS = 64 * 64
MAX_PIXELS = 192 * 192

NUM_LAYERS = 8
FULL_ATTENTION_INTERVAL = 4
LAYER_TYPES = [
    "full_attention" if (i + 1) % FULL_ATTENTION_INTERVAL == 0 else "linear_attention" for i in range(NUM_LAYERS)
]


def text_config() -> dict:
    """Language model part of config.json."""
    return {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_output_gate": True,
        "dtype": "bfloat16",
        "eos_token_id": TOKEN_ID["<|endoftext|>"],
        "full_attention_interval": FULL_ATTENTION_INTERVAL,
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 128,
        "initializer_range": 0.02,
        "layer_types": LAYER_TYPES,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_value_head_dim": 32,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 4096,
        "model_type": "qwen3_5_moe_text",
        "moe_intermediate_size": 64,
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "num_attention_heads": 4,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "num_hidden_layers": NUM_LAYERS,
        "num_key_value_heads": 2,
        "output_router_logits": False,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [3, 3, 2],
            "partial_rotary_factor": 0.25,
            "rope_theta": 10000,
            "rope_type": "default",
        },
        "partial_rotary_factor": 0.25,
        "router_aux_loss_coef": 0.001,
        "shared_expert_intermediate_size": 64,
        "tie_word_embeddings": False,
        "use_cache": True,
        "vocab_size": VOCAB_SIZE,
    }


def vision_config() -> dict:
    """Vision tower part of config.json."""
    return {
        "deepstack_visual_indexes": [],
        "depth": 4,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_size": 128,
        "in_channels": 3,
        "initializer_range": 0.02,
        "intermediate_size": 256,
        "model_type": "qwen3_5_moe_vision",
        "num_heads": 4,
        "num_position_embeddings": 256,
        "out_hidden_size": 128,
        "patch_size": PATCH,
        "spatial_merge_size": MERGE,
        "temporal_patch_size": TEMPORAL_PATCH,
    }


def model_config() -> dict:
    """The whole config.json."""
    return {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "dtype": "bfloat16",
        "image_token_id": TOKEN_ID["<|image_pad|>"],
        "model_type": "qwen3_5_moe",
        "text_config": text_config(),
        "tie_word_embeddings": False,
        "transformers_version": "5.24.0",
        "video_token_id": TOKEN_ID["<|video_pad|>"],
        "vision_config": vision_config(),
        "vision_end_token_id": TOKEN_ID["<|vision_end|>"],
        "vision_start_token_id": TOKEN_ID["<|vision_start|>"],
    }


def generation_config() -> dict:
    """generation_config.json: greedy unless asked otherwise; two end tokens as in the published files."""
    return {
        "bos_token_id": TOKEN_ID["<|endoftext|>"],
        "do_sample": False,
        "eos_token_id": [TOKEN_ID["<|im_end|>"], TOKEN_ID["<|endoftext|>"]],
        "pad_token_id": TOKEN_ID["<|endoftext|>"],
        "transformers_version": "5.24.0",
    }


def _pixel_config() -> dict:
    return {
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "merge_size": MERGE,
        "patch_size": PATCH,
        "processor_class": "Qwen3VLProcessor",
        "size": {"longest_edge": MAX_PIXELS, "shortest_edge": MIN_PIXELS},
        "temporal_patch_size": TEMPORAL_PATCH,
    }


def write_config_files(directory: Path) -> None:
    """Write config.json, generation_config.json and both preprocessor files into `directory`."""
    files = {
        "config.json": model_config(),
        "generation_config.json": generation_config(),
        "preprocessor_config.json": _pixel_config() | {"image_processor_type": "Qwen2VLImageProcessorFast"},
        "video_preprocessor_config.json": _pixel_config()
        | {"size": {"longest_edge": 16 * MAX_PIXELS, "shortest_edge": MIN_PIXELS},
           "video_processor_type": "Qwen3VLVideoProcessor", "fps": 2},
    }  # fmt: skip
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (directory / name).write_text(json.dumps(content, indent=2) + "\n")
