"""Drafting changes no token, no text and no bit of a logprob: the demo checkpoint on 32 held-out prompts, pictures
among them, greedy and sampled, for several draft lengths, and with a draft that is always wrong."""

import json
import re

import pytest

from build import native
from build.demo.config import CHECKPOINT_DIR
from build.demo.heldout import Item, load
from build.demo.images import render
from qwen35 import LLM, SamplingParams, StructuredOutputs
from qwen35.llm import Completion
from tests.drafters import OracleDrafter

# Half of the sets' prompts hold pictures; those of key_repeat are more than 200 tokens long.
NUM_PROMPTS = {"text": 4, "chat": 4, "arithmetic": 4, "key_repeat": 2, "colour": 4, "shape": 4, "count": 3,
               "position": 4, "compare": 3}  # fmt: skip
SAMPLINGS = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=16, logprobs=0),
    "sampled": SamplingParams(temperature=0.8, seed=11, max_tokens=16, logprobs=0),
}
SETTINGS = {"max_context_tokens": 512, "kv_cache_bytes": 32 << 20, "max_batch_tokens": 256}


def to_prompt(item: Item) -> str | list[dict]:
    if not item.messages:
        return item.prompt
    return [{**message, "content": to_content(message["content"])} for message in item.messages]


def to_content(content: str | list[dict]) -> str | list[dict]:
    if isinstance(content, str):
        return content
    return [{"type": "image", "image": render(p["spec"])} if p["type"] == "image" else p for p in content]


PROMPTS = [to_prompt(item) for name, count in NUM_PROMPTS.items() for item in load(name)[:count]]


def generate(llm: LLM, kind: str) -> list[Completion]:
    return llm.generate(PROMPTS, SAMPLINGS[kind], template_kwargs={"enable_thinking": False})


def outcome(completions: list[Completion]) -> list[tuple]:
    return [(c.token_ids, c.text, c.finish_reason, c.logprobs, c.cumulative_logprob) for c in completions]


@pytest.fixture(scope="module", params=["reference", "cpu"], autouse=True)
def kernels(request) -> str:
    """All of this module for each implementation of the arithmetic."""
    if request.param == "cpu":
        native.build()
    SETTINGS["kernels"] = request.param
    return request.param


@pytest.fixture(scope="module")
def plain(kernels) -> dict[str, list[Completion]]:
    llm = LLM(CHECKPOINT_DIR, num_draft_tokens=0, **SETTINGS)
    return {kind: generate(llm, kind) for kind in SAMPLINGS}


@pytest.mark.parametrize("kind", SAMPLINGS)
@pytest.mark.parametrize("num_draft_tokens", [1, 2, 3, 5])
def test_any_draft_length_gives_the_tokens_of_none(plain, num_draft_tokens, kind):
    assert len(PROMPTS) == 32
    completions = generate(LLM(CHECKPOINT_DIR, num_draft_tokens=num_draft_tokens, **SETTINGS), kind)
    assert outcome(completions) == outcome(plain[kind])
    assert sum(c.num_accepted_draft_tokens for c in completions) > 32, "runs of accepted drafts, else nothing is shown"


@pytest.mark.parametrize("kind", SAMPLINGS)
def test_a_draft_that_is_always_wrong(plain, kind):
    llm = LLM(CHECKPOINT_DIR, num_draft_tokens=3, **SETTINGS)
    llm.engine._drafter = OracleDrafter({uid: c.token_ids for uid, c in enumerate(plain[kind])}, wrong=1.0)
    completions = generate(llm, kind)
    assert outcome(completions) == outcome(plain[kind])
    assert sum(c.num_draft_tokens for c in completions) > 32
    assert sum(c.num_accepted_draft_tokens for c in completions) == 0


SCHEMA = {"type": "object", "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 99}},
          "required": ["age"], "additionalProperties": False}  # fmt: skip
STRUCTURED = [
    StructuredOutputs("json", json.dumps(SCHEMA), any_whitespace=False),
    StructuredOutputs("regex", "[a-f]{3,9}-[0-9]{2}"),
    StructuredOutputs("choice", '["red", "green", "blue"]'),
    StructuredOutputs("grammar", 'root ::= "(" root ")" | "x"'),
]


def structured(num_draft_tokens: int, temperature: float) -> list[Completion]:
    """Each kind of grammar, at once and after a thinking part of at most six tokens."""
    options = {"max_tokens": 40, "logprobs": 1, "thinking_token_budget": 6, "seed": 3, "temperature": temperature}
    samplings = [SamplingParams(structured_outputs=wanted, **options) for wanted in STRUCTURED]
    prompts = [[{"role": "user", "content": "Say something."}]] * len(samplings)
    llm = LLM(CHECKPOINT_DIR, num_draft_tokens=num_draft_tokens, **SETTINGS)
    completions: list[Completion] = []
    for is_thinking in (False, True):
        completions += llm.generate(prompts, samplings, template_kwargs={"enable_thinking": is_thinking})
    return completions


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_structured_output(temperature):
    without = structured(0, temperature)
    drafted = structured(3, temperature)
    assert outcome(drafted) == outcome(without)
    assert sum(c.num_accepted_draft_tokens for c in drafted) > 8
    for index, completion in enumerate(drafted):
        thoughts, mark, text = completion.text.rpartition("</think>")
        assert bool(mark) == (index >= len(STRUCTURED)), "a thinking part where the prompt opens one"
        kind = STRUCTURED[index % len(STRUCTURED)].kind
        fits = {"json": lambda t: 0 <= json.loads(t)["age"] <= 99, "choice": lambda t: t in ("red", "green", "blue"),
                "regex": lambda t: re.fullmatch("[a-f]{3,9}-[0-9]{2}", t),
                "grammar": lambda t: re.fullmatch(r"(\(*)x\)*", t) and t.count("(") == t.count(")")}  # fmt: skip
        assert completion.finish_reason == "stop" and fits[kind](text), completion.text
