"""`make demo` and our client, as people start them, against the real server."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from build.backends import ROOT
from build.demo_run import IMAGE_QUESTION, TEXT_QUESTION, draw_figure
from build.processes import shared_memory_with_prefix
from build.server import Ports, Server
from qwen35.client import Client
from qwen35.errors import InvalidArgument

CHAT = {"stream": True, "max_tokens": 48, "temperature": 0.0, "chat_template_kwargs": {"enable_thinking": False}}


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=240)


def test_demo_answers_and_leaves_nothing(nvfp4_checkpoint: Path, tmp_path: Path):
    """The second run of `make demo`: the checkpoint is quantised already. Another server may be running."""
    ports = Ports.free()
    options = ["--http-port", str(ports.http), "--grpc-port", str(ports.grpc), "--metrics-port", str(ports.metrics)]
    finished = run("build.demo_run", *options)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    answers = re.findall(r"^> (.*)\n(.+)\n\[.* (\d+) new tokens, .* tokens/s.*\]$", finished.stdout, re.MULTILINE)
    assert [question for question, _, _ in answers] == [TEXT_QUESTION, IMAGE_QUESTION]
    assert "red circle" in answers[1][1]
    assert re.search(
        r"^total: \d+ tokens at [\d.]+ tokens/s, drafts accepted: \d+/\d+ = ", finished.stdout, re.MULTILINE
    )
    seconds = float(re.search(r"^answering after ([\d.]+) s", finished.stdout, re.MULTILINE)[1])
    assert seconds < 30
    (pid,) = re.findall(r"^tritonserver (\d+)", finished.stdout, re.MULTILINE)
    assert not shared_memory_with_prefix([f"qwen35-{pid}-"])


def test_grpc_and_http_give_the_same_answer(server: Server):
    over_grpc, over_http = Client(server.grpc_url), Client(server.http_url, protocol="http")
    first = over_grpc.chat(IMAGE_QUESTION, images=[draw_figure()], **CHAT)
    second = over_http.chat(IMAGE_QUESTION, images=[draw_figure()], **CHAT)
    third = over_http.chat(IMAGE_QUESTION, images=[draw_figure()], **{**CHAT, "stream": False})
    for other in (second, third):
        assert (other.text, other.num_output_tokens, other.total_draft_tokens) == (
            first.text,
            first.num_output_tokens,
            first.total_draft_tokens,
        )
    assert first.finish_reason == "stop" and first.num_input_tokens > 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_errors_of_the_server_come_by_class_and_field(server: Server, protocol: str, stream: bool):
    client = Client(server.grpc_url if protocol == "grpc" else server.http_url, protocol=protocol)
    with pytest.raises(InvalidArgument, match="^INVALID_ARG: temperature: expected "):
        client.chat("hello", stream=stream, temperature=-1.0)


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_command_line(server: Server, tmp_path: Path, protocol: str):
    (tmp_path / "figure.png").write_bytes(draw_figure())
    url = server.grpc_url if protocol == "grpc" else server.http_url
    options = ["--url", url, "--image", str(tmp_path / "figure.png"), "--no-thinking", "--temperature", "0", "--stream"]
    finished = run("qwen35.client", IMAGE_QUESTION, *options, *(["--http"] if protocol == "http" else []))
    assert finished.returncode == 0, finished.stderr
    assert "red circle" in finished.stdout and "finish reason stop" in finished.stderr
