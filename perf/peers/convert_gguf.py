"""Starts llama.cpp's own converter: `python convert_gguf.py SOURCE_TREE CHECKPOINT [its options]`.

The converter recognises a tokenizer by a hash of what it does to a sample, and refuses a synthetic checkpoint's. Which
pre-tokenizer is written makes no difference to a benchmark on token ids, so it is told the family's.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path


def main() -> None:
    source_tree = Path(sys.argv[1])
    sys.path[:0] = [str(source_tree), str(source_tree / "gguf-py")]
    from conversion.base import TextModel

    TextModel.get_vocab_base_pre = lambda self, tokenizer: "qwen35"
    sys.argv = [str(source_tree / "convert_hf_to_gguf.py"), *sys.argv[2:]]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
