"""The adapter of the llm over a fake Triton: a real engine on a tiny checkpoint, a real manager behind the calls."""

import json
import time

import numpy as np
import pytest
import torch

from qwen35.config import ModelConfig
from qwen35.serving.options import RawRequest, resolve
from qwen35.serving.process import settings_of
from qwen35.serving.shared_state import contents_of
from qwen35.state.arena import Arena
from qwen35.state.geometry import Geometry
from qwen35.state.manager import Manager
from qwen35.state.operations import Operations
from tests.serving import fake_triton
from tests.serving.fake_triton import Request, load_model, model_args, text
from tests.tiny_checkpoint import make_tiny_checkpoint

WAIT = 20.0
OUTPUTS = ("text_output", "finish_reason", "num_output_tokens", "error")


class Llm:
    """The model, and the state manager that its calls reach."""

    def __init__(self, model, operations, manager):
        self.model, self.operations, self.manager = model, operations, manager

    def request(self, token_ids=(65, 66, 67), lease=None, client_id="", options=None, **inputs):
        inputs = {"text_input": "x", "stream": True, "return_finish_reason": True, **inputs}
        raw = RawRequest({k: v for k, v in inputs.items() if v is not None}, options or {}, client_id)
        resolved, _ = resolve(raw, request_timeout_seconds=60)
        lease = self.operations.run("open", json.loads(resolved.to_json())) if lease is None else lease
        num_tokens = len(token_ids)
        request = Request(
            {
                "request": text(resolved.to_json()),
                "token_ids": np.array(token_ids, np.int32),
                "positions": np.arange(num_tokens, dtype=np.int32)[None].repeat(3, 0),
                "embeds": torch.zeros(0, 64, dtype=torch.bfloat16),
                "lease": text(json.dumps(lease)),
            }
        )
        request.requested = OUTPUTS
        return request

    def run(self, request):
        assert self.model.execute([request]) is None
        assert request.sender.done.wait(WAIT)
        return request.sender.responses

    def wait_until_idle(self):
        deadline = time.monotonic() + WAIT
        while (stats := self.manager.stats()).num_claimed_leases or stats.num_open_leases or stats.num_used_slots:
            assert time.monotonic() < deadline, stats
            time.sleep(0.01)


@pytest.fixture
def llm(monkeypatch, tmp_path):
    make_tiny_checkpoint(tmp_path / "checkpoint")
    settings = {
        "checkpoint": tmp_path / "checkpoint",
        "device": "cpu",
        "kv_cache_bytes": 1 << 20,
        "num_slots": 4,
        "heartbeat_seconds": 0.05,
        "arena_name": f"test-{time.monotonic_ns()}",
        "session_directory": tmp_path / "sessions",
    }
    args = model_args("llm", **settings) | {"model_instance_name": "llm_0", "model_name": "llm"}
    resolved = settings_of(args)
    geometry = Geometry.derive(ModelConfig.from_directory(resolved.checkpoint), resolved)
    arena = Arena.open(resolved.arena_name, geometry, contents_of(resolved))
    manager = Manager(arena, unclaimed_lease_seconds=60.0)
    operations = Operations(manager)
    monkeypatch.setattr(fake_triton.InferenceRequest, "answer", staticmethod(operations.run))
    model = load_model(monkeypatch, "llm").TritonPythonModel()
    model.initialize(args)
    yield Llm(model, operations, manager)
    model.finalize()
    manager.reap()
    stats = manager.stats()
    manager.check_integrity()
    assert (stats.blocks.held, stats.slots.held, stats.prefix.num_pins, stats.num_dead_holders) == (0, 0, 0, 0)
    assert arena.close(), "the model must have let go of the arena"


def texts_of(responses):
    return [response.outputs["text_output"].as_numpy()[0].decode() for response in responses]


def test_the_models_agree_on_what_the_arena_holds():
    configs = [json.loads(model_args(name)["model_config"])["parameters"] for name in ("llm", "state_manager")]
    names = configs[0].keys() & configs[1].keys()
    assert {"checkpoint", "num_slots", "num_checkpoints", "kernels", "activations", "num_threads"} <= names
    assert [configs[0][name] for name in names] == [configs[1][name] for name in names]
    resolved = [settings_of(model_args(name)) for name in ("llm", "state_manager")]
    assert contents_of(resolved[0]) == contents_of(resolved[1])


