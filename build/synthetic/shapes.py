"""Dimensions of published models and of the benchmark checkpoint, as their config.json writes them.

Sources: the published configurations of Qwen3.5-35B-A3B (Qwen3.6-35B-A3B has the same) and Qwen3.5-397B-A17B.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

FULL_ATTENTION_INTERVAL = 4
_VOCABULARY = 248320
_VISION = {
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_heads": 16,
    "num_position_embeddings": 2304,
}


@dataclass(frozen=True)
class Shape:
    """One model's dimensions.

    text        keys of `text_config` that differ between models
    vision      keys of `vision_config` that differ between models
    matrix_std  of the entries of every matrix but routers and embeddings
    """

    text: Mapping[str, Any]
    vision: Mapping[str, Any]
    matrix_std: float

    def config(self, num_layers: int | None = None, *, has_draft: bool = True) -> dict[str, Any]:
        """config.json without token ids and without a quantisation; `num_layers` cuts the model short."""
        depth = num_layers or self.text["num_hidden_layers"]
        interval = FULL_ATTENTION_INTERVAL
        kinds = ["linear_attention" if (i + 1) % interval else "full_attention" for i in range(depth)]
        text = {**_TEXT_COMMON, **self.text, "num_hidden_layers": depth, "layer_types": kinds}
        text["mtp_num_hidden_layers"] = int(has_draft)
        vision = {**_VISION_COMMON, **self.vision, "out_hidden_size": text["hidden_size"]}
        return {
            "architectures": ["Qwen3_5MoeForConditionalGeneration"],
            "dtype": "bfloat16",
            "model_type": "qwen3_5_moe",
            "text_config": text,
            "tie_word_embeddings": False,
            "vision_config": vision,
        }


_TEXT_COMMON: Mapping[str, Any] = MappingProxyType(
    {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_output_gate": True,
        "dtype": "bfloat16",
        "full_attention_interval": FULL_ATTENTION_INTERVAL,
        "head_dim": 256,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 262144,
        "model_type": "qwen3_5_moe_text",
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "output_router_logits": False,
        "partial_rotary_factor": 0.25,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
            "partial_rotary_factor": 0.25,
            "rope_theta": 10000000,
            "rope_type": "default",
        },
        "router_aux_loss_coef": 0.001,
        "tie_word_embeddings": False,
        "use_cache": True,
    }
)
_VISION_COMMON: Mapping[str, Any] = MappingProxyType(
    {
        "deepstack_visual_indexes": [],
        "hidden_act": "gelu_pytorch_tanh",
        "in_channels": 3,
        "initializer_range": 0.02,
        "model_type": "qwen3_5_moe_vision",
        "num_position_embeddings": 2304,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    }
)

SHAPES: Mapping[str, Shape] = MappingProxyType(
    {
        # The benchmark checkpoint: 344 M parameters, 379 M with the draft and the vision tower.
        "344m": Shape(
            text={
                "hidden_size": 1024, "num_hidden_layers": 8, "vocab_size": 32000,
                "num_attention_heads": 8, "num_key_value_heads": 2,
                "linear_num_key_heads": 8, "linear_num_value_heads": 16,
                "num_experts": 32, "num_experts_per_tok": 4,
                "moe_intermediate_size": 256, "shared_expert_intermediate_size": 256,
            },
            vision={"depth": 4, "hidden_size": 256, "intermediate_size": 512, "num_heads": 4},
            matrix_std=0.03,
        ),
        "35b": Shape(
            text={
                "hidden_size": 2048, "num_hidden_layers": 40, "vocab_size": _VOCABULARY,
                "num_attention_heads": 16, "num_key_value_heads": 2,
                "linear_num_key_heads": 16, "linear_num_value_heads": 32,
                "num_experts": 256, "num_experts_per_tok": 8,
                "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
            },
            vision=_VISION,
            matrix_std=0.02,
        ),
        "397b": Shape(
            text={
                "hidden_size": 4096, "num_hidden_layers": 60, "vocab_size": _VOCABULARY,
                "num_attention_heads": 32, "num_key_value_heads": 2,
                "linear_num_key_heads": 16, "linear_num_value_heads": 64,
                "num_experts": 512, "num_experts_per_tok": 10,
                "moe_intermediate_size": 1024, "shared_expert_intermediate_size": 1024,
            },
            vision=_VISION,
            matrix_std=0.015,
        ),
    }
)  # fmt: skip
