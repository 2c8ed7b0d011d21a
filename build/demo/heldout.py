"""The held-out sets in tests/data: made here from a seed, loaded and graded here.

`python -m build.demo.heldout` writes them. An item keeps its pictures as specifications (`images.render`).
"""

import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from . import images, tasks
from .docs import held_out_documents
from .tokenizer import load_tokenizer

DATA_DIR = Path(__file__).parents[2] / "tests" / "data"
ITEMS_PER_SET = 200
SEED = 20251
TEXT_PROMPT_CHARS = 160
MIN_KEY_DISTANCE_TOKENS, MAX_KEY_DISTANCE_TOKENS = 200, 260
ASK_TOKENS = 10


@dataclass(frozen=True)
class Item:
    """One held-out request. `messages` is empty for raw text, whose `prompt` is then continued.

    `answer` is what `grade` looks for ("" where nothing is graded), `reference` the whole answer that training
    would give.
    """

    set: str
    id: str
    messages: list[dict]
    answer: str
    reference: str
    prompt: str = ""

    def specs(self) -> list[dict]:
        parts = [part for m in self.messages if not isinstance(m["content"], str) for part in m["content"]]
        return [part["spec"] for part in parts if part["type"] == "image"]


def _chat_items(name: str, task: Callable, seed: int) -> list[Item]:
    """Items of one task whose key is held out, no question twice."""
    rng, documents = random.Random(seed), held_out_documents()
    items: dict[str, Item] = {}
    while len(items) < ITEMS_PER_SET:
        chat = task(rng, documents)
        question = json.dumps(chat.messages)
        if tasks.is_held_out(chat.key) and question not in items:
            item_id = f"{name}-{len(items):03d}"
            items[question] = Item(name, item_id, chat.messages, chat.short, chat.answer)
    return list(items.values())


def _chat(rng: random.Random, documents: list[str]) -> tasks.Chat:
    return rng.choice((tasks.definition, tasks.definition, tasks.sequence))(rng, documents)


def _distant_key(count_tokens: Callable[[str], int], rng: random.Random, documents: list[str]) -> tasks.Chat:
    """A key at least 200 tokens before the question."""
    while True:
        chat = tasks.key_repeat(rng, documents, min_chars=480, max_chars=680)
        after_key = chat.messages[0]["content"].split(chat.key, 1)[1]
        if MIN_KEY_DISTANCE_TOKENS <= count_tokens(after_key) - ASK_TOKENS <= MAX_KEY_DISTANCE_TOKENS:
            return chat


def _text_items(seed: int) -> list[Item]:
    """Beginnings of held-out documents."""
    rng = random.Random(seed)
    documents = [text for text in held_out_documents() if len(text) > 2 * TEXT_PROMPT_CHARS]
    found: dict[str, str] = {}
    while len(found) < ITEMS_PER_SET:
        text = rng.choice(documents)
        start = text.find(" ", rng.randrange(len(text) - 2 * TEXT_PROMPT_CHARS)) if rng.random() < 0.6 else 0
        prompt = text[start : start + TEXT_PROMPT_CHARS].rsplit(" ", 1)[0].strip()
        rest = text[start + len(prompt) :][: 2 * TEXT_PROMPT_CHARS]
        if len(prompt) > TEXT_PROMPT_CHARS // 2:
            found[prompt] = rest.strip()
    return [Item("text", f"text-{i:03d}", [], "", rest, prompt) for i, (prompt, rest) in enumerate(found.items())]


def make_all() -> dict[str, list[Item]]:
    tokenizer = load_tokenizer()
    distant = partial(_distant_key, lambda text: len(tokenizer(text)["input_ids"]))
    makers = {
        "chat": _chat, "arithmetic": tasks.arithmetic, "key_repeat": distant, "colour": tasks.colour,
        "shape": tasks.shape, "count": tasks.count, "position": tasks.position, "compare": tasks.compare,
    }  # fmt: skip
    sets = {name: _chat_items(name, task, SEED + i) for i, (name, task) in enumerate(makers.items())}
    return {"text": _text_items(SEED + 100)} | sets


SET_NAMES = ("text", "chat", "arithmetic", "key_repeat", "colour", "shape", "count", "position", "compare")


def load(set_name: str) -> list[Item]:
    """The items of one set from tests/data."""
    if set_name not in SET_NAMES:
        raise ValueError(f"set: expected one of {', '.join(SET_NAMES)}, got {set_name}")
    lines = (DATA_DIR / f"{set_name}.jsonl").read_text().splitlines()
    return [Item(**json.loads(line)) for line in lines]


def _named(text: str, names) -> set[str]:
    return {name for name in names if re.search(rf"\b{name}\b", text)}


def grade(item: Item, text: str) -> bool:
    """Whether `text` answers the item: exactly the right word, or the right number (sums: after the last '=')."""
    text = re.sub(r"<think>.*?</think>", "", text, flags=re.S).strip().removesuffix("<|im_end|>").strip()
    if item.set == "arithmetic":
        numbers = re.findall(r"-?\d+", text.rsplit("=", 1)[-1])
        return numbers[:1] == [item.answer]
    if item.set == "count":
        return re.findall(r"\d+", text)[:1] == [item.answer]
    if item.set == "compare":
        return re.sub(r"[^a-z]", " ", text.lower()).split()[-1:] == [item.answer]
    if item.set == "key_repeat":
        return re.findall(r"[A-Z0-9]{4,}", text)[:1] == [item.answer]
    names = {"colour": images.COLOURS, "shape": images.SHAPES, "position": images.PLACES}.get(item.set)
    if names:
        return _named(text.lower(), names) == {item.answer}
    return text == item.answer


def main() -> None:
    DATA_DIR.mkdir(parents=True, exist_ok=True)
    for name, items in make_all().items():
        lines = (json.dumps(item.__dict__, ensure_ascii=False) for item in items)
        (DATA_DIR / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
        print(f"{name}: {len(items)} items")


if __name__ == "__main__":
    main()
