"""What a checkpoint directory says of its model: shapes of the files that exist, and refusals that name the key."""

import json

import pytest
import torch

from qwen35.config import FULL_ATTENTION, LINEAR_ATTENTION, ModelConfig
from qwen35.errors import ConfigError
from tests.tiny_checkpoint import tiny_config


@pytest.fixture
def write(tmp_path):
    """Writes config.json after changes to the whole and to its two parts, and other files; returns the directory."""

    def write(whole=None, text=None, vision=None, **files):
        config = tiny_config()
        for part, changes in ((config, whole), (config["text_config"], text), (config["vision_config"], vision)):
            part.update(changes or {})
            for key in [key for key, value in part.items() if value is _REMOVED]:
                del part[key]
        for name, content in {"config": config, **files}.items():
            (tmp_path / f"{name}.json").write_text(json.dumps(content))
        return tmp_path

    return write


_REMOVED = object()


def test_fields(write):
    config = ModelConfig.from_directory(write())
    expected = tiny_config()
    text, vision = config.text, config.vision
    for name in (
        "hidden_size",
        "num_experts",
        "linear_key_head_dim",
        "head_dim",
        "vocab_size",
        "mtp_num_hidden_layers",
    ):
        assert getattr(text, name) == expected["text_config"][name]
    for name in ("depth", "patch_size", "spatial_merge_size", "out_hidden_size", "num_position_embeddings"):
        assert getattr(vision, name) == expected["vision_config"][name]
    assert config.image_token_id == expected["image_token_id"] and config.dtype == torch.bfloat16
    assert text.layer_types.count(FULL_ATTENTION) == text.num_full_attention_layers == 1
    assert text.conv_dim == 2 * text.key_dim + text.value_dim
    assert not config.has_fp8_kv_cache


def test_both_shapes_of_the_rotary_parameters(write):
    rope = tiny_config()["text_config"]["rope_parameters"]
    new = ModelConfig.from_directory(write()).text
    old_text = {
        "rope_parameters": _REMOVED,
        "rope_theta": rope["rope_theta"],
        "partial_rotary_factor": rope["partial_rotary_factor"],
        "rope_scaling": {"type": "default", "mrope_section": rope["mrope_section"]},
    }
    old = ModelConfig.from_directory(write(text=old_text)).text
    assert (old.rope_theta, old.rotary_dim, old.mrope_section) == (new.rope_theta, new.rotary_dim, new.mrope_section)


def test_layer_types_from_the_interval(write):
    text = {"layer_types": _REMOVED, "full_attention_interval": 2}
    expected = (LINEAR_ATTENTION, FULL_ATTENTION) * 2
    assert ModelConfig.from_directory(write(text=text)).text.layer_types == expected


def test_text_only_config(write):
    """A flat file without a vision tower needs no image tokens."""
    directory = write()
    (directory / "config.json").write_text(json.dumps(tiny_config()["text_config"]))
    config = ModelConfig.from_directory(directory)
    assert config.vision is None and config.image_token_id is None
    assert config.text.hidden_size == tiny_config()["text_config"]["hidden_size"]


def test_eos_is_the_union_of_all_files(write):
    directory = write(
        whole={"eos_token_id": 3},
        text={"eos_token_id": [4, 5]},
        generation_config={"eos_token_id": [5, 6]},
        tokenizer_config={"eos_token": {"content": "<end>"}},
        tokenizer={"added_tokens": [{"id": 7, "content": "<end>"}], "model": {"vocab": {"<end>": 99}}},
    )
    assert ModelConfig.from_directory(directory).eos_token_ids == {3, 4, 5, 6, 7}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"tokenizer_config": {"eos_token": "e", "added_tokens_decoder": {"8": {"content": "e"}}}}, {8}),
        ({"tokenizer_config": {"eos_token": "e"}, "tokenizer": {"model": {"vocab": {"e": 9}}}}, {9}),
        ({"tokenizer_config": {"eos_token": None}}, set()),
    ],
)
def test_eos_of_the_tokenizer(write, files, expected):
    directory = write(whole={"eos_token_id": _REMOVED}, text={"eos_token_id": _REMOVED}, **files)
    assert ModelConfig.from_directory(directory).eos_token_ids == expected


@pytest.mark.parametrize(
    "files",
    [
        {"hf_quant_config": {"quantization": {"kv_cache_quant_algo": "FP8"}}},
        {"whole": {"quantization_config": {"kv_cache_scheme": {"num_bits": 8, "type": "float"}}}},
    ],
)
def test_fp8_cache_is_announced_in_either_file(write, files):
    assert ModelConfig.from_directory(write(**files)).has_fp8_kv_cache


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"text": {"hidden_size": _REMOVED}}, r"text_config.hidden_size: expected int, got nothing"),
        ({"text": {"num_experts": "8"}}, r"text_config.num_experts: expected int, got '8'"),
        ({"text": {"head_dim": True}}, r"text_config.head_dim: expected int, got True"),
        ({"text": {"num_experts_per_tok": 99}}, r"num_experts_per_tok: expected at most num_experts \(4\), got 99"),
        (
            {"text": {"num_key_value_heads": 3}},
            r"num_attention_heads: expected a multiple of num_key_value_heads \(3\)",
        ),
        ({"text": {"vocab_size": 0}}, r"text_config.vocab_size: expected a positive integer, got 0"),
        ({"text": {"layer_types": [LINEAR_ATTENTION]}}, r"layer_types: expected 4 entries"),
        ({"text": {"layer_types": ["mamba"] * 4}}, r"layer_types: expected 4 entries .*got \['mamba'"),
        ({"text": {"attention_bias": True}}, r"attention_bias: expected False, the only kind supported, got True"),
        ({"text": {"hidden_act": "gelu"}}, r"hidden_act: expected 'silu'"),
        ({"text": {"rope_parameters": {"rope_theta": 1e4}}}, r"rope_parameters.mrope_section: expected list"),
        ({"vision": {"depth": _REMOVED}}, r"vision_config.depth: expected int, got nothing"),
        ({"vision": {"deepstack_visual_indexes": [3]}}, r"deepstack_visual_indexes: expected \[\]"),
        ({"whole": {"image_token_id": _REMOVED}}, r"config.json.image_token_id: expected int, got nothing"),
        ({"whole": {"dtype": "int8"}}, r"config.json.dtype: expected one of bfloat16"),
        ({"whole": {"eos_token_id": "x"}}, r"config.json.eos_token_id: expected an integer or a list"),
        ({"tokenizer_config": {"eos_token": "e"}}, r"expected the id of eos_token 'e' in tokenizer.json, found none"),
    ],
)
def test_refusals_name_the_key(write, changes, message):
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_directory(write(**changes))


def test_missing_and_broken_files(tmp_path):
    with pytest.raises(ConfigError, match="expected a checkpoint's config.json, found no such file"):
        ModelConfig.from_directory(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="config.json: expected JSON"):
        ModelConfig.from_directory(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="expected a JSON object, got list"):
        ModelConfig.from_directory(tmp_path)
