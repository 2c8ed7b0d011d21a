"""What a checkpoint directory says about its model: frozen records with transformers' names.

Knows JSON files, not weights and not settings. Required keys have no defaults; a feature that this project does not
implement is refused here, so that no later code has to look for it. Defaults are those of transformers 5.24
`models/qwen3_5_moe/configuration_qwen3_5_moe.py` and only for keys that published files leave out."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from qwen35.errors import ConfigError

LINEAR_ATTENTION = "linear_attention"
FULL_ATTENTION = "full_attention"
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32, "float64": torch.float64}


@dataclass(frozen=True)
class TextConfig:
    """The language model and its MTP layer."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    layer_types: tuple[str, ...]  # "linear_attention" or "full_attention", one a layer
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_conv_kernel_dim: int
    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    shared_expert_intermediate_size: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope_theta: float
    rotary_dim: int  # head dimensions that are rotated
    mrope_section: tuple[int, int, int]  # rotary frequencies of the temporal, height and width axis
    mtp_num_hidden_layers: int = 0
    tie_word_embeddings: bool = False

    def __post_init__(self) -> None:
        _expect_positive("text_config", self, may_be_zero={"mtp_num_hidden_layers", "tie_word_embeddings"})
        _expect_multiple("text_config", self, "num_attention_heads", "num_key_value_heads")
        _expect_multiple("text_config", self, "linear_num_value_heads", "linear_num_key_heads")
        unknown = set(self.layer_types) - {LINEAR_ATTENTION, FULL_ATTENTION}
        if len(self.layer_types) != self.num_hidden_layers or unknown:
            raise ConfigError(
                f"text_config.layer_types: expected {self.num_hidden_layers} entries (num_hidden_layers), each "
                f"{LINEAR_ATTENTION} or {FULL_ATTENTION}, got {list(self.layer_types)}"
            )
        if self.num_experts_per_tok > self.num_experts:
            raise ConfigError(
                f"text_config.num_experts_per_tok: expected at most num_experts ({self.num_experts}), "
                f"got {self.num_experts_per_tok}"
            )
        if not 0 < self.rotary_dim <= self.head_dim or self.rotary_dim != 2 * sum(self.mrope_section):
            raise ConfigError(
                f"text_config.mrope_section: expected three counts whose sum is half the rotary dimensions "
                f"({self.rotary_dim} of {self.head_dim}), got {list(self.mrope_section)}"
            )

    @property
    def key_dim(self) -> int:
        """Channels of the GDN queries, and of its keys."""
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def value_dim(self) -> int:
        """Channels of the GDN values."""
        return self.linear_num_value_heads * self.linear_value_head_dim

    @property
    def conv_dim(self) -> int:
        """Channels of the GDN convolution: queries, keys, values."""
        return 2 * self.key_dim + self.value_dim

    @property
    def num_full_attention_layers(self) -> int:
        return self.layer_types.count(FULL_ATTENTION)

    @property
    def num_gated_delta_layers(self) -> int:
        return self.layer_types.count(LINEAR_ATTENTION)


@dataclass(frozen=True)
class VisionConfig:
    """The vision tower."""

    depth: int
    hidden_size: int
    hidden_act: str
    intermediate_size: int
    num_heads: int
    in_channels: int
    patch_size: int  # pixels a side
    spatial_merge_size: int  # patches a side that become one embedding
    temporal_patch_size: int  # frames
    out_hidden_size: int
    num_position_embeddings: int
    rope_theta: float = 10000.0

    def __post_init__(self) -> None:
        _expect_positive("vision_config", self)
        _expect_multiple("vision_config", self, "hidden_size", "num_heads")

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads


@dataclass(frozen=True)
class ModelConfig:
    """A whole checkpoint. Without a vision tower the four token ids of images are None."""

    text: TextConfig
    vision: VisionConfig | None
    image_token_id: int | None
    video_token_id: int | None
    vision_start_token_id: int | None
    vision_end_token_id: int | None
    eos_token_ids: frozenset[int]  # union of config, generation config and tokenizer
    dtype: torch.dtype  # of the checkpoint's dense tensors
    has_fp8_kv_cache: bool = False  # the checkpoint announces FP8 keys and values

    @classmethod
    def from_directory(cls, path: str | Path) -> ModelConfig:
        """Reads config.json; where they exist generation_config.json, hf_quant_config.json and the tokenizer's files.

        Raises ConfigError naming the file and the key.
        """
        directory = Path(path)
        whole = _read_json(directory / "config.json")
        if whole is None:
            raise ConfigError(f"{directory / 'config.json'}: expected a checkpoint's config.json, found no such file")
        text_section = _Section("text_config", whole.get("text_config", whole))
        vision_config = whole.get("vision_config")
        top = _Section("config.json", whole)
        token_id = top.require if vision_config else top.optional
        return cls(
            text=_text_config(text_section, tied=bool(whole.get("tie_word_embeddings"))),
            vision=_vision_config(_Section("vision_config", vision_config)) if vision_config else None,
            image_token_id=token_id("image_token_id", int),
            video_token_id=token_id("video_token_id", int),
            vision_start_token_id=token_id("vision_start_token_id", int),
            vision_end_token_id=token_id("vision_end_token_id", int),
            eos_token_ids=_eos_token_ids(directory, whole, text_section.values),
            dtype=_dtype(whole, text_section.values),
            has_fp8_kv_cache=_announces_fp8_kv(directory, whole),
        )


