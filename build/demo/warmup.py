"""Stage 1: the vision tower alone, with linear heads, until it sees shapes.

Trained through the language model from the start, shape stays at chance. Here every merged patch learns which figure
has its centre in it (shape, colour or none), and the mean of all learns shape, colour, number and place of the picture.
"""

import random

import torch
import torch.nn.functional as F
from torch import nn

from . import images, tasks
from .config import VISION_WIDTH
from .model import Pictures, Vision

COLOUR_INDEX = {name: i for i, name in enumerate(images.COLOURS)}
SHAPE_INDEX = {name: i for i, name in enumerate(images.SHAPES)}
SMALL_SIZES = ((64, 64), (96, 64), (64, 96), (96, 96), (128, 96), (96, 128), (128, 64), (64, 128), (128, 128))
LARGE_SIZES = ((160, 64), (64, 192), (192, 96), (96, 160), (160, 128), (128, 192), (160, 160), (192, 192), (64, 160))


class Heads(nn.Module):
    """Linear read-outs of the tower's output; thrown away after the warm-up."""

    def __init__(self):
        super().__init__()
        self.cell_shape = nn.Linear(VISION_WIDTH, len(images.SHAPES) + 1)
        self.cell_colour = nn.Linear(VISION_WIDTH, len(images.COLOURS) + 1)
        self.shape = nn.Linear(VISION_WIDTH, len(images.SHAPES))
        self.colour = nn.Linear(VISION_WIDTH, len(images.COLOURS))
        self.count = nn.Linear(VISION_WIDTH, 4)
        self.place = nn.Linear(VISION_WIDTH, len(images.PLACES))


def sample_batch(rng: random.Random, num_patches: int, large_share: float) -> dict:
    """Pictures of one size, about `num_patches` patches in all, with their targets (place -1 where not asked)."""
    sizes = LARGE_SIZES if rng.random() < large_share else SMALL_SIZES
    width, height = rng.choice(sizes)
    grid_h, grid_w = height // images.PATCH, width // images.PATCH
    batch: dict = {"frames": [], "cells": [], "cell_colours": [], "labels": []}
    while len(batch["frames"]) < max(4, num_patches // (grid_h * grid_w)):
        number = rng.choice((1, 1, 1, 2, 3, 4))
        place = rng.choice(images.PLACES) if number == 1 and rng.random() < 0.6 else None
        spec = images.sample_spec(rng, count=number, place=place, sizes=[(width, height)], jitter=0.0)
        if tasks.is_held_out(str(spec["seed"])):
            continue
        shapes, colours = images.cells(spec, grid_h // 2, grid_w // 2)
        figure = spec["figures"][0]
        batch["frames"].append(images.to_frame(images.render(spec))[0])
        batch["cells"].append(shapes)
        batch["cell_colours"].append(colours)
        batch["labels"].append((
            SHAPE_INDEX[figure["shape"]], COLOUR_INDEX[figure["colour"]], number - 1,
            images.PLACES.index(place) if place else -1,
        ))  # fmt: skip
    return {
        "frames": torch.stack(batch["frames"]), "grid": (grid_h, grid_w), "cells": torch.tensor(batch["cells"]),
        "cell_colours": torch.tensor(batch["cell_colours"]), "labels": torch.tensor(batch["labels"]),
    }  # fmt: skip


def loss_and_scores(vision: Vision, heads: Heads, batch: dict) -> tuple[torch.Tensor, dict[str, float]]:
    """Sum of the cross-entropies and the share of right answers per head."""
    features = vision(batch["frames"], *batch["grid"]).float()  # [B, M, H]
    pooled = features.mean(1)
    loss = F.cross_entropy(heads.cell_shape(features).flatten(0, 1), batch["cells"].flatten())
    loss = loss + F.cross_entropy(heads.cell_colour(features).flatten(0, 1), batch["cell_colours"].flatten())
    occupied = batch["cells"] > 0
    right = (heads.cell_shape(features).argmax(-1) == batch["cells"])[occupied]
    scores = {"cell": right.float().mean().item()}
    for i, name in enumerate(("shape", "colour", "count", "place")):
        target = batch["labels"][:, i]
        logits = getattr(heads, name)(pooled)
        if (target >= 0).any():
            loss = loss + 0.5 * F.cross_entropy(logits, target, ignore_index=-1)
            scores[name] = (logits.argmax(-1) == target)[target >= 0].float().mean().item()
    return loss, scores


def cell_loss(heads: Heads, features: list[torch.Tensor], pictures: tuple[Pictures, ...]) -> torch.Tensor:
    """The per-patch part of the warm-up's loss, kept on as an auxiliary loss of the main stage; mean over patches."""
    flat = torch.cat([f.flatten(0, 1) for f in features]).float()
    cells = torch.cat([p.cells.flatten(1) for p in pictures], 1)  # [2, patches]
    return F.cross_entropy(heads.cell_shape(flat), cells[0]) + F.cross_entropy(heads.cell_colour(flat), cells[1])
