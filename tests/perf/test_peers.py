"""Peers behind stand-in programs: what they are asked, what is made of their answers."""

import json
from pathlib import Path

import pytest

from perf.peers import peer as peer_module
from perf.peers.llama import LlamaPeer
from perf.peers.peer import WORKS, PeerError, Timing, Work, WorkerPeer, in_rounds
from perf.peers.worker import turn

DECODE = WORKS["decode, 8 streams"]
PREFILL = WORKS["prefill 512"]


def program(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def worker(directory: Path, script: str) -> WorkerPeer:
    python = program(directory / "python", script)
    return WorkerPeer("fake", "memory", directory, python=python, log_path=directory / "log", num_threads=1)


# Answers with the number of tokens asked for, as seconds; CPU time twice that.
COUNTING = """
echo '{"ready": true}'
while read -r line; do
    n=${line##*num_tokens\\": }; n=${n%\\}}
    echo "{\\"seconds\\": $n, \\"cpu_seconds\\": $n$n}"
done
"""


def test_decoding_is_the_time_of_all_tokens_minus_that_of_the_first(tmp_path: Path):
    peer = worker(tmp_path, COUNTING)
    peer.start()
    assert peer.measure(DECODE) == Timing(65 - 1, 6565 - 11)
    assert peer.measure(PREFILL) == Timing(1, 11)
    assert peer.answer(["one", "two"], 7) == Timing(7, 77)
    peer.close()


def test_a_worker_that_ends_is_told_with_its_log(tmp_path: Path):
    peer = worker(tmp_path, "echo out of memory >&2")
    with pytest.raises(PeerError, match="fake: expected an answer, got the end of its process.*\nout of memory"):
        peer.start()
    peer.close()


def test_a_worker_that_does_not_answer_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(peer_module, "START_SECONDS", 0.05)
    peer = worker(tmp_path, "read -r line")
    with pytest.raises(PeerError, match="got none in 0 s"):
        peer.start()
    peer.close()


def test_llama_reports_its_own_seconds_with_the_flags_that_were_faster(tmp_path: Path):
    asked = tmp_path / "asked"
    slow, fast = (json.dumps({"t_pp": 2 * t, "t_tg": t}) for t in (1.5, 0.75))
    script = f"echo \"$@\" >>{asked}; echo loading; case \"$*\" in *off*) echo '{fast}';; *) echo '{slow}';; esac"
    peer = LlamaPeer("llama", program(tmp_path / "bench", script), asked, num_threads=2)
    assert peer.measure(DECODE).seconds == 1.5
    peer.warm_up(DECODE)
    peer.warm_up(WORKS["prefill 4096"])  # too long to be tried
    assert peer.measure(DECODE).seconds == 0.75
    assert peer.measure(PREFILL).seconds == 3.0
    lines = asked.read_text().splitlines()
    assert "-t 2 -tb 2 --output-format jsonl -npp 32 -ntg 64 -npl 8 -c 768" in lines[0]
    assert "-npp 512 -ntg 1 -npl 1 -c 513" in lines[-1]
    assert len(lines) == 1 + 2 + 1 + 1


def test_llama_that_fails_is_told(tmp_path: Path):
    peer = LlamaPeer("llama", program(tmp_path / "bench", "echo bad model >&2; exit 3"), tmp_path / "m", num_threads=1)
    with pytest.raises(PeerError, match="got code 3: bad model"):
        peer.measure(DECODE)
    with pytest.raises(PeerError, match="perf.peers.gguf"):
        peer.start()


def test_rounds_begin_with_another_peer_each_time():
    peers = list("abc")
    turns = in_rounds([PREFILL, DECODE], peers, num_rounds=4)
    firsts = [[peer for r, work, peer in turns if (r, work) == (i, DECODE)] for i in range(4)]
    assert firsts == [["a", "b", "c"], ["b", "c", "a"], ["c", "a", "b"], ["a", "b", "c"]]
    assert len(turns) == 4 * 2 * 3


@pytest.mark.parametrize(
    ("work", "tokens"), [(DECODE, 8 * 64), (PREFILL, 512), (Work("four", 4, 32, is_decode=True), 256)]
)
def test_tokens_that_a_rate_counts(work: Work, tokens: int):
    assert work.num_timed_tokens == tokens


def test_prompts_of_a_turn_are_random_or_given():
    seen = []

    def generate(prompts, num_tokens):
        seen.append((prompts, num_tokens))

    timing = turn(generate, {"num_streams": 3, "num_prompt_tokens": 5, "num_tokens": 9}, vocab_size=7)
    turn(generate, {"prompts": ["a text"], "num_tokens": 2}, vocab_size=7)
    (prompts, num_tokens), given = seen
    assert timing["seconds"] >= 0.0 and num_tokens == 9
    assert [len(prompt) for prompt in prompts] == [5, 5, 5] and all(0 <= t < 7 for p in prompts for t in p)
    assert given == (["a text"], 2)
