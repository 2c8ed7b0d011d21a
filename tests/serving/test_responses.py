import json
from dataclasses import replace

import numpy as np
import pytest

from qwen35.engine.request import Emission, TokenLogprob, Usage
from qwen35.errors import Cancelled, InternalError
from qwen35.serving.options import RawRequest, resolve
from qwen35.serving.responses import _TYPES, ResponseBuilder

TIMES = {"arrival": 1, "first_scheduled": 2, "first_token": 3, "last_token": 4}
VLLM = set(_TYPES) - {"cum_log_probs", "output_log_probs", "sequence_index", "batch_index"}
SWITCHES = {
    "return_finish_reason": ("finish_reason",),
    "return_cumulative_logprob": ("cumulative_logprob",),
    "return_logprobs": ("logprobs",),
    "return_num_input_tokens": ("num_input_tokens",),
    "return_num_output_tokens": ("num_output_tokens",),
    "return_perf_metrics": (
        *("acceptance_rate", "total_accepted_draft_tokens", "total_draft_tokens"),
        *("kv_cache_alloc_new_blocks", "kv_cache_reused_blocks", "kv_cache_alloc_total_blocks"),
        *("arrival_time_ns", "first_scheduled_time_ns", "first_token_time_ns", "last_token_time_ns"),
    ),
    "return_log_probs": ("cum_log_probs", "output_log_probs"),
}


def builder(requested=frozenset(_TYPES), **inputs):
    request, _ = resolve(RawRequest({"text_input": "Prompt ", **inputs}, {}), request_timeout_seconds=600)
    return ResponseBuilder(request, requested, lambda token: f"<{token}>", block_tokens=16)


def emission(text="", tokens=(), total=0, finish=None, error=None, logprobs=(), cumulative=0.0):
    usage = Usage(20, total, num_draft_tokens=8, num_accepted_draft_tokens=6, num_cached_tokens=16)
    return Emission(1, usage, tuple(tokens), text, tuple(logprobs), cumulative, finish, error, TIMES)


STEPS = (
    emission("a", [1], 1),
    emission("", [2], 2),  # an unfinished character
    emission("bc", [3, 4], 4),
    emission("d", [5], 5, finish="stop"),
)


def run(made, steps=STEPS):
    return [response for step in steps if (response := made.push(step)) is not None]


def test_streaming_gives_new_text_only_and_waits_for_text():
    responses = run(builder(stream=True, return_num_output_tokens=True, return_finish_reason=True))
    assert [r.outputs["text_output"].tolist() for r in responses] == [["a"], ["bc"], ["d"]]
    assert [r.outputs["num_output_tokens"].tolist() for r in responses] == [[1], [3], [1]]
    assert [r.outputs["finish_reason"].tolist() for r in responses] == [["None"], ["None"], ["stop"]]
    assert [r.is_final for r in responses] == [False, False, True]


def test_not_streaming_gives_one_response_with_the_prompt_before_it():
    (response,) = run(builder(return_num_output_tokens=True))
    assert response.outputs["text_output"].tolist() == ["Prompt abcd"]
    assert response.outputs["num_output_tokens"].tolist() == [5]
    assert response.is_final
    (response,) = run(builder(exclude_input_in_output=True))
    assert response.outputs["text_output"].tolist() == ["abcd"]


def test_streamed_text_equals_the_single_answer():
    streamed = run(builder(stream=True))
    (single,) = run(builder(exclude_input_in_output=True))
    assert "".join(r.outputs["text_output"][0] for r in streamed) == single.outputs["text_output"][0]


@pytest.mark.parametrize("switch", SWITCHES)
def test_an_output_appears_only_with_its_switch(switch):
    always = {"text_output", "sequence_index", "batch_index"}
    (response,) = run(builder(**{switch: True}))
    assert set(response.outputs) == always | set(SWITCHES[switch])
    (response,) = run(builder())
    assert set(response.outputs) == always


def test_outputs_that_nobody_reads_are_left_out():
    (response,) = run(builder(requested=VLLM, return_log_probs=True))
    assert set(response.outputs) == {"text_output"}


def test_types_and_shapes():
    logprobs = [(TokenLogprob(1, -0.5, 1),), (TokenLogprob(2, -0.25, 2),)]
    made = builder(**dict.fromkeys(SWITCHES, True))
    (response,) = run(made, [emission("ab", [1, 2], 2, finish="length", logprobs=logprobs, cumulative=-0.75)])
    shapes = {name: array.shape for name, array in response.outputs.items()}
    assert shapes.pop("output_log_probs") == (1, 2)
    assert (shapes.pop("sequence_index"), shapes.pop("batch_index")) == ((1, 1), (1, 1))
    assert set(shapes.values()) == {(1,)}
    assert {name: array.dtype.type for name, array in response.outputs.items()} == {
        name: np.dtype(kind).type for name, kind in _TYPES.items() if name not in ("error", "prompt_logprobs")
    }


def test_speculation_and_block_counts():
    (response,) = run(builder(return_perf_metrics=True))
    values = {name: array.tolist()[0] for name, array in response.outputs.items()}
    assert values["acceptance_rate"] == 0.75
    assert (values["total_accepted_draft_tokens"], values["total_draft_tokens"]) == (6, 8)
    assert values["kv_cache_alloc_total_blocks"] == 2  # 25 tokens in blocks of 16
    assert (values["kv_cache_reused_blocks"], values["kv_cache_alloc_new_blocks"]) == (1, 1)
    assert (values["arrival_time_ns"], values["last_token_time_ns"]) == (1, 4)


