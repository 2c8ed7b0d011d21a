"""How linear weights lie in memory: the seam between loading and the kernels that read them.

Loading asks a layout for the memory of each weight and hands it the checkpoint's rows as they come from disk, in any
order and from any number of files; a layout of some kernels puts them where those want them. So a weight is laid anew
on its way into memory, and no second copy of it ever exists.

Letters: N output features, K input features, E experts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from qwen35.nvfp4 import FP8Tensor, LinearWeight, NVFP4Tensor

Allocate = Callable[[tuple[int, ...], torch.dtype], Tensor]
ROW_ALIGNMENT = 64  # `first_row` of every `store` is a multiple of it


class WeightLayout(Protocol):
    """Of linear weights: [N, K], or [E, N, K] for a stack of experts.

    The matrices of a weight are its parts: `codes` and `scales` of an NVFP4Tensor, `weight` of an FP8Tensor and of a
    dense tensor.
    """

    def target(self, weight: LinearWeight, allocate: Allocate) -> LinearWeight:
        """What the kernels will hold, its matrices uninitialised and from `allocate`.

        `weight` has its matrices on the meta device: shapes and types are what counts. Scales of whole matrices
        ([] or [E]) are real and belong into the result; they are filled later. Called once more before loading with
        an `allocate` that only counts: the same calls must come in the same order.
        """
        ...

    def store(self, target: LinearWeight, part: str, expert: int | None, first_row: int, rows: Tensor) -> None:
        """Puts rows [R, bytes or values of K], as they lie on disk, into one part of one matrix.

        Every row comes exactly once. `rows` is only valid during the call.
        """
        ...


class PlainLayout:
    """As on disk; the default."""

    def target(self, weight: LinearWeight, allocate: Allocate) -> LinearWeight:
        if isinstance(weight, NVFP4Tensor):
            codes = allocate(tuple(weight.codes.shape), weight.codes.dtype)
            return replace(weight, codes=codes, scales=allocate(tuple(weight.scales.shape), weight.scales.dtype))
        if isinstance(weight, FP8Tensor):
            return replace(weight, weight=allocate(tuple(weight.weight.shape), weight.weight.dtype))
        return allocate(tuple(weight.shape), weight.dtype)

    def store(self, target: LinearWeight, part: str, expert: int | None, first_row: int, rows: Tensor) -> None:
        matrix = target if isinstance(target, Tensor) else getattr(target, part)
        matrix = matrix if expert is None else matrix[expert]
        matrix[first_row : first_row + len(rows)].copy_(rows)
