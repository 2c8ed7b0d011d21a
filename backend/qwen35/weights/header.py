"""The header of a safetensors file: names, types, shapes and places of its tensors, checked against the file's size.

Format: 8 bytes of header length (little endian), that many bytes of JSON (name -> dtype, shape, data_offsets from the
header's end; `__metadata__`), the tensors' bytes without holes. Source: the format's description in the safetensors
repository.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from qwen35.errors import CheckpointError

MAX_HEADER_BYTES = 100_000_000  # the format's own limit
DTYPES = {
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


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor as its file's header describes it; `offset` counts bytes from the beginning of the file."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    file: Path
    offset: int

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def read_header(path: Path) -> list[TensorInfo]:
    """The tensors of a file in the order of their bytes.

    Raises CheckpointError with both sizes for a file that is cut short or too long, and for a header that does not
    parse, lists an unknown type, or whose tensors overlap, leave holes or do not have the size of their shape.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            text = file.read(length) if length <= MAX_HEADER_BYTES else b""
    except OSError as error:
        raise CheckpointError(f"{path}: expected a readable safetensors file, got {error}") from error
    try:
        if size < 8 or len(text) < length:
            raise ValueError(f"a header of {length} bytes")
        fields = json.loads(text)
        fields.pop("__metadata__", None)
        infos = [_info(path, name, entry, 8 + length) for name, entry in fields.items()]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{path}: expected a complete safetensors file, got {size} bytes that do not parse ({error}); copy it again"
        ) from error
    infos.sort(key=lambda info: (info.offset, info.num_bytes))
    _check_places(path, infos, 8 + length, size)
    return infos


def _info(path: Path, name: str, entry: Mapping[str, Any], data_start: int) -> TensorInfo:
    begin, end = entry["data_offsets"]
    if entry["dtype"] not in DTYPES:
        raise CheckpointError(f"{path}: {name}: expected one of the types {', '.join(DTYPES)}, got {entry['dtype']}")
    shape = tuple(entry["shape"])
    if not all(isinstance(count, int) and count >= 0 for count in (begin, end, *shape)):
        raise ValueError(f"offsets or shape of {name}")
    info = TensorInfo(name, shape, DTYPES[entry["dtype"]], path, data_start + begin)
    if end - begin != info.num_bytes:
        raise CheckpointError(
            f"{path}: {name}: expected {info.num_bytes} bytes for {entry['dtype']} {list(shape)}, got {end - begin}"
        )
    return info


def _check_places(path: Path, infos: list[TensorInfo], data_start: int, size: int) -> None:
    end = data_start
    for info in infos:
        if info.offset != end:
            raise CheckpointError(
                f"{path}: {info.name}: expected to begin at byte {end}, where the one before it ends, got {info.offset}"
            )
        end += info.num_bytes
    if size < end:
        raise CheckpointError(
            f"{path}: expected a complete safetensors file, got {size} bytes of the {end} that its header describes; "
            "copy it again"
        )
    if size > end:
        raise CheckpointError(f"{path}: expected {end} bytes as its header describes, got {size}; copy it again")
