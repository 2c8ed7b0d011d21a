"""Command line of `build.synthetic`."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import build.synthetic
from build.synthetic.generate import SyntheticError, generate
from build.synthetic.layouts import LAYOUTS
from build.synthetic.shapes import SHAPES
from qwen35.weights.scheme import Kind


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    layout, started = LAYOUTS[options.layout], time.monotonic()
    if options.nvfp4_head:
        layout = layout.with_head(layout.kinds.get("experts", Kind.NVFP4))
    try:
        written = generate(
            SHAPES[options.shape],
            layout,
            options.output,
            num_layers=options.layers,
            has_draft=not options.no_draft,
            seed=options.seed,
            rounds_dense=options.round_dense,
        )
    except SyntheticError as error:
        print(f"synthetic: {error}", file=sys.stderr)
        return 1
    seconds = time.monotonic() - started
    print(f"{options.output}: {written.num_tensors} tensors, {written.num_bytes} bytes, written in {seconds:.0f} s")
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m build.synthetic", description=build.synthetic.__doc__.splitlines()[0]
    )
    parser.add_argument("--shape", choices=SHAPES, required=True, help="dimensions")
    parser.add_argument("--layout", choices=LAYOUTS, required=True, help="names and kinds of weights")
    parser.add_argument("--output", type=Path, required=True, help="directory to create")
    parser.add_argument("--layers", type=int, metavar="N", help="cut the model short (default: its full depth)")
    parser.add_argument("--no-draft", action="store_true", help="without mtp.*")
    parser.add_argument("--nvfp4-head", action="store_true", help="the lm_head in NVFP4 as well")
    parser.add_argument(
        "--round-dense",
        action="store_true",
        help="NVFP4 weights are the bf16 layout's of the same seed, rounded (slow; default: drawn packed)",
    )
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
