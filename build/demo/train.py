"""Train the demo checkpoint: `python -m build.demo.train STAGE --minutes N [--resume]` (CPU, one thread, seeded).

Stages, each starting from the state that the one before left in the work directory:
vision (tower with linear heads), main (everything, the draft head on detached states), distil (draft head on the
target's own outputs). Batch i of a stage depends on (seed, stage, i) only, so a resumed run sees the data that an
unbroken one would.
"""

import argparse
import contextlib
import math
import random
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

from . import data, distil, export, warmup
from .config import WORK_DIR
from .fake_quant import RoundedWeights, quantised_state
from .model import Batch, DemoModel, Layout
from .muon import Muon

SAVE_EVERY_S = 120.0
NUM_ROWS, ROW_TOKENS = 12, 320
REPLAYS, BUFFER_BATCHES = 3, 200
CELL_WEIGHT = 0.5


def rng_for(stage: str, step: int, seed: int) -> random.Random:
    return random.Random(f"{seed}/{stage}/{step}")


def schedule(progress: float, step: int, floor: float = 0.05, warm_steps: int = 100, hold: float = 0.5) -> float:
    """Factor of the learning rate: a linear rise, a plateau up to `hold` of the time, then a cosine down to `floor`."""
    rise = min(1.0, (step + 1) / warm_steps)
    if progress <= hold:
        return rise
    fall = 0.5 * (1 + math.cos(math.pi * min(1.0, (progress - hold) / (1 - hold))))
    return rise * (floor + (1 - floor) * fall)


def make_optimizer(parameters: dict[str, torch.nn.Parameter], lr: float, decay: float = 0.02) -> torch.optim.AdamW:
    matrices = [p for p in parameters.values() if p.ndim >= 2]
    vectors = [p for p in parameters.values() if p.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": decay, "peak": lr},
        {"params": vectors, "weight_decay": 0.0, "peak": lr},
    ]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.98), eps=1e-9, fused=True)


def is_hidden_matrix(name: str) -> bool:
    """Matrices inside the layers, which Muon trains; embeddings, head, routers and all small tensors go to AdamW."""
    if not name.endswith(("_proj.weight", "_proj", "fc.weight", "in_proj_qkv.weight", "in_proj_z.weight")):
        return False
    return "visual" not in name


class Optimizers:
    """Muon for the layers' matrices, AdamW for the rest; one state dict."""

    def __init__(self, modules: torch.nn.Module, lr: float, muon_lr: float, vision_lr: float):
        named = dict(modules.named_parameters())
        hidden = [p for n, p in named.items() if is_hidden_matrix(n)]
        vision = {n: p for n, p in named.items() if "visual" in n}
        heads = {n: p for n, p in named.items() if n.startswith("heads.")}
        rest = {n: p for n, p in named.items() if not is_hidden_matrix(n) and n not in vision | heads}
        self.all = [Muon(hidden, muon_lr), make_optimizer(rest, lr)]
        if vision:
            self.all += [make_optimizer(vision, vision_lr), make_optimizer(heads, vision_lr)]

    @property
    def param_groups(self) -> list[dict]:
        return [group for optimizer in self.all for group in optimizer.param_groups]

    def zero_grad(self, set_to_none: bool = True) -> None:
        for optimizer in self.all:
            optimizer.zero_grad(set_to_none=set_to_none)

    def step(self) -> None:
        for optimizer in self.all:
            optimizer.step()

    def state_dict(self) -> list[dict]:
        return [optimizer.state_dict() for optimizer in self.all]

    def load_state_dict(self, states: list[dict]) -> None:
        for optimizer, state in zip(self.all, states, strict=True):
            optimizer.load_state_dict(state)


class Smooth(dict):
    """Running means for the progress bar."""

    def add(self, values: dict[str, float], keep: float = 0.98) -> None:
        for name, value in values.items():
            self[name] = value if name not in self else keep * self[name] + (1 - keep) * value


