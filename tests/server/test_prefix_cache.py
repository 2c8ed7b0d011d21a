"""The prefix cache of a live server: second turns, and a killed llm that comes back to it."""

import json
import os
import signal
import time
import urllib.request

from build.server import Server
from tests.server.clients import generate, idle_stats, stats, vllm

GREEDY = {"max_tokens": 12, "temperature": 0}
SYSTEM = "You answer questions about Python in one short sentence and never ask one yourself."
SETTINGS = {"kv_cache_bytes": str(16 << 20), "num_slots": "4", "heartbeat_seconds": "0.3", "block_tokens": "8"}


def ask(server: Server, *messages: tuple[str, str]):
    conversation = [{"role": role, "content": content} for role, content in messages]
    answer = vllm(
        server,
        sampling=GREEDY,
        messages=json.dumps(conversation),
        stream=True,
        return_perf_metrics=True,
        return_num_input_tokens=True,
    )
    assert answer.error is None
    return answer


def counter(server: Server, name: str) -> float:
    with urllib.request.urlopen(server.metrics_url) as page:
        lines = page.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(f"qwen35_{name}{{"))


def wait_for(condition, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def num_hit_tokens(server: Server) -> int:
    return stats(server)["prefix"]["num_hit_tokens"]


def reused_blocks(answer) -> int:
    return int(answer.last["kv_cache_reused_blocks"][0])


def test_turns_hit_and_the_cache_survives_a_killed_llm(server_factory):
    server = server_factory(settings=SETTINGS)
    turns = [("system", SYSTEM), ("user", "What is a list?")]
    first = ask(server, *turns)
    num_tokens = int(first.last["num_input_tokens"][0])
    assert (reused_blocks(first), num_hit_tokens(server)) == (0, 0)

    again = ask(server, *turns)
    assert again.text == first.text and num_hit_tokens(server) == num_tokens
    assert reused_blocks(again) == num_tokens // 8

    before = num_hit_tokens(server)
    second = ask(server, *turns, ("assistant", first.text), ("user", "And a dictionary?"))
    assert num_tokens - 8 < num_hit_tokens(server) - before < int(second.last["num_input_tokens"][0])
    assert reused_blocks(second) == (num_hit_tokens(server) - before) // 8
    wait_for(lambda: counter(server, "cached_tokens_total") == num_hit_tokens(server), 5.0)
    assert counter(server, "checkpoints_total") > 3
    idle_stats(server)

    [holder] = [holder for holder in stats(server)["holders"] if not holder["is_done"]]
    time.sleep(0.05)  # not amid an exchange of messages with the server
    os.kill(holder["pid"], signal.SIGKILL)

    def answers() -> bool:
        try:
            status, body = generate(server, text_input="x", max_tokens=1, timeout=5.0)
        except OSError:
            return False
        return status == 200 and "error" not in body

    wait_for(answers)
    before = num_hit_tokens(server)
    warm = ask(server, *turns)
    assert warm.text == first.text and num_hit_tokens(server) - before == num_tokens
    idle_stats(server)
    server.stop()  # a model whose stub was killed never unloads in this version of the server
