"""Requests through the door `ensemble`, in the way of TensorRT-LLM's clients: typed inputs of shape [1, n]."""

import io

import numpy as np
import pytest
from PIL import Image

from tests.server.clients import data_uri, generate, generate_stream, picture, trtllm, vllm

PERFORMANCE = (
    *("kv_cache_alloc_new_blocks", "kv_cache_reused_blocks", "kv_cache_alloc_total_blocks"),
    *("arrival_time_ns", "first_scheduled_time_ns", "first_token_time_ns", "last_token_time_ns"),
    *("acceptance_rate", "total_accepted_draft_tokens", "total_draft_tokens"),
)
# What TensorRT-LLM's own end-to-end client sends with every request.
USUAL = {"beam_width": 1, "num_return_sequences": 1, "pad_id": 0, "length_penalty": 1.0, "repetition_penalty": 1.0}


def test_both_doors_give_the_same_text(server):
    typed = trtllm(server, "Hello", max_tokens=8, temperature=0.0, stream=True, **USUAL)
    plain = vllm(server, "Hello", sampling={"max_tokens": 8, "temperature": 0}, stream=True)
    assert typed.error is None and len(typed.responses) > 1
    assert typed.text == plain.text
    sampled = {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "seed": 11}
    typed = trtllm(server, "Hello", max_tokens=8, **sampled, exclude_input_in_output=True)
    plain = vllm(server, "Hello", sampling={"max_tokens": 8, **sampled}, exclude_input_in_output=True)
    assert typed.text == plain.text


def test_without_sampling_options_it_decodes_greedily(server):
    greedy = trtllm(server, "Hello", max_tokens=8, temperature=0.0).text
    assert trtllm(server, "Hello", max_tokens=8).text == greedy
    assert trtllm(server, "Hello", max_tokens=8, top_k=0, top_p=0.0).text == greedy


def test_outputs_that_its_clients_ask_for(server):
    answer = trtllm(
        server,
        "Hello",
        outputs=("text_output", "cum_log_probs", "output_log_probs", "sequence_index", "batch_index", *PERFORMANCE),
        max_tokens=8,
        end_id=-1,
        return_log_probs=True,
        return_perf_metrics=True,
        **USUAL,
    )
    outputs = answer.last
    assert outputs["text_output"].shape == (1,)
    assert outputs["sequence_index"].tolist() == outputs["batch_index"].tolist() == [[0]]
    assert outputs["output_log_probs"].shape == (1, 8)
    assert outputs["cum_log_probs"][0] == pytest.approx(outputs["output_log_probs"].sum(), rel=1e-5)
    assert all(outputs[name].shape == (1,) for name in PERFORMANCE)
    total, new, reused = (
        outputs[f"kv_cache_{name}"][0] for name in ("alloc_total_blocks", "alloc_new_blocks", "reused_blocks")
    )
    assert total == new + reused > 0


def test_optional_outputs_are_absent_without_their_switch(server):
    assert set(trtllm(server, "Hello", max_tokens=2).last) == {"text_output", "sequence_index", "batch_index"}


def test_stop_words_and_end_id(server):
    whole = trtllm(server, "Hello", max_tokens=12, end_id=-1, exclude_input_in_output=True).text
    stop = whole[len(whole) // 2 :][:3]
    stopped = trtllm(server, "Hello", max_tokens=12, end_id=-1, exclude_input_in_output=True, stop_words=["\0no", stop])
    assert stopped.text == whole[: whole.index(stop)]


def test_images_as_pixels_and_as_data_uris(server):
    data = picture("blue")
    pixels = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
    reference = vllm(server, "What?", images=[data], sampling={"max_tokens": 6, "temperature": 0}, stream=True).text
    options = {"max_tokens": 6, "temperature": 0.0, "stream": True}
    assert trtllm(server, "What?", image_bytes_input=pixels[None, None], **options).text == reference
    assert trtllm(server, "What?", image_url_input=[data_uri(data)], **options).text == reference


def test_generate_endpoints(server):
    body = {"text_input": "Hello", "max_tokens": 6, "bad_words": "", "stop_words": "", "end_id": -1}
    status, answer = generate(server, "ensemble", **{**body, "bad_words": ["zzz"], "stop_words": ["\0no"]})
    assert status == 200 and answer["text_output"].startswith("Hello")
    status, events = generate_stream(
        server, "ensemble", text_input="Hello", max_tokens=6, end_id=-1, stream=True, exclude_input_in_output=True
    )
    assert status == 200 and "Hello" + "".join(event["text_output"] for event in events) == answer["text_output"]


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"beam_width": 2}, "UNSUPPORTED: beam_width: expected 1"),
        ({"num_return_sequences": 0}, "INVALID_ARG: n: expected a value from 1"),
        ({"guided_decoding_guide_type": "regex"}, "INVALID_ARG: guided_decoding_guide: expected a guide of type regex"),
        ({"lora_task_id": 3}, "UNSUPPORTED: lora_task_id"),
        ({"embedding_bias_words": ["a"]}, "UNSUPPORTED: embedding_bias_words"),
        ({"return_context_logits": True}, "UNSUPPORTED: return_context_logits"),
        ({"image_url_input": ["http://example.org/a.png"]}, "UNSUPPORTED: image_url_input[0]"),
        ({"max_tokens": 0}, "INVALID_ARG: max_tokens"),
    ],
)
def test_what_is_not_done_here_is_refused_by_name(server, option, message):
    answer = trtllm(server, "Hello", **{"max_tokens": 2, **option})
    assert answer.error.startswith(message), answer.error
    assert answer.responses == []
