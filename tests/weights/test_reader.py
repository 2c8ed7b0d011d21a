"""Checkpoint directories as they are found: whole, sharded, cut short, contradicting themselves."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from qwen35.errors import CheckpointError
from qwen35.weights.reader import INDEX_FILE, CheckpointReader
from tests.tiny_checkpoint import make_tiny_checkpoint, tiny_tensors


@pytest.mark.parametrize("num_shards", [1, 3])
def test_names_shapes_and_values(tmp_path: Path, num_shards: int) -> None:
    expected = tiny_tensors()
    with CheckpointReader(make_tiny_checkpoint(tmp_path, num_shards=num_shards)) as reader:
        assert set(reader.names) == set(expected)
        for name, tensor in expected.items():
            info = reader.info(name)
            assert (info.shape, info.dtype) == (tuple(tensor.shape), tensor.dtype)
            assert info.num_bytes == tensor.numel() * 2
            assert torch.equal(reader.read(name), tensor)


def test_a_mapped_tensor_outlives_the_reader_and_copies_nothing(tmp_path: Path) -> None:
    make_tiny_checkpoint(tmp_path)
    with CheckpointReader(tmp_path) as reader:
        mapped = reader.map("lm_head.weight")
        assert reader.map("lm_head.weight").data_ptr() == mapped.data_ptr()
        assert reader.read("lm_head.weight").data_ptr() != mapped.data_ptr()
    assert torch.equal(mapped, tiny_tensors()["lm_head.weight"])
    address = mapped.data_ptr()
    maps = (line.split() for line in Path("/proc/self/maps").read_text().splitlines())
    ranges = [[int(end, 16) for end in fields[0].split("-")] + [fields[-1]] for fields in maps]
    assert [file for low, high, file in ranges if low <= address < high] == [str(tmp_path / "model.safetensors")]


def test_any_single_file_name_will_do(tmp_path: Path) -> None:
    make_tiny_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "weights.safetensors")
    assert "lm_head.weight" in CheckpointReader(tmp_path)


def _cut(path: Path, num_bytes: int) -> None:
    path.write_bytes(path.read_bytes()[:num_bytes])


def test_truncated_file_gives_both_sizes(tmp_path: Path) -> None:
    path = make_tiny_checkpoint(tmp_path) / "model.safetensors"
    whole = path.stat().st_size
    _cut(path, whole - 100)
    with pytest.raises(
        CheckpointError, match=f"model.safetensors: .*{whole - 100} bytes of the {whole}.*copy it again"
    ):
        CheckpointReader(tmp_path)


@pytest.mark.parametrize("num_bytes", [0, 4, 40])
def test_truncated_header(tmp_path: Path, num_bytes: int) -> None:
    _cut(make_tiny_checkpoint(tmp_path) / "model.safetensors", num_bytes)
    with pytest.raises(CheckpointError, match=f"{num_bytes} bytes that do not parse"):
        CheckpointReader(tmp_path)


def test_placeholder_file_instead_of_weights(tmp_path: Path) -> None:
    path = make_tiny_checkpoint(tmp_path) / "model.safetensors"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 123\n")
    with pytest.raises(CheckpointError, match="do not parse"):
        CheckpointReader(tmp_path)


def test_truncated_shard_is_named(tmp_path: Path) -> None:
    make_tiny_checkpoint(tmp_path, num_shards=3)
    _cut(tmp_path / "model-00002-of-00003.safetensors", 5000)
    with pytest.raises(CheckpointError, match="model-00002-of-00003.safetensors"):
        CheckpointReader(tmp_path)


def test_missing_shard_is_named_with_its_share(tmp_path: Path) -> None:
    make_tiny_checkpoint(tmp_path, num_shards=3)
    path = tmp_path / "model-00003-of-00003.safetensors"
    with CheckpointReader(tmp_path) as reader:
        lost = sum(reader.info(name).file == path for name in reader.names)
    path.unlink()
    with pytest.raises(CheckpointError, match=rf"no model-00003-of-00003.safetensors \({lost} tensors\)"):
        CheckpointReader(tmp_path)


def test_same_tensor_in_two_shards(tmp_path: Path) -> None:
    make_tiny_checkpoint(tmp_path, num_shards=2)
    second = tmp_path / "model-00002-of-00002.safetensors"
    with CheckpointReader(tmp_path) as reader:
        tensors = {name: reader.read(name) for name in reader.names if reader.info(name).file == second}
        twice = next(name for name in reader.names if reader.info(name).file != second)
        tensors[twice] = reader.read(twice)
    save_file(tensors, second)
    with pytest.raises(CheckpointError, match=f"{twice}: expected in one shard, got it in"):
        CheckpointReader(tmp_path)


def _edit_index(directory: Path, edit) -> None:
    path = directory / INDEX_FILE
    content = json.loads(path.read_text())
    edit(content["weight_map"])
    path.write_text(json.dumps(content))


def test_index_promises_a_tensor_that_no_shard_holds(tmp_path: Path) -> None:
    make_tiny_checkpoint(tmp_path, num_shards=2)
    _edit_index(tmp_path, lambda names: names.update({"ghost.weight": "model-00001-of-00002.safetensors"}))
    with pytest.raises(CheckpointError, match=r"1 that are not there: ghost.weight"):
        CheckpointReader(tmp_path)


def test_index_names_the_wrong_shard(tmp_path: Path) -> None:
    make_tiny_checkpoint(tmp_path, num_shards=2)

    def move(names: dict[str, str]) -> None:
        files = {"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"}
        (names["lm_head.weight"],) = files - {names["lm_head.weight"]}

    _edit_index(tmp_path, move)
    with pytest.raises(CheckpointError, match="lm_head.weight"):
        CheckpointReader(tmp_path)


def test_tensor_beyond_the_index_counts(tmp_path: Path) -> None:
    """What lies in a shard is part of the checkpoint; the loader then has to account for it."""
    make_tiny_checkpoint(tmp_path, num_shards=2)
    _edit_index(tmp_path, lambda names: names.pop("lm_head.weight"))
    assert "lm_head.weight" in CheckpointReader(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "expected JSON with a weight_map"),
        ("[]", "expected JSON with a weight_map"),
        ("{}", "expected JSON with a weight_map"),
        ('{"weight_map": {}}', "got an empty one"),
    ],
)
def test_broken_index(tmp_path: Path, content: str, message: str) -> None:
    make_tiny_checkpoint(tmp_path, num_shards=2)
    (tmp_path / INDEX_FILE).write_text(content)
    with pytest.raises(CheckpointError, match=message):
        CheckpointReader(tmp_path)


def test_no_weights(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="expected a checkpoint directory"):
        CheckpointReader(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="got 0 of them"):
        CheckpointReader(tmp_path)
    for name in ("a", "b"):
        save_file({name: torch.zeros(1)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(CheckpointError, match="got 2 of them"):
        CheckpointReader(tmp_path)


def test_unknown_name(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"expected a tensor 'nobody'"):
        CheckpointReader(make_tiny_checkpoint(tmp_path)).info("nobody")
