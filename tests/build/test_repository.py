"""Which checkpoints are quantised, under which name they are cached, and how they are placed."""

import json
import os
from pathlib import Path

import pytest

from build import repository
from build.quantization import ptq
from build.repository import RepositoryError, fingerprint, is_quantised, place, prepare


def write_checkpoint(directory: Path, config: dict | None = None) -> Path:
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config or {"model_type": "x"}), encoding="utf-8")
    (directory / "model.safetensors").write_bytes(b"weights")
    return directory


@pytest.fixture
def quantiser(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[Path, str]]:
    """Replaces the quantiser by one that records its calls, and the cache by an empty one."""
    calls: list[tuple[Path, str]] = []

    def quantise(checkpoint: Path, target: Path, scheme: str) -> None:
        calls.append((checkpoint, scheme))
        write_checkpoint(target, {"quantization_config": {}})

    monkeypatch.setattr(repository, "_quantise", quantise)
    monkeypatch.setattr(repository, "CACHE", tmp_path / "cache")
    return calls


def test_quantised_checkpoints_are_recognised(tmp_path: Path):
    plain = write_checkpoint(tmp_path / "plain")
    assert not is_quantised(plain)
    assert is_quantised(write_checkpoint(tmp_path / "a", {"quantization_config": {}}))
    (plain / "hf_quant_config.json").write_text("{}", encoding="utf-8")
    assert is_quantised(plain)


@pytest.mark.parametrize(
    ("missing", "message"), [("config.json", "with config.json"), ("model.safetensors", "got none")]
)
def test_directory_that_is_no_checkpoint(tmp_path: Path, missing: str, message: str):
    (write_checkpoint(tmp_path / "c") / missing).unlink()
    with pytest.raises(RepositoryError, match=message):
        prepare(tmp_path / "c")


def test_quantised_once_and_used_as_it_is_afterwards(tmp_path: Path, quantiser: list):
    checkpoint = write_checkpoint(tmp_path / "model")
    first = prepare(checkpoint)
    assert first.name.startswith("model-") and first.name.endswith("-nvfp4")
    assert (prepare(checkpoint), prepare(first)) == (first, first)
    assert quantiser == [(checkpoint, "nvfp4")]
    assert prepare(checkpoint, "w4a16_nvfp4") != first
    (checkpoint / "model.safetensors").write_bytes(b"WEIGHTS")
    assert prepare(checkpoint) != first and len(quantiser) == 3


@pytest.mark.parametrize("hashed_bytes_limit", [1 << 20, 0])
def test_fingerprint_follows_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hashed_bytes_limit: int):
    monkeypatch.setattr(repository, "_SMALL_CHECKPOINT_BYTES", hashed_bytes_limit)
    monkeypatch.setattr(repository, "_SMALL_FILE_BYTES", 100)
    checkpoint = write_checkpoint(tmp_path / "model")
    weights = checkpoint / "model.safetensors"
    weights.write_bytes(b"a" * 200)
    os.utime(weights, (1, 1))
    seen = {fingerprint(checkpoint)}
    os.utime(weights, (2, 2))  # another time matters only when the bytes are not hashed
    seen.add(fingerprint(checkpoint))
    assert len(seen) == (2 if hashed_bytes_limit == 0 else 1)
    weights.write_bytes(b"b" * 200)
    seen.add(fingerprint(checkpoint))
    (checkpoint / "config.json").write_text('{"model_type": "y"}', encoding="utf-8")
    seen.add(fingerprint(checkpoint))
    assert len(seen) == (4 if hashed_bytes_limit == 0 else 3)


def test_schemes_are_those_of_the_quantiser():
    assert set(repository.SCHEMES) == set(ptq.SCHEMES)


def test_failed_quantisation_is_an_error_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(repository, "CACHE", tmp_path / "cache")
    monkeypatch.setattr(repository.sys, "executable", "/bin/false")
    with pytest.raises(RepositoryError, match="expected exit code 0, got 1"):
        prepare(write_checkpoint(tmp_path / "model"))
    assert [path.suffix for path in (tmp_path / "cache" / "checkpoints").iterdir()] == [".lock"]


@pytest.mark.parametrize("before", [None, "link", "copy"])
@pytest.mark.parametrize("copy", [False, True])
def test_placing_replaces_what_was_there(tmp_path: Path, before: str | None, copy: bool):
    root = tmp_path / "model_repository"
    if before:
        place(write_checkpoint(tmp_path / "old"), root, copy=before == "copy")
    checkpoint = write_checkpoint(tmp_path / "new", {"model_type": "new"})
    placed = place(checkpoint, root, copy=copy)
    assert placed == root / "llm" / "1" / "checkpoint"
    assert json.loads((placed / "config.json").read_text(encoding="utf-8")) == {"model_type": "new"}
    assert placed.is_symlink() != copy
    assert copy or not os.path.isabs(os.readlink(placed))
    assert [path.name for path in placed.parent.iterdir()] == ["checkpoint"]
