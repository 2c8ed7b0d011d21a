"""What the arithmetic of activations costs in accuracy and gives in speed: ``python -m perf.arithmetic``.

Three tables over the choices of the setting `activations` for NVFP4 linears, native kernels throughout:
    error      of one linear against its exact product with the bf16 activations, relative, on synthetic outliers,
    agreement  of the demo checkpoint's next tokens with those of dense (bf16) activations, teacher-forced along the
               held-out answers: share of equal first choices, mean Kullback-Leibler divergence in nats. The torch
               reference, the same arithmetic in another order of additions, shows how much rounding alone changes,
    speed      of one linear by the number of rows, medians of interleaved runs on one thread.
The default (`kernels.select.DEFAULT_ACTIVATIONS`) must keep the error at most 2 %, agree in 99 % of the tokens of all
sets and stay below 0.005 nats; among those that do, the fastest at one row is taken.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from build import repository
from build.demo import heldout
from build.demo.heldout import Item
from perf.heldout import with_pictures
from perf.kernels import one_sequence, random_nvfp4, seconds
from qwen35.config import ModelConfig
from qwen35.kernels.cpu import CpuOps
from qwen35.kernels.cpu.weights import lay_out
from qwen35.kernels.ops import Ops
from qwen35.kernels.reference import ReferenceOps
from qwen35.nn.language import LanguageModel
from qwen35.nn.vision import VisionTower
from qwen35.nvfp4 import NVFP4Tensor, dequantize, quantize_weight
from qwen35.prompt.encoder import ImageEncoder
from qwen35.prompt.processor import PromptProcessor
from qwen35.prompt.types import Prompt, PromptLimits
from qwen35.settings import Settings
from qwen35.state.cache import view_of_bytes
from qwen35.state.geometry import Geometry
from qwen35.views import BatchView
from qwen35.weights.loader import load_language, load_vision

ACTIVATIONS = ("dense", "int11", "int8", "nvfp4")
REFERENCE = "dense, torch reference"
BF16, WIDTH, NUM_OUTPUTS, NUM_ROWS = torch.bfloat16, 2048, 512, 256
ROW_COUNTS = (1, 2, 4, 8, 64, 512)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m perf.arithmetic", description=__doc__)
    parser.add_argument("--items-per-set", type=int, default=heldout.ITEMS_PER_SET)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--output", type=Path, help="also write the tables to this file")
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    operations = {name: CpuOps(activations=name) for name in ACTIVATIONS}
    items = [item for name in heldout.SET_NAMES for item in heldout.load(name)[: options.items_per_set]]
    parts = [
        error_table(operations),
        agreement_table(agreements({**operations, REFERENCE: ReferenceOps()}, items)),
        speed_table(operations, options.repeats),
    ]
    text = "\n\n".join([f"Instruction set {operations['dense'].identity.split('/')[0]}, one thread.", *parts])
    print(text)
    if options.output:
        options.output.write_text(text + "\n", encoding="utf-8")
    return 0


# Error of one linear.


def synthetic_activations() -> Iterator[tuple[str, Tensor, Tensor]]:
    """(name, x [T, K] bf16, the channels [K] that are no outliers)."""
    gauss = torch.randn(NUM_ROWS, WIDTH)
    yield "gauss", gauss.to(BF16), torch.ones(WIDTH, dtype=torch.bool)
    student = torch.distributions.StudentT(3.0).sample((NUM_ROWS, WIDTH))
    yield "student-t, 3 degrees", student.to(BF16), torch.ones(WIDTH, dtype=torch.bool)
    for name, channels, factor in (
        ("0.2 % of channels x20", (5, 700, 1300, 2000), 20.0),
        ("1 channel x100", (5,), 100),
    ):
        x, is_plain = gauss.clone(), torch.ones(WIDTH, dtype=torch.bool)
        x[:, list(channels)] *= factor
        is_plain[list(channels)] = False
        yield name, x.to(BF16), is_plain


def error_table(operations: dict[str, CpuOps]) -> str:
    """The second number of a cell: against what the channels that are no outliers add, where there are any."""
    lines = [
        "| relative error of a linear, K = 2048 | " + " | ".join(operations) + " |",
        "|---|" + "---|" * len(operations),
    ]
    packed = quantize_weight(torch.randn(NUM_OUTPUTS, WIDTH))
    for name, x, is_plain in synthetic_activations():
        weight = with_input_scale(packed, x)
        matrix, wide = dequantize(weight, torch.float64).t(), x.double()
        sizes = [(wide @ matrix).norm()] + ([] if is_plain.all() else [((wide * is_plain) @ matrix).norm()])
        gaps = [(ops.linear(x, weight, out_dtype=torch.float32) - wide @ matrix).norm() for ops in operations.values()]
        cells = (", ".join(f"{100 * gap / size:.3g} %" for size in sizes) for gap in gaps)
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def with_input_scale(weight: NVFP4Tensor, x: Tensor) -> NVFP4Tensor:
    """Calibrated on x itself, as ModelOpt does on its data: the largest value takes the largest code and scale."""
    return replace(weight, input_scale=x.abs().max().float() / (6 * 448))


# Agreement on the demo checkpoint.


@dataclass
class Agreement:
    """Of next-token distributions with those of dense activations, over tokens."""

    divergences: list[Tensor] = field(default_factory=list)
    is_same: list[Tensor] = field(default_factory=list)

    def add(self, logits: Tensor, dense: Tensor) -> None:
        """Both [T, V]."""
        expected, got = dense.double().log_softmax(-1), logits.double().log_softmax(-1)
        self.divergences.append((expected.exp() * (expected - got)).sum(-1))
        self.is_same.append(dense.argmax(-1) == logits.argmax(-1))

    @property
    def num_tokens(self) -> int:
        return sum(len(part) for part in self.is_same)

    @property
    def top1(self) -> float:
        return torch.cat(self.is_same).double().mean().item()

    @property
    def mean_divergence(self) -> float:
        return torch.cat(self.divergences).mean().item()


class Forcing:
    """Logits along a prompt and its reference answer, for one set of weights and several operations."""

    def __init__(self, checkpoint: Path, operations: dict[str, Ops]) -> None:
        self.config = ModelConfig.from_directory(checkpoint)
        dense = operations["dense"]
        layout = dense.weight_layout
        weights, _, _ = load_language(checkpoint, self.config, with_draft=False, weight_layout=layout)
        self.models = {name: LanguageModel(self.config.text, weights, ops) for name, ops in operations.items()}
        vision, _ = load_vision(checkpoint, self.config)
        self.images = ImageEncoder(VisionTower(self.config.vision, vision, dense), 64 << 20)
        limits = PromptLimits(max_context_tokens=4096, max_image_bytes=20 << 20, max_image_pixels=64_000_000)
        self.processor = PromptProcessor(checkpoint, self.config, limits)
        self.geometry = Geometry.derive(self.config, Settings(num_draft_tokens=0, num_slots=1, kv_cache_bytes=16 << 20))
        flat = torch.zeros(self.geometry.cache_bytes, dtype=torch.uint8)
        self.cache = view_of_bytes(flat, self.geometry)

    def prompt_of(self, item: Item) -> Prompt:
        if item.messages:
            return self.processor.from_messages(with_pictures(item.messages))
        return self.processor.from_text(item.prompt)

    def logits(self, item: Item) -> dict[str, Tensor]:
        """[answer tokens, V] of each of the operations: what they would put in the answer's places."""
        prompt = self.prompt_of(item)
        answer = self.processor.from_text(item.reference).token_ids
        token_ids = torch.tensor((*prompt.token_ids, *answer))
        behind = prompt.positions.max() + 1 + torch.arange(len(answer))
        batch = replace(
            one_sequence(len(token_ids), kv_start=0, num_blocks=self.geometry.num_blocks),
            positions=torch.cat((prompt.positions, behind.expand(3, -1)), 1),
        )
        rows = self.images.embed(prompt) if prompt.images else None
        return {name: self._forward(model, token_ids, rows, batch, len(answer)) for name, model in self.models.items()}

    @torch.inference_mode()
    def _forward(
        self, model: LanguageModel, token_ids: Tensor, rows: Tensor | None, batch: BatchView, num_answers: int
    ) -> Tensor:
        embeds = model.embed(token_ids)
        if rows is not None:
            embeds[token_ids == self.config.image_token_id] = rows.to(embeds)
        hidden = model.forward(embeds, batch, self.cache)
        return model.logits(hidden[-num_answers - 1 : -1])


