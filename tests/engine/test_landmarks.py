"""Where checkpoints are wanted, and how a prompt is cut for them."""

import pytest

from qwen35.engine.detokenizer import Vocabulary
from qwen35.engine.landmarks import Landmarks
from qwen35.prompt.tokenizer import Tokenizer
from tests.tiny_checkpoint import TOKEN_ID, make_tiny_checkpoint

START, THINK = "<|im_start|>", "<think>"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return Tokenizer.from_directory(make_tiny_checkpoint(tmp_path_factory.mktemp("landmarks") / "checkpoint"))


def landmarks(tokenizer, interval_tokens=1000, max_deferred_tokens=4):
    return Landmarks(Vocabulary(tokenizer), interval_tokens=interval_tokens, max_deferred_tokens=max_deferred_tokens)


def prompt(tokenizer, *parts: str) -> list[int]:
    """A token for each byte, and the special token that a part is."""
    encode = Vocabulary(tokenizer).encode
    return [token_id for part in parts for token_id in ([TOKEN_ID[part]] if part in TOKEN_ID else encode(part))]


SYSTEM, USER, HEADER = (START, "system\nbe\n"), (START, "user\nhi\n"), (START, "assistant\n")
PROMPTS = {
    "raw text": (("hello",), {5}),
    "one turn, thinking": ((*USER, *HEADER, THINK, "\n"), {9, 9 + 11, 22}),
    "system prompt": ((*SYSTEM, *USER, *HEADER, THINK, "\n"), {11, 20, 31, 33}),
    "two turns": ((*USER, *HEADER, "yes\n", *USER, *HEADER, THINK, "\n"), {33, 44, 46}),
    "an answer that goes on": ((*USER, *HEADER, "I think"), {9, 20, 27}),
    "starts with the assistant": ((*HEADER,), {11}),
    "a marker at the end": ((*USER, START), {9, 10}),
}


@pytest.mark.parametrize("name", PROMPTS)
def test_places_in_a_prompt(tokenizer, name):
    parts, expected = PROMPTS[name]
    assert landmarks(tokenizer).of_prompt(prompt(tokenizer, *parts)) == tuple(sorted(expected))


@pytest.mark.parametrize(
    ("start", "end", "wanted", "expected"),
    [
        (0, 20, [], 20),
        (0, 20, [12], 12),
        (12, 20, [14, 16], 16),  # both with inputs that stay pending
        (12, 20, [14, 17], 14),
        (12, 20, [17, 18], 17),
        (19, 20, [20], 20),
    ],
)
def test_a_piece_ends_at_the_first_place_or_the_last_that_can_stay_pending(tokenizer, start, end, wanted, expected):
    assert landmarks(tokenizer).end_of_piece(start, end, wanted) == expected
