"""The two passes over what a model asks of a checkpoint.

First a `Planner` answers with tensors on the meta device and notes every name that is missing, misshapen or asked for
twice; then, when the plan has no fault, a `Loader` gives memory and notes what goes where. So a checkpoint that does
not fit is refused before its first byte is read, and the bytes are read in the order of the disk, whatever the model's
is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial

import torch
from torch import Tensor

from qwen35.kernels.weight_layout import ROW_ALIGNMENT, PlainLayout, WeightLayout
from qwen35.weights.huge_pages import HugePageMemory, aligned_bytes
from qwen35.weights.reader import CheckpointReader
from qwen35.weights.source import FLOATS, Store, TensorSource
from qwen35.weights.stream import READ_BYTES, Piece, Progress, stream


class Planner(TensorSource):
    """Answers on the meta device and collects faults."""

    def __init__(
        self, reader: CheckpointReader, dtype: torch.dtype | None = None, layout: WeightLayout | None = None
    ) -> None:
        super().__init__(reader, dtype, layout or PlainLayout())
        self.missing: list[str] = []
        self.mismatched: list[str] = []
        self.num_bytes_mapped = 0  # of the embedding
        self.num_bytes_allocated = 0

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        self.num_bytes_allocated += aligned_bytes(shape, dtype)
        return torch.empty(shape, dtype=dtype, device="meta")

    def claim(self, name: str, shape: tuple[int, ...], dtypes: Sequence[torch.dtype]) -> torch.dtype:
        if name not in self.reader:
            self.missing.append(name)
            return dtypes[0]
        info = self.reader.info(name)
        if name in self.taken:
            self.mismatch(f"{name}: expected to be consumed once, got a second use")
        elif info.shape != shape or info.dtype not in dtypes:
            expected = f"{'/'.join(_short(dtype) for dtype in dtypes)} {list(shape)}"
            self.mismatch(f"{name}: expected {expected}, got {_short(info.dtype)} {list(info.shape)}")
        self.taken[name] = info
        return info.dtype if info.dtype in dtypes else dtypes[0]

    def fill(self, name: str, rows: range, store: Store) -> None:
        """Nothing is read."""

    def embedding(self, name: str, shape: tuple[int, int]) -> Tensor:
        tensor = torch.empty(shape, dtype=self.claim(name, shape, FLOATS), device="meta")
        self.num_bytes_mapped += tensor.numel() * tensor.element_size()
        return tensor

    def mismatch(self, fault: str) -> None:
        self.mismatched.append(fault)


class Loader(TensorSource):
    """Gives memory for what a faultless plan asked for; `pieces` says what is to be read into it."""

    def __init__(self, plan: Planner, device: torch.device) -> None:
        super().__init__(plan.reader, plan.dtype, plan.layout)
        self.device = device
        self.pieces: list[Piece] = []
        self._planned = plan.taken
        self._memory = HugePageMemory(plan.num_bytes_allocated) if device.type == "cpu" else None

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if self._memory is None:
            return torch.empty(shape, dtype=dtype, device=self.device)
        return self._memory.take(shape, dtype)

    def claim(self, name: str, shape: tuple[int, ...], dtypes: Sequence[torch.dtype]) -> torch.dtype:
        assert name in self._planned and name not in self.taken, name
        info = self.taken[name] = self._planned[name]
        return info.dtype

    def fill(self, name: str, rows: range, store: Store) -> None:
        info = self.taken[name]
        width = info.shape[-1] if info.shape else 1
        row_bytes = width * info.dtype.itemsize
        step = max(1, READ_BYTES // row_bytes // ROW_ALIGNMENT) * ROW_ALIGNMENT
        for first in range(rows.start, rows.stop, step):
            count = min(step, rows.stop - first)
            take = partial(_take_rows, store, first - rows.start, info.dtype, width)
            self.pieces.append(Piece(info.file, info.offset + first * row_bytes, count * row_bytes, take))

    def embedding(self, name: str, shape: tuple[int, int]) -> Tensor:
        self.claim(name, shape, FLOATS)
        return self.reader.map(name, is_random=True).to(self.device)  # the mapping itself on a CPU

    def mismatch(self, fault: str) -> None:
        raise AssertionError(f"fault not seen by the plan: {fault}")

    def read(self, progress: Progress) -> None:
        """Fills the weights. Raises CheckpointError for a file that changes meanwhile."""
        with _one_torch_thread(), self._memory.populating() if self._memory is not None else nullcontext():
            stream(self.pieces, progress)
        self.pieces.clear()

    @property
    def unfilled(self) -> list[str]:
        """Names that the plan counted on and nobody took."""
        return [name for name in self._planned if name not in self.taken]


@contextmanager
def _one_torch_thread() -> Iterator[None]:
    """Copies are bound by memory, and other threads read and make pages meanwhile; on busy cores more threads of torch
    wait for each other, ten times longer than they work."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def _take_rows(store: Store, first_row: int, dtype: torch.dtype, width: int, data: Tensor) -> None:
    """Bytes from a file, at any address, as rows of their type."""
    if data.data_ptr() % dtype.itemsize:
        data = data.clone()
    store(first_row, data.view(dtype).view(-1, width))


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
