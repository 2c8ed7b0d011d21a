"""Sizes and numbers of an image on its way to the vision tower: which size it is resized to, and its patches.

Source: transformers `models/qwen2_vl/image_processing_pil_qwen2_vl.py` and
`models/qwen3_vl/video_processing_qwen3_vl.py`; the results equal theirs.

Letters: F frames of one temporal patch, C colour channels, h/w patches in height and width, p patch size, m merge
size, t temporal patch size.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from qwen35.config import VisionConfig
from qwen35.errors import ConfigError, InvalidArgument

MAX_ASPECT_RATIO = 200


@dataclass(frozen=True)
class PixelConfig:
    """One preprocessor file. `min_pixels` and `max_pixels` bound a resized image, or all frames of a video together."""

    patch_size: int
    merge_size: int
    temporal_patch_size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    min_pixels: int
    max_pixels: int
    resample: Image.Resampling = Image.Resampling.BICUBIC
    rescale_factor: float = 1 / 255
    fps: float = 2.0  # videos: frames a second that are looked at
    min_frames: int = 4
    max_frames: int = 768

    @property
    def factor(self) -> int:
        """Sides of a resized image are multiples of this many pixels."""
        return self.patch_size * self.merge_size

    @classmethod
    def from_file(cls, path: Path, vision: VisionConfig) -> PixelConfig:
        """preprocessor_config.json or video_preprocessor_config.json; its sizes must be those of the vision tower."""
        if not path.is_file():
            raise ConfigError(f"{path.name}: expected beside a config.json with a vision_config, found none")
        fields = json.loads(path.read_text(encoding="utf-8"))
        switched_off = [name for name in _ALWAYS_ON if fields.get(name) is False]
        if switched_off:
            raise ConfigError(f"{path.name}: {switched_off[0]}: expected true, got false")
        try:
            config = cls(
                patch_size=fields["patch_size"],
                merge_size=fields["merge_size"],
                temporal_patch_size=fields["temporal_patch_size"],
                mean=tuple(fields["image_mean"]),
                std=tuple(fields["image_std"]),
                min_pixels=_pixel_bound(fields, "min_pixels", "shortest_edge"),
                max_pixels=_pixel_bound(fields, "max_pixels", "longest_edge"),
                resample=Image.Resampling(fields.get("resample", Image.Resampling.BICUBIC)),
                **{name: fields[name] for name in _OPTIONAL if fields.get(name) is not None},
            )
        except KeyError as error:
            raise ConfigError(f"{path.name}: expected the key {error.args[0]!r}, found none") from error
        config._check_sizes(path.name, vision)
        return config

    def _check_sizes(self, file_name: str, vision: VisionConfig) -> None:
        ours = (self.patch_size, self.merge_size, self.temporal_patch_size)
        theirs = (vision.patch_size, vision.spatial_merge_size, vision.temporal_patch_size)
        if ours != theirs:
            raise ConfigError(
                f"{file_name}: patch, merge and temporal patch size: expected {theirs} as in vision_config, got {ours}"
            )


def image_size(name: str, height: int, width: int, config: PixelConfig) -> tuple[int, int]:
    """Height and width that an image is resized to. Raises InvalidArgument beyond an aspect ratio of 200:1."""
    _check_aspect_ratio(name, height, width)
    return _fit(height, width, 1, 1, config)


def video_size(name: str, num_frames: int, height: int, width: int, config: PixelConfig) -> tuple[int, int]:
    """Height and width of every frame: the bounds hold for all frames together."""
    _check_aspect_ratio(name, height, width)
    if min(height, width) < config.factor:
        scale = max(config.factor / height, config.factor / width)
        height, width = int(height * scale), int(width * scale)
    period = config.temporal_patch_size
    return _fit(height, width, num_frames, round(num_frames / period) * period, config)


def to_patches(pixels: Tensor, config: PixelConfig) -> Tensor:
    """uint8 pixels [F, C, h*p, w*p] to float32 patches [h*w, C*t*p*p], patches of one merge block side by side.

    A single frame (an image) fills all of the t temporal places.
    """
    p, m = config.patch_size, config.merge_size
    values = (pixels.to(torch.float32) * config.rescale_factor - _channel(config.mean)) / _channel(config.std)
    if values.shape[0] == 1:
        values = values.expand(config.temporal_patch_size, -1, -1, -1)
    t, c, height, width = values.shape
    blocks = values.reshape(t, c, height // p // m, m, p, width // p // m, m, p)
    return blocks.permute(2, 5, 3, 6, 1, 0, 4, 7).reshape(height * width // p**2, c * t * p * p)


def _fit(height: int, width: int, num_frames: int, num_padded_frames: int, config: PixelConfig) -> tuple[int, int]:
    """Rounds to multiples of the factor, then into the bounds: down where it was too large, up where too small."""
    factor = config.factor
    new_height, new_width = round(height / factor) * factor, round(width / factor) * factor
    num_pixels = num_padded_frames * new_height * new_width
    if num_pixels > config.max_pixels:
        shrink = math.sqrt(num_frames * height * width / config.max_pixels)
        new_height = max(factor, math.floor(height / shrink / factor) * factor)
        new_width = max(factor, math.floor(width / shrink / factor) * factor)
    elif num_pixels < config.min_pixels:
        grow = math.sqrt(config.min_pixels / (num_frames * height * width))
        new_height = math.ceil(height * grow / factor) * factor
        new_width = math.ceil(width * grow / factor) * factor
    return new_height, new_width


def _check_aspect_ratio(name: str, height: int, width: int) -> None:
    ratio = max(height, width) / min(height, width)
    if ratio > MAX_ASPECT_RATIO:
        raise InvalidArgument(
            f"{name}: expected an aspect ratio of at most {MAX_ASPECT_RATIO}:1, got {width}x{height} ({ratio:.0f}:1)"
        )


def _channel(values: tuple[float, ...]) -> Tensor:
    return torch.tensor(values, dtype=torch.float32).view(1, -1, 1, 1)


def _pixel_bound(fields: dict[str, Any], name: str, edge: str) -> int:
    return fields[name] if fields.get(name) is not None else fields["size"][edge]


_ALWAYS_ON = ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb")
_OPTIONAL = ("rescale_factor", "fps", "min_frames", "max_frames")
