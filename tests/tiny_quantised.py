"""The tiny checkpoint quantised, in the names and with the two configuration files of a ModelOpt export.

The weights go through the project's own `quantize_weight`, so this needs no ModelOpt and takes milliseconds; that real
exports look like this is tested in tests/build.

    make_tiny_quantised_checkpoint(tmp_path, algorithm="NVFP4", kv_scales=True)
"""

import json
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from qwen35.nvfp4 import quantize_weight
from tests.tiny_checkpoint import make_tiny_checkpoint, tiny_tensors, write_shards

Algorithm = Literal["NVFP4", "W4A16_NVFP4", "MIXED_PRECISION"]
_KEPT = ("lm_head", "embed_tokens", "conv1d", "in_proj_a", "in_proj_b", "mlp.gate", "shared_expert_gate")
INPUT_SCALE = 0.01


def make_tiny_quantised_checkpoint(
    directory: Path,
    *,
    seed: int = 0,
    algorithm: Algorithm = "NVFP4",
    kv_scales: bool = False,
    quantised_draft: bool = False,
    quantised_head: bool = False,
    num_shards: int = 1,
) -> Path:
    """Writes the directory and returns it. MIXED_PRECISION: FP8 attention, W4A16 experts, the rest dense."""
    make_tiny_checkpoint(directory, seed=seed)
    (directory / "model.safetensors").unlink()
    tensors: dict[str, Tensor] = {}
    layers: dict[str, dict] = {}
    for name, tensor in tiny_tensors(seed=seed, layout="per_expert").items():
        module = name.removesuffix(".weight")
        kind = _kind(module, tensor, algorithm, quantised_draft, quantised_head)
        tensors |= {name: tensor} if kind is None else _quantised(module, tensor, kind)
        if kind is not None:
            layers[module] = {"quant_algo": kind}
    if kv_scales:
        for kind in ("k", "v"):
            tensors[f"model.language_model.layers.3.self_attn.{kind}_proj.{kind}_scale"] = torch.tensor(0.25)
    write_shards(directory, tensors, num_shards)
    _write_configs(directory, algorithm, layers, kv_scales, quantised_draft, quantised_head)
    return directory


def _kind(module: str, tensor: Tensor, algorithm: str, quantised_draft: bool, quantised_head: bool) -> str | None:
    """How one module is quantised; None for what stays as it is."""
    if tensor.ndim != 2 or "visual" in module:
        return None
    if module == "lm_head":
        return "W4A16_NVFP4" if quantised_head else None
    if module.endswith(_KEPT) or (module.startswith("mtp.") and not quantised_draft) or module == "mtp.fc":
        return None
    if algorithm != "MIXED_PRECISION":
        return algorithm
    return "FP8" if "self_attn" in module else "W4A16_NVFP4" if ".experts." in module else None


def _quantised(module: str, weight: Tensor, kind: str) -> dict[str, Tensor]:
    if kind == "FP8":
        scale = weight.abs().amax().float() / 448
        tensors = {"weight": (weight.float() / scale).to(torch.float8_e4m3fn), "weight_scale": scale}
    else:
        packed = quantize_weight(weight)
        tensors = {
            "weight": packed.codes,
            "weight_scale": packed.scales,
            "weight_scale_2": packed.global_scale,
        }
    if kind != "W4A16_NVFP4":
        tensors["input_scale"] = torch.tensor(INPUT_SCALE)
    return {f"{module}.{name}": tensor for name, tensor in tensors.items()}


def _write_configs(
    directory: Path,
    algorithm: str,
    layers: dict[str, dict],
    kv_scales: bool,
    quantised_draft: bool,
    quantised_head: bool,
) -> None:
    excludes = ["model.language_model.embed_tokens", "model.visual*"]
    excludes += [] if quantised_head else ["lm_head"]
    excludes += ["mtp.fc"] if quantised_draft else ["mtp*", "mtp.layers.0*"]
    for index in range(4):
        root = f"model.language_model.layers.{index}."
        excludes += [f"{root}mlp.gate", f"{root}mlp.shared_expert_gate"]
        excludes += [f"{root}linear_attn.{name}" for name in ("conv1d", "in_proj_a", "in_proj_b")] if index < 3 else []
    excludes += ["mtp.layers.0.mlp.gate", "mtp.layers.0.mlp.shared_expert_gate"] if quantised_draft else []
    mixed = {"quantized_layers": layers} if algorithm == "MIXED_PRECISION" else {"group_size": 16}
    beside = {
        "quant_algo": algorithm,
        "kv_cache_quant_algo": "FP8" if kv_scales else None,
        "exclude_modules": excludes,
        **mixed,
    }
    (directory / "hf_quant_config.json").write_text(json.dumps({"quantization": beside}))
    inside = {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": excludes}
    inside |= {"quantized_layers": layers} if algorithm == "MIXED_PRECISION" else {}
    inside |= {"kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"}} if kv_scales else {}
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": inside}))
