"""Bytes that a token moves, against hand-counted ones; and one small run of the whole measurement."""

import os
from pathlib import Path

import pytest

from build.synthetic.companions import write_companions
from build.synthetic.generate import generate
from build.synthetic.inventory import Recipe, entries_of, target_kinds
from build.synthetic.layouts import LAYOUTS, quantization_configs
from build.synthetic.shapes import SHAPES
from build.synthetic.values import Values
from build.synthetic.writer import header_of
from perf.full_size import FullSize, measure, token_bytes
from qwen35.config import ModelConfig
from qwen35.weights.loader import load_language
from qwen35.weights.scheme import Kind
from tests.tiny_shape import TINY


def hollow(directory: Path, shape_name: str, layout) -> ModelConfig:
    """A checkpoint of headers and holes: names and shapes without a byte of weights."""
    shape = SHAPES[shape_name]
    write_companions(directory, shape.config(), None, None)
    config = ModelConfig.from_directory(directory)
    write_companions(directory, shape.config(), *quantization_configs(layout, target_kinds(config, layout)))
    entries = entries_of(config, layout, Recipe(Values(0), shape.matrix_std))
    path = directory / "model.safetensors"
    path.write_bytes(header_of(entries))
    os.truncate(path, path.stat().st_size + sum(entry.num_bytes for entry in entries))
    return config


@pytest.mark.parametrize(
    ("head", "megabytes"),
    # 129.8 M weights at 4.5 bits, routers and other small ones in bf16, 12.6 MB of state read and written
    [(Kind.NVFP4, 85.6), (Kind.DENSE, 85.6 + 32.768 * (2 - 0.5625))],
)
def test_the_344m(tmp_path: Path, head: Kind, megabytes: float) -> None:
    config = hollow(tmp_path, "344m", LAYOUTS["nvfp4"].with_head(head))
    weights, _, _ = load_language(tmp_path, config, with_draft=False, device="meta")
    found = token_bytes(config.text, weights, context_tokens=0, kv_item_bytes=2) / 1e6
    assert found == pytest.approx(megabytes, rel=0.03)
    with_context = token_bytes(config.text, weights, context_tokens=1000, kv_item_bytes=1) / 1e6
    assert with_context - found == pytest.approx(2 * 2 * 2 * 256 * 1000 / 1e6)  # 2 layers, K and V, 2 heads of 256


def test_share_of_the_floor() -> None:
    found = FullSize(0, 2 * 10**9, 1.0, 0, (20.0, 22.0), (4.0, 9.0, 5.0))
    assert found.share_of_floor == pytest.approx(5 / (21 / 2))


def test_one_small_run(tmp_path: Path) -> None:
    generate(TINY, LAYOUTS["nvfp4"], tmp_path / "tiny")
    found = measure(tmp_path / "tiny", 1, num_tokens=4, repeats=2, max_context_tokens=64)
    assert len(found.tokens_per_s) == 2 and min(found.tokens_per_s) > 0
    assert 0 < found.held_bytes < found.token_bytes * 4 < found.peak_bytes
