"""Hands out the tensors of a checkpoint, each once, as typed weights.

The code that builds the records of weights runs twice over this interface, see `passes`: it says which tensor goes
where, and never sees a byte.

Letters: N output features, K input features, E experts, I expert width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from qwen35.kernels.weight_layout import WeightLayout
from qwen35.nvfp4 import BLOCK_WIDTH, FP8Tensor, LinearWeight, NVFP4Tensor, quantize_weight
from qwen35.weights.header import TensorInfo
from qwen35.weights.reader import CheckpointReader
from qwen35.weights.scheme import Kind
from qwen35.weights.stream import READ_BYTES

FLOATS = (torch.bfloat16, torch.float32, torch.float16)
_BYTES, _E4M3 = (torch.uint8,), (torch.float8_e4m3fn,)
Store = Callable[[int, Tensor], None]  # (number of the first row, rows [R, ...])


@dataclass(frozen=True)
class Scale:
    """The scales of one weight, for a look at their values when they are filled: [] or [E]."""

    modules: tuple[str, ...]
    suffix: str
    values: Tensor


class TensorSource(ABC):
    """What the builders of weights ask for. Shapes are those that the model's configuration demands."""

    def __init__(self, reader: CheckpointReader, dtype: torch.dtype | None, layout: WeightLayout) -> None:
        self.reader = reader
        self.dtype = dtype  # of dense matrices; None: as stored
        self.layout = layout
        self.taken: dict[str, TensorInfo] = {}
        self.kinds: dict[str, Kind] = {}  # by module
        self.scales: list[Scale] = []

    @abstractmethod
    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Memory for weights, uninitialised."""

    @abstractmethod
    def claim(self, name: str, shape: tuple[int, ...], dtypes: Sequence[torch.dtype]) -> torch.dtype:
        """Consumes a tensor; its type on disk."""

    @abstractmethod
    def fill(self, name: str, rows: range, store: Store) -> None:
        """Sends rows of a claimed tensor, seen as [rows, last dimension], to `store` when its bytes are read."""

    @abstractmethod
    def embedding(self, name: str, shape: tuple[int, int]) -> Tensor:
        """[V, H] as stored; on a CPU the mapped file."""

    @abstractmethod
    def mismatch(self, fault: str) -> None:
        """Notes that tensors do not fit the model or each other."""

    def __contains__(self, name: str) -> bool:
        return name in self.reader

    def vector(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Norm or other small vector, in float32 whatever the file has."""
        self.claim(name, shape, FLOATS)
        return self._filled(name, self.allocate(shape, torch.float32))

    def dense(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Tensor that is never quantised."""
        stored = self.claim(name, shape, FLOATS)
        return self._filled(name, self.allocate(shape, self.dtype or stored))

    def optional_scalar(self, name: str) -> Tensor | None:
        """A scale that not every checkpoint has."""
        if name not in self.reader:
            return None
        target = self.allocate((), torch.float32)
        self._scale(name.rsplit(".", 1)[0], name.rsplit(".", 1)[1], target)
        self.scales.append(Scale((name.rsplit(".", 1)[0],), name.rsplit(".", 1)[1], target))
        return target

    def linear(self, module: str, shape: tuple[int, int]) -> LinearWeight:
        """Weight [N, K] of a linear layer, of the kind that its tensors show."""
        return self._weight([module], shape, is_stack=False)

    def expert_stack(
        self, modules: Sequence[str], shape: tuple[int, int], *, rounds_dense: bool = False
    ) -> LinearWeight:
        """One stack [E, N, K] from one linear layer for each expert; scales become [E]. All must be of one kind.
        `rounds_dense`: dense experts become NVFP4."""
        if not rounds_dense or any(self._kind_on_disk(module) is not Kind.DENSE for module in modules):
            return self._weight(modules, shape, is_stack=True)
        target = self._rounded_target(modules[0], (len(modules), *shape))
        for expert, module in enumerate(modules):
            self.kinds[module] = Kind.DENSE
            self.claim(f"{module}.weight", shape, FLOATS)
            self.fill(f"{module}.weight", range(shape[0]), partial(_store_rounded, self.layout, target, expert))
        return target

    def fused_stack(
        self, name: str, shape: tuple[int, int, int], num_parts: int = 1, *, rounds_dense: bool = False
    ) -> tuple[LinearWeight, ...]:
        """Dense experts stored as one tensor [E, num_parts * N, K], without a `.weight` of its own, as `num_parts`
        stacks [E, N, K]; `shape` is that of one. `rounds_dense`: they become NVFP4."""
        self.kinds[name] = Kind.DENSE
        num_experts, num_rows, width = shape
        stored = self.claim(name, (num_experts, num_parts * num_rows, width), FLOATS)
        if rounds_dense:
            targets = tuple(self._rounded_target(name, shape) for _ in range(num_parts))
        else:
            weight = torch.empty(shape, dtype=self.dtype or stored, device="meta")
            targets = tuple(self.layout.target(weight, self.allocate) for _ in range(num_parts))
        for index in range(num_experts * num_parts):
            expert, part = divmod(index, num_parts)
            if rounds_dense:
                store: Store = partial(_store_rounded, self.layout, targets[part], expert)
            else:
                store = partial(_store_rows, self.layout, targets[part], "weight", expert)
            self.fill(name, range(index * num_rows, (index + 1) * num_rows), store)
        return targets

    def _rounded_target(self, name: str, shape: tuple[int, int, int]) -> LinearWeight:
        """NVFP4 memory for dense experts, which are rounded one by one as they are read, each whole."""
        num_experts, num_rows, width = shape
        if width % BLOCK_WIDTH or num_rows * width * FLOATS[1].itemsize > READ_BYTES:
            self.mismatch(
                f"{name}: experts can be rounded to NVFP4 when their width is a multiple of {BLOCK_WIDTH} and each has "
                f"at most {READ_BYTES // FLOATS[1].itemsize} weights, got {num_rows} x {width}"
            )
            width = BLOCK_WIDTH
        codes = torch.empty(num_experts, num_rows, width // 2, dtype=torch.uint8, device="meta")
        scales = torch.empty(num_experts, num_rows, width // BLOCK_WIDTH, dtype=torch.float8_e4m3fn, device="meta")
        global_scale = self.allocate((num_experts,), torch.float32)
        return self.layout.target(NVFP4Tensor(codes, scales, global_scale), self.allocate)

    def _weight(self, modules: Sequence[str], shape: tuple[int, int], *, is_stack: bool) -> LinearWeight:
        kind = self._kind_on_disk(modules[0])
        if kind in (Kind.NVFP4, Kind.W4A16_NVFP4) and shape[1] % BLOCK_WIDTH:
            width = shape[1]
            self.mismatch(f"{modules[0]}: NVFP4 needs an input width that is a multiple of {BLOCK_WIDTH}, got {width}")
            shape = (shape[0], width - width % BLOCK_WIDTH)
        lead = (len(modules),) if is_stack else ()
        target, scales = self._target(modules[0], kind, lead, shape)
        for expert, module in enumerate(modules):
            self._fill_weight(module, kind, modules[0], shape, target, expert if is_stack else None, scales)
        self.scales += [Scale(tuple(modules), suffix, values) for suffix, values in scales.items()]
        return target

    def _target(
        self, module: str, kind: Kind, lead: tuple[int, ...], shape: tuple[int, int]
    ) -> tuple[LinearWeight, dict[str, Tensor]]:
        """Memory of a weight of one kind, and its scales [] or [E] by their suffix on disk."""
        suffixes = [suffix for suffix in _SCALES[kind] if suffix != "input_scale" or f"{module}.{suffix}" in self]
        scales = {suffix: self.allocate(lead, torch.float32) for suffix in suffixes}
        if kind is Kind.DENSE:
            stored = self.reader.info(f"{module}.weight").dtype if f"{module}.weight" in self else FLOATS[0]
            dtype = self.dtype or (stored if stored in FLOATS else FLOATS[0])
            weight: LinearWeight = torch.empty((*lead, *shape), dtype=dtype, device="meta")
        else:
            matrices = [
                torch.empty((*lead, *part_shape), dtype=dtypes[0], device="meta")
                for _, _, part_shape, dtypes in _matrices(kind, shape)
            ]
            record = FP8Tensor if kind is Kind.FP8 else NVFP4Tensor
            own = "weight_scale" if kind is Kind.FP8 else "weight_scale_2"
            weight = record(*matrices, scales[own], scales.get("input_scale"))
        return self.layout.target(weight, self.allocate), scales

    def _fill_weight(
        self,
        module: str,
        kind: Kind,
        first: str,
        shape: tuple[int, int],
        target: LinearWeight,
        expert: int | None,
        scales: dict[str, Tensor],
    ) -> None:
        """One matrix, and its places in the scales of the stack that `first` began."""
        found = self.kinds[module] = self._kind_on_disk(module)
        is_same = found is kind
        if not is_same:
            self.mismatch(f"{module}: expected {kind.value} as in {first}, got {found.value}")
        for suffix, part, part_shape, dtypes in _matrices(found, shape):
            self.claim(f"{module}.{suffix}", part_shape, dtypes)
            if is_same:
                store = partial(_store_rows, self.layout, target, part, expert)
                self.fill(f"{module}.{suffix}", range(part_shape[0]), store)
        present = [suffix for suffix in _SCALES[found] if suffix != "input_scale" or f"{module}.{suffix}" in self]
        if is_same and present != list(scales):
            # FP8 alone has a scale that is optional: some with it would leave rows unset, or drop what is on disk.
            self.mismatch(f"{module}: expected input_scale on all experts or on none, unlike {first}")
            is_same = False
        for suffix in present:
            values = scales[suffix] if is_same else None
            self._scale(module, suffix, values if values is None or expert is None else values[expert])

    def _scale(self, module: str, suffix: str, target: Tensor | None) -> None:
        """Scale, float32 of shape []; files write it with shape [] or [1]. Without a target it is only consumed."""
        name = f"{module}.{suffix}"
        stored = self.reader.info(name).shape if name in self.reader else ()
        self.claim(name, (1,) if stored == (1,) else (), FLOATS)
        if target is not None:
            self._filled(name, target)

    def _filled(self, name: str, target: Tensor) -> Tensor:
        """`target` takes the whole tensor, whatever its type is on disk."""
        flat = target.view(-1, target.shape[-1]) if target.ndim else target.view(1, 1)
        self.fill(name, range(len(flat)), partial(_copy_rows, flat))
        return target

    def _kind_on_disk(self, module: str) -> Kind:
        name = f"{module}.weight"
        dtype = self.reader.info(name).dtype if name in self.reader else None
        if dtype is torch.uint8:
            return Kind.NVFP4 if f"{module}.input_scale" in self.reader else Kind.W4A16_NVFP4
        return Kind.FP8 if dtype is torch.float8_e4m3fn else Kind.DENSE


_SCALES = {  # of whole matrices, by their suffixes on disk
    Kind.DENSE: (),
    Kind.FP8: ("weight_scale", "input_scale"),
    Kind.W4A16_NVFP4: ("weight_scale_2",),
    Kind.NVFP4: ("weight_scale_2", "input_scale"),
}


def _matrices(
    kind: Kind, shape: tuple[int, int]
) -> tuple[tuple[str, str, tuple[int, int], tuple[torch.dtype, ...]], ...]:
    """Suffix on disk, part of the weight, shape and types of what is stored for each output feature."""
    num_rows, width = shape
    if kind is Kind.DENSE:
        return (("weight", "weight", shape, FLOATS),)
    if kind is Kind.FP8:
        return (("weight", "weight", shape, _E4M3),)
    return (
        ("weight", "codes", (num_rows, width // 2), _BYTES),
        ("weight_scale", "scales", (num_rows, width // BLOCK_WIDTH), _E4M3),
    )


def _copy_rows(target: Tensor, first_row: int, rows: Tensor) -> None:
    target[first_row : first_row + len(rows)].copy_(rows)


def _store_rows(
    layout: WeightLayout, target: LinearWeight, part: str, expert: int | None, first_row: int, rows: Tensor
) -> None:
    layout.store(target, part, expert, first_row, rows)


def _store_rounded(layout: WeightLayout, target: LinearWeight, expert: int, first_row: int, rows: Tensor) -> None:
    """`rows` is a whole matrix; it takes its own global scale."""
    assert first_row == 0 and not isinstance(target, Tensor)
    packed = quantize_weight(rows)
    target.global_scale[expert].copy_(packed.global_scale)
    layout.store(target, "codes", expert, 0, packed.codes)
    layout.store(target, "scales", expert, 0, packed.scales)
