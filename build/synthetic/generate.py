"""From a shape and a layout to a checkpoint directory."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from build.synthetic.companions import NUM_SPECIAL_IDS, write_companions
from build.synthetic.inventory import Recipe, entries_of, target_kinds
from build.synthetic.layouts import Layout, quantization_configs
from build.synthetic.shapes import Shape
from build.synthetic.values import Values
from build.synthetic.writer import MAX_SHARD_BYTES, write_checkpoint
from qwen35.config import ModelConfig

_MIN_VOCABULARY = 1024 + NUM_SPECIAL_IDS  # the demo's words fit


class SyntheticError(RuntimeError):
    """The arguments do not allow it; the message says what to change."""


@dataclass(frozen=True)
class Written:
    """What lies in the directory."""

    num_tensors: int
    num_bytes: int


def generate(
    shape: Shape,
    layout: Layout,
    output: Path,
    *,
    num_layers: int | None = None,
    has_draft: bool = True,
    seed: int = 0,
    rounds_dense: bool = False,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> Written:
    """Writes a new directory; it appears when it is complete. `rounds_dense` as in `inventory.Recipe`.

    Raises SyntheticError for a place that is taken, a vocabulary too small for the tokenizer, or too little disk.
    """
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise SyntheticError(f"output: expected no directory or an empty one, {output} has files")
    if shape.text["vocab_size"] < _MIN_VOCABULARY:
        raise SyntheticError(f"vocab_size: expected at least {_MIN_VOCABULARY}, got {shape.text['vocab_size']}")
    output.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{output.name}.", suffix=".partial", dir=output.parent))
    try:
        partial.chmod(0o755)
        recipe = Recipe(Values(seed), shape.matrix_std, rounds_dense)
        plain = shape.config(num_layers, has_draft=has_draft)
        written = _fill(partial, plain, layout, recipe, max_shard_bytes)
        partial.rename(output)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return written


def _fill(directory: Path, plain: dict[str, Any], layout: Layout, recipe: Recipe, max_shard_bytes: int) -> Written:
    """`plain`: config.json without a quantisation."""
    write_companions(directory, plain, None, None)
    config = ModelConfig.from_directory(directory)
    write_companions(directory, plain, *quantization_configs(layout, target_kinds(config, layout)))
    entries = entries_of(config, layout, recipe)
    num_bytes = sum(entry.num_bytes for entry in entries)
    free = shutil.disk_usage(directory).free
    if num_bytes > free:
        raise SyntheticError(f"output: expected {num_bytes} bytes free at {directory.parent}, got {free}")
    with tqdm(total=num_bytes, desc="writing", unit="B", unit_scale=True, unit_divisor=1024, mininterval=1) as bar:
        write_checkpoint(directory, entries, bar.update, max_shard_bytes)
    return Written(len(entries), num_bytes)
