"""What the two configuration files announce, and where they disagree with each other and with the tensors."""

import json
from pathlib import Path

import pytest

from qwen35.errors import CheckpointError
from qwen35.weights.scheme import Kind, QuantizationScheme

ROOT = "model.language_model.layers.0."


def _write(directory: Path, inside: dict | None = None, beside: dict | None = None) -> QuantizationScheme:
    config = {} if inside is None else {"quantization_config": {"quant_method": "modelopt", **inside}}
    (directory / "config.json").write_text(json.dumps(config))
    if beside is not None:
        (directory / "hf_quant_config.json").write_text(json.dumps({"quantization": beside}))
    return QuantizationScheme.from_directory(directory)


def test_not_quantised(tmp_path: Path) -> None:
    scheme = _write(tmp_path)
    assert scheme.algorithm is None and scheme.kv_cache is None and scheme.warnings == ()
    assert scheme.announced_kind(f"{ROOT}self_attn.q_proj") is Kind.DENSE


@pytest.mark.parametrize("algorithm", ["NVFP4", "W4A16_NVFP4", "FP8"])
@pytest.mark.parametrize("where", ["inside", "beside"])
def test_one_algorithm_for_all_but_the_excluded(tmp_path: Path, algorithm: str, where: str) -> None:
    excludes = [f"{ROOT}mlp.gate", "lm_head"]
    if where == "inside":
        scheme = _write(tmp_path, {"quant_algo": algorithm, "ignore": excludes})
    else:
        scheme = _write(tmp_path, beside={"quant_algo": algorithm, "exclude_modules": excludes})
    assert scheme.announced_kind(f"{ROOT}self_attn.q_proj") is Kind(algorithm)
    assert scheme.announced_kind(f"{ROOT}mlp.gate") is Kind.DENSE
    assert scheme.announced_kind("language_model.lm_head") is Kind.DENSE


@pytest.mark.parametrize(
    "layers",
    [
        {
            f"{ROOT}self_attn.q_proj": {"quant_algo": "FP8"},
            f"{ROOT}mlp.experts": {"quant_algo": "NVFP4", "group_size": 16},
        },
        {"model.layers.0.self_attn*": "FP8", "model.layers.0.mlp.experts*": "NVFP4"},
    ],
)
def test_mixed_precision(tmp_path: Path, layers: dict) -> None:
    scheme = _write(tmp_path, {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers})
    assert scheme.announced_kind(f"{ROOT}self_attn.q_proj") is Kind.FP8
    assert scheme.announced_kind(f"{ROOT}mlp.experts.17.up_proj") is Kind.NVFP4
    assert scheme.announced_kind("model.layers.0.mlp.experts.17.up_proj") is Kind.NVFP4
    assert scheme.announced_kind("mtp.layers.0.mlp.experts.17.up_proj") is Kind.DENSE
    assert scheme.announced_kind(f"{ROOT}mlp.shared_expert.up_proj") is Kind.DENSE


@pytest.mark.parametrize(
    ("inside", "beside", "expected"),
    [
        ({"kv_cache_scheme": {"num_bits": 8, "type": "float"}}, None, "FP8"),
        ({"kv_cache_scheme": {"num_bits": 4, "type": "float"}}, None, "NVFP4"),
        ({"kv_cache_scheme": "NVFP4"}, None, "NVFP4"),
        ({}, {"kv_cache_quant_algo": "FP8"}, "FP8"),
        ({}, {"kv_cache_quant_algo": None}, None),
    ],
)
def test_kv_cache(tmp_path: Path, inside: dict, beside: dict | None, expected: str | None) -> None:
    assert _write(tmp_path, {"quant_algo": "NVFP4", **inside}, beside).kv_cache == expected


def test_both_files_are_read_and_compared(tmp_path: Path) -> None:
    scheme = _write(
        tmp_path,
        {"quant_algo": "NVFP4", "ignore": ["lm_head"], "kv_cache_scheme": {"num_bits": 8}},
        {"quant_algo": "W4A16_NVFP4", "exclude_modules": ["lm_head", "mtp*"], "kv_cache_quant_algo": "FP8"},
    )
    assert scheme.algorithm == "NVFP4"
    assert scheme.announced_kind("mtp.fc") is Kind.DENSE
    assert len(scheme.warnings) == 2
    assert scheme.warnings[0] == "quant_algo: config.json has 'NVFP4', hf_quant_config.json has 'W4A16_NVFP4'"
    assert scheme.warnings[1].startswith("excluded modules: ")


def test_disagreements_are_counted_by_kind(tmp_path: Path) -> None:
    scheme = _write(tmp_path, {"quant_algo": "NVFP4", "ignore": ["lm_head"]})
    kinds = {f"model.layers.{i}.self_attn.q_proj": Kind.DENSE for i in range(5)}
    kinds |= {"lm_head": Kind.NVFP4, "model.layers.0.self_attn.k_proj": Kind.NVFP4}
    warnings = scheme.disagreements(kinds)
    assert len(warnings) == 2
    assert warnings[0].startswith("5 linear layers are dense on disk, NVFP4 in the configuration: model.layers.0.")
    assert warnings[0].endswith(", …")
    assert warnings[1] == "1 linear layers are NVFP4 on disk, dense in the configuration: lm_head"


@pytest.mark.parametrize(
    ("inside", "message"),
    [
        ({"quant_method": "compressed-tensors"}, "quant_method: expected 'modelopt', got 'compressed-tensors'"),
        ({"quant_algo": "INT4_AWQ"}, "quant_algo: expected one of NVFP4, W4A16_NVFP4, FP8, MIXED_PRECISION"),
        ({"quant_algo": "NVFP4", "config_groups": {"group_0": {"weights": {"group_size": 32}}}}, "group_size"),
        ({"quant_algo": "MIXED_PRECISION", "quantized_layers": {"a": {"quant_algo": "W8A16"}}}, "quantized_layers: a"),
        ({"quant_algo": "NVFP4", "kv_cache_scheme": {"num_bits": 3}}, "kv_cache_scheme: expected FP8 or NVFP4"),
    ],
)
def test_what_is_refused(tmp_path: Path, inside: dict, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        _write(tmp_path, inside)


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config.json: expected a checkpoint directory with config.json"):
        QuantizationScheme.from_directory(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "hf_quant_config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"hf_quant_config.json: expected readable JSON"):
        QuantizationScheme.from_directory(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="expected a JSON object, got list"):
        QuantizationScheme.from_directory(tmp_path)
