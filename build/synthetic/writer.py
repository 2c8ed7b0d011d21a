"""Writes a checkpoint's tensors as safetensors shards, chunk by chunk: memory use does not grow with the checkpoint.

Format: 8 bytes of header length, a JSON header (name -> type, shape, offsets), the bytes in the header's order.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from qwen35.weights.reader import INDEX_FILE, SINGLE_FILE

MAX_SHARD_BYTES = 4 << 30
_ITEM_BYTES = {"BF16": 2, "F32": 4, "F8_E4M3": 1, "U8": 1}
_HEADER_ALIGNMENT_BYTES = 64  # of the first tensor
Progress = Callable[[int], None]  # bytes just written


@dataclass(frozen=True)
class Entry:
    """One tensor: where it goes and how its bytes come.

    dtype   as safetensors writes it
    chunks  the tensor's bytes in order, uint8 arrays; may be called again and gives the same
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    chunks: Callable[[], Iterable[np.ndarray]]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * _ITEM_BYTES[self.dtype]


def write_checkpoint(
    directory: Path, entries: Sequence[Entry], progress: Progress, max_shard_bytes: int = MAX_SHARD_BYTES
) -> None:
    """One file, or shards and their index when the tensors are more than `max_shard_bytes`."""
    shards = list(_shards(entries, max_shard_bytes))
    if len(shards) == 1:
        _write_shard(directory / SINGLE_FILE, shards[0], progress)
        return
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file_name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _write_shard(directory / file_name, shard, progress)
        weight_map |= dict.fromkeys((entry.name for entry in shard), file_name)
    metadata = {"total_size": sum(entry.num_bytes for entry in entries)}
    index = json.dumps({"metadata": metadata, "weight_map": weight_map}, indent=1)
    (directory / INDEX_FILE).write_text(index, encoding="utf-8")


def _shards(entries: Sequence[Entry], max_shard_bytes: int) -> Iterator[list[Entry]]:
    """Consecutive runs of tensors; a tensor larger than a shard has one of its own."""
    shard: list[Entry] = []
    num_bytes = 0
    for entry in entries:
        if shard and num_bytes + entry.num_bytes > max_shard_bytes:
            yield shard
            shard, num_bytes = [], 0
        shard.append(entry)
        num_bytes += entry.num_bytes
    yield shard


def _write_shard(path: Path, entries: Sequence[Entry], progress: Progress) -> None:
    """Wide types first: every tensor then starts at a multiple of its item's size."""
    ordered = sorted(entries, key=lambda entry: -_ITEM_BYTES[entry.dtype])
    with path.open("wb") as file:
        file.write(header_of(ordered))
        for entry in ordered:
            num_bytes = 0
            for chunk in entry.chunks():
                num_bytes += file.write(chunk.data)
                progress(len(chunk))
            assert num_bytes == entry.num_bytes, (entry.name, num_bytes, entry.num_bytes)
        file.flush()
        os.fdatasync(file.fileno())  # only clean pages can be given back
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def header_of(entries: Sequence[Entry]) -> bytes:
    """The beginning of a file of these tensors, in this order."""
    fields: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for entry in entries:
        end = offset + entry.num_bytes
        fields[entry.name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % _HEADER_ALIGNMENT_BYTES)
    return len(text).to_bytes(8, "little") + text
