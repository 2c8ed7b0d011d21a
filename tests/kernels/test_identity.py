"""What makes two arithmetics different."""

from __future__ import annotations

from pathlib import Path

import pytest

from qwen35.kernels.cpu.library import ISA_VARIABLE, LIBRARY_VARIABLE
from qwen35.kernels.identity import arithmetic_of
from qwen35.settings import Settings


def name(**settings: object) -> str:
    return arithmetic_of(Settings(**settings), "cpu")


def test_what_changes_bits_changes_the_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.delenv(ISA_VARIABLE, raising=False)
    monkeypatch.setenv(LIBRARY_VARIABLE, str(tmp_path / "not built"))
    changes = {"kernels": "reference", "activations": "nvfp4", "dtype": "float32", "kv_cache_dtype": "fp8"}
    names = [name(), name(num_threads=2), *(name(**{key: value}) for key, value in changes.items())]
    names.append(arithmetic_of(Settings(), "meta"))
    monkeypatch.setenv(ISA_VARIABLE, "portable")
    names.append(name())
    for number in (1, 2):
        library = tmp_path / f"build{number}" / "library.so"
        monkeypatch.setenv(LIBRARY_VARIABLE, str(library))
        library.parent.mkdir()
        library.touch()
        names.append(name())
    assert len(set(names)) == len(names)


def test_what_does_not_leaves_it():
    assert name() == name(num_slots=3, prefix_cache_bytes=5, max_batch_tokens=7)
