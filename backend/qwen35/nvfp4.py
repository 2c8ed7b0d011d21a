"""NVFP4 and FP8 weights as ModelOpt stores them, and the arithmetic between codes and real numbers.

A leaf: torch only. It does not know checkpoints, names or kernels.

One value is `e2m1[code] * (e4m3(block scale) * global_scale)`, both products in fp32. A block is 16 neighbours along K.
Two codes share a byte: the low nibble is the even k, the high nibble the odd k.

Rounding is to the nearest E2M1 value, ties to the even code, saturating at 6.

Underflow rule, for weights and activations alike: a block whose absolute maximum is zero gets the scale 1, every other
scale is clamped to [2^-9, 448], the range of E4M3, before it is rounded. So a block too small for its scale is
still coded with the smallest scale there is and loses precision gradually. (The GPU quantisation kernels instead
replace a scale below 1e-5 by 1, which turns the whole block to zero.) The rule is that of ModelOpt's `NVFP4QTensor`,
the format's reference on a CPU; with one rule for both sides an activation and a weight of equal values have equal
codes.

Source: modelopt 0.47 `torch/quantization/qtensor/nvfp4_tensor.py`.

Letters: N output features, K input features, E experts; `…` any leading dimensions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

BLOCK_WIDTH = 16  # values of K that share one block scale
PANEL_ROWS = 16  # output features that a CPU kernel computes at once
INT8_LEVELS, INT11_LEVELS = 127.0, 1019.0  # on either side of zero; two digits of 8 * [-127, 127] + [-4, 3]
E2M1_MAX = 6.0
E4M3_MAX = 448.0
E4M3_MIN_POSITIVE = 2.0**-9  # smallest subnormal
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# Code 8 (negative zero) decodes to +0.0, as in ModelOpt, so that exact zeros have one bit pattern.
E2M1_VALUES = _MAGNITUDES + (0.0,) + tuple(-magnitude for magnitude in _MAGNITUDES[1:])
_LEAST_AMAX = 1e-30  # blocks below are taken as zero: 127 and more over their maximum might overflow
# Bounds between neighbouring magnitudes. At an even position a tie goes down, at an odd one up: both to the even code.
_BOUNDS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


@dataclass(frozen=True)
class NVFP4Tensor:
    """Packed weight of shape [N, K], or [E, N, K] for a stack of experts.

    codes        uint8         [..., N, K/2]
    scales       float8_e4m3fn [..., N, K/16]
    global_scale float32       [] or the leading dimensions ([E])
    input_scale  float32       [] or [E]: static scale of W4A4 activations; None: activations stay as they are (W4A16)

    Raises ValueError when the parts do not fit each other.
    """

    codes: Tensor
    scales: Tensor
    global_scale: Tensor
    input_scale: Tensor | None = None

    def __post_init__(self) -> None:
        _check_type("NVFP4 codes", self.codes, torch.uint8)
        _check_type("NVFP4 block scales", self.scales, torch.float8_e4m3fn)
        *lead, num_rows, packed_width = self.codes.shape
        expected = (*lead, num_rows, packed_width * 2 // BLOCK_WIDTH)
        if packed_width * 2 % BLOCK_WIDTH or tuple(self.scales.shape) != expected:
            raise ValueError(
                f"NVFP4 block scales: expected shape {expected} for codes {tuple(self.codes.shape)} "
                f"(one scale per {BLOCK_WIDTH} values), got {tuple(self.scales.shape)}"
            )
        _check_scale("NVFP4 global scale", self.global_scale, lead)
        if self.input_scale is not None:
            _check_scale("NVFP4 input scale", self.input_scale, lead)

    @property
    def shape(self) -> torch.Size:
        """Shape of the weight it stands for: [..., N, K]."""
        return torch.Size((*self.codes.shape[:-1], self.codes.shape[-1] * 2))

    @property
    def num_bytes(self) -> int:
        return sum(_num_bytes(part) for part in (self.codes, self.scales, self.global_scale, self.input_scale))

    @property
    def device(self) -> torch.device:
        return self.codes.device

    def to(self, device: torch.device | str) -> NVFP4Tensor:
        return NVFP4Tensor(
            self.codes.to(device),
            self.scales.to(device),
            self.global_scale.to(device),
            None if self.input_scale is None else self.input_scale.to(device),
        )

    def __getitem__(self, expert: int) -> NVFP4Tensor:
        """One matrix of a stack: [E, N, K] -> [N, K]."""
        if self.codes.ndim < 3:
            raise IndexError(f"NVFP4 weight {tuple(self.shape)} is no stack: expected [E, N, K]")
        return NVFP4Tensor(
            self.codes[expert],
            self.scales[expert],
            _pick(self.global_scale, expert),
            None if self.input_scale is None else _pick(self.input_scale, expert),
        )


@dataclass(frozen=True)
class FP8Tensor:
    """Weight of shape [N, K] or [E, N, K] in E4M3: `weight * weight_scale`.

    weight       float8_e4m3fn [..., N, K]
    weight_scale float32       [] or [E]
    input_scale  float32       [] or [E]: static scale of FP8 activations; None: activations stay as they are
    """

    weight: Tensor
    weight_scale: Tensor
    input_scale: Tensor | None = None

    def __post_init__(self) -> None:
        _check_type("FP8 weight", self.weight, torch.float8_e4m3fn)
        lead = self.weight.shape[:-2]
        _check_scale("FP8 weight scale", self.weight_scale, lead)
        if self.input_scale is not None:
            _check_scale("FP8 input scale", self.input_scale, lead)

    @property
    def shape(self) -> torch.Size:
        return self.weight.shape

    @property
    def num_bytes(self) -> int:
        return sum(_num_bytes(part) for part in (self.weight, self.weight_scale, self.input_scale))

    @property
    def device(self) -> torch.device:
        return self.weight.device

    def to(self, device: torch.device | str) -> FP8Tensor:
        scale = None if self.input_scale is None else self.input_scale.to(device)
        return FP8Tensor(self.weight.to(device), self.weight_scale.to(device), scale)

    def __getitem__(self, expert: int) -> FP8Tensor:
        """One matrix of a stack: [E, N, K] -> [N, K]."""
        if self.weight.ndim < 3:
            raise IndexError(f"FP8 weight {tuple(self.shape)} is no stack: expected [E, N, K]")
        scale = None if self.input_scale is None else _pick(self.input_scale, expert)
        return FP8Tensor(self.weight[expert], _pick(self.weight_scale, expert), scale)


@dataclass(frozen=True)
class NVFP4Panels:
    """An NVFP4 weight [N, K] or [E, N, K] in the order in which CPU kernels read it: panels of 16 output features,
    zeros beyond N. One step of a kernel takes 16 features at 4 neighbours of K from one nibble of 64 code bytes.

    codes        uint8         [..., N/16, K/16, 128]: [half][feature][4], byte i of half h holds k = 8h + i in its low
                               and k = 8h + 4 + i in its high nibble
    scales       float8_e4m3fn [..., N/16, K/16, 16]: one a feature
    num_rows     N
    global_scale, input_scale  as in `NVFP4Tensor`
    """

    codes: Tensor
    scales: Tensor
    num_rows: int
    global_scale: Tensor
    input_scale: Tensor | None = None

    @classmethod
    def from_rows(cls, weight: NVFP4Tensor) -> NVFP4Panels:
        """The same weight, laid out by torch."""
        padding = (0, 0, 0, -weight.shape[-2] % PANEL_ROWS)
        codes = torch.nn.functional.pad(unpack(weight.codes), padding)
        codes = codes.unflatten(-1, (-1, 2, 2, 4)).unflatten(
            -5, (-1, PANEL_ROWS)
        )  # [..., P, lane, block, half, nib, 4]
        codes = codes.movedim(-5, -3)  # [..., P, block, half, lane, nib, 4]
        codes = (codes[..., 0, :] | codes[..., 1, :] << 4).flatten(-3).contiguous()  # [..., P, block, 128]
        scales = torch.nn.functional.pad(weight.scales.view(torch.uint8), padding).unflatten(-2, (-1, PANEL_ROWS)).mT
        scales = scales.contiguous().view(torch.float8_e4m3fn)  # [..., P, block, 16]
        return cls(codes, scales, weight.shape[-2], weight.global_scale, weight.input_scale)

    def to_rows(self) -> NVFP4Tensor:
        """The same weight as a checkpoint holds it."""
        halves = self.codes.unflatten(-1, (2, PANEL_ROWS, 4))  # [..., P, block, half, lane, 4]
        codes = torch.stack((halves & 0x0F, halves >> 4), -2).movedim(-3, -5)  # [..., P, lane, block, half, nib, 4]
        codes = codes.flatten(-4).flatten(-3, -2)[..., : self.num_rows, :]  # [..., N, K]
        scales = self.scales.view(torch.uint8).mT.flatten(-3, -2)[..., : self.num_rows, :]  # [..., N, K/16]
        scales = scales.contiguous().view(torch.float8_e4m3fn)
        return NVFP4Tensor(_pack(codes), scales, self.global_scale, self.input_scale)

    @property
    def shape(self) -> torch.Size:
        """Shape of the weight it stands for: [..., N, K]."""
        *lead, _, num_blocks, _ = self.codes.shape
        return torch.Size((*lead, self.num_rows, num_blocks * BLOCK_WIDTH))

    @property
    def num_bytes(self) -> int:
        return sum(_num_bytes(part) for part in (self.codes, self.scales, self.global_scale, self.input_scale))

    @property
    def device(self) -> torch.device:
        return self.codes.device

    def __getitem__(self, expert: int) -> NVFP4Panels:
        """One matrix of a stack: [E, N, K] -> [N, K]."""
        if self.codes.ndim < 4:
            raise IndexError(f"NVFP4 weight {tuple(self.shape)} is no stack: expected [E, N, K]")
        return NVFP4Panels(
            self.codes[expert],
            self.scales[expert],
            self.num_rows,
            _pick(self.global_scale, expert),
            None if self.input_scale is None else _pick(self.input_scale, expert),
        )


LinearWeight: TypeAlias = Tensor | NVFP4Tensor | NVFP4Panels | FP8Tensor


def num_bytes(weight: LinearWeight) -> int:
    """Bytes held by a weight of any kind, scales included."""
    return _num_bytes(weight) if isinstance(weight, Tensor) else weight.num_bytes


def global_scale_of(amax: Tensor) -> Tensor:
    """Global scale for values up to `amax` (any shape): the largest block then gets the block scale 448."""
    return amax.float() / (E2M1_MAX * E4M3_MAX)


def quantize_weight(
    weight: Tensor, global_scale: Tensor | None = None, input_scale: Tensor | None = None
) -> NVFP4Tensor:
    """Packs a weight [..., N, K]; without `global_scale` each matrix takes its own from its absolute maximum.

    A matrix of zeros gets the global scale 1. Raises ValueError when K is no multiple of 16 or a value is not finite.
    """
    if weight.ndim < 2 or weight.shape[-1] % BLOCK_WIDTH:
        raise ValueError(
            f"NVFP4 weight: expected [..., N, K] with K a multiple of {BLOCK_WIDTH}, got {tuple(weight.shape)}"
        )
    amax = weight.abs().amax(dim=(-2, -1)).float()
    if not torch.isfinite(amax).all():
        raise ValueError("NVFP4 weight: expected finite values, got inf or nan")
    if global_scale is None:
        global_scale = torch.where(amax == 0, torch.ones_like(amax), global_scale_of(amax))
    codes, scales = _quantize_blocks(weight, global_scale)
    return NVFP4Tensor(_pack(codes), scales, global_scale.float(), input_scale)


def quantize_activation(x: Tensor, input_scale: Tensor) -> tuple[Tensor, Tensor]:
    """W4A4 activations: x [..., K] -> packed codes uint8 [..., K/2], block scales float8_e4m3fn [..., K/16].

    `input_scale` is the static scale of the checkpoint, a float32 scalar; each block of 16 of each row takes its block
    scale from its own values alone, so a row's codes never depend on the other rows. Values beyond 2688 * input_scale
    saturate.
    """
    codes, scales = _quantize_blocks(x, input_scale)
    return _pack(codes), scales


def fake_quantize_activation(x: Tensor, input_scale: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """x [..., K] rounded through NVFP4 with the static `input_scale`; in `dtype`, by default that of x.

    Ask for float32 where the rounded values must be exact: only there is the product of the scales not rounded again.
    """
    codes, scales = _quantize_blocks(x, input_scale)
    return _decode(codes, scales, input_scale, dtype or x.dtype)


def fake_quantize_activation_fp8(x: Tensor, input_scale: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """x [..., K] rounded through E4M3 with the static scalar `input_scale`, saturating at 448 * input_scale."""
    scaled = (x.float() / input_scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return (scaled.float() * input_scale).to(dtype or x.dtype)


def fake_quantize_activation_levels(x: Tensor, num_levels: float) -> Tensor:
    """x [..., K] rounded to `num_levels` (INT8_LEVELS, INT11_LEVELS) on either side of zero in each block of 16 along
    K: a level is the block's absolute maximum over their number; below 1e-30 the block is zero. A last block may be
    shorter."""
    *_, width = x.shape
    blocks = torch.nn.functional.pad(x.float(), (0, -width % BLOCK_WIDTH)).unflatten(-1, (-1, BLOCK_WIDTH))
    amax = blocks.abs().amax(-1, keepdim=True)  # [..., K/16, 1]
    inverse = torch.full_like(amax, num_levels).div_(amax)  # one rounding: a number over a tensor would take two
    levels = (blocks * inverse.masked_fill_(amax < _LEAST_AMAX, 0.0)).round_()
    scale = (amax / num_levels).masked_fill_(amax < _LEAST_AMAX, 0.0)
    return (levels * scale).flatten(-2)[..., :width].to(x.dtype)


def dequantize(weight: LinearWeight, dtype: torch.dtype = torch.float32) -> Tensor:
    """The weight [..., N, K] in `dtype`. In float32 an NVFP4 weight equals ModelOpt's dequantisation bit for bit."""
    if isinstance(weight, NVFP4Panels):
        weight = weight.to_rows()
    if isinstance(weight, NVFP4Tensor):
        return _decode(unpack(weight.codes), weight.scales, weight.global_scale, dtype)
    if isinstance(weight, FP8Tensor):
        return (weight.weight.float() * _broadcast(weight.weight_scale, weight.weight.ndim)).to(dtype)
    return weight.to(dtype)


