"""What makes two arithmetics different."""

from __future__ import annotations

import pytest

from qwen35.kernels.cpu.library import ISA_VARIABLE, find_library
from qwen35.kernels.identity import arithmetic_of
from qwen35.kernels.reference import ReferenceOps
from qwen35.kernels.select import select_ops
from qwen35.settings import Settings


def name(**settings: object) -> str:
    resolved = Settings(**settings)
    return arithmetic_of(select_ops(resolved, "cpu"), resolved, "cpu")


def test_settings_that_change_bits_change_the_name():
    names = [
        name(kernels="reference"),
        name(kernels="reference", activations="nvfp4"),
        name(kernels="reference", dtype="float32"),
        name(kernels="reference", kv_cache_dtype="fp8"),
        arithmetic_of(ReferenceOps(), Settings(kernels="reference"), "cuda:1"),
        arithmetic_of(ReferenceOps(), Settings(kernels="reference", num_threads=2), "cpu"),
    ]
    assert len(set(names)) == len(names)
    assert name(kernels="reference", num_slots=3, prefix_cache_bytes=5) == names[0]


@pytest.mark.skipif(not find_library().is_file(), reason="the native library is not built")
def test_native_kernels_are_named_by_their_build_and_instruction_path(monkeypatch: pytest.MonkeyPatch):
    native = name(kernels="cpu")
    assert find_library().parent.name in native and native != name(kernels="reference")
    monkeypatch.setenv(ISA_VARIABLE, "portable")
    assert name(kernels="cpu") != native
