"""Batches of packed sequences: chats and documentation, as token ids with 3-axis positions and loss weights."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer

from . import images, tasks
from .config import CHECKPOINT_DIR, TOKEN_ID
from .docs import training_documents
from .model import Batch, Pictures

IMAGE_ID, IM_END, END_OF_TEXT = TOKEN_ID["<|image_pad|>"], TOKEN_ID["<|im_end|>"], TOKEN_ID["<|endoftext|>"]
THINKING_SHARE = 0.1
DRILL_SHARE, DRILL_ITEMS = 0.05, 12
FAINT_SHARE = 0.25  # extra white figures: on a light ground their shape is the hardest to see
DOCUMENT_WEIGHT = 0.4
DOCUMENT_ROWS = 6  # one row in six is all documentation
PASSAGE_HEAD, PASSAGE_TAIL = 20, 24  # tokens of a key chat before and after its passage, roughly

# Relative frequency of each task in the stream, by chats.
MIX: dict[tasks.Task, float] = {
    tasks.arithmetic: 0.13, tasks.key_repeat: 0.06, tasks.definition: 0.07, tasks.small_talk: 0.02,
    tasks.sequence: 0.07, tasks.conversation: 0.05, tasks.colour: 0.03, tasks.shape: 0.22, tasks.count: 0.12,
    tasks.position: 0.03, tasks.describe: 0.08, tasks.compare: 0.12,
}  # fmt: skip


@dataclass(frozen=True)
class Sequence3:
    """One tokenised sequence with the pictures it holds."""

    tokens: list[int]
    weights: list[float]
    specs: list[dict]


def grid_of(spec: dict) -> tuple[int, int]:
    """Patches (rows, columns) of a picture after resizing."""
    height, width = images.smart_resize(spec["height"], spec["width"])
    return height // images.PATCH, width // images.PATCH


def render_prompt(messages: list[dict], thinking: bool) -> tuple[str, list[dict]]:
    """The chat template's text with one placeholder per merged patch, and the pictures in order."""
    specs: list[dict] = []
    out = []
    for message in messages:
        content = message["content"]
        if not isinstance(content, str):
            content = "".join(
                part["text"] if part["type"] == "text" else _picture_text(part, specs) for part in content
            )
        out.append(f"<|im_start|>{message['role']}\n{content.strip()}<|im_end|>\n")
    out.append("<|im_start|>assistant\n" + ("<think>\n" if thinking else "<think>\n\n</think>\n\n"))
    return "".join(out), specs


