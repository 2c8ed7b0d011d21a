"""GGUF files of a checkpoint for llama.cpp, made once: `python -m perf.peers.gguf --checkpoint DIR --quantised DIR`.

bf16   of the bf16 checkpoint       q4_0   of that, by llama-quantize       nvfp4   of the ModelOpt export
"""

from __future__ import annotations

import argparse
import subprocess
from pathlib import Path

from build.backends import CACHE

_CONVERTER = Path(__file__).with_name("convert_gguf.py")
KINDS = ("bf16", "q4_0", "nvfp4")
PEERS = CACHE / "peers"


def gguf_path(peers: Path, checkpoint: Path, kind: str) -> Path:
    return peers / "gguf" / f"{checkpoint.resolve().name}-{kind}.gguf"


def convert(peers: Path, checkpoint: Path, kind: str, output: Path) -> None:
    """By the converter in llama.cpp's source tree. Raises CalledProcessError."""
    root = peers / "llama_cpp"
    output.parent.mkdir(parents=True, exist_ok=True)
    partial = output.with_suffix(".partial")
    if kind == "q4_0":
        source = gguf_path(peers, checkpoint, "bf16")
        command = [root / "bin" / "llama-quantize", source, partial, "Q4_0"]
    else:
        source_tree = root / "source" / "vendor" / "llama.cpp"
        command = [root / "venv" / "bin" / "python", _CONVERTER, source_tree, checkpoint, "--outfile", partial]
        command += ["--outtype", "bf16", "--no-mtp"]
    subprocess.run([str(word) for word in command], check=True)
    partial.rename(output)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, required=True, help="bf16")
    parser.add_argument("--quantised", type=Path, required=True, help="its NVFP4 export")
    parser.add_argument("--peers-directory", type=Path, default=PEERS)
    options = parser.parse_args()
    for kind in KINDS:
        checkpoint = options.quantised if kind == "nvfp4" else options.checkpoint
        path = gguf_path(options.peers_directory, checkpoint, kind)
        if not path.is_file():
            convert(options.peers_directory, checkpoint, kind, path)
        print(f"{path}  {path.stat().st_size / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