class _Section:
    """A JSON object whose keys are read with a type; errors name the section and the key."""

    def __init__(self, name: str, values: Mapping[str, Any]) -> None:
        self.name, self.values = name, values

    def require(self, key: str, kind: type) -> Any:
        if self.values.get(key) is None:
            raise ConfigError(f"{self.name}.{key}: expected {kind.__name__}, got nothing: the key is required")
        return self.optional(key, kind)

    def optional(self, key: str, kind: type, default: Any = None) -> Any:
        value = self.values.get(key)
        if value is None:
            return default
        accepted = (int, float) if kind is float else kind
        if not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
            raise ConfigError(f"{self.name}.{key}: expected {kind.__name__}, got {value!r}")
        return kind(value)

    def refuse(self, key: str, supported: Any, default: Any) -> None:
        """Refuses every value of a key but the one that is implemented."""
        value = self.values.get(key)
        value = default if value is None else value
        if value != supported:
            raise ConfigError(f"{self.name}.{key}: expected {supported!r}, the only kind supported, got {value!r}")


_TEXT_INTEGERS = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim",
    "linear_conv_kernel_dim", "num_experts", "num_experts_per_tok", "moe_intermediate_size",
    "shared_expert_intermediate_size", "max_position_embeddings",
)  # fmt: skip


def _text_config(section: _Section, tied: bool) -> TextConfig:
    section.refuse("hidden_act", "silu", default="silu")
    section.refuse("attention_bias", False, default=False)
    section.refuse("attn_output_gate", True, default=True)
    section.refuse("mtp_use_dedicated_embeddings", False, default=False)
    integers = {name: section.require(name, int) for name in _TEXT_INTEGERS}
    return TextConfig(
        **integers,
        **_rope(section, integers["head_dim"]),
        layer_types=_layer_types(section, integers["num_hidden_layers"]),
        rms_norm_eps=section.require("rms_norm_eps", float),
        mtp_num_hidden_layers=section.optional("mtp_num_hidden_layers", int, 0),
        tie_word_embeddings=tied or section.optional("tie_word_embeddings", bool, False),
    )


def _layer_types(section: _Section, num_layers: int) -> tuple[str, ...]:
    """Listed, or every `full_attention_interval`-th layer is one of full attention."""
    listed = section.optional("layer_types", list)
    if listed is not None:
        return tuple(listed)
    interval = section.require("full_attention_interval", int)
    return tuple(LINEAR_ATTENTION if (i + 1) % interval else FULL_ATTENTION for i in range(num_layers))


def _rope(section: _Section, head_dim: int) -> dict[str, Any]:
    """Both shapes: `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` beside the other keys."""
    nested = section.optional("rope_parameters", dict) or section.optional("rope_scaling", dict, {})
    rope = _Section(f"{section.name}.rope_parameters", {**_top_level_rope(section), **nested})
    kind = rope.values.get("rope_type") or rope.values.get("type") or "default"
    if kind not in ("default", "mrope"):
        raise ConfigError(f"{rope.name}.rope_type: expected default, the only kind supported, got {kind!r}")
    rope.refuse("mrope_interleaved", True, default=True)
    sections = rope.require("mrope_section", list)
    if len(sections) != 3 or not all(isinstance(n, int) and n >= 0 for n in sections):
        raise ConfigError(f"{rope.name}.mrope_section: expected three counts, got {sections!r}")
    return {
        "rope_theta": rope.require("rope_theta", float),
        "rotary_dim": int(head_dim * rope.require("partial_rotary_factor", float)),
        "mrope_section": tuple(sections),
    }


