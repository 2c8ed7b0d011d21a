"""Headers of safetensors files: whole, cut, and telling nonsense."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from qwen35.errors import CheckpointError
from qwen35.weights.header import MAX_HEADER_BYTES, read_header


def write(path: Path, fields: dict, num_bytes: int, *, length: int | None = None) -> Path:
    text = json.dumps(fields).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + bytes(num_bytes))
    return path


def entry(begin: int, end: int, shape: list, dtype: str = "F32") -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_names_places_and_sizes_are_those_of_the_library(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    tensors = {
        "b": torch.arange(6.0).view(2, 3),
        "a": torch.tensor(3, dtype=torch.uint8),
        "empty": torch.zeros(0, 4),
        "half": torch.ones(5, dtype=torch.bfloat16),
    }
    save_file(tensors, path, metadata={"format": "pt"})
    infos, content = read_header(path), path.read_bytes()
    assert {info.name for info in infos} == set(tensors)
    assert [info.offset for info in infos] == sorted(info.offset for info in infos)
    for info in infos:
        tensor = tensors[info.name]
        assert (info.shape, info.dtype) == (tuple(tensor.shape), tensor.dtype)
        data = content[info.offset : info.offset + info.num_bytes]
        assert data == tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize(
    ("fields", "num_bytes", "message"),
    [
        ({"a": entry(0, 8, [2])}, 7, r"got \d+ bytes of the \d+ that its header describes; copy it again"),
        ({"a": entry(0, 8, [2])}, 9, r"expected \d+ bytes as its header describes, got \d+; copy it again"),
        ({"a": entry(0, 8, [3])}, 8, r"a: expected 12 bytes for F32 \[3\], got 8"),
        ({"a": entry(0, 8, [2]), "b": entry(12, 16, [1])}, 16, r"b: expected to begin at byte \d+, .* got \d+"),
        ({"a": entry(0, 8, [2]), "b": entry(4, 8, [1])}, 8, r"b: expected to begin at byte"),
        ({"a": entry(0, 2, [2], "F4")}, 2, r"a: expected one of the types F64, .* got F4"),
        ({"a": entry(0, 8, [-2])}, 8, r"do not parse \(offsets or shape of a\)"),
        ({"a": {"dtype": "F32", "shape": [2]}}, 8, r"do not parse \('data_offsets'\)"),
        ({"a": 3}, 8, "do not parse"),
    ],
)
def test_faults(tmp_path: Path, fields: dict, num_bytes: int, message: str) -> None:
    path = write(tmp_path / "a.safetensors", fields, num_bytes)
    with pytest.raises(CheckpointError, match=message) as caught:
        read_header(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("length", [MAX_HEADER_BYTES + 1, 10**6])
def test_a_length_that_cannot_be(tmp_path: Path, length: int) -> None:
    path = write(tmp_path / "a.safetensors", {}, 20, length=length)
    with pytest.raises(CheckpointError, match=f"do not parse \\(a header of {length} bytes\\)"):
        read_header(path)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="expected a readable safetensors file"):
        read_header(tmp_path / "none.safetensors")
