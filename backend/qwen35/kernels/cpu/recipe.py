"""What the native library is made of and where it lies: shared by whoever builds it and whoever loads it."""

from __future__ import annotations

import hashlib
import platform
from pathlib import Path

SOURCES = Path(__file__).parent
COMMON_FLAGS = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-pthread",
    "-ffp-contract=off",  # a * b + c must have one meaning wherever it is inlined
    "-Wall",
    "-Wextra",
    "-Wno-psabi",
    "-Wno-uninitialized",  # gcc's own AVX-512 headers set these two off
    "-Wno-maybe-uninitialized",
)
_AVX512_FLAGS = (
    *("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq"),
    *("-mavx512bf16", "-mavx512vnni", "-mavx512vbmi", "-mf16c", "-mfma"),
)
ISA_FLAGS = {
    "amx": (*_AVX512_FLAGS, "-mamx-tile", "-mamx-int8", "-mamx-bf16"),
    "avx512": _AVX512_FLAGS,
    "avx2": ("-mavx2", "-mfma", "-mf16c"),
    "portable": (),
}


def is_x86() -> bool:
    return platform.machine() in {"x86_64", "AMD64"}


def instruction_sets() -> tuple[str, ...]:
    """Names of the code paths built on this kind of machine; the CPU decides among them at run time."""
    return tuple(ISA_FLAGS) if is_x86() else ("portable",)


def library_path() -> Path:
    """Changes with every source and every flag, so that a stale library is never loaded."""
    digest = hashlib.sha256(repr((COMMON_FLAGS, ISA_FLAGS, platform.machine())).encode())
    for source in sorted([*SOURCES.glob("*.cpp"), *SOURCES.glob("*.h")]):
        digest.update(source.name.encode() + source.read_bytes())
    return SOURCES.parents[3] / ".cache" / "native" / digest.hexdigest()[:16] / "libqwen35_cpu.so"
