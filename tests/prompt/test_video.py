"""Oracle: transformers' Qwen3-VL video size rule, times and patch order."""

import io

import numpy as np
import pytest
import torch
from PIL import Image
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor, smart_resize

from qwen35.errors import InvalidArgument
from qwen35.prompt.pixels import PixelConfig, video_size
from qwen35.prompt.types import PromptLimits
from qwen35.prompt.video import VideoSource, load_video

CONFIG = PixelConfig(16, 2, 2, (0.5,) * 3, (0.5,) * 3, min_pixels=4096, max_pixels=98_304, max_frames=12)
LIMITS = PromptLimits(
    max_context_tokens=10**6, max_image_bytes=1_000_000, max_image_pixels=50_000, max_video_pixels=300_000
)


def frame(index: int, width: int = 96, height: int = 64) -> Image.Image:
    values = np.random.default_rng(index).integers(0, 256, (height, width, 3))
    return Image.fromarray(values.astype(np.uint8))


def animation(num_frames: int, milliseconds: int = 500, kind: str = "WEBP") -> bytes:
    buffer = io.BytesIO()
    frames = [Image.new("RGB", (64, 64), (20 * index % 250, 0, 0)) for index in range(num_frames)]
    options = {"lossless": True} if kind == "WEBP" else {}
    frames[0].save(buffer, kind, save_all=True, append_images=frames[1:], duration=milliseconds, **options)
    return buffer.getvalue()


@pytest.mark.parametrize("num_frames", [2, 3, 4, 5, 7, 12])
@pytest.mark.parametrize(("width", "height"), [(96, 64), (30, 305), (1, 1), (10, 40), (640, 480), (33, 3000)])
def test_size_equals_transformers(num_frames, width, height):
    expected = smart_resize(num_frames, height, width, 2, 32, CONFIG.min_pixels, CONFIG.max_pixels)
    assert video_size("video", num_frames, height, width, CONFIG) == expected


@pytest.mark.parametrize("num_frames", [1, 2, 3, 6])
def test_patches_and_times_equal_transformers(num_frames):
    frames = [frame(index) for index in range(num_frames)]
    video = load_video(VideoSource(frames, fps=3), "video", CONFIG, LIMITS)
    height, width = video_size("video", max(num_frames, 2), 64, 96, CONFIG)
    resized = np.stack([np.asarray(f.resize((width, height), Image.Resampling.BICUBIC)) for f in frames])
    values = (torch.from_numpy(resized).permute(0, 3, 1, 2)[None].float() / 255 - 0.5) / 0.5
    expected, grid_t, grid_h, grid_w = Qwen3VLVideoProcessor.patchify(None, values, 16, 2, 2)
    assert [patch.grid for patch in video.patches] == [(1, grid_h, grid_w)] * grid_t
    torch.testing.assert_close(torch.cat([p.patches for p in video.patches]), expected[0], rtol=0, atol=1e-5)
    times = Qwen3VLProcessor._calculate_timestamps(None, list(range(num_frames)), 3, 2)
    assert list(video.timestamps) == pytest.approx(times)


def test_given_times():
    video = load_video(VideoSource([frame(0)] * 3, timestamps=[0.0, 1.0, 5.0]), "video", CONFIG, LIMITS)
    assert video.timestamps == (0.5, 5.0)


def test_default_rate_is_the_preprocessors():
    assert load_video(VideoSource([frame(0)] * 4), "video", CONFIG, LIMITS).timestamps == (0.25, 1.25)


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
def test_animation_is_sampled(kind):
    video = load_video(VideoSource(animation(9, kind=kind), fps=1), "video", CONFIG, LIMITS)
    # 9 frames in 4.5 s at one a second: 4 of them, the 1st, 4th, 6th and 9th, shown at 0, 1.5, 2.5 and 4 s
    reds = [int(frame_pixels[0, 0, 0]) for patch in video.patches for frame_pixels in patch.pixels]
    assert reds == [0, 60, 100, 160]
    assert video.timestamps == (0.75, 3.25)


def test_animation_shorter_than_the_least_number_of_frames():
    video = load_video(VideoSource(animation(3)), "video", CONFIG, LIMITS)
    assert video.timestamps == (0.25, 1.0)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (VideoSource([]), "video: expected 1 to 12 frames, got 0"),
        (VideoSource([frame(0)] * 13), "video: expected 1 to 12 frames, got 13"),
        (VideoSource([frame(0)], fps=0), "video.fps: expected a positive number, got 0"),
        (VideoSource([frame(0)], fps=float("nan")), "video.fps: expected a positive number, got nan"),
        (VideoSource([frame(0)], fps=1, timestamps=[0]), "video: expected either fps or timestamps"),
        (VideoSource([frame(0)] * 2, timestamps=[0]), "video.timestamps: expected 2 ascending times"),
        (VideoSource([frame(0)] * 2, timestamps=[1, 0]), "video.timestamps: expected 2 ascending times"),
        (VideoSource(animation(2), timestamps=[0, 1]), "video.timestamps: expected with a list of frames only"),
        (VideoSource([frame(0), frame(1, 32, 32)]), r"video\[1\]: expected the size of the first frame"),
        (VideoSource([frame(0), b"\0 no image"]), r"video\[1\]: expected an image"),
        (VideoSource([frame(0, 200, 200)] * 8), "video: expected at most 300000 pixels, got 320000"),
        (VideoSource([frame(0, 300, 200)]), r"video\[0\]: expected at most 50000 pixels, got 60000"),
        (VideoSource(animation(80)), "video: expected at most 300000 pixels"),
        (VideoSource(animation(9)[:-30]), "video: .*does not decode"),
        (VideoSource(b"\0\0\0\x20ftypisom"), "video: expected an image"),
    ],
)
def test_refused(source, message):
    with pytest.raises(InvalidArgument, match=message):
        load_video(source, "video", CONFIG, LIMITS)