def test_a_stream_and_its_single_answer(llm):
    options = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}
    streamed = llm.run(llm.request(options=options))
    (single,) = llm.run(llm.request(options=options, stream=False, exclude_input_in_output=True))
    assert len(streamed) > 1
    assert "".join(texts_of(streamed)) == texts_of([single])[0]
    assert single.outputs["finish_reason"].as_numpy().tolist() == [b"length"]
    llm.wait_until_idle()


def test_what_is_no_lease_or_no_request_is_refused(llm):
    request = llm.request(lease={"row": 1})
    assert str(llm.run(request)[0].failure).startswith("INVALID_ARG: lease: expected a lease")
    request = llm.request()
    request._inputs[0] = fake_triton.Tensor("request", text("{}"))
    assert str(llm.run(request)[0].failure).startswith("INVALID_ARG: request: expected a request")
    llm.wait_until_idle()  # the lease of the second one has been closed


def test_a_lease_that_does_not_exist_is_refused(llm):
    for lease in ({"row": 3, "generation": 99}, {"row": 10**6, "generation": 1}, {"row": -1, "generation": 0}):
        (response,) = llm.run(llm.request(lease=lease))
        assert str(response.failure).startswith("UNAVAILABLE: lease: expected a live one")


def test_a_cancel_by_id_ends_the_stream(llm):
    request = llm.request(client_id="mine", options={"max_tokens": 400, "ignore_eos": True})
    llm.model.execute([request])
    while not request.sender.responses:
        time.sleep(0.01)
    assert llm.operations.run("cancel", {"request_id": "mine"}) == {"cancelled": 1}
    assert request.sender.done.wait(WAIT)
    last = request.sender.responses[-1]
    assert last.outputs["error"].as_numpy()[0] == b"CANCELLED: Request was cancelled"
    llm.wait_until_idle()


def test_what_the_engine_refuses_is_an_error(llm):
    (response,) = llm.run(llm.request(token_ids=[10**6]))
    assert str(response.failure).startswith("INVALID_ARG: token_ids: expected")
    llm.wait_until_idle()


def test_a_manager_that_does_not_answer_is_asked_again(llm, monkeypatch):
    failures = [RuntimeError("being reloaded")] * 3
    run = llm.operations.run

    def answer(operation, message):
        if operation == "claim" and failures:
            raise failures.pop()
        return run(operation, message)

    monkeypatch.setattr(fake_triton.InferenceRequest, "answer", staticmethod(answer))
    responses = llm.run(llm.request(options={"max_tokens": 2, "ignore_eos": True}))
    assert responses[-1].failure is None and failures == []
    llm.wait_until_idle()


def test_many_requests_share_few_slots(llm):
    requests = [llm.request(options={"max_tokens": 3, "ignore_eos": True}) for _ in range(20)]
    llm.model.execute(requests)
    for request in requests:
        assert request.sender.done.wait(WAIT)
        assert request.sender.num_finals == 1 and request.sender.responses[-1].failure is None
    llm.wait_until_idle()


def test_a_saved_text_goes_on_and_a_prompt_begins_with_it(llm, tmp_path):
    options = {"temperature": 0.8, "seed": 3, "ignore_eos": True, "bad_words": "</think>"}
    whole = "".join(texts_of(llm.run(llm.request(options={**options, "max_tokens": 12}))))
    first = llm.run(llm.request(options={**options, "max_tokens": 5, "save_session": "it"}))
    assert [path.name for path in (tmp_path / "sessions").iterdir()] == ["it"]
    going_on = llm.request((), text_input=None, options={"restore_session": "it", "max_tokens": 7})
    rest = llm.run(going_on)
    assert rest[-1].failure is None, rest[-1].failure
    assert "".join(texts_of(first) + texts_of(rest)) == whole
    token_ids = llm.model._sessions.load("it").token_ids
    turn = {**options, "max_tokens": 6}
    plain = texts_of(llm.run(llm.request((*token_ids, 66, 67), options=turn)))
    restored = texts_of(llm.run(llm.request((*token_ids, 66, 67), options={**turn, "restore_session": "it"})))
    assert "".join(restored) == "".join(plain)
    (refused,) = llm.run(llm.request((1, 2, 3, 4, 5, 6, 7, 8, 9), options={"restore_session": "it"}))
    assert "restore_session: expected a prompt that begins with the 7 tokens" in str(refused.failure)
    (unknown,) = llm.run(llm.request((), text_input=None, options={"restore_session": "other"}))
    assert "restore_session: expected the name of a saved session, got 'other'" in str(unknown.failure)
    llm.wait_until_idle()