def test_perf_metrics_come_with_the_last_response_only():
    responses = run(builder(stream=True, return_perf_metrics=True))
    assert ["acceptance_rate" in r.outputs for r in responses] == [False, False, True]


def test_logprobs_json():
    position = (TokenLogprob(7, -1.5, 2), TokenLogprob(3, -0.5, 1))
    made = builder(sampling_parameters='{"logprobs": 1}', return_logprobs=True)
    (response,) = run(made, [emission("x", [7], 1, finish="stop", logprobs=[position])])
    assert json.loads(response.outputs["logprobs"][0]) == [
        {
            "7": {"logprob": -1.5, "rank": 2, "decoded_token": "<7>"},
            "3": {"logprob": -0.5, "rank": 1, "decoded_token": "<3>"},
        }
    ]


def test_logprobs_are_null_when_the_sampling_parameters_ask_for_none():
    position = (TokenLogprob(7, -1.5, 2),)
    made = builder(return_cumulative_logprob=True, return_logprobs=True)
    (response,) = run(made, [emission("x", [7], 1, finish="stop", logprobs=[position], cumulative=-1.5)])
    assert response.outputs["logprobs"].tolist() == ["null"]
    assert response.outputs["cumulative_logprob"].tolist() == [-1.5]


@pytest.mark.parametrize("stream", [True, False])
def test_an_error_before_the_first_response_is_a_triton_error(stream):
    steps = [emission(error=Cancelled())] if stream else [STEPS[0], emission(error=Cancelled())]
    (response,) = run(builder(stream=stream), steps)
    assert str(response.error) == "CANCELLED: Request was cancelled"
    assert response.is_final and not response.outputs


def test_an_error_after_the_first_response_is_an_output():
    responses = run(builder(stream=True), [STEPS[0], STEPS[1], emission(error=InternalError("engine: it stopped"))])
    assert [r.is_final for r in responses] == [False, True]
    assert responses[1].error is None
    assert responses[1].outputs["error"].tolist() == ["INTERNAL: engine: it stopped"]
    assert responses[1].outputs["text_output"].tolist() == [""]


def of_sample(index, *arguments, **options):
    return replace(emission(*arguments, **options), sample_index=index)


SAMPLES = (
    of_sample(0, "a", [1], 1),
    of_sample(1, "x", [6], 1),
    of_sample(1, "y", [7], 2, finish="length"),
    of_sample(0, "b", [2], 2, finish="stop"),
)


def test_samples_are_elements_at_the_door_of_vllm():
    switches = {"return_finish_reason": True, "return_num_output_tokens": True, "return_num_input_tokens": True}
    made = builder(VLLM, sampling_parameters='{"n": 2}', **switches)
    (response,) = run(made, SAMPLES)
    assert response.outputs["text_output"].tolist() == ["Prompt ab", "Prompt xy"]
    assert response.outputs["finish_reason"].tolist() == ["stop", "length"]
    assert response.outputs["num_output_tokens"].tolist() == [2, 2]
    assert response.outputs["num_input_tokens"].tolist() == [20]
    assert response.is_final
    assert (made.delivered.num_input_tokens, made.delivered.num_output_tokens) == (20, 4)


def test_a_stream_of_samples_at_the_door_of_vllm():
    made = builder(VLLM, sampling_parameters='{"n": 2}', stream=True, return_finish_reason=True)
    responses = run(made, SAMPLES)
    texts = [response.outputs["text_output"].tolist() for response in responses]
    assert texts == [["a", ""], ["", "x"], ["", "y"], ["b", ""]]
    reasons = [response.outputs["finish_reason"].tolist() for response in responses]
    assert reasons == [["None", "None"], ["None", "None"], ["None", "length"], ["stop", "length"]]
    assert [response.is_final for response in responses] == [False, False, False, True]


@pytest.mark.parametrize("stream", [False, True])
def test_samples_have_responses_of_their_own_at_the_typed_door(stream):
    made = builder(n=2, stream=stream, exclude_input_in_output=True, return_log_probs=True)
    texts = ["", ""]
    responses = run(made, SAMPLES)
    for response in responses:
        texts[response.outputs["sequence_index"][0, 0]] += response.outputs["text_output"][0]
        assert response.outputs["text_output"].shape == (1,)
    assert texts == ["ab", "xy"]
    assert len(responses) == (4 if stream else 2)
    assert [response.is_final for response in responses] == [False] * (len(responses) - 1) + [True]


def test_an_error_of_one_sample_is_the_end():
    made = builder(VLLM, sampling_parameters='{"n": 2}', stream=True)
    responses = run(made, [*SAMPLES[:3], of_sample(0, error=InternalError("engine: it stopped"))])
    assert responses[-1].is_final and responses[-1].outputs["error"].tolist() == ["INTERNAL: engine: it stopped"]
    assert made.delivered.num_output_tokens == 3


def test_logprobs_of_the_prompt_come_with_the_first_response():
    entry = (TokenLogprob(7, -1.5, 2),)
    steps = [replace(STEPS[0], prompt_logprobs=(entry, entry)), *STEPS[1:]]
    shown = {"7": {"logprob": -1.5, "rank": 2, "decoded_token": "<7>"}}
    for stream in (True, False):
        first, *others = run(builder(stream=stream, sampling_parameters='{"prompt_logprobs": 0}'), steps)
        assert json.loads(first.outputs["prompt_logprobs"][0]) == [None, shown, shown]
        assert all("prompt_logprobs" not in response.outputs for response in others)
    assert all("prompt_logprobs" not in response.outputs for response in run(builder(stream=True)))
