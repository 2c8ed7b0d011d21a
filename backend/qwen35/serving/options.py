"""The one place where inputs, `sampling_parameters` and request parameters become a request: names, types, precedence,
defaults, conflicts. Pure: it knows neither Triton's objects nor the tokenizer.

Precedence: `sampling_parameters` before the request's own parameters; an input of the same meaning must agree with
both.
"""

from __future__ import annotations

import difflib
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from qwen35.engine.request import SamplingParams
from qwen35.errors import InvalidArgument, Unsupported
from qwen35.serving import fields, structured
from qwen35.serving.resolved import ResolvedRequest, Returns

IMAGE_INPUTS = ("image", "image_url_input", "image_bytes_input")
_PROMPT_INPUTS = frozenset(
    {"text_input", "messages", "tools", "chat_template_kwargs", "sampling_parameters", *IMAGE_INPUTS}
)
_INPUT, _SAMPLING, _PARAMETERS = "the input", "sampling_parameters", "the request's parameters"


@dataclass(frozen=True)
class RawRequest:
    """What a client sent, as Python values. Inputs that were absent are absent here."""

    inputs: Mapping[str, Any]  # name -> text, bool, number or list, by the tensor's type and dims
    parameters: Mapping[str, Any]  # scalars
    request_id: str = ""
    timeout_us: int = 0  # Triton's request timeout; 0: none


@dataclass(frozen=True)
class PromptSource:
    """Exactly one of ``text`` and ``messages`` is set, or nothing (a session's text goes on). ``images`` belong to
    ``text``: file bytes, base64 or data URIs as sent, or decoded pixels [height, width, channels]."""

    text: str | None = None
    messages: list[Any] | None = None
    tools: list[Any] | None = None
    template_kwargs: dict[str, Any] | None = None
    images: tuple[Any, ...] = ()
    images_field: str = "image"


def resolve(raw: RawRequest, *, request_timeout_seconds: float) -> tuple[ResolvedRequest, PromptSource]:
    """Validate everything that can be validated without the tokenizer. Raises InvalidArgument or Unsupported."""
    values = _collect(raw)
    _refuse_unsupported(values)
    restored = values.get("restore_session", "")
    prompt = _prompt(raw.inputs, may_be_absent=bool(restored))
    if prompt == PromptSource():
        _refuse_sampling(values)
    sampling, wants_logprobs = _sampling(values, is_typed=any(_is_typed(name) for name in raw.inputs))
    for name in fields.SESSIONS:
        if values.get(name) and sampling.n > 1:
            raise InvalidArgument.field("n", f"1 with {name}", sampling.n)
    stream = values.get("stream", False)
    arrival = time.time_ns()
    return (
        ResolvedRequest(
            uid=secrets.token_hex(8),
            request_id=raw.request_id,
            sampling=sampling,
            seed=secrets.randbits(64) if sampling.seed is None else sampling.seed,
            stream=stream,
            returns=_returns(values),
            wants_logprobs=wants_logprobs,
            arrival_unix_ns=arrival,
            deadline_unix_ns=arrival + int(_timeout_seconds(raw, request_timeout_seconds) * 1e9),
            priority=-_triton_integer(raw, "priority"),  # as in vLLM, a lower number goes first
            echo=_echo(values.get("exclude_input_in_output"), stream, prompt),
            save_session=values.get("save_session", ""),
            restore_session=restored,
            is_continued=prompt == PromptSource(),
        ),
        prompt,
    )


def _collect(raw: RawRequest) -> dict[str, Any]:
    """Every option by its canonical name, converted; the first source in order of precedence wins."""
    inputs = {name: value for name, value in raw.inputs.items() if name not in _PROMPT_INPUTS}
    sampling = raw.inputs.get("sampling_parameters")
    sampling = fields.to_object("sampling_parameters", sampling, dict, "a JSON object") if sampling else {}
    for name in sampling:
        if name in fields.DELIVERY:
            raise InvalidArgument.field(
                name, "an input or a request parameter, not a sampling parameter", sampling[name]
            )
    parameters = {name: value for name, value in raw.parameters.items() if name not in fields.TRITON_KEYS}
    found: dict[str, tuple[Any, str, str]] = {}  # canonical name -> value, source, name as sent
    for source, options in ((_INPUT, inputs), (_SAMPLING, sampling), (_PARAMETERS, parameters)):
        for sent, value in options.items():
            if value is None:
                continue
            name = fields.ALIASES.get(sent, sent)
            if name not in fields.CONVERTERS:
                raise _unknown(sent, source)
            converted = fields.CONVERTERS[name](sent, value)
            earlier = found.setdefault(name, (converted, source, sent))
            if earlier[0] != converted and (earlier[1] in (_INPUT, source)):
                raise InvalidArgument(
                    f"{sent}: expected one value, got {earlier[0]!r} from {earlier[1]} ({earlier[2]})"
                    f" and {converted!r} from {source} ({sent})"
                )
    return {name: value for name, (value, _, _) in found.items()}


def _is_typed(input_name: str) -> bool:
    """Whether only the TensorRT-LLM door has this input."""
    name = fields.ALIASES.get(input_name, input_name)
    return name in fields.CONVERTERS and name not in fields.DELIVERY


