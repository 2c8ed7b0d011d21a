"""The ways in which checkpoints of one model are found on disk: expert layout, kinds of weights, configuration files.

A role is what a linear layer does: experts, shared_expert, attention, gated_delta or lm_head; every other layer (and
the whole draft and vision tower) is dense in all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from qwen35.weights.scheme import Kind

_QUANTISER = {"name": "modelopt", "version": "0.47.0"}
_GROUP_SIZE = 16


@dataclass(frozen=True)
class Layout:
    """One way.

    kinds                 by role; a role that is not listed is dense
    has_fused_experts     the target's experts lie in one tensor a projection
    has_fused_draft       the same of the draft's
    has_float32_vectors   `A_log` and `linear_attn.norm.weight` are F32 among BF16
    has_fp8_kv            FP8 keys and values are announced, in hf_quant_config.json alone and without scales
    up_scale              global scale of up_proj relative to gate_proj's (1: shared, as ModelOpt's export makes them)
    """

    kinds: Mapping[str, Kind] = field(default_factory=dict)
    has_fused_experts: bool = False
    has_fused_draft: bool = False
    has_float32_vectors: bool = False
    has_fp8_kv: bool = False
    up_scale: float = 1.0

    def kind(self, role: str) -> Kind:
        return self.kinds.get(role, Kind.DENSE)

    def with_head(self, kind: Kind) -> Layout:
        """The same with an lm_head of another kind."""
        changed = {**vars(self), "kinds": {**self.kinds, "lm_head": kind}}
        return Layout(**changed)


_ALL_NVFP4 = dict.fromkeys(("experts", "shared_expert", "attention", "gated_delta"), Kind.NVFP4)
LAYOUTS: Mapping[str, Layout] = MappingProxyType(
    {
        "bf16": Layout(has_fused_experts=True),  # Qwen3.5 as published
        "qwen3.6": Layout(has_fused_experts=True, has_fused_draft=True, has_float32_vectors=True),
        "nvfp4": Layout(_ALL_NVFP4),  # ModelOpt's NVFP4_DEFAULT_CFG
        "experts-only": Layout({"experts": Kind.NVFP4}),  # ModelOpt's NVFP4_EXPERTS_ONLY_CFG
        "mixed": Layout(  # NVIDIA's published files
            {
                "experts": Kind.W4A16_NVFP4,
                "shared_expert": Kind.W4A16_NVFP4,
                "lm_head": Kind.W4A16_NVFP4,
                "attention": Kind.FP8,
                "gated_delta": Kind.FP8,
            },
            has_fused_draft=True,
            has_fp8_kv=True,
            up_scale=1.25,
        ),
    }
)


def quantization_configs(
    layout: Layout, kinds: Mapping[str, Kind]
) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """`quantization_config` of config.json and the content of hf_quant_config.json; two None without quantisation.

    kinds  of every linear layer of the target by module name, experts one by one
    """
    used = set(layout.kinds.values())
    if not used:
        return None, None
    mixed = len(used) > 1
    algorithm = "MIXED_PRECISION" if mixed else next(iter(used)).value
    excludes = _excludes(kinds)
    layers = {module: _entry(kind) for module, kind in kinds.items() if kind is not Kind.DENSE} if mixed else {}
    inside = {"config_groups": _groups(kinds, mixed), "ignore": excludes, "quant_algo": algorithm}
    inside |= {"producer": _QUANTISER, "quant_method": "modelopt"}
    beside = {"quant_algo": algorithm, "kv_cache_quant_algo": "FP8" if layout.has_fp8_kv else None}
    beside |= {"exclude_modules": excludes} if mixed else {"group_size": _GROUP_SIZE, "exclude_modules": excludes}
    if mixed:
        inside["quantized_layers"] = beside["quantized_layers"] = layers
    return inside, {"producer": _QUANTISER, "quantization": beside}


def _excludes(kinds: Mapping[str, Kind]) -> list[str]:
    dense = [module for module, kind in kinds.items() if kind is Kind.DENSE]
    return [*dense, "model.visual*", "mtp*", "mtp.layers.0*"]


def _entry(kind: Kind) -> dict[str, Any]:
    return {"quant_algo": kind.value} if kind is Kind.FP8 else {"quant_algo": kind.value, "group_size": _GROUP_SIZE}


def _groups(kinds: Mapping[str, Kind], mixed: bool) -> dict[str, Any]:
    """One group for each kind; with several of them each lists its layers."""
    used: Sequence[Kind] = [kind for kind in dict.fromkeys(kinds.values()) if kind is not Kind.DENSE]
    return {
        f"group_{number}": _group(kind, [module for module in kinds if kinds[module] is kind] if mixed else ["Linear"])
        for number, kind in enumerate(used)
    }


def _group(kind: Kind, targets: Iterable[str]) -> dict[str, Any]:
    eight, four = {"dynamic": False, "num_bits": 8, "type": "float"}, {"dynamic": False, "num_bits": 4, "type": "float"}
    four |= {"group_size": _GROUP_SIZE}
    numbers = eight if kind is Kind.FP8 else four
    inputs = {} if kind is Kind.W4A16_NVFP4 else {"input_activations": numbers}
    return {**inputs, "weights": numbers, "targets": list(targets)}
