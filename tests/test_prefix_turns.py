"""Conversations on the demo checkpoint, in one process: a turn runs what is behind the longest common prefix, no
more."""

import dataclasses
import os

import pytest
from PIL import Image

from build.demo.config import CHECKPOINT_DIR
from qwen35 import LLM, SamplingParams

SETTINGS = {"max_context_tokens": 1024, "kv_cache_bytes": 16 << 20, "num_slots": 4, "max_batch_tokens": 64}
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, logprobs=1)
SYSTEM = {"role": "system", "content": "You answer questions about the programming language Python in one sentence."}
FIRST = {"role": "user", "content": "What is a list?"}
SECOND = {"role": "user", "content": "And a dictionary?"}


def ask(llm: LLM, messages: list[dict], is_thinking: bool, sampling: SamplingParams = GREEDY):
    """The completion, the prompt's tokens, and how many of them the target has run."""
    kwargs = {"enable_thinking": is_thinking}
    run, num_run = llm.engine._target.run, []

    def counting(pieces):
        num_run.extend(piece.num_inputs for piece in pieces if piece.sequence.num_generated_tokens == 0)
        return run(pieces)

    llm.engine._target.run = counting
    [completion] = llm.generate([messages], sampling, template_kwargs=kwargs)
    llm.engine._target.run = run
    return completion, llm._prompt(messages, None, kwargs).token_ids, sum(num_run)


def plain(messages: list[dict], is_thinking: bool):
    llm = LLM(CHECKPOINT_DIR, num_draft_tokens=0, num_checkpoints=0, **SETTINGS)
    return ask(llm, messages, is_thinking)[0]


def common(left: tuple[int, ...], right: tuple[int, ...]) -> int:
    return len(os.path.commonprefix([left, right]))


def said(completion) -> tuple:
    return completion.token_ids, completion.text, completion.logprobs, completion.finish_reason


@pytest.mark.parametrize("is_thinking", [False, True])
def test_a_second_turn_runs_the_tokens_after_the_longest_common_prefix(is_thinking):
    llm = LLM(CHECKPOINT_DIR, **SETTINGS)
    first, prompt, num_run = ask(llm, [SYSTEM, FIRST], is_thinking)
    assert num_run == len(prompt) and first.num_cached_tokens == 0
    messages = [SYSTEM, FIRST, {"role": "assistant", "content": first.text}, SECOND]
    second, longer, num_run = ask(llm, messages, is_thinking)
    num_common = common(prompt + first.token_ids[:-1], longer)
    assert num_common > len(prompt) - 8
    assert num_run == len(longer) - second.num_cached_tokens <= len(longer) - num_common
    assert said(second) == said(plain(messages, is_thinking))
    _, other, num_run = ask(llm, [SYSTEM, SECOND], is_thinking)
    assert num_run == len(other) - common(other, prompt) + len(user_header(llm)), "the system prompt is shared"
    llm.close()


def user_header(llm: LLM) -> tuple[int, ...]:
    """What all messages of users begin with: common to both prompts, but no place of a checkpoint."""
    return llm._prompt("<|im_start|>user\n", None, None).token_ids


def test_the_same_prompt_three_times_runs_once_with_a_picture_too():
    llm = LLM(CHECKPOINT_DIR, **SETTINGS)
    picture = Image.new("RGB", (96, 64), (200, 30, 30))
    messages = [
        {"role": "user", "content": [{"type": "image", "image": picture}, {"type": "text", "text": "What is it?"}]}
    ]
    answers = [ask(llm, messages, False) for _ in range(3)]
    assert [num_run for _, _, num_run in answers] == [len(answers[0][1]), 0, 0]
    assert len({said(completion) for completion, _, _ in answers}) == 1
    assert len({(c.num_draft_tokens, c.num_accepted_draft_tokens) for c, _, _ in answers}) == 1
    assert [c.num_cached_tokens for c, _, _ in answers] == [0, len(answers[0][1]), len(answers[0][1])]
    several = ask(llm, messages, False, dataclasses.replace(GREEDY, temperature=0.8, seed=3))
    assert several[2] == 0
    llm.close()
