"""The seam for kernels that want weights laid out their way: every row comes once, wherever the checkpoint has it."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from qwen35.config import ModelConfig
from qwen35.kernels.weight_layout import ROW_ALIGNMENT, PlainLayout
from qwen35.nvfp4 import NVFP4Tensor
from qwen35.weights import passes, stream
from qwen35.weights.loader import load_language
from tests.tiny_checkpoint import make_tiny_checkpoint
from tests.tiny_quantised import make_tiny_quantised_checkpoint


@dataclass(frozen=True)
class Reversed:
    """A weight whose rows lie in the opposite order, codes and scales in one tensor [..., N, K/2 + K/16]."""

    rows: Tensor
    global_scale: Tensor
    input_scale: Tensor | None

    def plain(self) -> NVFP4Tensor:
        turned, width = self.rows.flip(-2), self.rows.shape[-1] * 8 // 9
        scales = turned[..., width:].contiguous().view(torch.float8_e4m3fn)
        return NVFP4Tensor(turned[..., :width].contiguous(), scales, self.global_scale, self.input_scale)


class ReversedLayout(PlainLayout):
    """NVFP4 weights as `Reversed`, all others plain. Counts rows."""

    def __init__(self) -> None:
        self.num_stored: Counter = Counter()

    def target(self, weight, allocate):
        if not isinstance(weight, NVFP4Tensor):
            return super().target(weight, allocate)
        *lead, num_rows, width = weight.codes.shape
        rows = allocate((*lead, num_rows, width + width // 8), torch.uint8)
        return Reversed(rows, weight.global_scale, weight.input_scale)

    def store(self, target, part, expert, first_row, rows):
        assert first_row % ROW_ALIGNMENT == 0
        self.num_stored[id(target), part, expert] += len(rows)
        if not isinstance(target, Reversed):
            super().store(target, part, expert, first_row, rows)
            return
        matrix = target.rows if expert is None else target.rows[expert]
        width = matrix.shape[-1] * 8 // 9
        columns = slice(0, width) if part == "codes" else slice(width, None)
        stop = len(matrix) - first_row
        matrix[stop - len(rows) : stop, columns] = rows.view(torch.uint8).flip(0)


def load(directory: Path, layout=None):
    config = ModelConfig.from_directory(directory)
    return load_language(directory, config, with_draft=True, weight_layout=layout)[:2]


def pairs(plain, turned, path: str = ""):
    """Linear weights of both records, by path."""
    if isinstance(turned, Reversed):
        yield path, plain, turned.plain()
    elif isinstance(plain, tuple):
        for index, (one, other) in enumerate(zip(plain, turned, strict=True)):
            yield from pairs(one, other, f"{path}.{index}")
    elif isinstance(plain, Tensor):
        yield path, plain, turned
    elif plain is not None:
        for name in vars(plain):
            yield from pairs(getattr(plain, name), getattr(turned, name), f"{path}.{name}")


@pytest.mark.parametrize("read_bytes", [stream.READ_BYTES, 4096])
def test_rows_are_laid_anew_on_the_way(tmp_path: Path, monkeypatch, read_bytes: int) -> None:
    monkeypatch.setattr(passes, "READ_BYTES", read_bytes)
    directory = make_tiny_quantised_checkpoint(tmp_path, quantised_head=True, num_shards=3)
    layout = ReversedLayout()
    num_packed = 0
    for path, plain, turned in pairs(load(directory), load(directory, layout)):
        if isinstance(plain, NVFP4Tensor):
            num_packed += 1
            for part in ("codes", "scales", "global_scale"):
                one, other = getattr(plain, part), getattr(turned, part)
                assert one.dtype == other.dtype and torch.equal(one.float(), other.float()), (path, part)
        else:
            assert torch.equal(plain, turned), path
    assert num_packed == 3 * 3 + 4 + 4 * 6 + 1
    assert set(layout.num_stored.values()) == {32, 64, 128, 256, 272, 4}


def test_fused_experts_arrive_apart(tmp_path: Path) -> None:
    """The same through every way: fused or one by one, plain or through a layout."""
    fused = load(make_tiny_checkpoint(tmp_path / "fused"), ReversedLayout())[0].layers[2].mlp.experts
    single = load(make_tiny_checkpoint(tmp_path / "single", layout="per_expert"))[0].layers[2].mlp.experts
    for name in ("gate_proj", "up_proj", "down_proj"):
        assert torch.equal(getattr(fused, name), getattr(single, name))
        assert getattr(fused, name).is_contiguous()