def unpack(codes: Tensor) -> Tensor:
    """uint8 [..., K/2] -> one code a byte, uint8 [..., K]."""
    pairs = torch.stack((codes & 0x0F, codes >> 4), dim=-1)  # [..., K/2, 2]
    return pairs.flatten(-2)  # [..., K]


def _pack(codes: Tensor) -> Tensor:
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def _quantize_blocks(x: Tensor, global_scale: Tensor) -> tuple[Tensor, Tensor]:
    """x [..., K] -> one code a byte, uint8 [..., K], and scales float8_e4m3fn [..., K/16]."""
    if x.shape[-1] % BLOCK_WIDTH:
        raise ValueError(f"NVFP4 values: expected K a multiple of {BLOCK_WIDTH}, got {tuple(x.shape)}")
    blocks = x.float().unflatten(-1, (-1, BLOCK_WIDTH))  # [..., K/16, 16]
    scale = blocks.abs().amax(-1) / (E2M1_MAX * _broadcast(global_scale, x.ndim))  # [..., K/16]
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    scales = scale.clamp(E4M3_MIN_POSITIVE, E4M3_MAX).to(torch.float8_e4m3fn)
    steps = scales.float() * _broadcast(global_scale, x.ndim)  # [..., K/16]
    return _round_to_codes(blocks / steps.unsqueeze(-1)).flatten(-2), scales