def save(path: Path, **content) -> None:
    """Write a state file so that a crash leaves the old or the new one, never half of one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(content, path.with_suffix(".tmp"))
    path.with_suffix(".tmp").replace(path)


def run_vision(model: DemoModel, args: argparse.Namespace) -> None:
    """Stage 1 on `model.model.visual`."""
    vision, heads = model.model.visual, warmup.Heads()
    modules = torch.nn.ModuleDict({"vision": vision, "heads": heads})
    optimizer = make_optimizer(dict(modules.named_parameters()), args.lr)
    loop = Loop("vision", args, modules, optimizer)
    for rng, progress in loop:
        batch = warmup.sample_batch(rng, 1536, large_share=0.15 + 0.35 * progress)
        with torch.autocast("cpu", torch.bfloat16):
            loss, scores = warmup.loss_and_scores(vision, heads, batch)
        loop.backward(loss)
        loop.update(scores | {"loss": loss.item()})


class Loop:
    """Iterates steps until the time is spent; owns optimiser steps, progress bar and state file."""

    def __init__(
        self,
        stage: str,
        args: argparse.Namespace,
        modules: torch.nn.Module,
        optimizer: torch.optim.Optimizer | Optimizers,
    ):
        self.stage, self.args, self.modules, self.optimizer = stage, args, modules, optimizer
        self.path = WORK_DIR / f"{stage}.pt"
        self.step, self.spent_s, self.smooth = 0, 0.0, Smooth()
        if args.resume and self.path.exists():
            state = torch.load(self.path)
            modules.load_state_dict(state["modules"])
            optimizer.load_state_dict(state["optimizer"])
            self.step, self.spent_s = state["step"], state["spent_s"]

    def __iter__(self):
        budget_s, last_save = 60 * self.args.minutes, time.monotonic()
        bar = tqdm(total=round(budget_s), initial=round(self.spent_s), unit="s", desc=self.stage, mininterval=5)
        while self.spent_s < budget_s:
            started = time.monotonic()
            self.progress = self.spent_s / budget_s
            yield rng_for(self.stage, self.step, self.args.seed), self.progress
            self.step += 1
            self.spent_s += time.monotonic() - started
            bar.update(round(self.spent_s) - bar.n)
            bar.set_postfix({"step": self.step} | {k: f"{v:.3f}" for k, v in self.smooth.items()}, refresh=False)
            if time.monotonic() - last_save > SAVE_EVERY_S:
                self.save()
                last_save = time.monotonic()
        self.save()
        bar.close()

    def save(self) -> None:
        save(
            self.path, modules=self.modules.state_dict(), optimizer=self.optimizer.state_dict(), step=self.step,
            spent_s=self.spent_s,
        )  # fmt: skip

    def backward(self, loss: torch.Tensor) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()

    def update(self, scores: dict[str, float], clip: float = 1.0) -> None:
        """One optimiser step at the scheduled learning rate."""
        for group in self.optimizer.param_groups:
            group["lr"] = group["peak"] * schedule(self.progress, self.step)
        torch.nn.utils.clip_grad_norm_(self.modules.parameters(), clip)
        self.optimizer.step()
        self.smooth.add(scores)


class Batches(Dataset):
    """Batch i of a stream; made in a worker process."""

    def __init__(self, stream: data.Stream):
        self.stream = stream

    def __len__(self) -> int:
        return 10**9

    def __getitem__(self, index: int) -> Batch:
        torch.set_num_threads(1)
        return self.stream.batch(index)


def batches(stream: data.Stream, start: int):
    """Endless batches from number `start` on."""
    indices = range(start, 10**9)
    yield from DataLoader(Batches(stream), batch_size=None, sampler=indices, num_workers=1, prefetch_factor=4)


def next_token_loss(model: DemoModel, hidden: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, dict[str, float]]:
    """Weighted cross-entropy over the tokens that count, and the accuracy on answers (weight 1)."""
    target, weights = batch.tokens[:, 1:], batch.weights[:, 1:]
    counted = weights > 0
    logits = model.lm_head(hidden[:, :-1][counted]).float()
    target, weights = target[counted], weights[counted]
    each = F.cross_entropy(logits, target, reduction="none")
    with torch.no_grad():
        answer = weights >= 1
        scores = {
            "answer": each[answer].mean().item(),
            "text": each[~answer].mean().item(),
            "right": (logits.argmax(-1) == target)[answer].float().mean().item(),
        }
    return (each * weights).sum() / weights.sum(), scores


def draft_loss(model: DemoModel, hidden, embedded, batch: Batch, layout: Layout, depth: int):
    """Mean cross-entropy of the draft steps against the true tokens, and each step's share of right guesses."""
    outputs = model.mtp(hidden.detach(), embedded.detach(), layout, depth)
    roots = hidden.shape[1] - depth - 1
    loss, scores = 0.0, {}
    for step, output in enumerate(outputs):
        window = slice(step + 2, step + 2 + roots)
        weights = batch.weights[:, window]
        counted = (weights > 0) & (batch.segments[:, window] == batch.segments[:, :roots])
        target, weights = batch.tokens[:, window][counted], weights[counted]
        logits = F.linear(output[:, :roots][counted], model.lm_head.weight.detach()).float()
        each = F.cross_entropy(logits, target, reduction="none")
        loss = loss + (each * weights).sum() / weights.sum() / depth
        answer = weights >= 1
        scores[f"d{step + 1}"] = (logits.argmax(-1) == target)[answer].float().mean().item()
    return loss, scores


