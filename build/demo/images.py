"""Synthetic images of coloured figures, drawn from a small specification, and their patches.

`sample_spec(rng, ...)` draws a specification, `render(spec)` the picture (deterministic, Pillow), `to_patches(image)`
the tower's input. A specification is plain JSON, so a held-out item carries its picture in a few numbers.
"""

import math
import random
from collections.abc import Sequence

import numpy as np
import torch
from PIL import Image, ImageDraw

from .config import MAX_PIXELS, MERGE, MIN_PIXELS, PATCH

COLOURS = {
    "red": (214, 40, 40), "green": (40, 160, 60), "blue": (40, 80, 210), "yellow": (240, 210, 40),
    "purple": (140, 50, 170), "orange": (245, 135, 30), "black": (25, 25, 25), "white": (250, 250, 250),
}  # fmt: skip
SHAPES = ("circle", "square", "triangle", "star", "cross")
PLACES = ("top left", "top right", "bottom left", "bottom right", "centre")
BACKGROUNDS = ((200, 200, 200), (225, 215, 200), (190, 205, 220), (205, 220, 195), (170, 170, 175))
SIDES = (64, 96, 128, 160, 192)
FACTOR = PATCH * MERGE


def smart_resize(
    height: int, width: int, min_pixels: int = MIN_PIXELS, max_pixels: int = MAX_PIXELS
) -> tuple[int, int]:
    """Height and width that are multiples of 32, near the given aspect ratio, with min_pixels <= area <= max_pixels.

    The rule of transformers' Qwen2VLImageProcessor.
    """
    if max(height, width) / min(height, width) > 200:
        raise ValueError(f"image: expected an aspect ratio of at most 200, got {height}x{width}, crop it")
    new_h, new_w = round(height / FACTOR) * FACTOR, round(width / FACTOR) * FACTOR
    if new_h * new_w > max_pixels:
        beta = math.sqrt(height * width / max_pixels)
        new_h = max(FACTOR, math.floor(height / beta / FACTOR) * FACTOR)
        new_w = max(FACTOR, math.floor(width / beta / FACTOR) * FACTOR)
    elif new_h * new_w < min_pixels:
        beta = math.sqrt(min_pixels / (height * width))
        new_h, new_w = math.ceil(height * beta / FACTOR) * FACTOR, math.ceil(width * beta / FACTOR) * FACTOR
    return new_h, new_w