def _round_to_codes(values: Tensor) -> Tensor:
    """float32 -> E2M1 codes, uint8 of the same shape."""
    magnitudes = values.abs()
    bounds = torch.tensor(_BOUNDS, device=values.device)
    index = torch.searchsorted(bounds, magnitudes.contiguous(), out_int32=True)
    ties_upward = (magnitudes.unsqueeze(-1) == bounds[1::2]).any(-1)
    return (index + ties_upward).to(torch.uint8) | ((values < 0).to(torch.uint8) << 3)


def _decode(codes: Tensor, scales: Tensor, global_scale: Tensor, dtype: torch.dtype) -> Tensor:
    table = torch.tensor(E2M1_VALUES, device=codes.device)
    steps = scales.float() * _broadcast(global_scale, scales.ndim)  # [..., K/16]
    blocks = table[codes.int()].unflatten(-1, (-1, BLOCK_WIDTH))  # [..., K/16, 16]
    return (blocks * steps.unsqueeze(-1)).flatten(-2).to(dtype)


def _broadcast(scale: Tensor, num_dims: int) -> Tensor:
    """Scale with leading dimensions ([] or [E]) made to multiply a tensor of `num_dims` dimensions."""
    return scale.float().reshape(*scale.shape, *(1,) * (num_dims - scale.ndim))


def _pick(scale: Tensor, expert: int) -> Tensor:
    return scale if scale.ndim == 0 else scale[expert]


def _num_bytes(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.numel() * tensor.element_size()


def _check_type(what: str, tensor: Tensor, dtype: torch.dtype) -> None:
    if tensor.dtype != dtype or tensor.ndim < 2:
        raise ValueError(f"{what}: expected {dtype} [..., N, K], got {tensor.dtype} {tuple(tensor.shape)}")


def _check_scale(what: str, scale: Tensor, lead: torch.Size | list[int]) -> None:
    if scale.dtype != torch.float32 or tuple(scale.shape) not in {(), tuple(lead)}:
        raise ValueError(
            f"{what}: expected float32 of shape () or {tuple(lead)}, got {scale.dtype} {tuple(scale.shape)}"
        )
