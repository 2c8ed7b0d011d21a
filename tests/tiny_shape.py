"""Dimensions of a synthetic checkpoint small enough to write in every test."""

from build.synthetic.shapes import Shape

TINY = Shape(
    text={
        "hidden_size": 64, "num_hidden_layers": 4, "vocab_size": 1344, "head_dim": 32, "num_attention_heads": 4,
        "num_key_value_heads": 2, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
        "linear_value_head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 48, "max_position_embeddings": 512,
        "rope_parameters": {"mrope_section": [2, 1, 1], "partial_rotary_factor": 0.25, "rope_theta": 1e7},
    },
    vision={
        "depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "num_position_embeddings": 64,
    },
    matrix_std=0.1,
)  # fmt: skip
