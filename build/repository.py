"""A checkpoint directory made servable: quantised to NVFP4 once, cached, and linked into the model repository.

`python -m build.repository --checkpoint DIR`. A bf16 checkpoint goes through `build.quantize` into
`.cache/checkpoints/<name>-<fingerprint>-<scheme>/`; one that is quantised already is used as it is.
"""

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from build.backends import CACHE, ROOT, locked

DEMO_CHECKPOINT = ROOT / "build" / "demo" / "checkpoint"
PLACED_CHECKPOINT = Path("llm", "1", "checkpoint")  # below the model repository, the setting `checkpoint`'s default
SCHEMES = ("nvfp4", "w4a16_nvfp4", "experts_only")  # of build.quantize, which this module starts but does not import
# Up to this size a checkpoint's bytes are hashed; beyond it names, sizes and times of its large files stand for them.
# One thread quantises it: its products are too small for two, which take ten times as long on a busy machine.
_SMALL_CHECKPOINT_BYTES = 256 << 20
_SMALL_FILE_BYTES = 1 << 20


class RepositoryError(RuntimeError):
    """The checkpoint cannot be served; the message says what is missing."""


def read_config(checkpoint: Path) -> dict[str, object]:
    """`config.json` of a checkpoint directory. Raises RepositoryError when it is not one."""
    path = checkpoint / "config.json"
    if not path.is_file():
        raise RepositoryError(f"checkpoint: expected a directory with config.json and *.safetensors, got {checkpoint}")
    if not any(checkpoint.glob("*.safetensors")):
        raise RepositoryError(f"checkpoint: expected *.safetensors files, got none in {checkpoint}")
    return json.loads(path.read_text(encoding="utf-8"))


def is_quantised(checkpoint: Path) -> bool:
    """Whether the checkpoint announces a quantisation, in `hf_quant_config.json` or in its `config.json`."""
    return (checkpoint / "hf_quant_config.json").is_file() or "quantization_config" in read_config(checkpoint)


def fingerprint(checkpoint: Path) -> str:
    """16 hex digits that change with the checkpoint's files, and with the code that quantises them."""
    files = sorted(path for path in checkpoint.iterdir() if path.is_file())
    hash_everything = _is_small(checkpoint)
    digest = hashlib.sha256()
    for path in files:
        status = path.stat()
        digest.update(f"{path.name}\0{status.st_size}\0".encode())
        if hash_everything or status.st_size <= _SMALL_FILE_BYTES:
            digest.update(path.read_bytes())
        else:
            digest.update(str(status.st_mtime_ns).encode())
    for path in _quantiser_sources():
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def prepare(checkpoint: Path, scheme: str = "nvfp4") -> Path:
    """Directory of the checkpoint as it is served; quantises it, with a progress bar, when that is not cached."""
    checkpoint = Path(checkpoint).resolve()
    if is_quantised(checkpoint):
        return checkpoint
    target = CACHE / "checkpoints" / f"{checkpoint.name}-{fingerprint(checkpoint)}-{scheme}"
    with locked(target.with_suffix(".lock")):
        if not target.is_dir():
            _quantise(checkpoint, target, scheme)
    return target


def place(checkpoint: Path, model_repository: Path, *, copy: bool = False) -> Path:
    """Put the checkpoint where config.pbtxt expects it: a relative symlink, or a copy that can travel on its own."""
    target = model_repository / PLACED_CHECKPOINT
    target.parent.mkdir(parents=True, exist_ok=True)
    fresh = target.with_name(f"{target.name}.{os.getpid()}.new")
    if copy:
        shutil.copytree(checkpoint, fresh)
    else:
        fresh.symlink_to(os.path.relpath(checkpoint.resolve(), target.parent.resolve()), target_is_directory=True)
    if copy and target.is_symlink():
        target.unlink()  # a directory cannot replace a link
    elif target.is_dir() and not target.is_symlink():
        shutil.rmtree(target)
    fresh.replace(target)
    return target


def _is_small(checkpoint: Path) -> bool:
    sizes = (path.stat().st_size for path in checkpoint.iterdir() if path.is_file())
    return sum(sizes) <= _SMALL_CHECKPOINT_BYTES


def _quantiser_sources() -> Iterable[Path]:
    yield ROOT / "build" / "quantize.py"
    yield from sorted((ROOT / "build" / "quantization").glob("*.py"))
    yield ROOT / "backend" / "qwen35" / "nvfp4.py"


def _quantise(checkpoint: Path, target: Path, scheme: str) -> None:
    """Run the quantiser, which makes `target` appear when it is whole, in a process of its own: its memory is gone
    before a server starts."""
    for leftover in target.parent.glob(f".{target.name}.*"):  # of a run that was killed
        shutil.rmtree(leftover)
    print(f"quantising {checkpoint} to {scheme}", flush=True)
    command = [sys.executable, "-m", "build.quantize", "--scheme", scheme]
    command += ["--checkpoint", str(checkpoint), "--output", str(target)]
    environment = dict(os.environ)
    if _is_small(checkpoint):
        environment["OMP_NUM_THREADS"] = "1"
    code = subprocess.run(command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, check=False).returncode
    if code != 0:
        raise RepositoryError(f"quantisation: expected exit code 0, got {code}; its messages are above")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m build.repository", description=__doc__)
    parser.add_argument("--checkpoint", type=Path, default=DEMO_CHECKPOINT, help="bf16 or NVFP4 checkpoint directory")
    parser.add_argument("--scheme", choices=SCHEMES, default="nvfp4")
    parser.add_argument("--model-repository", type=Path, default=ROOT / "model_repository")
    parser.add_argument("--copy", action="store_true", help="copy the checkpoint instead of linking it")
    options = parser.parse_args()
    try:
        served = prepare(options.checkpoint, options.scheme)
        placed = place(served, options.model_repository, copy=options.copy)
    except RepositoryError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{placed} -> {served}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
