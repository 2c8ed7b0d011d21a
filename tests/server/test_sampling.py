"""Structured output, several samples and logprobs of the prompt through both doors of a live server."""

import json
import re

import pytest

from tests.server.clients import generate, trtllm, vllm

SCHEMA = {"type": "object", "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 99}},
          "required": ["age"], "additionalProperties": False}  # fmt: skip
PATTERN = "[a-f]{3,9}-[0-9]{2}"
SAMPLED = {"temperature": 1.0, "seed": 4, "max_tokens": 40}
FITS = {
    "json": lambda text: 0 <= json.loads(text)["age"] <= 99,
    "regex": lambda text: re.fullmatch(PATTERN, text),
    "choice": lambda text: text in ("red", "green"),
    "grammar": lambda text: re.fullmatch(r"\(*x\)*", text),
}


@pytest.mark.parametrize(
    "wanted",
    [
        {"json": SCHEMA, "disable_any_whitespace": True},
        {"regex": PATTERN},
        {"choice": ["red", "green"]},
        {"grammar": 'root ::= "(" root ")" | "x"'},
    ],
    ids=list(FITS),
)
def test_structured_output_with_and_without_drafts(server, wanted):
    options = {**SAMPLED, "structured_outputs": wanted}
    drafted = vllm(server, "Say: ", sampling=options, return_finish_reason=True, exclude_input_in_output=True)
    plain = vllm(server, "Say: ", sampling={**options, "num_draft_tokens": 0}, stream=True)
    assert drafted.error is None
    assert FITS[next(iter(wanted))](drafted.text), drafted.text
    assert drafted.values("finish_reason") == [b"stop"]
    assert plain.text == drafted.text


def test_structured_output_as_request_parameters(server):
    body = {"text_input": "Say: ", "exclude_input_in_output": True, "parameters": {**SAMPLED, "temperature": 0}}
    body["parameters"]["structured_outputs"] = json.dumps({"choice": ["red", "green"]})
    status, answer = generate(server, **body)
    assert status == 200 and answer["text_output"] in ("red", "green")


@pytest.mark.parametrize(
    ("guide_type", "guide", "fits"),
    [
        ("regex", PATTERN, FITS["regex"]),
        ("ebnf_grammar", 'root ::= "(" root ")" | "x"', FITS["grammar"]),
        ("json_schema", json.dumps({"enum": ["red", 7]}), lambda text: json.loads(text) in ("red", 7)),
    ],
)
def test_guides_of_the_typed_door(server, guide_type, guide, fits):
    options = {"guided_decoding_guide_type": guide_type, "guided_decoding_guide": guide, "max_tokens": 40}
    answer = trtllm(server, "Say: ", exclude_input_in_output=True, **options)
    assert answer.error is None and fits(answer.text), answer.text


def test_samples_at_both_doors(server):
    joined = vllm(server, "Hello", sampling={**SAMPLED, "n": 3}, return_num_output_tokens=True,
                  exclude_input_in_output=True)  # fmt: skip
    (response,) = joined.responses
    texts = [text.decode() for text in response["text_output"]]
    assert len(set(texts)) == 3 and response["num_output_tokens"].shape == (3,)
    single = vllm(server, "Hello", sampling=SAMPLED, exclude_input_in_output=True)
    assert single.text == texts[0]
    for stream in (False, True):
        typed = trtllm(server, "Hello", num_return_sequences=3, exclude_input_in_output=True, stream=stream, **SAMPLED)
        parts = ["", "", ""]
        for one in typed.responses:
            parts[one["sequence_index"].item()] += one["text_output"][0].decode()
        assert parts == texts
        assert typed.finals == [False] * (len(typed.finals) - 1) + [True]


def test_logprobs_of_the_prompt(server):
    answer = vllm(server, "Hello", sampling={"max_tokens": 2, "prompt_logprobs": 1}, return_num_input_tokens=True)
    first, *others = json.loads(answer.last["prompt_logprobs"][0])
    assert first is None
    assert len(others) == answer.values("num_input_tokens")[0] - 1
    assert all(min(entry["rank"] for entry in position.values()) == 1 for position in others)
