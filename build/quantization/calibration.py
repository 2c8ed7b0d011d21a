"""Calibration data as token ids, positions and patches: what the reference model is shown while its ranges are taken.

A sample is one line of a calibration file:

    {"text": "raw text"}
    {"messages": [{"role": "user", "content": …}], "answer": "what the assistant says"}

with images as in chat requests (`{"type": "image_url", "image_url": {"url": …}}`); a path is relative to the file.
Without a file the demo checkpoint is calibrated on its own training tasks, every other one on `generic`.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from build.demo.config import CHECKPOINT_DIR as DEMO_CHECKPOINT
from build.quantization.generic import generic_samples
from qwen35.config import ModelConfig
from qwen35.errors import Qwen35Error
from qwen35.prompt.processor import PromptProcessor, resolve_local
from qwen35.prompt.types import Prompt, PromptLimits

MAX_TOKENS = 4096  # of one sample; longer texts and answers are cut, longer chats refused


class CalibrationError(RuntimeError):
    """The calibration data cannot be used; the message names the file and the line."""


@dataclass(frozen=True)
class CalibrationInput:
    """Arguments of one forward pass of the reference model, batch of one.

    token_ids [1, T]; positions [3, 1, T]; patches [P, features] and grids [images, 3], None without images
    """

    token_ids: Tensor
    positions: Tensor
    patches: Tensor | None
    grids: Tensor | None

    def model_arguments(self) -> dict[str, Any]:
        """Under transformers' names."""
        arguments: dict[str, Any] = {"input_ids": self.token_ids, "position_ids": self.positions, "use_cache": False}
        if self.patches is not None:
            arguments |= {"pixel_values": self.patches, "image_grid_thw": self.grids}
        return arguments


def calibration_inputs(
    checkpoint: Path, config: ModelConfig, num_samples: int, file: Path | None = None, seed: int = 0
) -> list[CalibrationInput]:
    """Raises CalibrationError for a file that cannot be read or a sample that the checkpoint cannot take."""
    limits = PromptLimits(max_context_tokens=min(MAX_TOKENS, config.text.max_position_embeddings))
    processor = PromptProcessor(checkpoint, config, limits)
    if file is not None:
        samples, source = read_file(file)[:num_samples], str(file)
    elif is_demo(checkpoint):
        samples, source = demo_samples(num_samples, seed), "demo"
    else:
        with_images, with_chat = config.vision is not None, processor.template is not None
        samples = generic_samples(num_samples, with_images=with_images, with_chat=with_chat, seed=seed)
        source = "built-in"
    if not samples:
        raise CalibrationError(f"calibration: expected at least one sample, got none from {source}")
    folder = file.parent if file is not None else Path()
    return [_encode(sample, processor, folder, f"{source}:{line}") for line, sample in enumerate(samples, 1)]


def is_demo(checkpoint: Path) -> bool:
    """The demo checkpoint or a copy of it: it has the demo's own tokenizer."""
    ours, theirs = DEMO_CHECKPOINT / "tokenizer.json", checkpoint / "tokenizer.json"
    return ours.is_file() and theirs.is_file() and ours.read_bytes() == theirs.read_bytes()


def demo_samples(num_samples: int, seed: int = 0) -> list[dict[str, Any]]:
    """Every task of the demo in turn and its documentation texts; nothing of the held-out sets."""
    from build.demo import docs, images, tasks

    rng = random.Random(seed)
    documents = docs.training_documents()
    kinds: list[Callable[..., Any] | None] = [*tasks.TASKS, None]
    samples: list[dict[str, Any]] = []
    while len(samples) < num_samples:
        task = kinds[len(samples) % len(kinds)]
        if task is None:
            samples.append({"text": rng.choice(documents)[:1200]})
            continue
        chat = task(rng, documents)
        if tasks.is_held_out(chat.key):
            continue
        messages = [_with_pictures(message, images.render) for message in chat.messages]
        samples.append({"messages": messages, "answer": chat.answer})
    return samples


def read_file(file: Path) -> list[dict[str, Any]]:
    """Samples of a JSON-lines file; empty lines are skipped."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise CalibrationError(f"calibration: expected a readable text file, got {file}: {error}") from error
    samples = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            samples.append(_parse(line, f"{file}:{number}"))
    return samples


def _parse(line: str, where: str) -> dict[str, Any]:
    try:
        sample = json.loads(line)
    except ValueError as error:
        raise CalibrationError(f"{where}: expected JSON, got {error}") from error
    if not isinstance(sample, dict) or ("text" in sample) == ("messages" in sample):
        raise CalibrationError(f'{where}: expected an object with either "text" or "messages", got {line[:80]}')
    return sample


def _encode(sample: dict[str, Any], processor: PromptProcessor, folder: Path, where: str) -> CalibrationInput:
    def resolve(value: Any, name: str) -> Any:
        beside = folder / value if isinstance(value, str) and len(value) < 4096 else None
        return beside if beside is not None and beside.is_file() else resolve_local(value, name)

    most = processor.limits.max_context_tokens - 1
    try:
        if "text" in sample:
            token_ids = processor.tokenizer.encode(sample["text"])
            return _to_input(processor.from_token_ids(token_ids[:most]), ())
        prompt = processor.from_messages(sample["messages"], resolve=resolve)
    except Qwen35Error as error:
        raise CalibrationError(f"{where}: {error.message}") from error
    answer = processor.tokenizer.encode_plain(sample.get("answer", ""))
    return _to_input(prompt, answer[: most - len(prompt.token_ids)])


def _to_input(prompt: Prompt, answer: Iterable[int]) -> CalibrationInput:
    """The prompt and an answer behind it."""
    answer = list(answer)
    token_ids = torch.tensor([[*prompt.token_ids, *answer]])  # [1, T]
    following = torch.arange(len(answer)) + prompt.next_position
    positions = torch.cat((prompt.positions, following.expand(3, -1)), dim=1)  # [3, T]
    patches = [image.patches for image in prompt.images]
    return CalibrationInput(
        token_ids=token_ids,
        positions=positions.unsqueeze(1),
        patches=torch.cat(patches) if patches else None,
        grids=torch.tensor([image.grid for image in prompt.images]) if patches else None,
    )


def _with_pictures(message: dict[str, Any], render: Callable[[dict], Any]) -> dict[str, Any]:
    """A demo message with its pictures drawn from their specifications."""
    if isinstance(message["content"], str):
        return message
    parts = [
        {"type": "image", "image": render(part["spec"])} if part["type"] == "image" else part
        for part in message["content"]
    ]
    return {**message, "content": parts}
