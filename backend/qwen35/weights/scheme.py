"""How a checkpoint says it is quantised, read from both of its files; and how it really is, told by the tensors.

`config.json: quantization_config` and `hf_quant_config.json` are both read. Neither decides how a tensor is loaded: the
tensors on disk do (a bfloat16 weight without scales is dense whatever the lists say), and every disagreement becomes a
warning. The files decide only what no tensor shows: the type of the KV cache.

Knows no torch: the state manager asks it for the KV type without loading anything.
Source of the fields: modelopt 0.47 `torch/export/convert_hf_config.py`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from qwen35.errors import CheckpointError
from qwen35.weights.excludes import Excludes
from qwen35.weights.names import spellings

_GROUP_SIZE = 16
_MAX_EXAMPLES = 3


class Kind(Enum):
    """How the weight of a linear layer is stored."""

    DENSE = "dense"
    NVFP4 = "NVFP4"  # 4-bit weight, static scale for 4-bit activations
    W4A16_NVFP4 = "W4A16_NVFP4"  # 4-bit weight only
    FP8 = "FP8"


_FIELDS = {"algorithm": "quant_algo", "kv_cache": "KV cache type", "excludes": "excluded modules"}
_ALGORITHMS = (Kind.NVFP4.value, Kind.W4A16_NVFP4.value, Kind.FP8.value, "MIXED_PRECISION")


@dataclass(frozen=True)
class QuantizationScheme:
    """What the configuration files announce.

    algorithm         None (not quantised), "NVFP4", "W4A16_NVFP4", "FP8" or "MIXED_PRECISION"
    kv_cache          None, "FP8" or "NVFP4"
    excludes          modules that stayed dense
    quantized_layers  kind by module for MIXED_PRECISION
    warnings          where the two files disagree
    """

    algorithm: str | None
    kv_cache: str | None
    excludes: Excludes
    quantized_layers: Mapping[str, Kind]
    warnings: tuple[str, ...] = ()

    @classmethod
    def from_directory(cls, directory: Path | str, target_modules: Iterable[str] = ()) -> QuantizationScheme:
        """Reads both files. Raises CheckpointError for an unreadable file, an unknown method or algorithm, a clash."""
        directory = Path(directory)
        announced = _from_config(_read_json(directory / "config.json", required=True))
        beside = _from_hf_quant_config(_read_json(directory / "hf_quant_config.json", required=False))
        merged, warnings = _merge(announced, beside)
        return cls(
            algorithm=_check_algorithm(merged.get("algorithm"), merged.get("group_size")),
            kv_cache=_kv_cache(merged.get("kv_cache")),
            excludes=Excludes.parse(merged.get("excludes") or (), target_modules),
            quantized_layers={name: _kind(name, entry) for name, entry in (merged.get("layers") or {}).items()},
            warnings=tuple(warnings),
        )

    def announced_kind(self, module: str) -> Kind:
        """What the files say of one linear layer, whatever spelling they use."""
        if self.algorithm is None or self.excludes.exclude(module):
            return Kind.DENSE
        if self.algorithm != "MIXED_PRECISION":
            return Kind(self.algorithm)
        return next((kind for form in spellings(module) if (kind := self._mixed_kind(form))), Kind.DENSE)

    def _mixed_kind(self, module: str) -> Kind | None:
        """Entry of `quantized_layers` for one spelling: of the module, else of its nearest ancestor, else of a glob."""
        parts = module.split(".")
        for depth in range(len(parts), 0, -1):
            if kind := self.quantized_layers.get(".".join(parts[:depth])):
                return kind
        globs = (name for name in self.quantized_layers if "*" in name)
        return next((self.quantized_layers[name] for name in globs if fnmatchcase(module, name)), None)

    def disagreements(self, kinds_on_disk: Mapping[str, Kind]) -> list[str]:
        """One warning for each pair (announced, found), with a count and examples."""
        pairs: dict[tuple[Kind, Kind], list[str]] = {}
        for module, found in kinds_on_disk.items():
            announced = self.announced_kind(module)
            if announced is not found:
                pairs.setdefault((announced, found), []).append(module)
        return [
            f"{len(modules)} linear layers are {found.value} on disk, {announced.value} in the configuration: "
            + _examples(modules)
            for (announced, found), modules in pairs.items()
        ]


def _from_config(config: dict[str, Any]) -> dict[str, Any] | None:
    """Fields of `config.json: quantization_config` under common names."""
    found = config.get("quantization_config") or config.get("text_config", {}).get("quantization_config")
    if found is None:
        return None
    method = found.get("quant_method")
    if method != "modelopt":
        raise CheckpointError(
            f"config.json: quantization_config.quant_method: expected 'modelopt', got {method!r}; "
            "quantise the original checkpoint with build/quantize.py"
        )
    groups = found.get("config_groups") or {}
    sizes = {group.get("weights", {}).get("group_size") for group in groups.values()} - {None}
    return {
        "algorithm": found.get("quant_algo"),
        "kv_cache": found.get("kv_cache_scheme") or found.get("kv_cache_quant_algo"),
        "excludes": found.get("ignore") or found.get("exclude_modules") or [],
        "layers": found.get("quantized_layers") or {},
        "group_size": max(sizes, default=None),
    }


def _from_hf_quant_config(content: dict[str, Any] | None) -> dict[str, Any] | None:
    """Fields of `hf_quant_config.json: quantization` under common names."""
    if content is None:
        return None
    found = content.get("quantization") or {}
    return {
        "algorithm": found.get("quant_algo"),
        "kv_cache": found.get("kv_cache_quant_algo"),
        "excludes": found.get("exclude_modules") or [],
        "layers": found.get("quantized_layers") or {},
        "group_size": found.get("group_size"),
    }


def _merge(config: dict[str, Any] | None, beside: dict[str, Any] | None) -> tuple[dict[str, Any], list[str]]:
    """config.json first, the other file where that is silent; a warning for each field in which they differ."""
    if config is None or beside is None:
        return config or beside or {}, []
    merged = {field: config[field] or beside[field] for field in config}
    merged["excludes"] = list(dict.fromkeys([*config["excludes"], *beside["excludes"]]))
    comparable = {"kv_cache": _kv_cache, "excludes": sorted}
    warnings = []
    for field, title in _FIELDS.items():
        own, other = (comparable.get(field, lambda value: value)(side[field]) for side in (config, beside))
        if own != other:
            warnings.append(f"{title}: config.json has {_short(own)}, hf_quant_config.json has {_short(other)}")
    return merged, warnings


def _check_algorithm(algorithm: str | None, group_size: int | None) -> str | None:
    if algorithm is None:
        return None
    if algorithm not in _ALGORITHMS:
        raise CheckpointError(f"quant_algo: expected one of {', '.join(_ALGORITHMS)}, got {algorithm!r}")
    if "NVFP4" in algorithm and group_size not in (None, _GROUP_SIZE):
        raise CheckpointError(f"group_size: expected {_GROUP_SIZE} for {algorithm}, got {group_size!r}")
    return algorithm


def _kind(module: str, entry: Mapping[str, Any] | str) -> Kind:
    algorithm = entry if isinstance(entry, str) else entry.get("quant_algo")
    if algorithm not in {kind.value for kind in Kind}:
        expected = ", ".join(kind.value for kind in Kind)
        raise CheckpointError(f"quantized_layers: {module}: expected one of {expected}, got {algorithm!r}")
    return Kind(algorithm)


def _kv_cache(announced: Any) -> str | None:
    """Type of the KV cache from a name or from a scheme of bits and type."""
    if not announced:
        return None
    if isinstance(announced, Mapping):
        announced = {8: "FP8", 4: "NVFP4"}.get(announced.get("num_bits"), announced)
    if announced not in ("FP8", "NVFP4"):
        raise CheckpointError(f"kv_cache_scheme: expected FP8 or NVFP4, got {announced!r}")
    return announced


def _read_json(path: Path, *, required: bool) -> dict[str, Any] | None:
    """A JSON file of the checkpoint; None when it is optional and not there."""
    if not path.exists():
        if required:
            raise CheckpointError(f"{path}: expected a checkpoint directory with {path.name}, got no such file")
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: expected readable JSON, got {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: expected a JSON object, got {type(content).__name__}")
    return content


def _examples(names: list[str]) -> str:
    shown = ", ".join(names[:_MAX_EXAMPLES])
    return shown if len(names) <= _MAX_EXAMPLES else f"{shown}, …"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
