"""What clients send about structured output to one form: vLLM's `structured_outputs`, TensorRT-LLM's pair of inputs."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from qwen35.engine.request import StructuredOutputs
from qwen35.errors import InvalidArgument, Unsupported
from qwen35.prompt.template import check_text

ANY_OBJECT = '{"type": "object"}'
# vLLM's keys without an effect here (one library, whatever they say), and those that are not done.
_IGNORED = frozenset({"backend", "disable_fallback"})
_UNSUPPORTED = frozenset({"disable_additional_properties", "whitespace_pattern", "structural_tag"})


def to_structured(name: str, value: Any) -> StructuredOutputs | None:
    """A JSON object, also as text, with one of json, json_object, regex, choice and grammar. None for an empty one."""
    if isinstance(value, str):
        try:
            value = json.loads(value) if value else {}
        except (ValueError, RecursionError) as error:
            raise InvalidArgument.field(name, f"a JSON object ({error})", value) from error
    if not isinstance(value, Mapping):
        raise InvalidArgument.field(name, "a JSON object", value)
    given = {key: item for key, item in value.items() if item not in (None, False, "") and key not in _IGNORED}
    any_whitespace = not given.pop("disable_any_whitespace", False)
    for key in given:
        if key in _UNSUPPORTED:
            raise Unsupported(
                f"{name}.{key}: expected it to be left out (this server does not support it); offered are "
                f"{', '.join(_READ)}, and disable_any_whitespace for json"
            )
        if key not in _READ:
            raise InvalidArgument.field(f"{name}.{key}", f"one of {', '.join(_READ)}", given[key])
    if len(given) > 1:
        raise InvalidArgument.field(name, f"one of {', '.join(_READ)}", list(given))
    for key, item in given.items():
        kind, read = _READ[key]
        return StructuredOutputs(kind, read(f"{name}.{key}", item), any_whitespace)
    return None


def from_guide(guide_type: str | None, guide: str | None) -> StructuredOutputs | None:
    """TensorRT-LLM's `guided_decoding_guide_type` and `guided_decoding_guide`; None when both are absent or empty."""
    if not guide_type:
        if guide:
            raise InvalidArgument.field("guided_decoding_guide_type", "a type for the guide", guide_type)
        return None
    if guide_type not in _GUIDES:
        raise InvalidArgument.field("guided_decoding_guide_type", f"one of {', '.join(_GUIDES)}", guide_type)
    if guide_type == "json":
        return StructuredOutputs("json", ANY_OBJECT)
    if not guide:
        raise InvalidArgument.field("guided_decoding_guide", f"a guide of type {guide_type}", guide)
    kind, read = _READ[_GUIDES[guide_type]]
    return StructuredOutputs(kind, read("guided_decoding_guide", guide))


def _schema(name: str, value: Any) -> str:
    """A schema as an object or as JSON text."""
    if not isinstance(value, (str, Mapping)):
        raise InvalidArgument.field(name, "a JSON schema", value)
    text = value if isinstance(value, str) else json.dumps(value)
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument.field(name, f"a JSON schema ({error})", text) from error
    if not isinstance(schema, (dict, bool)):
        raise InvalidArgument.field(name, "a JSON schema", value)
    return text


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise InvalidArgument.field(name, "text", value)
    check_text(name, value)
    return value


def _choices(name: str, value: Any) -> str:
    if not isinstance(value, list) or not value or not all(isinstance(item, str) and item for item in value):
        raise InvalidArgument.field(name, "a list of texts that are not empty", value)
    for item in value:
        check_text(name, item)
    return json.dumps(value)


def _any_object(name: str, value: Any) -> str:
    if value is not True:
        raise InvalidArgument.field(name, "true or false", value)
    return ANY_OBJECT


# Name on the wire -> our kind, and how its value is read.
_READ: Mapping[str, tuple[Any, Callable[[str, Any], str]]] = {
    "json": ("json", _schema),
    "json_object": ("json", _any_object),
    "regex": ("regex", _text),
    "choice": ("choice", _choices),
    "grammar": ("grammar", _text),
}
_GUIDES = {"json": "json", "json_schema": "json", "regex": "regex", "ebnf_grammar": "grammar"}
