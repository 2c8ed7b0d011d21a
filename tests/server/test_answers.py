"""Text and image requests through the door `qwen35`, in the ways of the vLLM backend's clients and of Triton's own."""

import base64
import json
import queue
import time
import urllib.request

import pytest

from tests.server.clients import Stream, chat, generate, generate_stream, picture, send_vllm, vllm

GREEDY = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}
ALL_SWITCHES = {
    "return_finish_reason": True,
    "return_cumulative_logprob": True,
    "return_logprobs": True,
    "return_num_input_tokens": True,
    "return_num_output_tokens": True,
    "return_perf_metrics": True,
}


def test_a_text_chat_streams(server):
    answer = vllm(server, messages=chat("What is a list?"), sampling=GREEDY, stream=True)
    assert answer.error is None
    assert len(answer.responses) > 1
    assert answer.finals == [False] * (len(answer.finals) - 1) + [True]  # the last text has the flag, nothing follows
    assert all(answer.texts)


def test_streamed_text_equals_the_single_answer(server):
    streamed = vllm(server, "def f(x):", sampling=GREEDY, stream=True)
    single = vllm(server, "def f(x):", sampling=GREEDY, exclude_input_in_output=True)
    assert len(single.responses) == 1 and single.finals == [True]
    assert streamed.text == single.text


def test_the_prompt_is_repeated_unless_excluded(server):
    answer = vllm(server, "grüße", sampling=GREEDY)
    assert answer.text.startswith("grüße")
    assert answer.text.removeprefix("grüße") == vllm(server, "grüße", sampling=GREEDY, stream=True).text


def test_an_image_chat_streams(server):
    answer = vllm(
        server,
        messages=chat("Which colour?", picture("blue")),
        sampling=GREEDY,
        stream=True,
        return_num_input_tokens=True,
    )
    without = vllm(server, messages=chat("Which colour?"), sampling=GREEDY, stream=True, return_num_input_tokens=True)
    assert answer.error is None and answer.text
    assert answer.values("num_input_tokens")[0] > without.values("num_input_tokens")[0]


def test_images_count_and_matter(server):
    """Other pixels, other probabilities: what the image shows reaches the language model."""

    def logprob(*images):
        answer = vllm(
            server,
            messages=chat("Which colour?", *images),
            sampling={"temperature": 0, "max_tokens": 1},
            return_cumulative_logprob=True,
            return_num_input_tokens=True,
        )
        return answer.values("cumulative_logprob")[0], answer.values("num_input_tokens")[0]

    red, blue = picture("red"), picture("blue", size=(96, 64))
    one, other, two, swapped = logprob(red), logprob(picture("blue")), logprob(red, blue), logprob(blue, red)
    assert one[1] == other[1] < two[1] == swapped[1]
    assert len({one[0], other[0], two[0], swapped[0]}) == 4
    assert logprob(red) == one


def test_every_form_of_an_image_gives_the_same_answer(server):
    data = picture("green")
    forms = [data, base64.b64encode(data), "data:image/png;base64," + base64.b64encode(data).decode()]
    answers = {vllm(server, "What is this?", images=[form], sampling=GREEDY, stream=True).text for form in forms}
    assert len(answers) == 1
    marked = "<|vision_start|><|image_pad|><|vision_end|>What is this?"
    assert answers == {vllm(server, marked, images=[data], sampling=GREEDY, stream=True).text}


def test_options_mean_the_same_wherever_they_come_from(server):
    sampling = {"temperature": 0.8, "seed": 7, "top_p": 0.9, "max_tokens": 6, "ignore_eos": True}
    strings = {"temperature": "0.8", "random_seed": "7", "top_p": "0.9", "max_tokens": "6", "ignore_eos": "true"}
    reference = vllm(server, "Once", sampling=sampling, stream=True).text
    assert reference == vllm(server, "Once", sampling=strings, stream=True).text
    assert reference == vllm(server, "Once", parameters=strings, stream=True).text
    assert reference == vllm(server, "Once", parameters=sampling, stream=True).text
    _, body = generate(server, text_input="Once", exclude_input_in_output=True, **sampling)
    assert reference == body["text_output"]
    _, body = generate(server, text_input="Once", parameters={**sampling, "exclude_input_in_output": True})
    assert reference == body["text_output"]


