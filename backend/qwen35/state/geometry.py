"""Sizes of everything that lives in an arena, derived once from the model's config and the settings.

Knows numbers only: no memory, no files, no tensors. Letters as in `qwen35.views`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from qwen35.errors import ConfigError

if TYPE_CHECKING:
    from qwen35.config import ModelConfig
    from qwen35.settings import Settings

DTYPE_BYTES = {"fp8": 1, "bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}
REGION_ALIGN_BYTES = 4096
_POSITIVE = (
    "num_blocks",
    "block_tokens",
    "num_slots",
    "max_context_tokens",
    "hidden_size",
    "max_leases",
    "max_holders",
    "max_pending",
)


@dataclass(frozen=True)
class Region:
    """One tensor of the cache: where it starts in the cache bytes, its shape and type."""

    name: str
    offset_bytes: int
    shape: tuple[int, ...]
    dtype: str

    @property
    def is_by_slot(self) -> bool:
        """Its first axis counts slots; else blocks."""
        return not self.name.endswith((".keys", ".values"))

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """Counts, shapes and types of the caches and of the tables that say who owns them."""

    num_blocks: int
    block_tokens: int
    num_slots: int  # of sequences and of checkpoints together
    num_checkpoints: int  # so many of them are there for the prefix cache; 0: it is off
    max_context_tokens: int  # of a sequence
    num_attention_layers: int  # of the target
    has_draft: bool  # one more KV layer
    num_gated_delta_layers: int
    hidden_size: int
    num_kv_heads: int
    head_dim: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_channels: int  # 2 * Hk * Dk + Hv * Dv
    conv_width: int
    max_pending: int  # inputs of one verify: largest draft length + 1
    dtype: str  # of activations: conv inputs, pending inputs
    kv_dtype: str
    state_dtype: str  # of the recurrence: recurrent state, decay, beta
    max_leases: int
    max_holders: int = 16

    def __post_init__(self) -> None:
        for name in _POSITIVE:
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: expected a positive integer, got {getattr(self, name)}")
        if not 0 <= self.num_checkpoints < self.num_slots:
            raise ConfigError(f"num_checkpoints: expected 0 to num_slots - 1, got {self.num_checkpoints}")
        for name in ("dtype", "kv_dtype", "state_dtype"):
            if getattr(self, name) not in DTYPE_BYTES:
                raise ConfigError(f"{name}: expected one of {', '.join(DTYPE_BYTES)}, got {getattr(self, name)!r}")

    @classmethod
    def derive(cls, config: ModelConfig, settings: Settings) -> Geometry:
        """Sizes for one model under these settings; blocks are what fits into ``settings.kv_cache_bytes``."""
        text = config.text
        dtype = _dtype_name(config.dtype if settings.dtype == "auto" else settings.dtype)
        kv_dtype = _kv_dtype_name(config, settings, dtype)
        num_attention_layers = text.num_full_attention_layers
        num_kv_layers = num_attention_layers + (settings.num_draft_tokens > 0)
        kv_row_bytes = 2 * text.num_key_value_heads * text.head_dim * DTYPE_BYTES[kv_dtype]
        if not (num_attention_layers and text.num_gated_delta_layers):
            raise ConfigError("layer_types: expected layers of full and of linear attention, got "
                              f"{num_attention_layers} and {text.num_gated_delta_layers}")  # fmt: skip
        block_bytes = num_kv_layers * settings.block_tokens * kv_row_bytes
        if block_bytes > settings.kv_cache_bytes:
            raise ConfigError(f"kv_cache_bytes: expected at least {block_bytes} (one block of {settings.block_tokens} "
                              f"tokens), got {settings.kv_cache_bytes}")  # fmt: skip
        return cls(
            num_blocks=settings.kv_cache_bytes // block_bytes,
            block_tokens=settings.block_tokens,
            num_slots=settings.num_slots + settings.num_checkpoints,
            num_checkpoints=settings.num_checkpoints,
            max_context_tokens=settings.max_context_tokens or text.max_position_embeddings,
            num_attention_layers=num_attention_layers,
            has_draft=settings.num_draft_tokens > 0,
            num_gated_delta_layers=text.num_gated_delta_layers,
            hidden_size=text.hidden_size,
            num_kv_heads=text.num_key_value_heads,
            head_dim=text.head_dim,
            num_value_heads=text.linear_num_value_heads,
            key_head_dim=text.linear_key_head_dim,
            value_head_dim=text.linear_value_head_dim,
            conv_channels=text.conv_dim,
            conv_width=text.linear_conv_kernel_dim,
            max_pending=settings.num_draft_tokens + 1,
            dtype=dtype,
            kv_dtype=kv_dtype,
            state_dtype="float32",
            max_leases=2 * (settings.max_queued_requests + settings.num_slots) + 64,
        )

    @property
    def block_bytes(self) -> int:
        """Keys and values of one block in all KV layers, the draft's included."""
        kv_row_bytes = 2 * self.num_kv_heads * self.head_dim * DTYPE_BYTES[self.kv_dtype]
        return (self.num_attention_layers + self.has_draft) * self.block_tokens * kv_row_bytes

    @property
    def slot_bytes(self) -> int:
        """Everything that one slot holds."""
        return sum(region.num_bytes // self.num_slots for region in self.regions if region.is_by_slot)

    @property
    def max_sequence_blocks(self) -> int:
        return min(self.num_blocks, -(-self.max_context_tokens // self.block_tokens))

    @property
    def max_pins(self) -> int:
        """One for each request that hit a prefix, and as many again for what the running ones publish."""
        return 2 * self.max_leases + 4 * self.num_slots

    @property
    def max_extents(self) -> int:
        """Every extent holds at least one block or slot; 4096 of them are plenty."""
        return min(self.num_blocks + self.num_slots, 4096)

    @property
    def regions(self) -> tuple[Region, ...]:
        """All tensors of the cache with their places, in order, each aligned to a page."""
        regions: list[Region] = []
        offset = 0
        for name, shape, dtype in self._shapes():
            regions.append(Region(name, offset, shape, dtype))
            offset += -(-regions[-1].num_bytes // REGION_ALIGN_BYTES) * REGION_ALIGN_BYTES
        return tuple(regions)

    @property
    def cache_bytes(self) -> int:
        """Bytes of KV blocks and slots, alignment included."""
        last = self.regions[-1]
        return -(-(last.offset_bytes + last.num_bytes) // REGION_ALIGN_BYTES) * REGION_ALIGN_BYTES

    @property
    def table_bytes(self) -> int:
        """Bytes of the header and the ownership tables."""
        from qwen35.state.tables import TableLayout

        return TableLayout.of(self).num_bytes

    def bytes_by_part(self) -> dict[str, int]:
        """Bytes of each kind of content: keys, values, draft.keys, …, tables; alignment left out."""
        parts: dict[str, int] = {}
        for region in self.regions:
            layer, _, part = region.name.rpartition(".")
            part = region.name if layer == "draft" else part
            parts[part] = parts.get(part, 0) + region.num_bytes
        return parts | {"tables": self.table_bytes}

    def as_dict(self) -> dict[str, int | str | bool]:
        return asdict(self)

    def difference(self, other: dict[str, object]) -> str:
        """The fields in which a stored geometry differs from this one: ``name: expected …, got …; …``."""
        mine = self.as_dict()
        names = sorted(name for name in mine.keys() | other.keys() if mine.get(name) != other.get(name))
        return "; ".join(f"{name}: expected {mine.get(name)}, got {other.get(name)}" for name in names)

    def _shapes(self) -> Iterator[tuple[str, tuple[int, ...], str]]:
        kv = (self.num_blocks, self.block_tokens, self.num_kv_heads, self.head_dim)  # [B, P, Hkv, D]
        slots, pending, heads = self.num_slots, self.max_pending, self.num_value_heads
        for layer in range(self.num_attention_layers):
            yield f"attention{layer}.keys", kv, self.kv_dtype
            yield f"attention{layer}.values", kv, self.kv_dtype
        if self.has_draft:
            yield "draft.keys", kv, self.kv_dtype
            yield "draft.values", kv, self.kv_dtype
        for layer in range(self.num_gated_delta_layers):
            prefix = f"gated_delta{layer}"
            yield f"{prefix}.recurrent", (slots, heads, self.key_head_dim, self.value_head_dim), self.state_dtype
            yield f"{prefix}.conv", (slots, self.conv_channels, self.conv_width - 1), self.dtype
            yield f"{prefix}.pending_inputs", (slots, pending, self.conv_channels), self.dtype
            yield f"{prefix}.pending_decay", (slots, pending, heads), self.state_dtype
            yield f"{prefix}.pending_beta", (slots, pending, heads), self.state_dtype
        yield "boundary_hidden", (slots, self.hidden_size), self.dtype


def _dtype_name(dtype: object) -> str:
    """``torch.bfloat16`` and ``"bfloat16"`` both give ``bfloat16``."""
    return str(dtype).removeprefix("torch.")


def _kv_dtype_name(config: ModelConfig, settings: Settings, dtype: str) -> str:
    if settings.kv_cache_dtype != "auto":
        return settings.kv_cache_dtype
    return "fp8" if config.has_fp8_kv_cache else dtype
