"""Values of synthetic tensors, drawn in chunks and straight in the type that goes to disk.

Every matrix has a generator of its own, seeded by the run's seed and the matrix's name: its values do not depend on
the order of writing, nor on whether experts lie fused or one by one. A value is one random number mapped through a
table of quantiles of the normal distribution: 65,536 of them for bfloat16, 256 for E4M3, 16 for E2M1.

Letters: N output features, K input features.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from qwen35.nvfp4 import BLOCK_WIDTH, E2M1_MAX, E2M1_VALUES, E4M3_MAX, quantize_weight

CHUNK_VALUES = 1 << 22
INPUT_AMAX = 12.0  # what a calibration would have seen: the static input scales are of this size
MAX_NORMAL = float(torch.special.ndtri(torch.tensor(1 - 0.5 / 65536, dtype=torch.float64)))  # the largest quantile
_TYPICAL_BLOCK_AMAX = 2.03  # median of the largest of 16 normal magnitudes


class Values:
    """Chunks of bytes (uint8 arrays) of tensors, by name."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def normal(self, name: str, num_values: int, std: float, mean: float = 0.0) -> Iterator[np.ndarray]:
        """bfloat16, normal."""
        table = _bf16_table(std, mean)
        for bits in self._bits(name, num_values):
            yield table.take(bits).view(np.uint8)

    def packed_codes(self, name: str, num_values: int) -> Iterator[np.ndarray]:
        """E2M1 codes, two a byte, as of a normal matrix with the block scales of `block_scales`."""
        return self._translated(f"{name}.codes", num_values // 2, _code_table())

    def block_scales(self, name: str, num_values: int) -> Iterator[np.ndarray]:
        """E4M3 block scales, one for 16 values."""
        return self._translated(f"{name}.scales", num_values // BLOCK_WIDTH, _block_scale_table())

    def e4m3(self, name: str, num_values: int) -> Iterator[np.ndarray]:
        """E4M3 values of a normal matrix with the scale `fp8_scale`."""
        return self._translated(f"{name}.e4m3", num_values, _e4m3_table())

    def rounded(self, name: str, num_values: int, std: float, *, scales: bool) -> Iterator[np.ndarray]:
        """The values of `normal` rounded to NVFP4: packed codes, or their block scales."""
        factor = torch.tensor(nvfp4_global_scale(std))
        for chunk in self.normal(name, num_values, std):
            dense = torch.from_numpy(chunk.view(np.int16)).view(torch.bfloat16)
            packed = quantize_weight(dense.view(-1, BLOCK_WIDTH), factor)
            yield (packed.scales.view(torch.uint8) if scales else packed.codes).flatten().numpy()

    def _translated(self, name: str, num_bytes: int, table: bytes) -> Iterator[np.ndarray]:
        for bits in self._bits(name, -(-num_bytes // 2)):
            translated = np.frombuffer(bits.tobytes().translate(table), dtype=np.uint8)
            yield translated[:num_bytes]
            num_bytes -= len(translated)

    def _bits(self, name: str, num_values: int) -> Iterator[np.ndarray]:
        """Uniform uint16, `num_values` of them."""
        bits = np.random.SFC64(np.random.SeedSequence([self._seed, zlib.crc32(name.encode())]))
        for start in range(0, num_values, CHUNK_VALUES):
            count = min(CHUNK_VALUES, num_values - start)
            yield bits.random_raw(-(-count // 4)).view(np.uint16)[:count]


def nvfp4_global_scale(std: float) -> float:
    """Of a normal matrix: its largest value gets the code 6 in a block of the scale 448."""
    return float(torch.tensor(MAX_NORMAL * std).bfloat16()) / (E2M1_MAX * E4M3_MAX)


def fp8_scale(std: float) -> float:
    return MAX_NORMAL * std / E4M3_MAX


def floats(tensor: Tensor) -> np.ndarray:
    """Bytes of a tensor."""
    return tensor.contiguous().flatten().view(torch.uint8).numpy()


def _quantiles(count: int) -> Tensor:
    return torch.special.ndtri((torch.arange(count, dtype=torch.float64) + 0.5) / count)


@lru_cache(maxsize=64)
def _bf16_table(std: float, mean: float) -> np.ndarray:
    values = (mean + std * _quantiles(1 << 16)).bfloat16()
    return values.view(torch.int16).numpy().view(np.uint16)


@lru_cache(maxsize=1)
def _code_table() -> bytes:
    """Two codes for every byte: each half of its bits is one of 16 quantiles, rounded to the nearest E2M1 value."""
    targets = _quantiles(16) * (E2M1_MAX / _TYPICAL_BLOCK_AMAX)
    grid = torch.tensor(E2M1_VALUES, dtype=torch.float64)
    codes = (targets[:, None] - grid).abs().argmin(1)  # the first of equals: zero is always code 0
    return bytes((codes[:, None] << 4 | codes).flatten().tolist())


@lru_cache(maxsize=1)
def _block_scale_table() -> bytes:
    """Quantiles of the largest of 16 normal magnitudes, as E4M3 scales relative to `nvfp4_global_scale`."""
    shares = (torch.arange(256, dtype=torch.float64) + 0.5) / 256
    largest = torch.special.ndtri((1 + shares ** (1 / BLOCK_WIDTH)) / 2)
    return _as_e4m3(largest / MAX_NORMAL * E4M3_MAX)


@lru_cache(maxsize=1)
def _e4m3_table() -> bytes:
    return _as_e4m3(_quantiles(256) / MAX_NORMAL * E4M3_MAX)


def _as_e4m3(values: Tensor) -> bytes:
    return bytes(values.float().clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8).tolist())