def sample_size(rng: random.Random, max_tokens: int = 36) -> tuple[int, int]:
    """Width and height in pixels, multiples of 32, with 4 to `max_tokens` merged patches; small ones more often."""
    if rng.random() < 0.5:
        max_tokens = min(max_tokens, 12)
    while True:
        width, height = rng.choice(SIDES), rng.choice(SIDES)
        if 4 <= (width // FACTOR) * (height // FACTOR) <= max_tokens:
            return width, height


def _place_box(place: str, width: int, height: int, radius: float) -> tuple[float, float, float, float]:
    """Range of centres (x0, x1, y0, y1) for a named place: the middle or a corner part."""
    if place == "centre":
        return 0.44 * width, 0.56 * width, 0.44 * height, 0.56 * height
    vertical, horizontal = place.split()
    edge = radius + 1
    x = (edge, max(edge, 0.30 * width)) if horizontal == "left" else (min(width - edge, 0.70 * width), width - edge)
    y = (edge, max(edge, 0.30 * height)) if vertical == "top" else (min(height - edge, 0.70 * height), height - edge)
    return *x, *y


def _figure(rng: random.Random, shape: str, colour: str, x: float, y: float, radius: float) -> dict:
    return {
        "shape": shape, "colour": colour, "x": round(x, 1), "y": round(y, 1), "radius": round(radius, 1),
        "angle": rng.randint(-15, 15),
    }  # fmt: skip


def sample_spec(
    rng: random.Random,
    *,
    count: int = 1,
    place: str | None = None,
    shape: str | None = None,
    colour: str | None = None,
    max_tokens: int = 36,
    sizes: Sequence[tuple[int, int]] = (),
    jitter: float = 0.3,
) -> dict:
    """A random picture of `count` figures; with `count` > 1 all have one shape and one colour each drawn at random."""
    fitting = [(w, h) for w, h in sizes if w * h <= max_tokens * FACTOR**2]
    width, height = rng.choice(fitting) if fitting else sample_size(rng, max_tokens)
    if rng.random() < jitter:  # resized by the processor to the same grid
        width, height = width + rng.randint(-10, 10), height + rng.randint(-10, 10)
    short = min(width, height)
    shape = shape or rng.choice(SHAPES)
    colour = colour or rng.choice(list(COLOURS))
    figures: list[dict] = []
    if count == 1:
        high = 0.22 if place else 0.38
        radius = max(9.0, rng.uniform(0.16 if place else 0.2, high) * short)
        place = place or ""
        x0, x1, y0, y1 = (
            _place_box(place, width, height, radius) if place else (radius, width - radius, radius, height - radius)
        )
        figures.append(_figure(rng, shape, colour, rng.uniform(x0, x1), rng.uniform(y0, y1), radius))
    else:
        figures = _scatter(rng, count, shape, colour, width, height)
    return {
        "width": width, "height": height, "background": rng.randrange(len(BACKGROUNDS)),
        "noise": rng.randint(0, 8), "seed": rng.getrandbits(31), "figures": figures,
    }  # fmt: skip


def _scatter(rng: random.Random, count: int, shape: str, colour: str, width: int, height: int) -> list[dict]:
    """`count` figures apart from each other; shrinks them until they fit."""
    limit = 0.2 * min(width, height) if count > 2 else 0.24 * min(width, height)
    while True:
        figures: list[dict] = []
        for _ in range(40):
            radius = max(7.0, rng.uniform(0.7, 1.0) * limit)
            x, y = rng.uniform(radius, width - radius), rng.uniform(radius, height - radius)
            if all(math.hypot(x - f["x"], y - f["y"]) > radius + f["radius"] + 3 for f in figures):
                figures.append(_figure(rng, shape, colour, x, y, radius))
                if len(figures) == count:
                    return figures
        limit *= 0.93


def _outline(figure: dict) -> list[tuple[float, float]]:
    """Corner points of a straight-edged figure."""
    turn, radius = math.radians(figure["angle"]), figure["radius"]
    if figure["shape"] == "square":
        polar = [(45 + 90 * i, 1.0) for i in range(4)]
    elif figure["shape"] == "triangle":
        polar = [(-90 + 120 * i, 1.0) for i in range(3)]
    elif figure["shape"] == "star":
        polar = [(-90 + 36 * i, 1.0 if i % 2 == 0 else 0.42) for i in range(10)]
    else:
        arm = math.degrees(math.atan2(0.3, 1.0))
        inner = 0.3 * math.sqrt(2) / math.hypot(1.0, 0.3)
        polar = [(90 * i + d, r) for i in range(4) for d, r in ((-arm, 1.0), (arm, 1.0), (45, inner))]
    return [
        (
            figure["x"] + radius * r * math.cos(math.radians(a) + turn),
            figure["y"] + radius * r * math.sin(math.radians(a) + turn),
        )
        for a, r in polar
    ]


def render(spec: dict) -> Image.Image:
    """The RGB picture of a specification; the same bytes for the same specification."""
    image = Image.new("RGB", (spec["width"], spec["height"]), BACKGROUNDS[spec["background"]])
    draw = ImageDraw.Draw(image)
    for figure in spec["figures"]:
        fill, x, y, radius = COLOURS[figure["colour"]], figure["x"], figure["y"], figure["radius"]
        if figure["shape"] == "circle":
            draw.ellipse((x - radius, y - radius, x + radius, y + radius), fill=fill)
        else:
            draw.polygon(_outline(figure), fill=fill)
    if spec["noise"]:
        noise = np.random.default_rng(spec["seed"]).integers(
            -spec["noise"], spec["noise"] + 1, (spec["height"], spec["width"], 3), dtype=np.int16
        )
        image = Image.fromarray(np.clip(np.asarray(image, np.int16) + noise, 0, 255).astype(np.uint8))
    return image


def cells(spec: dict, rows: int, columns: int) -> tuple[list[int], list[int]]:
    """Per merged patch of a picture: 1 + shape and 1 + colour of the figure whose centre is there, else 0."""
    shapes, colours = [0] * (rows * columns), [0] * (rows * columns)
    for figure in spec["figures"]:
        column = min(columns - 1, int(figure["x"] / spec["width"] * columns))
        row = min(rows - 1, int(figure["y"] / spec["height"] * rows))
        shapes[row * columns + column] = 1 + SHAPES.index(figure["shape"])
        colours[row * columns + column] = 1 + list(COLOURS).index(figure["colour"])
    return shapes, colours


def to_frame(image: Image.Image) -> tuple[torch.Tensor, int, int]:
    """Resize by the rule, normalise to [-1, 1]: ([N, 768] patches of one frame in merge order, grid_h, grid_w)."""
    height, width = smart_resize(image.height, image.width)
    if (height, width) != (image.height, image.width):
        image = image.resize((width, height), Image.Resampling.BICUBIC)
    pixels = torch.from_numpy(np.asarray(image.convert("RGB"), dtype=np.uint8).copy())
    pixels = pixels.permute(2, 0, 1).float().mul_(2 / 255).sub_(1.0)  # [3, H, W]
    grid_h, grid_w = height // PATCH, width // PATCH
    blocks = pixels.view(3, grid_h // MERGE, MERGE, PATCH, grid_w // MERGE, MERGE, PATCH)
    return blocks.permute(1, 4, 2, 5, 0, 3, 6).reshape(grid_h * grid_w, 3 * PATCH * PATCH), grid_h, grid_w


def to_patches(image: Image.Image) -> tuple[torch.Tensor, tuple[int, int, int]]:
    """The published processor's `pixel_values` [N, 1536] (the frame twice) and grid (1, h, w)."""
    frame, grid_h, grid_w = to_frame(image)
    twice = frame.view(-1, 3, 1, PATCH * PATCH).expand(-1, -1, 2, -1)
    return twice.reshape(len(frame), -1), (1, grid_h, grid_w)
