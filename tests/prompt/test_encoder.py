import threading

import pytest
import torch

from qwen35.prompt.encoder import ImageEncoder
from qwen35.prompt.pixels import PixelConfig
from qwen35.prompt.types import ImageInput, Prompt

CONFIG = PixelConfig(16, 2, 2, (0.5,) * 3, (0.5,) * 3, 4096, 65536)
ROW_BYTES = 8 * 2  # hidden 8, bfloat16
IMAGE_BYTES = 4 * ROW_BYTES


class FakeTower:
    """Rows filled with the first pixel's value; counts its calls."""

    hidden_size = 8
    dtype = torch.bfloat16

    def __init__(self):
        self.calls = []
        self.gate = None

    def forward(self, patches, grid):
        self.calls.append(round((patches[0, 0].item() * 0.5 + 0.5) * 255))
        if self.gate:
            self.gate.wait(10)
        if self.calls[-1] == 255:
            raise RuntimeError("white")
        return torch.full((grid[1] * grid[2] // 4, 8), self.calls[-1], dtype=self.dtype)


def image(value: int, offset: int = 0, height: int = 64) -> ImageInput:
    pixels = torch.full((1, 3, height, 64), value, dtype=torch.uint8)
    return ImageInput(pixels, CONFIG, (1, height // 16, 4), f"{value}", height // 16, offset)


def prompt(*images: ImageInput) -> Prompt:
    return Prompt((0,), torch.zeros(3, 1, dtype=torch.int64), 1, images, "")


def test_rows_in_order_and_computed_once():
    tower = FakeTower()
    encoder = ImageEncoder(tower, 1 << 20)
    rows = encoder.embed(prompt(image(1), image(2), image(1)))
    assert rows[:, 0].tolist() == [1] * 4 + [2] * 4 + [1] * 4
    assert rows.dtype == torch.bfloat16
    assert tower.calls == [1, 2]
    encoder.embed(prompt(image(2)))
    assert tower.calls == [1, 2]
    assert (encoder.num_hits, encoder.num_misses, encoder.used_bytes) == (2, 2, 2 * IMAGE_BYTES)


def test_text_alone():
    rows = ImageEncoder(FakeTower(), 0).embed(prompt())
    assert rows.shape == (0, 8) and rows.dtype == torch.bfloat16


def test_least_recently_used_leaves_first():
    tower = FakeTower()
    encoder = ImageEncoder(tower, 2 * IMAGE_BYTES)
    for value in (1, 2, 1, 3, 1, 2):  # 3 pushes 2 out, since 1 was used after it; 2 then pushes 3 out
        encoder.embed_image(image(value))
        assert encoder.used_bytes <= 2 * IMAGE_BYTES
    assert tower.calls == [1, 2, 3, 2]


@pytest.mark.parametrize("cache_bytes", [0, IMAGE_BYTES - 1])
def test_image_larger_than_the_cache(cache_bytes):
    tower = FakeTower()
    encoder = ImageEncoder(tower, cache_bytes)
    assert encoder.embed(prompt(image(5), image(5)))[:, 0].tolist() == [5] * 8
    assert tower.calls == [5, 5] and encoder.used_bytes == 0


def _in_threads(num_threads, work):
    results = []

    def run():
        try:
            results.append(work())
        except RuntimeError as error:
            results.append(error)

    threads = [threading.Thread(target=run) for _ in range(num_threads)]
    for thread in threads:
        thread.start()
    return threads, results


def test_threads_share_one_call():
    tower = FakeTower()
    tower.gate = threading.Event()
    encoder = ImageEncoder(tower, 1 << 20)
    threads, results = _in_threads(4, lambda: encoder.embed_image(image(7)))
    while encoder.num_hits < 3:
        threading.Event().wait(0.001)
    tower.gate.set()
    for thread in threads:
        thread.join(10)
    assert tower.calls == [7] and all(rows[0, 0] == 7 for rows in results) and len(results) == 4


def test_failure_reaches_every_thread_and_is_not_kept():
    tower = FakeTower()
    tower.gate = threading.Event()
    encoder = ImageEncoder(tower, 1 << 20)
    threads, results = _in_threads(3, lambda: encoder.embed_image(image(255)))
    while encoder.num_hits < 2:
        threading.Event().wait(0.001)
    tower.gate.set()
    for thread in threads:
        thread.join(10)
    assert [str(error) for error in results] == ["white"] * 3
    with pytest.raises(RuntimeError):
        encoder.embed_image(image(255))
    assert tower.calls == [255, 255]
