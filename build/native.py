"""Builds the native kernels in seconds, or nothing when they are there: ``python -m build.native [--sanitize]``."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from qwen35.kernels.cpu.recipe import COMMON_FLAGS, ISA_FLAGS, SOURCES, instruction_sets, is_x86, library_path

SANITIZERS = ("-fsanitize=address,undefined", "-fno-omit-frame-pointer", "-g")


def build(target: Path | None = None, extra_flags: tuple[str, ...] = ()) -> Path:
    """Compiles into `target`, by default where it is looked for, and returns its path.

    Raises RuntimeError without a compiler and when it refuses the sources, with what it said.
    """
    target = target or library_path()
    if target.exists():
        return target
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        raise RuntimeError("native kernels: expected a C++17 compiler, got none; install g++ or set CXX")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        objects = [_compile(compiler, folder, *unit, extra_flags) for unit in _units()]
        linked = Path(folder) / target.name
        _run([compiler, "-shared", "-pthread", *extra_flags, "-o", str(linked), *objects])
        linked.replace(target)  # whole or not at all, whoever else builds
    return target


def _units() -> list[tuple[str, str, tuple[str, ...]]]:
    """(object name, source, flags) of each translation unit."""
    x86 = ("-DQWEN35_X86",) if is_x86() else ()
    units = [(name, f"{name}.cpp", x86) for name in ("threads", "dispatch", "program")]
    return units + [(isa, "isa.cpp", (*x86, *ISA_FLAGS[isa], f"-DQWEN35_ISA={isa}")) for isa in instruction_sets()]


def _compile(
    compiler: str, folder: str, name: str, source: str, flags: tuple[str, ...], extra_flags: tuple[str, ...]
) -> str:
    output = f"{folder}/{name}.o"
    _run([compiler, *COMMON_FLAGS, *flags, *extra_flags, "-c", str(SOURCES / source), "-o", output])
    return output


def _run(command: list[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise RuntimeError(f"native kernels: {' '.join(command)} failed:\n{result.stderr}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sanitize", action="store_true", help="an ASan and UBSan build beside the plain one")
    arguments = parser.parse_args()
    target = library_path()
    if arguments.sanitize:
        target = target.with_name("libqwen35_cpu_sanitized.so")
    try:
        print(build(target, SANITIZERS if arguments.sanitize else ()))
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
