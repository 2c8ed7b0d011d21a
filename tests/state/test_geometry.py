from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from qwen35.errors import ConfigError
from qwen35.settings import Settings
from qwen35.state.cache import view_of_bytes
from qwen35.state.geometry import DTYPE_BYTES, Geometry
from tests.state.tiny import tiny_geometry


def config(**changes: object) -> SimpleNamespace:
    """The parts of a `ModelConfig` that sizes depend on: the published 35B."""
    text = SimpleNamespace(
        num_full_attention_layers=10,
        num_gated_delta_layers=30,
        max_position_embeddings=262144,
        hidden_size=2048,
        num_key_value_heads=2,
        head_dim=256,
        linear_num_value_heads=32,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_conv_kernel_dim=4,
        conv_dim=2 * 16 * 128 + 32 * 128,
    )
    return SimpleNamespace(**({"text": text, "dtype": torch.bfloat16, "has_fp8_kv_cache": False} | changes))


def test_published_sizes():
    geometry = Geometry.derive(config(), Settings(num_slots=1, num_checkpoints=0))
    parts = geometry.bytes_by_part()
    assert geometry.block_bytes == 11 * 16 * 2 * 2 * 256 * 2  # layers, tokens, K and V, heads, dim, bfloat16
    assert geometry.num_blocks == (256 << 20) // geometry.block_bytes
    assert parts["recurrent"] == 60 << 20  # of one sequence: facts of the architecture
    assert parts["keys"] + parts["values"] == 10 * parts["draft.keys"] + 10 * parts["draft.values"]
    assert parts["pending_inputs"] == 30 * 4 * 8192 * 2
    assert geometry.cache_bytes + geometry.table_bytes >= sum(parts.values())


@pytest.mark.parametrize(
    ("settings", "has_fp8", "expected"),
    [
        ({}, False, ("bfloat16", "bfloat16", "float32")),
        ({}, True, ("bfloat16", "fp8", "float32")),
        ({"kv_cache_dtype": "bfloat16"}, True, ("bfloat16", "bfloat16", "float32")),
        ({"dtype": "float32"}, False, ("float32", "float32", "float32")),
        ({"dtype": "float64"}, False, ("float64", "float64", "float32")),
        ({"dtype": "float32", "kv_cache_dtype": "fp8"}, False, ("float32", "fp8", "float32")),
    ],
)
def test_types(settings: dict, has_fp8: bool, expected: tuple[str, str, str]):
    geometry = Geometry.derive(config(has_fp8_kv_cache=has_fp8), Settings(**settings))
    assert (geometry.dtype, geometry.kv_dtype, geometry.state_dtype) == expected


@pytest.mark.parametrize("num_draft_tokens", [0, 1, 5])
def test_draft_adds_a_layer_and_pending_rows(num_draft_tokens: int):
    geometry = Geometry.derive(config(), Settings(num_draft_tokens=num_draft_tokens))
    assert geometry.has_draft == (num_draft_tokens > 0)
    assert geometry.max_pending == num_draft_tokens + 1
    assert geometry.block_bytes == (10 + (num_draft_tokens > 0)) * 16 * 2048


def test_no_room_for_a_block():
    with pytest.raises(ConfigError, match=r"kv_cache_bytes: expected at least 360448 .* got 1000"):
        Geometry.derive(config(), Settings(kv_cache_bytes=1000))


def test_regions_do_not_overlap_and_are_aligned():
    geometry = tiny_geometry()
    end = 0
    for region in geometry.regions:
        assert region.offset_bytes >= end and region.offset_bytes % 4096 == 0
        end = region.offset_bytes + region.num_bytes
    assert end <= geometry.cache_bytes < end + 4096


def test_difference_names_both_values():
    stored = replace(tiny_geometry(), num_blocks=99, kv_dtype="fp8").as_dict()
    assert tiny_geometry().difference(stored) == "kv_dtype: expected bfloat16, got fp8; num_blocks: expected 12, got 99"
    assert tiny_geometry().difference(tiny_geometry().as_dict()) == ""


@pytest.mark.parametrize("kv_dtype", sorted(DTYPE_BYTES))
def test_view_shapes_and_aliasing(kv_dtype: str):
    geometry = tiny_geometry(kv_dtype=kv_dtype)
    flat = torch.zeros(geometry.cache_bytes, dtype=torch.uint8)
    cache = view_of_bytes(flat, geometry)
    assert len(cache.attention) == 2 and len(cache.gated_delta) == 3 and cache.draft is not None
    assert cache.draft.keys.shape == cache.attention[1].values.shape == (12, 4, 1, 8)
    view = cache.gated_delta[0]
    shapes = [tuple(t.shape) for t in (view.recurrent, view.conv, view.pending_inputs, view.pending_decay)]
    assert shapes == [(3, 2, 4, 6), (3, 20, 3), (3, 3, 20), (3, 3, 2)]
    assert (view.recurrent.dtype, view.conv.dtype, view.pending_beta.dtype) == (
        torch.float32, torch.bfloat16, torch.float32,
    )  # fmt: skip
    cache.draft.values[11] = 1.0
    assert int((flat != 0).sum()) > 0, "the view must alias the bytes"


def test_every_byte_of_a_tensor_is_its_own():
    geometry = tiny_geometry()
    cache = view_of_bytes(torch.zeros(geometry.cache_bytes, dtype=torch.uint8), geometry)
    tensors = [t for kv in (*cache.attention, cache.draft) for t in (kv.keys, kv.values)]
    tensors += [t for view in cache.gated_delta for t in vars(view).values()]
    for number, tensor in enumerate(tensors):
        tensor.fill_(number)
    for number, tensor in enumerate(tensors):
        assert bool((tensor == number).all())


def test_view_refuses_wrong_bytes_and_scales():
    geometry = tiny_geometry()
    with pytest.raises(ValueError, match=f"expected {geometry.cache_bytes} of uint8, got 5"):
        view_of_bytes(torch.zeros(5, dtype=torch.uint8), geometry)
    flat = torch.zeros(geometry.cache_bytes, dtype=torch.uint8)
    with pytest.raises(ValueError, match="kv_scales: expected 3 pairs, got 1"):
        view_of_bytes(flat, geometry, [(1.0, 1.0)])
    cache = view_of_bytes(flat, geometry, [(1.0, 2.0), (3.0, 4.0), (5.0, 6.0)])
    assert (cache.attention[1].key_scale, cache.draft.value_scale) == (3.0, 6.0)


@pytest.mark.parametrize("absent", ["num_full_attention_layers", "num_gated_delta_layers"])
def test_a_model_needs_both_kinds_of_layers(absent):
    model = config()
    setattr(model.text, absent, 0)
    with pytest.raises(ConfigError, match="layer_types: expected layers of full and of linear attention"):
        Geometry.derive(model, Settings())