def _top_level_rope(section: _Section) -> dict[str, Any]:
    return {k: section.values[k] for k in ("rope_theta", "partial_rotary_factor") if section.values.get(k) is not None}


_VISION_INTEGERS = (
    "depth", "hidden_size", "intermediate_size", "num_heads", "in_channels", "spatial_merge_size", "out_hidden_size",
    "num_position_embeddings",
)  # fmt: skip


def _vision_config(section: _Section) -> VisionConfig:
    section.refuse("deepstack_visual_indexes", [], default=[])
    rope = _Section("vision_config.rope_parameters", section.optional("rope_parameters", dict, {}))
    return VisionConfig(
        **{name: section.require(name, int) for name in _VISION_INTEGERS},
        patch_size=_one_number(section, "patch_size"),
        temporal_patch_size=_one_number(section, "temporal_patch_size"),
        hidden_act=section.optional("hidden_act", str, "gelu_pytorch_tanh"),
        rope_theta=rope.optional("rope_theta", float, 10000.0),
    )


def _one_number(section: _Section, key: str) -> int:
    """An integer, or a list of equal integers."""
    value = section.values.get(key)
    if isinstance(value, list) and len(set(value)) == 1:
        return _Section(section.name, {key: value[0]}).require(key, int)
    return section.require(key, int)


def _eos_token_ids(directory: Path, whole: Mapping[str, Any], text: Mapping[str, Any]) -> frozenset[int]:
    generation = _read_json(directory / "generation_config.json") or {}
    found: set[int] = set()
    for name, source in (("config.json", whole), ("text_config", text), ("generation_config.json", generation)):
        value = source.get("eos_token_id")
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(token_id, int) for token_id in ids):
            raise ConfigError(f"{name}.eos_token_id: expected an integer or a list of integers, got {value!r}")
        found.update(ids)
    return frozenset(found | _tokenizer_eos(directory))


def _tokenizer_eos(directory: Path) -> set[int]:
    """Id of the tokenizer's eos_token, from whichever of its two files lists it; empty without a tokenizer."""
    config = _read_json(directory / "tokenizer_config.json") or {}
    token = config.get("eos_token")
    token = token.get("content") if isinstance(token, dict) else token
    if token is None:
        return set()
    for token_id, entry in config.get("added_tokens_decoder", {}).items():
        if entry.get("content") == token:
            return {int(token_id)}
    tokenizer = _read_json(directory / "tokenizer.json") or {}
    ids = {entry["content"]: entry["id"] for entry in tokenizer.get("added_tokens", [])}
    ids = {**tokenizer.get("model", {}).get("vocab", {}), **ids} if token not in ids else ids
    if token not in ids:
        raise ConfigError(f"{directory}: expected the id of eos_token {token!r} in tokenizer.json, found none")
    return {int(ids[token])}


def _dtype(whole: Mapping[str, Any], text: Mapping[str, Any]) -> torch.dtype:
    name = next((v for s in (whole, text) for k in ("dtype", "torch_dtype") if (v := s.get(k))), "bfloat16")
    if name not in _DTYPES:
        raise ConfigError(f"config.json.dtype: expected one of {', '.join(_DTYPES)}, got {name!r}")
    return _DTYPES[name]


def _announces_fp8_kv(directory: Path, whole: Mapping[str, Any]) -> bool:
    """ModelOpt says it in hf_quant_config.json (`kv_cache_quant_algo`) and in config.json (`kv_cache_scheme`)."""
    quant = (_read_json(directory / "hf_quant_config.json") or {}).get("quantization", {})
    inline = whole.get("quantization_config") or {}
    algorithm = quant.get("kv_cache_quant_algo") or inline.get("kv_cache_quant_algo")
    scheme = inline.get("kv_cache_scheme") or {}
    return algorithm == "FP8" or (scheme.get("type") == "float" and scheme.get("num_bits") == 8)


def _read_json(path: Path) -> dict[str, Any] | None:
    """The JSON object in a file, None when there is no such file."""
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path}: expected JSON, got {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: expected a JSON object, got {type(content).__name__}")
    return content


def _expect_positive(section: str, record: object, may_be_zero: Collection[str] = ()) -> None:
    for name, value in vars(record).items():
        if isinstance(value, int) and value < (0 if name in may_be_zero else 1):
            raise ConfigError(f"{section}.{name}: expected a positive integer, got {value}")


def _expect_multiple(section: str, record: object, name: str, of_name: str) -> None:
    value, of_value = getattr(record, name), getattr(record, of_name)
    if value % of_value:
        raise ConfigError(f"{section}.{name}: expected a multiple of {of_name} ({of_value}), got {value}")
