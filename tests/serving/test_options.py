import json
import time

import pytest

from qwen35.engine.request import SamplingParams
from qwen35.errors import InvalidArgument, Unsupported
from qwen35.serving.options import PromptSource, RawRequest, resolve
from qwen35.serving.resolved import ImageSpan, ResolvedRequest


def resolved(parameters=None, sampling=None, timeout_us=0, **inputs):
    inputs.setdefault("text_input", "hello")
    if sampling is not None:
        inputs["sampling_parameters"] = json.dumps(sampling)
    inputs = {name: value for name, value in inputs.items() if value is not None}
    return resolve(RawRequest(inputs, parameters or {}, "7", timeout_us), request_timeout_seconds=600.0)


def test_defaults_are_those_of_vllm():
    request, prompt = resolved()
    assert request.sampling == SamplingParams(max_tokens=16, temperature=1.0)
    assert not request.stream
    assert not any(vars(request.returns).values())
    assert request.echo == "hello"
    assert (prompt.text, prompt.images) == ("hello", ())


@pytest.mark.parametrize(
    ("name", "sent", "field", "value"),
    [
        ("temperature", "0", "temperature", 0.0),
        ("temperature", 1, "temperature", 1.0),
        ("max_tokens", "1500", "max_tokens", 1500),
        ("max_tokens", 5.0, "max_tokens", 5),
        ("top_k", "-1", "top_k", -1),
        ("random_seed", "18446744073709551615", "seed", 2**64 - 1),
        ("seed", 3, "seed", 3),
        ("stop", "end", "stop", ("end",)),
        ("stop", '["a", "b"]', "stop", ("a", "b")),
        ("stop", "[a", "stop", ("[a",)),
        ("stop_words", "x", "stop", ("x",)),
        ("stop_token_ids", "[1, 2]", "stop_token_ids", (1, 2)),
        ("logit_bias", '{"7": -1.5, "3": 2}', "logit_bias", ((3, 2.0), (7, -1.5))),
        ("ignore_eos", "true", "ignore_eos", True),
        ("logprobs", "0", "logprobs", 0),
        ("min_length", "2", "min_tokens", 2),
    ],
)
def test_values_are_converted_by_the_type_of_the_option(name, sent, field, value):
    for request, _ in (resolved({name: sent}), resolved(sampling={name: sent})):
        assert getattr(request.sampling, field) == value
        assert type(getattr(request.sampling, field)) is type(value)


@pytest.mark.parametrize(
    ("parameters", "field"),
    [
        ({"temperature": "warm"}, "temperature"),
        ({"temperature": "nan"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "-3"}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"top_p": 0}, "top_p"),
        ({"stop": 5}, "stop"),
        ({"stop": '["a", 1]'}, "stop"),
        ({"stop_token_ids": "1"}, "stop_token_ids"),
        ({"logit_bias": "[1]"}, "logit_bias"),
        ({"ignore_eos": "perhaps"}, "ignore_eos"),
        ({"seed": -1}, "seed"),
        ({"temprature": 1}, "temprature"),
        ({"stream": "maybe"}, "stream"),
        ({"priority": "high"}, "priority"),
        ({"timeout": -1}, "timeout"),
        ({"min_tokens": 20, "max_tokens": 10}, "min_tokens"),
    ],
)
def test_what_does_not_convert_is_refused_by_name(parameters, field):
    with pytest.raises(InvalidArgument, match=rf"^INVALID_ARG: {field}: expected .*, got"):
        resolved(parameters)


def test_an_unknown_name_gets_a_hint():
    with pytest.raises(InvalidArgument, match="did you mean temperature"):
        resolved(sampling={"temprature": 1})


@pytest.mark.parametrize("key", ["id", "priority", "timeout", "sequence_id", "sequence_start", "sequence_end"])
def test_tritons_own_keys_are_accepted(key):
    assert resolved({key: 0})[0].sampling == SamplingParams()


