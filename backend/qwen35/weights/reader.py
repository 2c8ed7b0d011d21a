"""Tensors of a checkpoint directory by name: one safetensors file, or shards with an index.

Names, shapes, types and places come from the headers alone. The reader knows nothing of models; whether the tensors are
the right ones is for `source` and `loader` to prove.
"""

from __future__ import annotations

import json
import mmap
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from qwen35.errors import CheckpointError
from qwen35.weights.header import TensorInfo, read_header

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_MAP_NORESERVE = 0x4000  # Linux; Python's mmap does not name it in all versions


class CheckpointReader:
    """Open checkpoint directory; a context manager.

    Raises CheckpointError when the directory, its weights or one of its shards is missing, truncated or corrupt, when
    the index and the shards disagree, and when two shards hold a tensor of the same name.
    """

    def __init__(self, directory: Path | str) -> None:
        self.directory = Path(directory)
        self._infos: dict[str, TensorInfo] = {}
        self._mappings: dict[Path, mmap.mmap] = {}
        indexed = self._find_files()
        for path in dict.fromkeys(indexed.values()) if indexed else [self._single_file()]:
            self._add(path)
        _check_index(indexed, self._infos)

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Forgets the mappings. Mapped tensors stay valid."""
        self._mappings.clear()

    @property
    def names(self) -> tuple[str, ...]:
        """All tensor names, file by file in the order of their bytes."""
        return tuple(self._infos)

    def __contains__(self, name: str) -> bool:
        return name in self._infos

    def info(self, name: str) -> TensorInfo:
        """Shape and type of one tensor, without reading it. Raises CheckpointError for an unknown name."""
        if name not in self._infos:
            raise CheckpointError(f"{self.directory}: expected a tensor {name!r}, got none of that name")
        return self._infos[name]

    def map(self, name: str, *, is_random: bool = False) -> Tensor:
        """The tensor as a private mapping of its file: pages are read when they are touched, and copied when written.

        is_random  single rows will be read: the system reads nothing around them
        """
        info = self.info(name)
        memory = self._mapping(info.file)
        if is_random and hasattr(mmap, "MADV_RANDOM"):
            first = info.offset // mmap.PAGESIZE * mmap.PAGESIZE
            memory.madvise(mmap.MADV_RANDOM, first, info.offset + info.num_bytes - first)
        if info.num_bytes == 0:
            return torch.empty(info.shape, dtype=info.dtype)
        flat = torch.frombuffer(memory, dtype=torch.uint8, count=info.num_bytes, offset=info.offset)
        if flat.data_ptr() % info.dtype.itemsize:
            flat = flat.clone()  # a file whose header has an odd length
        return flat.view(info.dtype).view(info.shape)

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
            paths = {file: self.directory / file for file in weight_map.values()}
            shards = {name: paths[file] for name, file in weight_map.items()}
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

    def _add(self, path: Path) -> None:
        for info in read_header(path):
            if info.name in self._infos:
                other = self._infos[info.name].file.name
                raise CheckpointError(f"{info.name}: expected in one shard, got it in {other} and in {path.name}")
            self._infos[info.name] = info

    def _mapping(self, path: Path) -> mmap.mmap:
        """The whole file, mapped once; it takes no memory and no promise of memory."""
        if path not in self._mappings:
            flags, access = mmap.MAP_PRIVATE | _MAP_NORESERVE, mmap.PROT_READ | mmap.PROT_WRITE
            try:
                with path.open("rb") as file:
                    self._mappings[path] = mmap.mmap(file.fileno(), 0, flags=flags, prot=access)
            except (OSError, ValueError) as error:
                raise CheckpointError(f"{path}: expected a readable file, got {error}") from error
        return self._mappings[path]


def _check_index(indexed: dict[str, Path], infos: dict[str, TensorInfo]) -> None:
    """The index may not promise what the shards do not hold. Tensors beyond the index count as tensors."""
    lost = [name for name, path in indexed.items() if name not in infos or infos[name].file != path]
    if lost:
        raise CheckpointError(
            f"{INDEX_FILE}: expected its tensors in the shards it names, got {len(lost)} that are not there: "
            + ", ".join(sorted(lost)[:20])
        )
