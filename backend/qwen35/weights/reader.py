"""Reads tensors of a checkpoint directory by name: one safetensors file, or shards with an index.

Names, shapes and types come from the headers alone. The reader knows nothing of models; whether the tensors are the
right ones is for `source` and `loader` to prove.
"""

from __future__ import annotations

import json
import math
import struct
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from qwen35.errors import CheckpointError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True)
class TensorInfo:
    """One tensor as its file's header describes it."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    file: Path

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class CheckpointReader:
    """Open checkpoint directory; a context manager.

    Raises CheckpointError when the directory, its weights or one of its shards is missing, truncated or corrupt, when
    the index and the shards disagree, and when two shards hold a tensor of the same name.
    """

    def __init__(self, directory: Path | str) -> None:
        self.directory = Path(directory)
        self._files: dict[Path, safe_open] = {}
        self._infos: dict[str, TensorInfo] = {}
        self._open_files = ExitStack()
        try:
            indexed = self._find_files()
            for path in dict.fromkeys(indexed.values()) if indexed else [self._single_file()]:
                self._open(path)
            _check_index(indexed, self._infos)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes the files. Mapped tensors stay valid."""
        self._files.clear()
        self._open_files.close()

    @property
    def names(self) -> tuple[str, ...]:
        """All tensor names, file by file in the order of their headers."""
        return tuple(self._infos)

    def __contains__(self, name: str) -> bool:
        return name in self._infos

    def info(self, name: str) -> TensorInfo:
        """Shape and type of one tensor, without reading it. Raises CheckpointError for an unknown name."""
        if name not in self._infos:
            raise CheckpointError(f"{self.directory}: expected a tensor {name!r}, got none of that name")
        return self._infos[name]

    def map(self, name: str) -> Tensor:
        """The tensor as a private mapping of its file: pages are read when they are touched."""
        info = self.info(name)
        try:
            return self._files[info.file].get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{info.file}: {name}: expected a readable tensor, got {error}") from error

    def read(self, name: str) -> Tensor:
        """The tensor in memory of its own."""
        return self.map(name).clone()

    def _find_files(self) -> dict[str, Path]:
        """Shard by tensor name as the index has it; empty without an index."""
        if not self.directory.is_dir():
            raise CheckpointError(f"{self.directory}: expected a checkpoint directory, got none at this path")
        index_path = self.directory / INDEX_FILE
        if not index_path.exists():
            return {}
        try:
            weight_map = json.loads(index_path.read_text(encoding="utf-8"))["weight_map"]
            shards = {name: self.directory / file for name, file in weight_map.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{index_path}: expected JSON with a weight_map, got {error!r}") from error
        if not shards:
            raise CheckpointError(f"{index_path}: expected a weight_map with tensors, got an empty one")
        missing = sorted({path.name for path in shards.values() if not path.is_file()})
        if missing:
            lost = sum(path.name in missing for path in shards.values())
            raise CheckpointError(
                f"{self.directory}: expected every shard of the index, got no {', '.join(missing)} ({lost} tensors); "
                "copy the missing files"
            )
        return shards

    def _single_file(self) -> Path:
        files = sorted(self.directory.glob("*.safetensors"))
        if (self.directory / SINGLE_FILE) in files:
            return self.directory / SINGLE_FILE
        if len(files) != 1:
            raise CheckpointError(
                f"{self.directory}: expected {SINGLE_FILE}, {INDEX_FILE} or exactly one *.safetensors file, "
                f"got {len(files)} of them"
            )
        return files[0]

    def _open(self, path: Path) -> None:
        try:
            file = self._open_files.enter_context(safe_open(path, framework="pt"))
            infos = [_tensor_info(file, name, path) for name in file.keys()]  # noqa: SIM118 - not a mapping
        except (SafetensorError, OSError, ValueError) as error:
            raise CheckpointError(f"{path}: expected a complete safetensors file, got {_fault(path, error)}") from error
        self._files[path] = file
        for info in infos:
            if info.name in self._infos:
                other = self._infos[info.name].file.name
                raise CheckpointError(f"{info.name}: expected in one shard, got it in {other} and in {path.name}")
            self._infos[info.name] = info


def _tensor_info(file: safe_open, name: str, path: Path) -> TensorInfo:
    part = file.get_slice(name)
    dtype = part.get_dtype()
    if dtype not in _DTYPES:
        raise CheckpointError(f"{path}: {name}: expected one of the types {', '.join(_DTYPES)}, got {dtype}")
    return TensorInfo(name, tuple(part.get_shape()), _DTYPES[dtype], path)


def _check_index(indexed: dict[str, Path], infos: dict[str, TensorInfo]) -> None:
    """The index may not promise what the shards do not hold. Tensors beyond the index count as tensors."""
    lost = [name for name, path in indexed.items() if name not in infos or infos[name].file != path]
    if lost:
        raise CheckpointError(
            f"{INDEX_FILE}: expected its tensors in the shards it names, got {len(lost)} that are not there: "
            + ", ".join(sorted(lost)[:20])
        )


def _fault(path: Path, error: Exception) -> str:
    """What is wrong with a file, with both sizes when it was cut short."""
    size = path.stat().st_size if path.exists() else 0
    expected = _expected_bytes(path)
    if expected is not None and size < expected:
        return f"{size} bytes of the {expected} that its header describes; copy it again"
    return f"{size} bytes that do not parse ({error}); copy it again"


def _expected_bytes(path: Path) -> int | None:
    """Size of the file by its own header; None when the header itself is unreadable."""
    try:
        with path.open("rb") as file:
            (header_bytes,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(min(header_bytes, 1 << 27)))
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        return 8 + header_bytes + max(ends, default=0)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error):
        return None
