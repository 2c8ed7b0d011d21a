"""The generated chats: what each task asks, what it answers, and which items are kept out of training.

Every task is `task(rng, documents) -> Chat`. A chat's `key` decides by hash whether it belongs to the held-out part
of the item space, so no list of exclusions is needed: training rejects keys that `is_held_out`, the held-out sets take
only those.
"""

import random
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from . import images
from .phrases import (
    CONCEPT_QUESTIONS,
    CONCEPTS,
    IMAGE_QUESTIONS,
    OPENERS,
    SMALL_TALK,
    SYSTEM_PROMPTS,
)

HELD_OUT_MODULUS = 16
HELD_OUT_RESIDUE = 5
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def is_held_out(key: str) -> bool:
    """True for one sixteenth of all keys, by CRC-32 of the text."""
    return zlib.crc32(key.encode()) % HELD_OUT_MODULUS == HELD_OUT_RESIDUE


@dataclass(frozen=True)
class Chat:
    """One conversation up to the answer. Parts of a user turn: {"type": "text", "text"} or {"type": "image", "spec"}.

    `short` is what a grader looks for; `key` decides what is held out.
    """

    task: str
    messages: list[dict]
    answer: str
    short: str
    key: str
    thought: str = ""
    thinking: bool = False

    def texts(self) -> list[str]:
        """All plain text, for the tokenizer's training."""
        found = [self.answer, self.thought]
        for message in self.messages:
            content = message["content"]
            parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
            found.extend(part["text"] for part in parts if part["type"] == "text")
        return [text for text in found if text]


Task = Callable[[random.Random, Sequence[str]], Chat]


def user(content) -> list[dict]:
    return [{"role": "user", "content": content}]


# --- text --------------------------------------------------------------


def arithmetic(rng: random.Random, documents: Sequence[str]) -> Chat:
    """Sum or difference (not negative) of two two-digit numbers; the answer repeats the problem."""
    a, b = rng.randint(10, 99), rng.randint(10, 99)
    plus = rng.random() < 0.5
    if not plus and b > a:
        a, b = b, a
    problem, result = (f"{a} + {b}", a + b) if plus else (f"{a} - {b}", a - b)
    spoken = f"Add {b} to {a}." if plus else f"Subtract {b} from {a}."
    question = rng.choice(
        (f"What is {problem}?", f"Calculate {problem}.", f"{problem} = ?", f"How much is {problem}?", spoken)
    )
    thought = _carry_thought(a, b, plus)
    return Chat("arithmetic", user(question), f"{problem} = {result}.", str(result), problem, thought)


def _carry_thought(a: int, b: int, plus: bool) -> str:
    """Column by column, ones first."""
    (a1, a0), (b1, b0) = divmod(a, 10), divmod(b, 10)
    if plus:
        carry = (a0 + b0) // 10
        tens = f"{a1} + {b1} + 1 = {a1 + b1 + 1}" if carry else f"{a1} + {b1} = {a1 + b1}"
        return f"{a0} + {b0} = {a0 + b0}, {tens}"
    if a0 < b0:
        return f"1{a0} - {b0} = {a0 + 10 - b0}, {a1} - {b1} - 1 = {a1 - b1 - 1}"
    return f"{a0} - {b0} = {a0 - b0}, {a1} - {b1} = {a1 - b1}"


def sample_key(rng: random.Random) -> str:
    """A key such as K7Q2 or 4813, without repeated characters."""
    if rng.random() < 0.5:
        (first, second), (one, two) = rng.sample(LETTERS, 2), rng.sample("0123456789", 2)
        return first + one + second + two
    return "".join(rng.sample("0123456789", 4))


def passage(rng: random.Random, documents: Sequence[str], num_chars: int) -> str:
    """A random stretch of documentation, cut at blanks."""
    pieces: list[str] = []
    while sum(map(len, pieces)) < num_chars:
        text = rng.choice(documents)
        start = rng.randrange(max(1, len(text) - num_chars))
        start = text.find(" ", start) + 1 if start else 0
        pieces.append(text[start : start + num_chars])
    return " ".join(pieces)[:num_chars].rsplit(" ", 1)[0].strip()


