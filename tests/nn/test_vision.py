"""Oracle: transformers' Qwen3_5MoeVisionModel on the same random weights."""

import dataclasses
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from qwen35.config import ModelConfig
from qwen35.errors import ConfigError
from qwen35.kernels.reference import ReferenceOps
from qwen35.nn.vision import VisionTower, merge_order
from qwen35.weights.loader import load_vision
from tests.tiny_checkpoint import make_tiny_checkpoint

GRIDS = [(2, 2), (2, 4), (4, 6), (6, 4), (8, 8), (2, 20), (14, 2), (10, 18)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), dtype=torch.float32, seed=5)


@pytest.fixture(scope="module")
def reference(checkpoint):
    from transformers import Qwen3_5MoeForConditionalGeneration

    return Qwen3_5MoeForConditionalGeneration.from_pretrained(checkpoint, dtype=torch.float32).model.visual.eval()


@pytest.fixture(scope="module")
def config(checkpoint):
    return ModelConfig.from_directory(checkpoint)


@pytest.fixture(scope="module")
def tower(checkpoint, config):
    return VisionTower(config.vision, load_vision(checkpoint, config)[0], ReferenceOps())


def patches(height: int, width: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(height * width, 3 * 2 * 16 * 16, generator=generator) * 2 - 1


@pytest.mark.parametrize(("height", "width"), GRIDS)
def test_equals_transformers(tower, reference, height, width):
    x = patches(height, width)
    with torch.no_grad():
        expected = reference(x, grid_thw=torch.tensor([[1, height, width]])).pooler_output
        rows = tower.forward(x, (1, height, width))
    assert rows.shape == (height * width // 4, tower.hidden_size)
    torch.testing.assert_close(rows, expected, rtol=0, atol=1e-5)


def test_frames_of_a_video_equal_transformers(tower, reference):
    x = patches(6 * 4, 6)  # four temporal patches of 6 x 6
    with torch.no_grad():
        expected = reference(x, grid_thw=torch.tensor([[4, 6, 6]])).pooler_output
        rows = torch.cat([tower.forward(patch, (1, 6, 6)) for patch in x.chunk(4)])
    torch.testing.assert_close(rows, expected, rtol=0, atol=1e-5)


def test_bits_do_not_depend_on_company(tower):
    """Neither on what ran before nor on what other threads run meanwhile."""
    images = [(patches(h, w, seed), (1, h, w)) for seed, (h, w) in enumerate(GRIDS)]
    alone = [tower.forward(*image) for image in images]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda image: tower.forward(*image), reversed(images)))
    assert all(torch.equal(a, b) for a, b in zip(alone, reversed(together), strict=True))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 0.05), (torch.float64, 1e-5)])
def test_other_types(checkpoint, config, tower, dtype, tolerance):
    other = VisionTower(config.vision, load_vision(checkpoint, config, dtype=dtype)[0], ReferenceOps())
    x = patches(8, 8)
    rows, expected = other.forward(x, (1, 8, 8)), tower.forward(x, (1, 8, 8))
    assert rows.dtype == other.dtype == dtype
    assert (rows.float() - expected).abs().max() < tolerance * expected.abs().max()


def test_merge_order():
    rows, columns = merge_order(4, 4, 2, torch.device("cpu"))
    assert rows.tolist() == [0, 0, 1, 1, 0, 0, 1, 1, 2, 2, 3, 3, 2, 2, 3, 3]
    assert columns.tolist() == [0, 1, 0, 1, 2, 3, 2, 3, 0, 1, 0, 1, 2, 3, 2, 3]


def test_one_image_a_call(tower):
    with pytest.raises(ValueError, match="one image of grid"):
        tower.forward(patches(4, 4), (2, 2, 4))
    with pytest.raises(ValueError, match="got 16 patches"):
        tower.forward(patches(4, 4), (1, 4, 6))


def test_unknown_activation(tower):
    with pytest.raises(ConfigError, match="hidden_act: expected one of gelu_pytorch_tanh, gelu, got 'relu'"):
        VisionTower(dataclasses.replace(tower.config, hidden_act="relu"), tower.weights, ReferenceOps())