def test_sampling_parameters_go_before_request_parameters():
    request, _ = resolved({"max_tokens": 3, "top_k": 5}, sampling={"max_tokens": 4})
    assert (request.sampling.max_tokens, request.sampling.top_k) == (4, 5)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"max_tokens": 4, "sampling": {"max_tokens": 5}}, ("the input", "sampling_parameters")),
        ({"max_tokens": 4, "parameters": {"max_tokens": 5}}, ("the input", "request's parameters")),
        ({"stream": True, "parameters": {"stream": "false"}}, ("the input", "request's parameters")),
        ({"sampling": {"seed": 1, "random_seed": 2}}, ("(seed)", "(random_seed)")),
        ({"parameters": {"stop": "a", "stop_words": "b"}}, ("(stop)", "(stop_words)")),
    ],
)
def test_a_conflict_names_both_sources(arguments, named):
    with pytest.raises(InvalidArgument) as caught:
        resolved(**arguments)
    assert all(name in str(caught.value) for name in named)


def test_agreeing_sources_are_no_conflict():
    request, _ = resolved({"max_tokens": "4"}, sampling={"max_tokens": 4}, max_tokens=4, seed=1, random_seed=1)
    assert (request.sampling.max_tokens, request.sampling.seed) == (4, 1)


@pytest.mark.parametrize(
    ("sampling", "refused"),
    [
        ({"best_of": 2}, True),
        ({"prompt_logprobs": None}, False),
        ({"structured_outputs": '{"structural_tag": "x"}'}, True),
        ({"structured_outputs": {}}, False),
        ({"lora_name": "x"}, True),
        ({"lora_name": ""}, False),
        ({"spaces_between_special_tokens": False}, True),
        ({"spaces_between_special_tokens": "true"}, False),
    ],
)
def test_unsupported_features_are_refused_unless_neutral(sampling, refused):
    if refused:
        with pytest.raises(Unsupported, match=f"{next(iter(sampling))}.*: expected .* not support"):
            resolved(sampling=sampling)
    else:
        assert resolved(sampling=sampling)[0].sampling == SamplingParams()


# Fields of vLLM's SamplingParams (0.6 to 0.11), in its order, with a value that asks for something.
VLLM_FIELDS = {
    "n": 2, "best_of": 2, "presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.5,
    "temperature": 0.5, "top_p": 0.5, "top_k": 5, "min_p": 0.1, "seed": 3, "stop": ["x"], "stop_token_ids": [1],
    "bad_words": ["x"], "ignore_eos": True, "max_tokens": 5, "min_tokens": 1, "logprobs": 2, "prompt_logprobs": 2,
    "flat_logprobs": True, "detokenize": False, "skip_special_tokens": False, "spaces_between_special_tokens": False,
    "logits_processors": ["x.Y"], "include_stop_str_in_output": True, "truncate_prompt_tokens": 4, "output_kind": 1,
    "output_text_buffer_length": 3, "guided_decoding": {"regex": "a"}, "structured_outputs": {"regex": "a"},
    "logit_bias": {"1": 2.0}, "allowed_token_ids": [1], "extra_args": {"a": 1}, "skip_reading_prefix_cache": True,
    "thinking_token_budget": 4, "repetition_detection": {"max_pattern_size": 3}, "use_beam_search": True,
    "length_penalty": 2.0, "early_stopping": True,
}  # fmt: skip
NOT_DONE = {"best_of", "flat_logprobs", "detokenize", "spaces_between_special_tokens", "logits_processors",
            "truncate_prompt_tokens", "output_kind", "output_text_buffer_length", "extra_args",
            "skip_reading_prefix_cache", "repetition_detection", "use_beam_search", "early_stopping"}  # fmt: skip


@pytest.mark.parametrize("name", VLLM_FIELDS)
def test_each_field_of_vllm_acts_or_is_refused_by_name(name):
    sampling = {name: VLLM_FIELDS[name]}
    if name in NOT_DONE:
        with pytest.raises(Unsupported, match=f"^UNSUPPORTED: {name}: expected .* not support"):
            resolved(sampling=sampling)
    elif name != "length_penalty":  # of beams, of which there are none
        assert resolved(sampling=sampling)[0].sampling != SamplingParams()


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ({"max_tokens": 5}, {"max_tokens": 5, "temperature": 0.0}),
        ({"max_tokens": 5, "temperature": 0.5}, {"max_tokens": 5, "temperature": 0.5}),
        ({"max_tokens": 5, "top_p": 0.0, "top_k": 0}, {"max_tokens": 5, "temperature": 0.0}),
        ({"max_tokens": 5, "top_p": 0.0, "top_k": 4}, {"max_tokens": 5, "top_k": 4}),
        ({"max_tokens": 5, "end_id": 9, "temperature": 1.0}, {"max_tokens": 5, "stop_token_ids": (9,)}),
        ({"max_tokens": 5, "end_id": -1, "temperature": 1.0}, {"max_tokens": 5, "ignore_eos": True}),
        ({"beam_width": 1, "num_return_sequences": 1, "pad_id": 3, "length_penalty": 2.0}, {"temperature": 0.0}),
        ({"stop_words": ["a", "b"], "bad_words": ["c"], "temperature": 1.0}, {"stop": ("a", "b"), "bad_words": ("c",)}),
        ({"random_seed": 5, "temperature": 0.25}, {"seed": 5, "temperature": 0.25}),
        ({"return_log_probs": True, "temperature": 1.0}, {"logprobs": 0}),
        ({"embedding_bias_words": [], "guided_decoding_guide": "", "lora_task_id": 0}, {"temperature": 0.0}),
    ],
)
def test_typed_inputs(typed, expected):
    assert resolved(**typed)[0].sampling == SamplingParams(**expected)


