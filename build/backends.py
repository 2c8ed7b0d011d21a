"""tritonserver from the nvidia-pytriton wheel, and a Python backend directory assembled for the running interpreter.

Of the wheel only the server binary, the Python backend and its stubs are used, never pytriton's own API. The server
wants real files in its backend directory (a symlink "escapes backend directory"), one stub that matches the running
Python, and an environment in which that Python and its libpython come first. This module knows no ports and no models.
"""

import fcntl
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CACHE = ROOT / ".cache"
WHEEL = "nvidia-pytriton"
_BACKEND_FILES = ("libtriton_python.so", "triton_python_backend_utils.py")
_STUB = "triton_python_backend_stub"


class BackendError(RuntimeError):
    """The server's files or the Python they need are missing; the message names the remedy."""


@dataclass(frozen=True)
class ServerWheel:
    """Where the pieces of the installed wheel lie."""

    binary: Path
    sources: tuple[Path, ...]  # what the assembled backend directory holds
    libraries: Path  # shared libraries of the server itself
    version: str


def python_version() -> str:
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def find_wheel() -> ServerWheel:
    """The installed wheel. Raises BackendError when it, or a stub for this Python, is missing."""
    spec = importlib.util.find_spec("pytriton")
    if spec is None or spec.origin is None:
        raise BackendError(f"tritonserver: expected the wheel {WHEEL}, got none in {sys.prefix}; run `make venv`")
    package = Path(spec.origin).parent
    server = package / "tritonserver"
    stub = server / "python_backend_stubs" / python_version() / _STUB
    sources = (*(server / "backends" / "python" / name for name in _BACKEND_FILES), stub)
    binary = server / "bin" / "tritonserver"
    missing = [str(path) for path in (binary, *sources) if not path.is_file()]
    if missing:
        raise BackendError(
            f"tritonserver: expected a wheel with a stub for Python {python_version()}, got no {', '.join(missing)};"
            " use Python 3.10 to 3.12 (PYTHON=…)"
        )
    return ServerWheel(binary, sources, package.parent / "nvidia_pytriton.libs", importlib.metadata.version(WHEEL))


def python_library_dir() -> Path:
    """Folder of this Python's shared libpython, which the stub links. Raises BackendError when there is none."""
    name = f"libpython{python_version()}.so.1.0"
    folder = Path(sysconfig.get_config_var("LIBDIR"))
    candidates = [folder, folder / (sysconfig.get_config_var("MULTIARCH") or "")]
    for candidate in candidates:
        if (candidate / name).exists():
            return candidate
    raise BackendError(
        f"python: expected {name} in {folder}, got a Python without a shared library; install the package"
        f" libpython{python_version()} or choose another interpreter with PYTHON=…"
    )


def assemble_backends(directory: Path = CACHE / "backends") -> Path:
    """Make `directory`/python hold real copies of the backend, unless it does already. Returns `directory`."""
    wheel = find_wheel()
    stamp_text = _fingerprint(wheel)
    target = directory / "python"
    directory.mkdir(parents=True, exist_ok=True)
    with locked(directory.with_name(directory.name + ".lock")):
        stamp = target / ".stamp"
        if stamp.is_file() and stamp.read_text(encoding="utf-8") == stamp_text:
            return directory
        # Files that a running server has mapped are never overwritten: the old folder is renamed, then removed.
        fresh, old = (directory.with_name(f"{directory.name}-{word}") for word in ("new", "old"))
        for leftover in (fresh, old):
            shutil.rmtree(leftover, ignore_errors=True)
        fresh.mkdir()
        for source in wheel.sources:
            shutil.copy2(source, fresh / source.name)
        (fresh / ".stamp").write_text(stamp_text, encoding="utf-8")
        if target.exists():
            target.rename(old)
        fresh.rename(target)
        shutil.rmtree(old, ignore_errors=True)
    return directory


def server_environment(base: Mapping[str, str], settings: Mapping[str, str]) -> dict[str, str]:
    """Environment for tritonserver: `base` without PYTHON*, with this Python first on PATH and in LD_LIBRARY_PATH.

    `settings` reach the models as QWEN35_<UPPER NAME>. With another libpython first, `multiprocessing` in a stub fails
    with "'_thread.RLock' object has no attribute '_recursion_count'"; stubs of 3.11 and later ignore PYTHON*.
    """
    environment = {key: value for key, value in base.items() if not key.startswith("PYTHON")}
    environment["PATH"] = _joined(Path(sys.prefix) / "bin", base.get("PATH"))
    libraries = _joined(python_library_dir(), str(find_wheel().libraries))
    environment["LD_LIBRARY_PATH"] = _joined(libraries, base.get("LD_LIBRARY_PATH"))
    environment.update({f"QWEN35_{name.upper()}": value for name, value in settings.items()})
    return environment


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive `flock` on `path` (created when missing); the kernel frees it when the holder dies."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _joined(first: Path | str, rest: str | None) -> str:
    return f"{first}{os.pathsep}{rest}" if rest else str(first)


def _fingerprint(wheel: ServerWheel) -> str:
    digest = hashlib.sha256()
    for source in wheel.sources:
        digest.update(source.name.encode())
        digest.update(source.read_bytes())
    return f"{wheel.version} python{python_version()} {digest.hexdigest()}"


if __name__ == "__main__":
    print(assemble_backends())
