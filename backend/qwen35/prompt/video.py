"""A video as a client sends it (an animated image, or a list of frames) to temporal patches with their times.

Each temporal patch is an image of its own to the model, introduced by its time: ``<1.5 seconds>``. Files of moving
pictures (mp4 and the like) are not decoded: clients send frames.
Source: transformers `models/qwen3_vl/{processing,video_processing}_qwen3_vl.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image

from qwen35.errors import InvalidArgument
from qwen35.prompt.images import ImageSource, check_num_pixels, make_input, open_source, to_rgb
from qwen35.prompt.pixels import PixelConfig, video_size
from qwen35.prompt.types import ImageInput, PromptLimits

MAX_SOURCE_FRAMES = 4096
_DEFAULT_FRAME_MS = 100  # what viewers use for a frame that says 0


@dataclass(frozen=True)
class VideoSource:
    """An animated image, or frames with their rate or their times; without either the preprocessor's rate holds."""

    frames: ImageSource | Sequence[ImageSource]
    fps: float | None = None  # frames a second: of a list as sent, of an animated image as wanted
    timestamps: Sequence[float] | None = None  # seconds, one for each frame of a list


@dataclass(frozen=True)
class VideoInput:
    """Temporal patches in order of time, and the time of each in seconds."""

    patches: tuple[ImageInput, ...]
    timestamps: tuple[float, ...]


def load_video(source: VideoSource, name: str, config: PixelConfig, limits: PromptLimits) -> VideoInput:
    if source.fps is not None and not (math.isfinite(source.fps) and source.fps > 0):
        raise InvalidArgument.field(f"{name}.fps", "a positive number", source.fps)
    if isinstance(source.frames, (list, tuple)):
        frames, times = _load_frames(source, name, config, limits)
    else:
        if source.timestamps is not None:
            raise InvalidArgument(f"{name}.timestamps: expected with a list of frames only, got an animated image")
        frames, times = _sample_animation(source.frames, source.fps or config.fps, name, config, limits)
    return _group(frames, times, name, config)


def _load_frames(
    source: VideoSource, name: str, config: PixelConfig, limits: PromptLimits
) -> tuple[list[Image.Image], list[float]]:
    num_frames = len(source.frames)
    if not 1 <= num_frames <= config.max_frames:
        raise InvalidArgument(f"{name}: expected 1 to {config.max_frames} frames, got {num_frames}")
    times = source.timestamps
    if times is None:
        times = [index / (source.fps or config.fps) for index in range(num_frames)]
    elif source.fps is not None:
        raise InvalidArgument(f"{name}: expected either fps or timestamps, got both")
    if len(times) != num_frames or any(not math.isfinite(t) or t < 0 for t in times) or sorted(times) != list(times):
        raise InvalidArgument.field(f"{name}.timestamps", f"{num_frames} ascending times in seconds", list(times))
    frames, num_pixels = [], 0
    for index, frame in enumerate(source.frames):
        frame_name = f"{name}[{index}]"
        image = open_source(frame, frame_name, limits)
        num_pixels += image.width * image.height
        check_num_pixels(num_pixels, name, limits.max_video_pixels)
        frames.append(to_rgb(image, frame_name, limits))
        if frames[-1].size != frames[0].size:
            raise InvalidArgument.field(frame_name, f"the size of the first frame, {frames[0].size}", frames[-1].size)
    return frames, list(times)


def _sample_animation(
    source: ImageSource, fps: float, name: str, config: PixelConfig, limits: PromptLimits
) -> tuple[list[Image.Image], list[float]]:
    """Frames spread evenly over the animation, `fps` a second, at least `min_frames` where there are so many."""
    image = open_source(source, name, limits)
    seconds = _frame_seconds(image, name, limits)
    source_fps = len(seconds) / sum(seconds)
    num_frames = min(max(int(sum(seconds) * fps), config.min_frames), config.max_frames, len(seconds))
    indices = np.linspace(0, len(seconds) - 1, num_frames).round().astype(int).tolist()
    frames = []
    for index in indices:
        image.seek(index)
        frames.append(to_rgb(image.copy(), name, limits))
    return frames, [index / source_fps for index in indices]


def _frame_seconds(image: Image.Image, name: str, limits: PromptLimits) -> list[float]:
    """Length of every frame. The frames are walked and not counted first: counting costs as much as walking."""
    seconds: list[float] = []
    try:
        while True:
            image.seek(len(seconds))
            image.load()
            seconds.append((image.info.get("duration") or _DEFAULT_FRAME_MS) / 1000)
            check_num_pixels(len(seconds) * image.width * image.height, name, limits.max_video_pixels)
            if len(seconds) > MAX_SOURCE_FRAMES:
                raise InvalidArgument(f"{name}: expected at most {MAX_SOURCE_FRAMES} frames, got more")
    except EOFError:
        return seconds
    except InvalidArgument:
        raise
    except Exception as error:  # decoders raise many types on damaged frames
        raise InvalidArgument(f"{name}: frame {len(seconds)} does not decode: {error}") from error


def _group(frames: list[Image.Image], times: list[float], name: str, config: PixelConfig) -> VideoInput:
    """Resizes and joins frames to temporal patches; the last frame is repeated to fill the last patch."""
    period = config.temporal_patch_size
    first = frames[0]
    height, width = video_size(name, max(len(frames), period), first.height, first.width, config)
    resized = [frame.resize((width, height), config.resample) for frame in frames]
    num_missing = -len(frames) % period
    resized += resized[-1:] * num_missing
    times = times + times[-1:] * num_missing
    starts = range(0, len(resized), period)
    return VideoInput(
        patches=tuple(make_input(resized[start : start + period], config) for start in starts),
        timestamps=tuple((times[start] + times[start + period - 1]) / 2 for start in starts),
    )