def _unknown(name: str, source: str) -> InvalidArgument:
    near = difflib.get_close_matches(name, [*fields.CONVERTERS, *fields.ALIASES], n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    return InvalidArgument(f"{name}: expected a known option, got an unknown name in {source}{hint}")


def _refuse_unsupported(values: Mapping[str, Any]) -> None:
    for name, (_, neutral) in fields.UNSUPPORTED.items():
        if name in values and values[name] not in neutral:
            allowed = " or ".join(repr(value) for value in neutral) or "it to be left out"
            raise Unsupported(
                f"{name}: expected {allowed} (this server does not support it), got {values[name]!r}"[:300]
            )


def _refuse_sampling(values: Mapping[str, Any]) -> None:
    """A session without a prompt goes on with its own options."""
    for name, value in values.items():
        if (name in fields.SAMPLING and name != "max_tokens") or name in fields.TYPED_ONLY:
            raise InvalidArgument.field(name, "it to be left out where a session goes on with its own options", value)


def _prompt(inputs: Mapping[str, Any], *, may_be_absent: bool) -> PromptSource:
    """``may_be_absent``: a session is restored, whose own text can go on."""
    text, messages = inputs.get("text_input"), inputs.get("messages")
    if may_be_absent and not text and messages is None and not any(inputs.get(name) for name in IMAGE_INPUTS):
        return PromptSource()
    if (text is None) == (messages is None):
        raise InvalidArgument(
            f"text_input: expected exactly one of text_input and messages, got {'neither' if text is None else 'both'}"
        )
    sent = {name: inputs[name] for name in IMAGE_INPUTS if name in inputs and len(inputs[name]) > 0}
    if len(sent) > 1:
        raise InvalidArgument(f"{IMAGE_INPUTS[0]}: expected images in one input, got them in {' and '.join(sent)}")
    if messages is not None:
        return _chat(inputs, messages, sent)
    for name in ("tools", "chat_template_kwargs"):
        if inputs.get(name):
            raise InvalidArgument.field(name, "it to come with messages, not with text_input", inputs[name])
    if not text and not sent:
        raise InvalidArgument.field("text_input", "a prompt that is not empty", text)
    field, images = next(iter(sent.items()), (IMAGE_INPUTS[0], ()))
    return PromptSource(text=text, images=tuple(images), images_field=field)


def _chat(inputs: Mapping[str, Any], messages: str, images: Mapping[str, Any]) -> PromptSource:
    for name in images:
        raise InvalidArgument(f"{name}: expected images inside messages (image_url), got them as an input")
    parsed = fields.to_object("messages", messages, list, "a list of chat messages")
    if not parsed:
        raise InvalidArgument.field("messages", "at least one message", parsed)
    tools, template_kwargs = inputs.get("tools"), inputs.get("chat_template_kwargs")
    return PromptSource(
        messages=parsed,
        tools=fields.to_object("tools", tools, list, "a list of tools") if tools else None,
        template_kwargs=(
            fields.to_object("chat_template_kwargs", template_kwargs, dict, "a JSON object")
            if template_kwargs
            else None
        ),
    )


def _sampling(values: Mapping[str, Any], *, is_typed: bool) -> tuple[SamplingParams, bool]:
    """Sampling parameters, and whether the client asked for logprobs.

    ``is_typed``: TensorRT-LLM's inputs were used. Its clients expect greedy decoding when they give none of
    temperature, top_k and top_p, and 0 for the last two means not given.
    """
    given = {name: value for name, value in values.items() if name in fields.SAMPLING}
    if is_typed:
        given = {name: value for name, value in given.items() if value != 0 or name not in ("top_k", "top_p")}
        if not given.keys() & {"temperature", "top_k", "top_p"}:
            given["temperature"] = 0.0
    if (end_id := values.get("end_id")) is not None:
        if end_id >= 0:
            given["stop_token_ids"] = (*given.get("stop_token_ids", ()), end_id)
        else:
            given["ignore_eos"] = True
    guide = structured.from_guide(values.get("guided_decoding_guide_type"), values.get("guided_decoding_guide"))
    if guide is not None:
        if given.get("structured_outputs") not in (None, guide):
            raise InvalidArgument.field("guided_decoding_guide", "the same as structured_outputs", guide.text)
        given["structured_outputs"] = guide
    wants_logprobs = "logprobs" in given
    if values.get("return_log_probs") or values.get("return_cumulative_logprob"):
        given.setdefault("logprobs", 0)  # the sampled token's own
    return SamplingParams(**given), wants_logprobs


def _returns(values: Mapping[str, Any]) -> Returns:
    return Returns(
        finish_reason=values.get("return_finish_reason", False),
        cumulative_logprob=values.get("return_cumulative_logprob", False),
        logprobs=values.get("return_logprobs", False),
        num_input_tokens=values.get("return_num_input_tokens", False),
        num_output_tokens=values.get("return_num_output_tokens", False),
        perf_metrics=values.get("return_perf_metrics", False),
        log_probs=values.get("return_log_probs", False),
    )


def _echo(exclude: bool | None, stream: bool, prompt: PromptSource) -> str:
    """What goes before the first text: the prompt in a single answer to a raw prompt, unless excluded; else nothing."""
    if stream or prompt.text is None:
        if exclude is False:
            where = "in a stream" if stream else "with messages"
            raise InvalidArgument(
                f"exclude_input_in_output: expected true {where}, got false; the prompt is not repeated"
            )
        return ""
    return "" if exclude else prompt.text


def _timeout_seconds(raw: RawRequest, limit_seconds: float) -> float:
    """The client's timeout (Triton's, in microseconds) where it is shorter than the server's."""
    timeout_us = raw.timeout_us or _triton_integer(raw, "timeout")
    return min(timeout_us / 1e6, limit_seconds) if timeout_us else limit_seconds


def _triton_integer(raw: RawRequest, name: str) -> int:
    value = fields.to_int(name, raw.parameters.get(name, 0))
    if value < 0:
        raise InvalidArgument.field(name, "0 or more", value)
    return value
