"""Hands out the tensors of a checkpoint, each once, as typed weights.

The code that builds the records of weights runs twice over the same interface. First with a `Planner`, which answers
with tensors on the meta device and notes every name that is missing, misshapen or asked for twice; then, when the plan
has no fault, with a `Loader`, which reads. So a checkpoint that does not fit is refused before its first byte is read.

Letters: N output features, K input features, E experts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from qwen35.nvfp4 import BLOCK_WIDTH, FP8Tensor, LinearWeight, NVFP4Tensor
from qwen35.weights.reader import CheckpointReader, TensorInfo
from qwen35.weights.scheme import Kind

FLOATS = (torch.bfloat16, torch.float32, torch.float16)
Progress = Callable[[int, int], None]  # (bytes read, bytes to read)


class TensorSource(ABC):
    """What the builders of weights ask for. Shapes are those that the model's configuration demands."""

    def __init__(self, reader: CheckpointReader, device: torch.device, dtype: torch.dtype | None) -> None:
        self.reader = reader
        self.device = device
        self.dtype = dtype  # of dense matrices; None: as stored
        self.taken: dict[str, TensorInfo] = {}
        self.kinds: dict[str, Kind] = {}  # by module

    @abstractmethod
    def _take(self, name: str, shape: tuple[int, ...], dtypes: Sequence[torch.dtype]) -> Tensor:
        """The tensor of this name, consumed; on `self.device`."""

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
        return self._take(name, shape, FLOATS).float()

    def scalar(self, name: str) -> Tensor:
        """Scale, float32 of shape []; files write it with shape [] or [1]."""
        stored = self.reader.info(name).shape if name in self.reader else ()
        return self._take(name, (1,) if stored == (1,) else (), FLOATS).float().reshape(())

    def optional_scalar(self, name: str) -> Tensor | None:
        return self.scalar(name) if name in self.reader else None

    def dense(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Matrix that is never quantised."""
        tensor = self._take(name, shape, FLOATS)
        return tensor if self.dtype is None else tensor.to(self.dtype)

    def linear(self, module: str, shape: tuple[int, int]) -> LinearWeight:
        """Weight [N, K] of a linear layer, of the kind that its tensors show."""
        kind = self.kinds[module] = self._kind_on_disk(module)
        num_rows, width = shape
        if kind is Kind.DENSE:
            return self.dense(f"{module}.weight", shape)
        if kind is Kind.FP8:
            weight = self._take(f"{module}.weight", shape, (torch.float8_e4m3fn,))
            return FP8Tensor(
                weight, self.scalar(f"{module}.weight_scale"), self.optional_scalar(f"{module}.input_scale")
            )
        if width % BLOCK_WIDTH:
            self.mismatch(f"{module}: NVFP4 needs an input width that is a multiple of {BLOCK_WIDTH}, got {width}")
            width -= width % BLOCK_WIDTH
        return NVFP4Tensor(
            self._take(f"{module}.weight", (num_rows, width // 2), (torch.uint8,)),
            self._take(f"{module}.weight_scale", (num_rows, width // BLOCK_WIDTH), (torch.float8_e4m3fn,)),
            self.scalar(f"{module}.weight_scale_2"),
            self.optional_scalar(f"{module}.input_scale"),
        )

    def expert_stack(self, modules: Sequence[str], shape: tuple[int, int]) -> LinearWeight:
        """One stack [E, N, K] from one linear layer for each expert; scales become [E]. All must be of one kind."""
        stack: list[Tensor | None] = []
        for expert, module in enumerate(modules):
            parts = _parts(self.linear(module, shape))
            if self.kinds[module] is not self.kinds[modules[0]]:
                first = self.kinds[modules[0]].value
                self.mismatch(f"{module}: expected {first} as in {modules[0]}, got {self.kinds[module].value}")
                continue
            stack = stack or [_stack_of(part, len(modules)) for part in parts]
            if [part is None for part in parts] != [target is None for target in stack]:
                # FP8 alone has a scale that is optional: some with it would leave rows unset, or drop what is on disk.
                self.mismatch(f"{module}: expected input_scale on all experts or on none, unlike {modules[0]}")
                continue
            for target, part in zip(stack, parts, strict=True):
                if target is not None and part is not None:
                    target[expert].copy_(part)
        return _join(self.kinds[modules[0]], stack)

    def fused_stack(self, name: str, shape: tuple[int, int, int]) -> Tensor:
        """Dense experts stored as one tensor [E, N, K], without a `.weight` of its own."""
        self.kinds[name] = Kind.DENSE
        return self.dense(name, shape)

    def _kind_on_disk(self, module: str) -> Kind:
        name = f"{module}.weight"
        dtype = self.reader.info(name).dtype if name in self.reader else None
        if dtype is torch.uint8:
            return Kind.NVFP4 if f"{module}.input_scale" in self.reader else Kind.W4A16_NVFP4
        return Kind.FP8 if dtype is torch.float8_e4m3fn else Kind.DENSE


class Planner(TensorSource):
    """Answers on the meta device and collects faults."""

    def __init__(self, reader: CheckpointReader, dtype: torch.dtype | None) -> None:
        super().__init__(reader, torch.device("meta"), dtype)
        self.missing: list[str] = []
        self.mismatched: list[str] = []
        self.num_bytes_mapped = 0  # of the embedding

    def _take(self, name: str, shape: tuple[int, ...], dtypes: Sequence[torch.dtype]) -> Tensor:
        placeholder = torch.empty(shape, dtype=dtypes[0], device=self.device)
        if name not in self.reader:
            self.missing.append(name)
            return placeholder
        info = self.reader.info(name)
        if name in self.taken:
            self.mismatch(f"{name}: expected to be consumed once, got a second use")
        elif info.shape != shape or info.dtype not in dtypes:
            expected = f"{'/'.join(_short(dtype) for dtype in dtypes)} {list(shape)}"
            self.mismatch(f"{name}: expected {expected}, got {_short(info.dtype)} {list(info.shape)}")
        self.taken[name] = info
        return placeholder.to(info.dtype) if info.dtype in dtypes else placeholder

    def embedding(self, name: str, shape: tuple[int, int]) -> Tensor:
        tensor = self._take(name, shape, FLOATS)
        self.num_bytes_mapped += tensor.numel() * tensor.element_size()
        return tensor

    def mismatch(self, fault: str) -> None:
        self.mismatched.append(fault)

    @property
    def num_bytes_to_read(self) -> int:
        return sum(info.num_bytes for info in self.taken.values())


class Loader(TensorSource):
    """Reads what a faultless plan asked for."""

    def __init__(self, plan: Planner, device: torch.device, progress: Progress | None = None) -> None:
        super().__init__(plan.reader, device, plan.dtype)
        self._planned = plan.taken
        self._progress = progress
        self._num_bytes_to_read = plan.num_bytes_to_read
        self._num_bytes_read = 0

    def _take(self, name: str, shape: tuple[int, ...], dtypes: Sequence[torch.dtype]) -> Tensor:
        self._consume(name)
        if self.device.type == "cpu":
            return self.reader.read(name)
        return self.reader.map(name).to(self.device)

    def embedding(self, name: str, shape: tuple[int, int]) -> Tensor:
        self._consume(name)
        return self.reader.map(name).to(self.device)  # the mapping itself on a CPU

    def mismatch(self, fault: str) -> None:
        raise AssertionError(f"fault not seen by the plan: {fault}")

    @property
    def unfilled(self) -> list[str]:
        """Names that the plan counted on and nobody took."""
        return [name for name in self._planned if name not in self.taken]

    def _consume(self, name: str) -> None:
        assert name in self._planned and name not in self.taken, name
        self.taken[name] = self._planned[name]
        self._num_bytes_read += self.taken[name].num_bytes
        if self._progress is not None:
            self._progress(self._num_bytes_read, self._num_bytes_to_read)


def _parts(weight: LinearWeight) -> tuple[Tensor | None, ...]:
    if isinstance(weight, NVFP4Tensor):
        return weight.codes, weight.scales, weight.global_scale, weight.input_scale
    if isinstance(weight, FP8Tensor):
        return weight.weight, weight.weight_scale, weight.input_scale
    return (weight,)


def _stack_of(part: Tensor | None, num_experts: int) -> Tensor | None:
    return None if part is None else torch.empty((num_experts, *part.shape), dtype=part.dtype, device=part.device)


def _join(kind: Kind, parts: Sequence[Tensor | None]) -> LinearWeight:
    if kind is Kind.DENSE:
        return parts[0]
    return FP8Tensor(*parts) if kind is Kind.FP8 else NVFP4Tensor(*parts)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