def compile_layers(model: DemoModel) -> None:
    torch._dynamo.config.recompile_limit = 64
    for layer in model.model.language_model.layers:
        layer.compile(dynamic=False)
    model.mtp.compile(dynamic=False)


def run_main(model: DemoModel, args: argparse.Namespace) -> None:
    """Stage 2: everything, on the packed stream; the draft head, from `draft_from` of the time on, on detached ones."""
    heads = warmup.Heads()
    if not args.resume:
        warmed = torch.nn.ModuleDict({"vision": model.model.visual, "heads": heads})
        warmed.load_state_dict(torch.load(WORK_DIR / "vision.pt")["modules"])
    compile_layers(model)
    modules = torch.nn.ModuleDict({"model": model, "heads": heads})
    loop = Loop("main", args, modules, Optimizers(modules, args.lr, args.muon_lr, args.vision_lr))
    source = batches(data.Stream("main", args.seed, NUM_ROWS, ROW_TOKENS), loop.step)
    rounded = RoundedWeights(model)
    for _, progress in loop:
        batch = next(source)
        layout = Layout.of(batch.positions, batch.segments)
        with rounded if progress >= args.round_from else contextlib.nullcontext():
            with torch.autocast("cpu", torch.bfloat16):
                features = model.picture_features(batch)
                hidden, embedded, balance = model.hidden(batch, layout, features)
                loss, scores = next_token_loss(model, hidden, batch)
                seen = warmup.cell_loss(heads, features, batch.pictures)
                loss, scores = loss + 0.01 * balance + CELL_WEIGHT * seen, scores | {"cell": seen.item()}
                if progress >= args.draft_from:
                    draft, draft_scores = draft_loss(model, hidden, embedded, batch, layout, depth=1)
                    loss, scores = loss + draft, scores | draft_scores
            loop.backward(loss)
        loop.update(scores | {"loss": loss.item()})


def run_distil(model: DemoModel, args: argparse.Namespace) -> None:
    """Stage 3 on `model.mtp`; each batch of target states is used REPLAYS times, from a buffer."""
    state = export.main_state()
    model.load_state_dict(quantised_state(state))
    model.requires_grad_(False)
    model.mtp.load_state_dict({k.removeprefix("mtp."): v for k, v in state.items() if k.startswith("mtp.")})
    model.mtp.requires_grad_(True)
    own = distil.own_outputs(model, args.seed)
    compile_layers(model)
    loop = Loop("distil", args, model.mtp, Optimizers(model.mtp, args.lr, args.muon_lr, args.vision_lr))
    source = batches(distil.OwnStream(own, args.seed, NUM_ROWS, ROW_TOKENS), loop.step)
    buffer: list = []
    for rng, _ in loop:
        with torch.autocast("cpu", torch.bfloat16):
            if loop.step % REPLAYS == 0 or not buffer:
                buffer = buffer[-BUFFER_BATCHES:] + [distil.target_states(model, next(source))]
                states = buffer[-1]
            else:
                states = rng.choice(buffer)
            loss, scores = distil.distil_loss(model, *states)
        loop.backward(loss)
        loop.update(scores | {"loss": loss.item()})


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=("vision", "main", "distil"))
    parser.add_argument("--minutes", type=float, required=True)
    parser.add_argument("--lr", type=float, default=1.5e-3)
    parser.add_argument("--muon-lr", type=float, default=0.02)
    parser.add_argument("--vision-lr", type=float, default=4e-4)
    parser.add_argument(
        "--draft-from", type=float, default=0.4, help="share of the time after which drafts are trained"
    )
    parser.add_argument(
        "--round-from", type=float, default=0.7, help="share of the time after which weights are rounded"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resume", action="store_true")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    model = DemoModel()
    {"vision": run_vision, "main": run_main, "distil": run_distil}[args.stage](model, args)


if __name__ == "__main__":
    main()
