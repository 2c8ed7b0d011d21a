"""Several requests at a time: side by side, each as if it were alone."""

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from tests.server.clients import Stream, chat, idle_stats, picture, send_vllm, stats, texts, vllm

PROMPTS = ("Hello", "The", "def f(x):", "import os", "1 + 1 =", "Once", "A list", "class")


def ask(server, index):
    """A different kind of request for each index: greedy, sampled, with an image, short and long."""
    sampling = {"max_tokens": 6 + 2 * index, "ignore_eos": True, "seed": index, "temperature": 0.8 * (index % 2)}
    if index % 4 == 3:
        return vllm(server, messages=chat(PROMPTS[index], picture("red")), sampling=sampling, stream=True)
    return vllm(server, PROMPTS[index], sampling=sampling, stream=True)


def test_eight_streams_equal_their_solo_runs(server):
    solo = [ask(server, index) for index in range(8)]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda index: ask(server, index), range(8)))
    assert [answer.error for answer in together] == [None] * 8
    assert [answer.text for answer in together] == [answer.text for answer in solo]
    idle_stats(server)


def test_the_second_request_starts_before_the_first_ends(server):
    with Stream(server) as first, Stream(server) as second:
        send_vllm(first, "Hello", {"max_tokens": 150, "ignore_eos": True}, stream=True)
        assert first.next()[3] is None
        send_vllm(second, "Hello", {"max_tokens": 2, "ignore_eos": True}, stream=True)
        second.collect()
        done = time.monotonic()
        rest = first.collect()
        assert rest.error is None and len(rest.responses) > 1
        assert first.sent + rest.seconds[-1] > done


def test_text_is_not_held_up_by_an_image_in_front(server):
    """At the encoder, where it is decided: the image was there first, the text is answered first."""
    image = {"text_input": texts("x"), "image": texts(picture("olive", (2048, 2048)))}
    with Stream(server) as front, Stream(server) as behind:
        front.send("vision_encoder", image, outputs=("token_ids",))
        time.sleep(0.02)
        behind.send("vision_encoder", {"text_input": texts("y")}, outputs=("token_ids",))
        text_seconds, _, _, text_error = behind.next()
        image_seconds, _, _, image_error = front.next()
        assert text_error is None and image_error is None
        assert behind.sent + text_seconds < front.sent + image_seconds


def test_a_request_of_many_chunks_is_answered(server):
    """A prompt beyond one step's token budget, in company."""
    with ThreadPoolExecutor(2) as pool:
        sampling = {"max_tokens": 3, "ignore_eos": True, "temperature": 0}
        long = pool.submit(vllm, server, "word " * 300, sampling=sampling, stream=True, return_num_input_tokens=True)
        short = pool.submit(vllm, server, "Hello", sampling=sampling, stream=True)
        assert short.result().error is None
        assert long.result().values("num_input_tokens")[0] >= 300


def test_nothing_is_left_after_all_that(server):
    after = idle_stats(server)
    assert after["num_expired_leases"] == 0
    assert np.isclose(after["holders"][0]["num_used_blocks"], 0)
    assert stats(server)["num_reclaimed_extents"] == 0
