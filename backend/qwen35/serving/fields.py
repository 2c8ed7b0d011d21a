"""Names that clients may send, and how the text or number they send becomes a value. Pure; no Triton, no precedence."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from qwen35.errors import InvalidArgument
from qwen35.prompt.template import check_text
from qwen35.serving.structured import to_structured

_SESSION_NAME = re.compile(r"(?:[A-Za-z0-9_-][A-Za-z0-9._-]{0,127})?")

Convert = Callable[[str, Any], Any]  # (field name, value as sent) -> value; raises InvalidArgument that names the field

# Keys of Triton's own that `generate` repeats among the request parameters.
TRITON_KEYS = frozenset({"id", "priority", "timeout", "sequence_id", "sequence_start", "sequence_end"})

# Other names for the same thing.
ALIASES: Mapping[str, str] = {
    "random_seed": "seed",
    "stop_words": "stop",
    "min_length": "min_tokens",
    "num_return_sequences": "n",
    "guided_decoding": "structured_outputs",
}


def to_bool(name: str, value: Any) -> bool:
    if isinstance(value, bool):
        return value
    words = {"true": True, "1": True, "false": False, "0": False}
    text = str(value).strip().lower() if isinstance(value, (str, int)) else ""
    if text not in words:
        raise InvalidArgument.field(name, "true or false", value)
    return words[text]


def to_int(name: str, value: Any) -> int:
    number = value
    if isinstance(value, str):
        try:
            number = int(value)
        except ValueError:
            number = _parse_float(value)
    if isinstance(number, float) and number.is_integer():
        number = int(number)
    if isinstance(number, bool) or not isinstance(number, int):
        raise InvalidArgument.field(name, "an integer", value)
    return number


def to_float(name: str, value: Any) -> float:
    number = _parse_float(value) if isinstance(value, str) else value
    if isinstance(number, bool) or not isinstance(number, (int, float)) or not _is_finite(number):
        raise InvalidArgument.field(name, "a finite number", value)
    return float(number)


def _is_finite(number: float) -> bool:
    try:
        return math.isfinite(number)
    except OverflowError:  # an integer beyond any float
        return False


def to_text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise InvalidArgument.field(name, "text", value)
    return value


def to_anything(name: str, value: Any) -> Any:
    return value


def to_session_name(name: str, value: Any) -> str:
    """The name of a file; empty: none."""
    if not isinstance(value, str) or not _SESSION_NAME.fullmatch(value):
        raise InvalidArgument.field(name, "up to 128 of A-Z, a-z, 0-9, '.', '_' and '-', no '.' first", value)
    return value


def to_sequence(name: str, value: Any) -> tuple[Any, ...]:
    """A list of anything."""
    if not isinstance(value, (list, tuple)):
        raise InvalidArgument.field(name, "a list", value)
    return tuple(value)


def to_texts(name: str, value: Any) -> tuple[str, ...]:
    """One text, a list of texts, or such a list as JSON text (request parameters carry scalars only)."""
    parsed = _parse_json(value, opening="[")
    items = [parsed] if isinstance(parsed, str) else parsed
    if not isinstance(items, (list, tuple)) or not all(isinstance(item, str) for item in items):
        raise InvalidArgument.field(name, "a text or a list of texts", value)
    for item in items:
        check_text(name, item)
    return tuple(items)


def to_ints(name: str, value: Any) -> tuple[int, ...]:
    """A list of integers, also as JSON text."""
    parsed = _parse_json(value, opening="[")
    if not isinstance(parsed, (list, tuple)):
        raise InvalidArgument.field(name, "a list of integers", value)
    return tuple(to_int(name, item) for item in parsed)


def to_bias(name: str, value: Any) -> tuple[tuple[int, float], ...]:
    """A JSON object token id -> bias, also as text; sorted by token id."""
    parsed = _parse_json(value, opening="{")
    if not isinstance(parsed, dict):
        raise InvalidArgument.field(name, "an object of token id -> bias", value)
    return tuple(sorted((to_int(name, token), to_float(name, bias)) for token, bias in parsed.items()))


def to_object(name: str, text: str, kind: type, expected: str) -> Any:
    """JSON text of one kind: dict or list."""
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument.field(name, f"{expected} as JSON text ({error})", text) from error
    if not isinstance(parsed, kind):
        raise InvalidArgument.field(name, expected, parsed)
    return parsed


def _parse_float(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def _parse_json(value: Any, opening: str) -> Any:
    """Text that looks like JSON and is; else the value unchanged."""
    if isinstance(value, str) and value.lstrip().startswith(opening):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value


# Sampling options: names, meanings and ranges of qwen35.engine.request.SamplingParams.
SAMPLING: Mapping[str, Convert] = {
    "n": to_int,
    "max_tokens": to_int,
    "min_tokens": to_int,
    "temperature": to_float,
    "top_k": to_int,
    "top_p": to_float,
    "min_p": to_float,
    "typical_p": to_float,
    "seed": to_int,
    "repetition_penalty": to_float,
    "presence_penalty": to_float,
    "frequency_penalty": to_float,
    "logit_bias": to_bias,
    "bad_words": to_texts,
    "stop": to_texts,
    "stop_token_ids": to_ints,
    "ignore_eos": to_bool,
    "include_stop_str_in_output": to_bool,
    "skip_special_tokens": to_bool,
    "logprobs": to_int,
    "prompt_logprobs": to_int,
    "num_draft_tokens": to_int,
    "structured_outputs": to_structured,
    "allowed_token_ids": to_ints,
    "thinking_token_budget": to_int,
}

# How the answer is delivered; these may also come as request parameters.
DELIVERY: Mapping[str, Convert] = {
    "stream": to_bool,
    "exclude_input_in_output": to_bool,
    "return_finish_reason": to_bool,
    "return_cumulative_logprob": to_bool,
    "return_logprobs": to_bool,
    "return_num_input_tokens": to_bool,
    "return_num_output_tokens": to_bool,
    "return_perf_metrics": to_bool,
    "return_log_probs": to_bool,
}

# A text that is kept in a file at its end, or goes on from one.
SESSIONS: Mapping[str, Convert] = {
    "save_session": to_session_name,
    "restore_session": to_session_name,
}

# TensorRT-LLM's own: `end_id` adds a stop token (-1: no token ends it); `pad_id` and `length_penalty` act on batches
# and beams, of which there are none, so that any value is neutral; the two of guided decoding say the same as
# `structured_outputs`.
TYPED_ONLY: Mapping[str, Convert] = {
    "end_id": to_int,
    "pad_id": to_int,
    "length_penalty": to_float,
    "guided_decoding_guide_type": to_text,
    "guided_decoding_guide": to_text,
}

# Valid elsewhere, not done here: accepted at the values that change nothing.
UNSUPPORTED: Mapping[str, tuple[Convert, tuple[Any, ...]]] = {
    "best_of": (to_int, (1,)),
    "beam_width": (to_int, (1,)),
    "use_beam_search": (to_bool, (False,)),
    "early_stopping": (to_bool, (False,)),
    "truncate_prompt_tokens": (to_int, ()),
    "logits_processors": (to_anything, ([], "[]")),
    "output_kind": (to_anything, ()),  # a stream tells what is new
    "flat_logprobs": (to_bool, (False,)),
    "skip_reading_prefix_cache": (to_bool, (False,)),
    "skip_clone": (to_bool, (False, True)),  # a copy more or less in the client's own process
    "output_text_buffer_length": (to_int, (0,)),
    "repetition_detection": (to_anything, ({}, "{}")),
    "extra_args": (to_anything, ({}, "{}")),
    "detokenize": (to_bool, (True,)),
    "spaces_between_special_tokens": (to_bool, (True,)),
    "lora_name": (to_text, ("",)),
    "lora_task_id": (to_int, (0,)),
    "embedding_bias_words": (to_sequence, ((),)),
    "embedding_bias_weights": (to_sequence, ((),)),
    "return_context_logits": (to_bool, (False,)),
    "return_generation_logits": (to_bool, (False,)),
    "use_draft_logits": (to_bool, (False,)),
}

CONVERTERS: Mapping[str, Convert] = {
    **SAMPLING,
    **DELIVERY,
    **SESSIONS,
    **TYPED_ONLY,
    **{name: convert for name, (convert, _) in UNSUPPORTED.items()},
}