@pytest.mark.parametrize(
    "typed",
    [
        {"beam_width": 2},
        {"embedding_bias_words": ["a"], "embedding_bias_weights": [1.0]},
        {"lora_task_id": 4},
        {"return_context_logits": True},
    ],
)
def test_unsupported_typed_inputs_are_refused(typed):
    with pytest.raises(Unsupported):
        resolved(**typed)


def test_logprobs_are_wanted_only_when_asked_for():
    assert resolved(return_logprobs=True)[0].wants_logprobs is False
    assert resolved(sampling={"logprobs": 2}, return_logprobs=True)[0].wants_logprobs is True
    cumulative = resolved(return_cumulative_logprob=True)[0]
    assert (cumulative.sampling.logprobs, cumulative.wants_logprobs) == (0, False)


@pytest.mark.parametrize(
    ("inputs", "echo"),
    [
        ({}, "hello"),
        ({"exclude_input_in_output": True}, ""),
        ({"exclude_input_in_output": False}, "hello"),
        ({"stream": True}, ""),
        ({"stream": True, "exclude_input_in_output": True}, ""),
        ({"text_input": None, "messages": '[{"role": "user", "content": "x"}]'}, ""),
    ],
)
def test_echo(inputs, echo):
    assert resolved(**inputs)[0].echo == echo


@pytest.mark.parametrize("inputs", [{"stream": True}, {"text_input": None, "messages": '[{"role": "user"}]'}])
def test_echo_refused_where_it_can_not_be(inputs):
    with pytest.raises(InvalidArgument, match="exclude_input_in_output: expected true"):
        resolved(exclude_input_in_output=False, **inputs)


@pytest.mark.parametrize(
    ("inputs", "field"),
    [
        ({"text_input": None}, "text_input"),
        ({"text_input": ""}, "text_input"),
        ({"messages": "[{}]"}, "text_input"),
        ({"text_input": None, "messages": "{}"}, "messages"),
        ({"text_input": None, "messages": "[]"}, "messages"),
        ({"text_input": None, "messages": "nope"}, "messages"),
        ({"text_input": None, "messages": "[{}]", "tools": "{}"}, "tools"),
        ({"text_input": None, "messages": "[{}]", "chat_template_kwargs": "[]"}, "chat_template_kwargs"),
        ({"text_input": None, "messages": "[{}]", "image": [b"x"]}, "image"),
        ({"tools": "[]"}, "tools"),
        ({"image": [b"x"], "image_url_input": ["y"]}, "image"),
        ({"sampling_parameters": "[]"}, "sampling_parameters"),
        ({"sampling_parameters": "{"}, "sampling_parameters"),
        ({"sampling_parameters": '{"stream": true}'}, "stream"),
    ],
)
def test_bad_prompts_are_refused_by_name(inputs, field):
    with pytest.raises(InvalidArgument, match=rf"INVALID_ARG: {field}: expected"):
        resolved(**inputs)


@pytest.mark.parametrize("name", ["a", "A-b_c.d", "x" * 128, "-rf", ""])
def test_names_of_sessions(name):
    request = resolved({"save_session": name}, sampling={"restore_session": name})[0]
    assert (request.save_session, request.restore_session, request.is_continued) == (name, name, False)
    assert ResolvedRequest.from_json(request.to_json()) == request