def test_every_output_has_its_switch(server):
    bare = vllm(server, "Hello", sampling=GREEDY, stream=True)
    assert all(set(response) == {"text_output"} for response in bare.responses)
    answer = vllm(server, "Hello", sampling={**GREEDY, "logprobs": 2}, stream=True, **ALL_SWITCHES)
    assert answer.text == bare.text
    assert answer.values("finish_reason") == [b"None"] * (len(answer.responses) - 1) + [b"length"]
    assert sum(answer.values("num_output_tokens")) == 8
    assert len(set(answer.values("num_input_tokens"))) == 1
    cumulative = answer.values("cumulative_logprob")
    assert cumulative == sorted(cumulative, reverse=True) and cumulative[-1] < 0
    drafted, accepted = (answer.last[f"total_{kind}_tokens"][0] for kind in ("draft", "accepted_draft"))
    assert drafted > 0 and 0 <= accepted <= drafted
    assert answer.last["acceptance_rate"][0] == pytest.approx(accepted / drafted)
    times = [answer.last[f"{name}_time_ns"][0] for name in ("arrival", "first_scheduled", "first_token", "last_token")]
    assert times == sorted(times)


def test_logprobs(server):
    answer = vllm(
        server,
        "Hello",
        sampling={**GREEDY, "logprobs": 3},
        return_logprobs=True,
        return_cumulative_logprob=True,
        exclude_input_in_output=True,
    )
    positions = json.loads(answer.values("logprobs")[0])
    assert len(positions) == 8
    for position in positions:
        assert 3 <= len(position) <= 4
        assert [entry["rank"] for entry in position.values()].count(1) == 1
        assert all(token.isdecimal() and entry["logprob"] <= 0 for token, entry in position.items())
    first = [next(entry for entry in position.values() if entry["rank"] == 1) for position in positions]
    assert sum(entry["logprob"] for entry in first) == pytest.approx(answer.values("cumulative_logprob")[0], rel=1e-5)
    assert answer.text.isascii(), "no token of it is a part of a character: each one's text is its own"
    assert "".join(entry["decoded_token"] for entry in first) == answer.text != ""
    none = vllm(server, "Hello", sampling=GREEDY, return_logprobs=True)
    assert none.values("logprobs") == [b"null"]


def test_generate(server):
    status, body = generate(
        server, text_input="Hello", max_tokens=4, temperature=0, ignore_eos=True, return_finish_reason=True
    )
    assert (status, body["finish_reason"], body["model_name"]) == (200, "length", "qwen35")
    assert body["text_output"].startswith("Hello") and len(body["text_output"]) > len("Hello")


def test_generate_stream(server):
    options = {"text_input": "Hello", "max_tokens": 6, "temperature": 0, "ignore_eos": True}
    status, events = generate_stream(server, stream=True, **options)
    assert status == 200 and len(events) > 1
    _, body = generate(server, exclude_input_in_output=True, **options)
    assert "".join(event["text_output"] for event in events) == body["text_output"]
    status, events = generate_stream(server, **options)  # without stream: one event
    assert len(events) == 1


def test_tritons_own_keys_are_accepted(server):
    status, body = generate(
        server, text_input="Hello", max_tokens=2, id="4", priority=1, timeout=30_000_000, sequence_id=3
    )
    assert status == 200 and body["id"] == "4"


def test_stop_strings_end_the_text_before_them(server):
    whole = vllm(server, "Hello", sampling={**GREEDY, "max_tokens": 16}, stream=True).text
    stop = whole[len(whole) // 2 :][:3]
    answer = vllm(
        server, "Hello", sampling={**GREEDY, "max_tokens": 16, "stop": stop}, stream=True, return_finish_reason=True
    )
    assert answer.text == whole[: whole.index(stop)]
    assert answer.values("finish_reason")[-1] == b"stop"


@pytest.mark.parametrize("stream", [True, False])
def test_the_last_text_is_itself_the_final_response(server, stream):
    """Whether the client asks for an empty final response or not, none comes behind it."""
    answers = []
    for options in ({}, {"enable_empty_final_response": True}):
        with Stream(server) as connection:
            send_vllm(connection, "Hello", sampling=GREEDY, options=options, stream=stream)
            answers.append(connection.collect())
            with pytest.raises(queue.Empty):
                connection.next(timeout=0.5)
    for answer in answers:
        assert answer.error is None and "" not in answer.texts
        assert answer.finals == [False] * (len(answer.texts) - 1) + [True]
    assert answers[0].text == answers[1].text and (len(answers[0].texts) > 1) == stream


def test_metrics_tell_what_was_delivered(server):
    def counter(name):
        with urllib.request.urlopen(server.metrics_url) as page:
            lines = page.read().decode().splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(f"qwen35_{name}{{"))

    names = ("output_tokens_total", "requests_total", "time_to_first_token_seconds_count")
    time.sleep(1.2)  # for what earlier tests have left untold
    before = [counter(name) for name in names]
    vllm(server, "Hello", sampling=GREEDY, stream=True)
    deadline = time.monotonic() + 5.0  # they are told once a second
    while counter("requests_total") == before[1]:
        assert time.monotonic() < deadline
    assert [counter(name) - then for name, then in zip(names, before, strict=True)] == [8, 1, 1]