def agreements(operations: dict[str, Ops], items: Sequence[Item]) -> dict[str, dict[str, Agreement]]:
    """By operations, then by set, `all` first."""
    forcing = Forcing(repository.prepare(repository.DEMO_CHECKPOINT), operations)
    sets = ("all", *dict.fromkeys(item.set for item in items))
    found = {name: {set_name: Agreement() for set_name in sets} for name in operations if name != "dense"}
    for item in tqdm(items, unit="item"):
        logits = forcing.logits(item)
        for name, by_set in found.items():
            for set_name in ("all", item.set):
                by_set[set_name].add(logits[name], logits["dense"])
    return found


def agreement_table(found: dict[str, dict[str, Agreement]]) -> str:
    lines = ["| set | tokens | " + " | ".join(found) + " |", "|---|---|" + "---|" * len(found)]
    for set_name, first in next(iter(found.values())).items():
        ones = (by_set[set_name] for by_set in found.values())
        cells = (f"{100 * one.top1:.2f} %, {one.mean_divergence:.1e}" for one in ones)
        lines.append(f"| {set_name} | {first.num_tokens} | " + " | ".join(cells) + " |")
    return "Same first choice, mean KL in nats:\n\n" + "\n".join(lines)


# Speed of one linear.


def speed_table(operations: dict[str, CpuOps], repeats: int) -> str:
    """Of a weight that no cache near the core holds."""
    packed = with_input_scale(random_nvfp4(32768, WIDTH), torch.full((1,), 4.0))
    weight = lay_out(packed)
    lines = ["| NVFP4 linear 32768 x 2048, rows | " + " | ".join(operations) + " |", "|---|" + "---|" * len(operations)]
    for num_rows in ROW_COUNTS:
        x = torch.randn(num_rows, WIDTH).to(BF16)
        runs = {name: lambda ops=ops, x=x: ops.linear(x, weight) for name, ops in operations.items()}
        cells = [
            f"{weight.num_bytes / taken / 1e9:.1f} GB/s, {2 * num_rows * 32768 * WIDTH / taken / 1e9:.0f} GFLOP/s"
            for taken in interleaved(runs, repeats if num_rows < 64 else 3).values()
        ]
        lines.append(f"| {num_rows} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def interleaved(runs: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Median seconds of each, in turn; the first round is not counted."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for repeat in range(repeats + 1):
        for name, run in runs.items():
            taken = seconds(run)
            if repeat:
                times[name].append(taken)
    return {name: statistics.median(found) for name, found in times.items()}


if __name__ == "__main__":
    sys.exit(main())
