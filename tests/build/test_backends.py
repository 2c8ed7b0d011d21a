"""The assembled backend directory and the server's environment."""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from build import backends
from build.backends import BackendError, assemble_backends, find_wheel, locked, server_environment


def test_assembled_directory_holds_real_copies(tmp_path: Path):
    directory = assemble_backends(tmp_path / "backends")
    files = {path.name: path for path in (directory / "python").iterdir()}
    assert set(files) == {
        ".stamp",
        "libtriton_python.so",
        "triton_python_backend_stub",
        "triton_python_backend_utils.py",
    }
    assert not any(path.is_symlink() for path in files.values())
    assert os.access(files["triton_python_backend_stub"], os.X_OK)
    for source in find_wheel().sources:
        assert files[source.name].read_bytes() == source.read_bytes()


def test_second_assembly_touches_nothing(tmp_path: Path):
    first = assemble_backends(tmp_path / "backends") / "python"
    before = {path.name: path.stat().st_ino for path in first.iterdir()}
    assemble_backends(tmp_path / "backends")
    assert {path.name: path.stat().st_ino for path in first.iterdir()} == before


@pytest.mark.parametrize("leftover", ["backends-new", "backends-old", None])
def test_other_wheel_or_interrupted_assembly_is_replaced(tmp_path: Path, leftover: str | None):
    target = assemble_backends(tmp_path / "backends") / "python"
    (target / ".stamp").write_text("another version", encoding="utf-8")
    (target / "stale").write_text("", encoding="utf-8")
    if leftover:
        (tmp_path / leftover).mkdir()
        (tmp_path / leftover / "half").write_text("", encoding="utf-8")
    assemble_backends(tmp_path / "backends")
    assert not (target / "stale").exists() and not (target / "half").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["backends", "backends.lock"]


def test_environment_puts_this_python_first():
    environment = server_environment(
        {"PATH": "/usr/bin", "PYTHONPATH": "/x", "PYTHONHOME": "/y", "LD_LIBRARY_PATH": "/z", "HOME": "/root"},
        {"num_draft_tokens": "0"},
    )
    assert environment["PATH"] == f"{sys.prefix}/bin:/usr/bin"
    assert environment["LD_LIBRARY_PATH"].split(":") == [
        str(backends.python_library_dir()),
        str(find_wheel().libraries),
        "/z",
    ]
    assert not any(name.startswith("PYTHON") for name in environment)
    assert (environment["QWEN35_NUM_DRAFT_TOKENS"], environment["HOME"]) == ("0", "/root")


def test_environment_runs_the_interpreter_of_this_environment():
    environment = server_environment(os.environ, {})
    answer = subprocess.run(["python3", "-c", "import sys; print(sys.prefix)"], env=environment, capture_output=True)
    assert answer.stdout.decode().strip() == sys.prefix


def test_python_without_shared_library_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    real = sysconfig.get_config_var
    monkeypatch.setattr(sysconfig, "get_config_var", lambda name: str(tmp_path) if name == "LIBDIR" else real(name))
    with pytest.raises(BackendError, match=rf"expected libpython.*\.so\.1\.0 in {tmp_path}.*PYTHON="):
        backends.python_library_dir()


def test_python_without_a_stub_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(backends, "python_version", lambda: "3.99")
    with pytest.raises(BackendError, match=r"a stub for Python 3\.99"):
        find_wheel()


def test_missing_wheel_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(backends.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(BackendError, match="expected the wheel nvidia-pytriton"):
        find_wheel()


def test_lock_excludes_another_process(tmp_path: Path):
    path = tmp_path / "a" / "lock"
    with locked(path):
        assert subprocess.run(["flock", "-n", str(path), "true"]).returncode == 1
    assert subprocess.run(["flock", "-n", str(path), "true"]).returncode == 0