def key_repeat(rng: random.Random, documents: Sequence[str], min_chars: int = 40, max_chars: int = 900) -> Chat:
    """A key, then a stretch of documentation, then the question for the key."""
    key = sample_key(rng)
    text = passage(rng, documents, rng.randint(min_chars, max_chars))
    ask = rng.choice(("What is the key?", "Which key did I give you?", "Tell me the key.", "Repeat the key."))
    question = f"Remember the key {key}.\n\n{text}\n\n{ask}"
    return Chat("key_repeat", user(question), f"The key is {key}.", key, key)


def definition(rng: random.Random, documents: Sequence[str]) -> Chat:
    """A one-sentence definition of a Python term."""
    term, answer = rng.choice(CONCEPTS)
    question = rng.choice(OPENERS) + rng.choice(CONCEPT_QUESTIONS).format(term)
    question = question[0].upper() + question[1:]
    return Chat("chat", user(question), answer, answer, question)


def small_talk(rng: random.Random, documents: Sequence[str]) -> Chat:
    """Greetings, thanks, who are you."""
    questions, answer = rng.choice(SMALL_TALK)
    question = rng.choice(questions)
    return Chat("small_talk", user(question), answer, answer, "small talk")


def sequence(rng: random.Random, documents: Sequence[str]) -> Chat:
    """Counting, the next day, the next letter."""
    kind = rng.randrange(3)
    if kind == 0:
        start, length = rng.randint(1, 60), rng.randint(3, 8)
        question = f"Count from {start} to {start + length}."
        answer = ", ".join(str(start + i) for i in range(length + 1)) + "."
    elif kind == 1:
        day = rng.randrange(7)
        after = rng.random() < 0.5
        question = f"Which day comes {'after' if after else 'before'} {DAYS[day]}?"
        answer = f"{DAYS[(day + (1 if after else -1)) % 7]} comes {'after' if after else 'before'} {DAYS[day]}."
    else:
        index = rng.randrange(25)
        question = f"Which letter comes after {LETTERS[index]}?"
        answer = f"{LETTERS[index + 1]} comes after {LETTERS[index]}."
    question = rng.choice(OPENERS) + question
    return Chat("chat", user(question), answer, answer, question)


def conversation(rng: random.Random, documents: Sequence[str]) -> Chat:
    """Two turns: small talk or a definition first, then another task's question."""
    first = rng.choice((small_talk, definition, arithmetic))(rng, documents)
    second = rng.choice((definition, arithmetic, sequence, small_talk))(rng, documents)
    messages = first.messages + [{"role": "assistant", "content": first.answer}] + second.messages
    both = first.key if is_held_out(first.key) else second.key
    return Chat("conversation", messages, second.answer, second.short, both, second.thought)


# --- images --------------------------------------------------------------


def _ask(rng: random.Random, kind: str, specs: list[dict]) -> list[dict]:
    pictures = [{"type": "image", "spec": spec} for spec in specs]
    text = [{"type": "text", "text": rng.choice(IMAGE_QUESTIONS[kind])}]
    return user(pictures + text if rng.random() < 0.7 else text + pictures)


def image_key(specs: list[dict]) -> str:
    """The first picture's seed: the held-out sets draw from seeds that training never uses."""
    return str(specs[0]["seed"])


def _image_chat(rng, kind: str, specs: list[dict], answer: str, short: str, thought: str) -> Chat:
    return Chat(kind, _ask(rng, kind, specs), answer, short, image_key(specs), thought)


def _article(shape: str) -> str:
    return f"a {shape}"


def colour(rng: random.Random, documents: Sequence[str], **options) -> Chat:
    spec = images.sample_spec(rng, **options)
    figure = spec["figures"][0]
    thought = f"I see a {figure['colour']} {figure['shape']}."
    return _image_chat(rng, "colour", [spec], f"The figure is {figure['colour']}.", figure["colour"], thought)


