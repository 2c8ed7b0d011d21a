"""Texts kept in files by one server go on at the next."""

import numpy as np

from tests.server.clients import Stream, chat, picture, texts, vllm

OPTIONS = {"temperature": 0.8, "seed": 11, "ignore_eos": True}


def test_a_text_goes_on_at_a_server_that_was_started_anew(server_factory, tmp_path):
    settings = {"session_directory": str(tmp_path / "sessions")}
    first = server_factory(settings=settings)
    question = chat("What do you see?", picture("green"))
    whole = vllm(first, messages=question, sampling={**OPTIONS, "max_tokens": 14}, stream=True)
    begun = vllm(first, messages=question, sampling={**OPTIONS, "max_tokens": 6, "save_session": "it"}, stream=True)
    raw = {**OPTIONS, "max_tokens": 6, "save_session": "raw"}
    story = vllm(first, "A list is", sampling=raw, stream=True).text
    plain = vllm(first, f"A list is{story} and", sampling={**OPTIONS, "max_tokens": 8}, stream=True).text
    assert first.stop().is_clean
    second = server_factory(settings=settings)
    rest = vllm(second, sampling={"restore_session": "it", "max_tokens": 8}, stream=True, return_num_output_tokens=True)
    assert rest.error is None and begun.text + rest.text == whole.text
    assert sum(rest.values("num_output_tokens")) == 8
    again = vllm(second, parameters={"restore_session": "it", "max_tokens": 8, "save_session": "it"}, stream=True)
    assert again.text == rest.text
    restored = {**OPTIONS, "max_tokens": 8, "restore_session": "raw"}
    turn = vllm(second, f"A list is{story} and", sampling=restored, stream=True)
    if turn.error is None:  # else the story's tokens are not those that a tokenizer makes of its text
        assert turn.text == plain
    else:
        assert "restore_session: expected a prompt that begins with the" in turn.error
    other = vllm(second, "Something else", sampling=restored, stream=True)
    assert other.error.startswith("INVALID_ARG: restore_session: expected a prompt")
    assert sorted(path.name for path in (tmp_path / "sessions").iterdir()) == ["it", "raw"]


def test_without_a_directory_sessions_are_refused(server):
    for field in ("save_session", "restore_session"):
        refused = vllm(server, "Hello", sampling={field: "it"})
        assert refused.error.startswith(f"UNSUPPORTED: {field}: expected it to be left out"), refused.error
        with Stream(server) as connection:
            inputs = {"text_input": texts("Hello")[None], "max_tokens": np.array([[2]], np.int32)}
            connection.send("ensemble", inputs, parameters={field: "it"})
            assert connection.collect().error.startswith(f"UNSUPPORTED: {field}")
    assert vllm(server, "Hello", sampling={"save_session": "../x"}).error.startswith("INVALID_ARG: save_session")
