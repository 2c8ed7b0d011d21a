"""Drafting changes no token, no text and no bit of a logprob: the demo checkpoint on 32 held-out prompts, pictures
among them, greedy and sampled, for several draft lengths, and with a draft that is always wrong."""

import pytest

from build import native
from build.demo.config import CHECKPOINT_DIR
from build.demo.heldout import Item, load
from build.demo.images import render
from qwen35 import LLM, SamplingParams
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
