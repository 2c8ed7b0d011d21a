"""Oracle: transformers' get_rope_index."""

from types import SimpleNamespace

import pytest
import torch
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeModel

from qwen35.prompt.pixels import PixelConfig
from qwen35.prompt.positions import rotary_positions
from qwen35.prompt.types import ImageInput

CONFIG = PixelConfig(16, 2, 2, (0.5,) * 3, (0.5,) * 3, 4096, 65536)
IMAGE, VIDEO = 1, 2


def _model():
    model = SimpleNamespace(config=SimpleNamespace(vision_config=SimpleNamespace(spatial_merge_size=2)))
    model.get_vision_position_ids = lambda *a, **k: Qwen3_5MoeModel.get_vision_position_ids(model, *a, **k)
    return model


def _image(grid, offset):
    return ImageInput(torch.empty(0), CONFIG, grid, "", grid[1] * grid[2] // 4, offset)


# Each prompt: numbers of text tokens, and (kind, h, w) of an image or of one temporal patch of a video.
PROMPTS = {
    "text": [7],
    "one token": [1],
    "one image": [3, (IMAGE, 4, 6), 2],
    "image first": [(IMAGE, 2, 2), 1],
    "image last": [5, (IMAGE, 8, 2)],
    "two images": [3, (IMAGE, 4, 6), 2, (IMAGE, 10, 4), 4],
    "wide": [1, (IMAGE, 2, 64), 1],
    "video": [4, (VIDEO, 4, 6), 3, (VIDEO, 4, 6), 3, (VIDEO, 4, 6), 2],
    "video and images": [1, (IMAGE, 6, 2), 2, (VIDEO, 2, 4), 1, (VIDEO, 2, 4), 1, (IMAGE, 2, 6), 9],
}


@pytest.mark.parametrize("name", PROMPTS)
def test_positions_equal_transformers(name):
    kinds, grids, images = [], {IMAGE: [], VIDEO: []}, []
    for part in PROMPTS[name]:
        if isinstance(part, int):
            kinds += [0] * part
            continue
        kind, height, width = part
        images.append(_image((1, height, width), len(kinds)))
        grids[kind].append((1, height, width))
        kinds += [kind] * images[-1].num_tokens
    expected, delta = Qwen3_5MoeModel.get_rope_index(
        _model(),
        input_ids=torch.zeros(1, len(kinds), dtype=torch.int64),
        mm_token_type_ids=torch.tensor([kinds]),
        image_grid_thw=torch.tensor(grids[IMAGE]) if grids[IMAGE] else None,
        video_grid_thw=torch.tensor(grids[VIDEO]) if grids[VIDEO] else None,
    )
    positions, next_position = rotary_positions(len(kinds), images)
    assert positions.dtype == torch.int64
    assert torch.equal(positions, expected[:, 0])
    assert next_position == len(kinds) + delta.item()


def test_written_out():
    positions, next_position = rotary_positions(11, [_image((1, 4, 6), 3)])
    assert positions.tolist() == [
        [0, 1, 2, 3, 3, 3, 3, 3, 3, 6, 7],
        [0, 1, 2, 3, 3, 3, 4, 4, 4, 6, 7],
        [0, 1, 2, 3, 4, 5, 3, 4, 5, 6, 7],
    ]
    assert next_position == 8


def test_images_side_by_side_stay_apart():
    positions, _ = rotary_positions(4, [_image((1, 2, 4), 0), _image((1, 2, 4), 2)])
    assert positions.tolist() == [[0, 0, 2, 2], [0, 0, 2, 2], [0, 1, 2, 3]]