def _picture_text(part: dict, specs: list[dict]) -> str:
    specs.append(part["spec"])
    rows, columns = grid_of(part["spec"])
    return "<|vision_start|>" + "<|image_pad|>" * (rows * columns // 4) + "<|vision_end|>"


def positions_of(tokens: Sequence[int], specs: Sequence[dict]) -> list[tuple[int, int, int]]:
    """Rotary positions (T, H, W) per token: text advances by one, a picture by its longer merged side."""
    positions, place, index, remaining = [], 0, 0, iter(specs)
    while index < len(tokens):
        if tokens[index] != IMAGE_ID:
            positions.append((place, place, place))
            place, index = place + 1, index + 1
            continue
        rows, columns = (side // 2 for side in grid_of(next(remaining)))
        positions.extend((place, place + r, place + c) for r in range(rows) for c in range(columns))
        place, index = place + max(rows, columns), index + rows * columns
    return positions


class Stream:
    """Makes batch i of a stage from (seed, stage, i) alone."""

    def __init__(
        self, stage: str, seed: int, num_rows: int, row_tokens: int, mix: dict[tasks.Task, float] | None = None
    ):
        self.stage, self.seed, self.num_rows, self.row_tokens = stage, seed, num_rows, row_tokens
        self.tasks, self.shares = zip(*(mix or MIX).items(), strict=True)
        self.tokenizer = Tokenizer.from_file(str(CHECKPOINT_DIR / "tokenizer.json"))
        self.documents = training_documents()

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def chat(self, rng: random.Random, sizes: Sequence[tuple[int, int]]) -> Sequence3:
        """One chat of the mix that is not held out, or a drill; pictures take one of `sizes`."""
        if rng.random() < DRILL_SHARE:
            return self.drill(rng)
        while True:
            task = rng.choices(self.tasks, self.shares)[0]
            options: dict = {"sizes": sizes} if task in tasks.IMAGE_TASKS else {}
            if task is tasks.shape and rng.random() < FAINT_SHARE:
                options["colour"] = "white"
            chat = task(rng, self.documents, **options)
            if not tasks.is_held_out(chat.key):
                return self.tokenise(rng, chat)

    def tokenise(self, rng: random.Random, chat: tasks.Chat) -> Sequence3:
        thinking = bool(chat.thought) and rng.random() < THINKING_SHARE
        prompt, specs = render_prompt(tasks.with_system(rng, chat), thinking)
        answer = f"{chat.thought}\n</think>\n\n{chat.answer}" if thinking else chat.answer
        head, tail = self.encode(prompt), self.encode(answer) + [IM_END]
        weights = [0.0] * len(head)
        if chat.task == "key_repeat":  # its passage is documentation like any other
            inner = slice(PASSAGE_HEAD, len(head) - PASSAGE_TAIL)
            weights[inner] = [DOCUMENT_WEIGHT] * len(weights[inner])
        return Sequence3(head + tail, weights + [1.0] * len(tail), specs)

    def drill(self, rng: random.Random) -> Sequence3:
        """Solved sums or comparisons one after the other, for practice without pictures; only the results count."""
        task, mark, length = rng.choice(((tasks.arithmetic, "=", 12), (tasks.verdict, ":", 18)))
        tokens, weights = [], []
        while len(weights) < DRILL_ITEMS * length:
            chat = task(rng, self.documents)
            if tasks.is_held_out(chat.key):
                continue
            problem, result = chat.answer.split(mark)
            head, tail = self.encode(" " + problem + mark), self.encode(result)
            tokens += head + tail
            weights += [0.0] * len(head) + [1.0] * len(tail)
        return Sequence3(tokens, weights, [])

    def text(self, rng: random.Random, num_tokens: int) -> Sequence3:
        """Documentation of exactly `num_tokens` tokens; documents end with <|endoftext|>."""
        tokens: list[int] = []
        while len(tokens) < num_tokens:
            document = rng.choice(self.documents)
            start = rng.randrange(len(document)) if rng.random() < 0.7 else 0
            start = document.find(" ", start) if start else 0
            tokens += self.encode(document[max(0, start) :][: 6 * num_tokens]) + [END_OF_TEXT]
        return Sequence3(tokens[:num_tokens], [0.0] + [DOCUMENT_WEIGHT] * (num_tokens - 1), [])

    def batch(self, index: int) -> Batch:
        """Chats packed first-fit into the rows; what is left of each row is filled with documentation."""
        rng = random.Random(f"{self.seed}/{self.stage}/{index}")
        rows: list[list[Sequence3]] = [[] for _ in range(self.num_rows)]
        room = [self.row_tokens] * self.num_rows
        room[: self.num_rows // DOCUMENT_ROWS] = [0] * (self.num_rows // DOCUMENT_ROWS)  # whole rows of documentation
        sizes = [images.sample_size(rng) for _ in range(4)]
        misses = 0
        while misses < 6:
            sequence = self.chat(rng, sizes)
            row = next((r for r in range(self.num_rows) if room[r] >= len(sequence.tokens)), None)
            if row is None:
                misses += 1
                continue
            rows[row].append(sequence)
            room[row] -= len(sequence.tokens)
        for row in rows:
            left = self.row_tokens - sum(len(s.tokens) for s in row)
            if left:
                row.append(self.text(rng, left))
        return collate(rows)


def collate(rows: list[list[Sequence3]]) -> Batch:
    """Rows of equal total length -> one batch."""
    tokens = torch.tensor([[t for s in row for t in s.tokens] for row in rows])
    weights = torch.tensor([[w for s in row for w in s.weights] for row in rows])
    segments = torch.tensor([[i for i, s in enumerate(row) for _ in s.tokens] for row in rows])
    positions = torch.tensor([[p for s in row for p in positions_of(s.tokens, s.specs)] for row in rows])
    specs = [spec for row in rows for s in row for spec in s.specs]
    return Batch(tokens, positions.permute(2, 0, 1).contiguous(), segments, weights, _pictures(tokens, specs))


def _pictures(tokens: torch.Tensor, specs: list[dict]) -> tuple[Pictures, ...]:
    """Group pictures by grid; placeholders appear in the order of `specs`."""
    places = (tokens.flatten() == IMAGE_ID).nonzero().flatten()
    groups: dict[tuple[int, int], list] = {}
    used = 0
    for spec in specs:
        frame, rows, columns = images.to_frame(images.render(spec))
        count = rows * columns // 4
        cells = images.cells(spec, rows // 2, columns // 2)
        groups.setdefault((rows, columns), []).append((frame, places[used : used + count], cells))
        used += count
    pictures = []
    for (rows, columns), group in groups.items():
        frames, places, cells = zip(*group, strict=True)
        cells = torch.tensor(cells).transpose(0, 1)
        pictures.append(Pictures(torch.stack(frames), rows, columns, torch.stack(places), cells))
    return tuple(pictures)