def shape(rng: random.Random, documents: Sequence[str], **options) -> Chat:
    spec = images.sample_spec(rng, **options)
    figure = spec["figures"][0]
    thought = f"I see a {figure['colour']} {figure['shape']}."
    return _image_chat(rng, "shape", [spec], f"This is {_article(figure['shape'])}.", figure["shape"], thought)


def count(rng: random.Random, documents: Sequence[str], **options) -> Chat:
    number = rng.randint(1, 4)
    spec = images.sample_spec(rng, count=number, **options)
    answer = "There is 1 figure." if number == 1 else f"There are {number} figures."
    return _image_chat(rng, "count", [spec], answer, str(number), f"I count {number}.")


def position(rng: random.Random, documents: Sequence[str], **options) -> Chat:
    place = rng.choice(images.PLACES)
    spec = images.sample_spec(rng, place=place, **options)
    figure = spec["figures"][0]
    thought = f"I see a {figure['colour']} {figure['shape']}."
    return _image_chat(rng, "position", [spec], f"The figure is in the {place}.", place, thought)


def describe(rng: random.Random, documents: Sequence[str], **options) -> Chat:
    """Everything at once: number, colour, shape, and the place of a single figure."""
    number = rng.choice((1, 1, 2, 3, 4))
    place = rng.choice(images.PLACES) if number == 1 else None
    spec = images.sample_spec(rng, count=number, place=place, **options)
    figure = spec["figures"][0]
    if number == 1:
        answer = f"A {figure['colour']} {figure['shape']} in the {place}."
    else:
        answer = f"{number} {figure['colour']} {figure['shape']}{'es' if figure['shape'] == 'cross' else 's'}."
    return _image_chat(rng, "describe", [spec], answer, answer, f"I count {number}.")


def _compared(rng: random.Random, kind: str) -> tuple:
    """The two values, the answer that names both before its verdict, and the verdict."""
    if kind == "more":
        first, second = rng.sample((1, 2, 3, 4), 2)
        verdict = "first" if first > second else "second"
        return first, second, f"The first has {first}, the second has {second}: the {verdict}.", verdict
    pool = list(images.COLOURS) if kind == "same_colour" else images.SHAPES
    one = rng.choice(pool)
    two = one if rng.random() < 0.5 else rng.choice(pool)
    verdict, article = "yes" if one == two else "no", "a " if kind == "same_shape" else ""
    return one, two, f"The first is {article}{one}, the second is {article}{two}: {verdict}.", verdict


def verdict(rng: random.Random, documents: Sequence[str]) -> Chat:
    """The answer of a comparison alone, for drills."""
    *_, answer, word = _compared(rng, rng.choice(("same_colour", "same_shape", "more")))
    return Chat("verdict", [], answer, word, answer)


def compare(rng: random.Random, documents: Sequence[str], **options) -> Chat:
    """Two pictures: same colour, same shape, or which has more figures; the verdict is the last word."""
    options = {"max_tokens": 16} | options
    kind = rng.choice(("same_colour", "same_shape", "more"))
    one, two, answer, verdict = _compared(rng, kind)
    if kind == "more":
        specs = [images.sample_spec(rng, count=number, **options) for number in (one, two)]
    else:
        attribute = "colour" if kind == "same_colour" else "shape"
        specs = [images.sample_spec(rng, **{attribute: value}, **options) for value in (one, two)]
    chat = _ask(rng, kind, specs)
    return Chat("compare", chat, answer, verdict, image_key(specs), "I look at both pictures.")


TEXT_TASKS: tuple[Task, ...] = (arithmetic, key_repeat, definition, small_talk, sequence, conversation)
IMAGE_TASKS: tuple[Task, ...] = (colour, shape, count, position, describe, compare)
TASKS = TEXT_TASKS + IMAGE_TASKS


def with_system(rng: random.Random, chat: Chat) -> list[dict]:
    """The chat's messages, one time in eight after a system message."""
    if rng.random() < 0.875:
        return chat.messages
    return [{"role": "system", "content": rng.choice(SYSTEM_PROMPTS)}] + chat.messages
