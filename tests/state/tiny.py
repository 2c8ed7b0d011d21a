"""Small geometries for the state's tests."""

from qwen35.state.geometry import Geometry


def tiny_geometry(**changes: object) -> Geometry:
    """Two attention layers and a draft's, three GDN layers; a few kilobytes."""
    fields = {
        "num_blocks": 12,
        "block_tokens": 4,
        "num_slots": 3,
        "num_checkpoints": 1,
        "max_context_tokens": 40,
        "num_attention_layers": 2,
        "has_draft": True,
        "num_gated_delta_layers": 3,
        "hidden_size": 10,
        "num_kv_heads": 1,
        "head_dim": 8,
        "num_value_heads": 2,
        "key_head_dim": 4,
        "value_head_dim": 6,
        "conv_channels": 20,
        "conv_width": 4,
        "max_pending": 3,
        "dtype": "bfloat16",
        "kv_dtype": "bfloat16",
        "state_dtype": "float32",
        "max_leases": 8,
        "max_holders": 4,
    }
    return Geometry(**(fields | changes))