@pytest.mark.parametrize("name", [".", "..", ".saving-x", "a/b", "../a", "a b", "x" * 129, "é", "a\n", "a\0", 5, True])
@pytest.mark.parametrize("field", ["save_session", "restore_session"])
def test_names_that_are_no_file_of_the_directory_are_refused(field, name):
    with pytest.raises(InvalidArgument, match=f"INVALID_ARG: {field}: expected up to 128 of A-Z"):
        resolved(sampling={field: name})


def test_without_a_prompt_a_session_goes_on_under_its_own_options():
    for inputs in ({"text_input": None}, {"text_input": ""}):
        request, prompt = resolved({"restore_session": "x", "max_tokens": 9, "save_session": "y"}, **inputs)
        assert (request.is_continued, request.sampling.max_tokens, request.echo) == (True, 9, "")
        assert prompt == PromptSource()
    for field, value in (("temperature", 0.5), ("seed", 1), ("stop", "x"), ("logprobs", 2), ("end_id", 4)):
        with pytest.raises(InvalidArgument, match=f"{field}: expected it to be left out where a session goes on"):
            resolved({"restore_session": "x", field: value}, text_input=None)
    with pytest.raises(InvalidArgument, match="exactly one of text_input and messages, got neither"):
        resolved({"save_session": "x"}, text_input=None)


@pytest.mark.parametrize("field", ["save_session", "restore_session"])
def test_sessions_are_of_one_sample(field):
    with pytest.raises(InvalidArgument, match=f"n: expected 1 with {field}, got 2"):
        resolved({field: "x", "n": 2})


def test_an_image_alone_is_a_prompt():
    _, prompt = resolved(text_input="", image=[b"x", b"y"])
    assert (prompt.text, prompt.images, prompt.images_field) == ("", (b"x", b"y"), "image")


@pytest.mark.parametrize(
    ("timeout_us", "parameters", "seconds"),
    [(0, {}, 600.0), (2_000_000, {}, 2.0), (0, {"timeout": 3_000_000}, 3.0), (10**12, {}, 600.0)],
)
def test_deadline(timeout_us, parameters, seconds):
    before = time.time_ns()
    request, _ = resolved(parameters, timeout_us=timeout_us)
    assert before <= request.arrival_unix_ns <= time.time_ns()
    assert request.deadline_unix_ns - request.arrival_unix_ns == int(seconds * 1e9)


def test_priority_is_higher_for_a_lower_number():
    assert resolved({"priority": 2})[0].priority < resolved({"priority": 1})[0].priority < resolved()[0].priority


def test_ids_and_seeds_are_the_requests_own():
    requests = [resolved()[0] for _ in range(3)]
    assert {request.request_id for request in requests} == {"7"}
    assert len({request.uid for request in requests}) == 3
    assert len({request.seed for request in requests}) == 3
    assert resolved({"seed": 0})[0].seed == 0


def test_json_round_trip():
    request, _ = resolved(
        sampling={
            "stop": ["ü", "b"],
            "logit_bias": {"1": 2.0},
            "stop_token_ids": [4],
            "bad_words": ["x"],
            "seed": 2**64 - 1,
        },
        return_finish_reason=True,
        stream=True,
    )
    request = request.with_images((ImageSpan("ab", 3, 4),))
    assert ResolvedRequest.from_json(request.to_json()) == request


@pytest.mark.parametrize(
    ("field", "sent"),
    [
        ("temperature", "1" + "0" * 400),
        ("logit_bias", '{"5": 1' + "0" * 400 + "}"),
        ("stop", "[" * 5000),
        ("stop", '["\\ud800"]'),
        ("bad_words", '"\\ud800"'),
        ("embedding_bias_words", "5"),
        ("embedding_bias_weights", '"abc"'),
    ],
)
def test_json_that_python_chokes_on_is_refused_by_name(field, sent):
    with pytest.raises(InvalidArgument) as caught:
        resolved(text_input="x", sampling_parameters=f'{{"{field}": {sent}}}')
    assert str(caught.value).startswith(("INVALID_ARG: sampling_parameters:", f"INVALID_ARG: {field}:"))


def test_a_name_that_is_no_text_makes_a_message_that_is():
    with pytest.raises(InvalidArgument) as caught:
        resolved(sampling_parameters='{"\\ud800": 1}')
    assert str(caught.value).encode().startswith(rb"INVALID_ARG: \ud800: expected a known option")
