"""Structured output as clients of both doors ask for it."""

import json

import pytest

from qwen35.engine.request import SamplingParams, StructuredOutputs
from qwen35.errors import InvalidArgument, Qwen35Error, Unsupported
from qwen35.serving.options import RawRequest, resolve
from qwen35.serving.resolved import ResolvedRequest
from qwen35.serving.structured import ANY_OBJECT, to_structured

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def resolved(inputs=None, sampling=None) -> ResolvedRequest:
    inputs = {"text_input": "x", **(inputs or {})}
    if sampling is not None:
        inputs["sampling_parameters"] = json.dumps(sampling)
    return resolve(RawRequest(inputs, {}), request_timeout_seconds=1.0)[0]


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        ({"json": SCHEMA}, StructuredOutputs("json", json.dumps(SCHEMA))),
        ({"json": json.dumps(SCHEMA)}, StructuredOutputs("json", json.dumps(SCHEMA))),
        ({"json": {}}, StructuredOutputs("json", "{}")),
        ({"json_object": True}, StructuredOutputs("json", ANY_OBJECT)),
        ({"regex": "[ab]+", "json": None, "json_object": False}, StructuredOutputs("regex", "[ab]+")),
        ({"choice": ["a", "é"]}, StructuredOutputs("choice", '["a", "\\u00e9"]')),
        ({"grammar": 'root ::= "a"', "backend": "xgrammar"}, StructuredOutputs("grammar", 'root ::= "a"')),
        ({"json": {}, "disable_any_whitespace": True}, StructuredOutputs("json", "{}", any_whitespace=False)),
        ({}, None),
        ("", None),
    ],
)
def test_forms(sent, expected):
    assert to_structured("structured_outputs", sent) == expected
    if sent:
        assert to_structured("structured_outputs", json.dumps(sent)) == expected
        assert resolved(sampling={"structured_outputs": sent}).sampling.structured_outputs == expected
        assert resolved(sampling={"guided_decoding": json.dumps(sent)}).sampling.structured_outputs == expected


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        ("{", "structured_outputs: expected a JSON object"),
        ([1], "structured_outputs: expected a JSON object"),
        ({"json": "{"}, "structured_outputs.json: expected a JSON schema"),
        ({"json": 3}, "structured_outputs.json: expected a JSON schema"),
        ({"json": "[1]"}, "structured_outputs.json: expected a JSON schema"),
        ({"regex": ["a"]}, "structured_outputs.regex: expected text"),
        ({"regex": "\ud800"}, "structured_outputs.regex: expected valid Unicode"),
        ({"choice": []}, "structured_outputs.choice: expected a list of texts"),
        ({"choice": ["a", ""]}, "structured_outputs.choice: expected a list of texts"),
        ({"choice": "a"}, "structured_outputs.choice: expected a list of texts"),
        ({"regex": "a", "choice": ["b"]}, r"structured_outputs: expected one of .* got \['regex', 'choice'\]"),
        ({"jsn": {}}, "structured_outputs.jsn: expected one of json"),
    ],
)
def test_errors_name_the_part(sent, message):
    with pytest.raises(InvalidArgument, match=message):
        to_structured("structured_outputs", sent)


@pytest.mark.parametrize("key", ["structural_tag", "whitespace_pattern", "disable_additional_properties"])
def test_what_is_not_done(key):
    offered = "offered are json, json_object, regex, choice, grammar"
    with pytest.raises(Unsupported, match=f"structured_outputs.{key}: expected it to be left out .*; {offered}"):
        to_structured("structured_outputs", {"json": {}, key: "x"})


@pytest.mark.parametrize(
    ("guide_type", "guide", "expected"),
    [
        ("json", None, StructuredOutputs("json", ANY_OBJECT)),
        ("json_schema", json.dumps(SCHEMA), StructuredOutputs("json", json.dumps(SCHEMA))),
        ("regex", "[ab]+", StructuredOutputs("regex", "[ab]+")),
        ("ebnf_grammar", 'root ::= "a"', StructuredOutputs("grammar", 'root ::= "a"')),
        ("", "", None),
        ("xml", "x", "guided_decoding_guide_type: expected one of json, json_schema"),
        ("regex", "", "guided_decoding_guide: expected a guide of type regex"),
        ("json_schema", "{", "guided_decoding_guide: expected a JSON schema"),
        ("", "x", "guided_decoding_guide_type: expected a type"),
    ],
)
def test_typed_door(guide_type, guide, expected):
    sent = {"guided_decoding_guide_type": guide_type, "guided_decoding_guide": guide}
    if isinstance(expected, str):
        with pytest.raises(InvalidArgument, match=expected):
            resolved(sent)
    else:
        assert resolved(sent).sampling == SamplingParams(temperature=0.0, structured_outputs=expected)


def test_two_that_differ():
    sent = {"guided_decoding_guide_type": "regex", "guided_decoding_guide": "a"}
    assert resolved(sent, {"structured_outputs": {"regex": "a"}}).sampling.structured_outputs.text == "a"
    with pytest.raises(Qwen35Error, match="guided_decoding_guide: expected the same as structured_outputs"):
        resolved(sent, {"structured_outputs": {"regex": "b"}})


def test_round_trip():
    request = resolved(
        sampling={"structured_outputs": {"choice": ["a"]}, "allowed_token_ids": [3, 1], "thinking_token_budget": "7"}
    )
    again = ResolvedRequest.from_json(request.to_json())
    assert again == request
    assert (again.sampling.allowed_token_ids, again.sampling.thinking_token_budget) == ((3, 1), 7)
