"""`make demo`: quantise the checkpoint, launch tritonserver, stream a text chat and an image chat, stop cleanly."""

import io
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from PIL import Image, ImageDraw

from build import repository
from build.backends import BackendError
from build.serve import exit_on_signals, parse_arguments, server_of
from build.server import Server, ServerError
from qwen35.client import Client, Completion
from qwen35.errors import Qwen35Error

TEXT_QUESTION = "What is a list?"
IMAGE_QUESTION = "Describe the picture."
MAX_TOKENS = 96
CHAT_TIMEOUT_SECONDS = 300.0


def draw_figure(side_pixels: int = 128) -> bytes:
    """PNG of one red circle in the middle of a grey square."""
    image = Image.new("RGB", (side_pixels, side_pixels), (200, 200, 200))
    margin = side_pixels * 0.3
    box = (margin, margin, side_pixels - margin, side_pixels - margin)
    ImageDraw.Draw(image).ellipse(box, fill=(214, 40, 40))
    encoded = io.BytesIO()
    image.save(encoded, "PNG")
    return encoded.getvalue()


def run_chat(client: Client, title: str, question: str, images: Sequence[bytes] = ()) -> Completion:
    """Stream one greedy chat to the terminal."""
    print(f"\n--- {title}\n> {question}", flush=True)
    completion = client.chat(
        question,
        images=images,
        stream=True,
        on_text=lambda text: print(text, end="", flush=True),
        chat_template_kwargs={"enable_thinking": False},
        max_tokens=MAX_TOKENS,
        temperature=0.0,
    )
    print(f"\n[{completion.summary()}]", flush=True)
    return completion


def print_totals(completions: Sequence[Completion]) -> None:
    """One line over all chats: speed, and the part of the drafts that was accepted."""
    num_tokens = sum(each.num_output_tokens for each in completions)
    seconds = sum(each.total_seconds for each in completions)
    drafted = sum(each.total_draft_tokens or 0 for each in completions)
    accepted = sum(each.total_accepted_draft_tokens or 0 for each in completions)
    rate = f"{accepted}/{drafted} = {accepted / drafted:.2f}" if drafted else "no drafts"
    print(f"\ntotal: {num_tokens} tokens at {num_tokens / seconds:.1f} tokens/s, drafts accepted: {rate}", flush=True)


def run_chats(server: Server) -> list[Completion]:
    client = Client(server.grpc_url, timeout_seconds=CHAT_TIMEOUT_SECONDS)
    return [
        run_chat(client, "text chat", TEXT_QUESTION),
        run_chat(client, "image chat (a red circle on grey)", IMAGE_QUESTION, [draw_figure()]),
    ]


def run_demo(checkpoint: Path, server: Server) -> int:
    """Start, ask, stop; 0 when both answers came and nothing was left behind."""
    print(f"starting tritonserver on {checkpoint}", flush=True)
    begin = time.monotonic()
    with server:
        print(f"answering after {time.monotonic() - begin:.1f} s")
        print(f"tritonserver {server.pid}: http {server.http_url}, grpc {server.grpc_url}, log {server.log_path}")
        completions = run_chats(server)
        print_totals(completions)
        report = server.stop()
    if not report.is_clean:
        print(f"stop: expected nothing left behind, got {report}; log {server.log_path}", file=sys.stderr)
        return 1
    print(f"stopped in {report.seconds:.1f} s, no process and nothing in /dev/shm left", flush=True)
    silent = [completion for completion in completions if not completion.text.strip()]
    if silent:
        print(f"answers: expected text in each, got {silent}", file=sys.stderr)
    return 1 if silent else 0


def main() -> int:
    options = parse_arguments(program="python -m build.demo_run", description=__doc__)
    exit_on_signals()
    try:
        checkpoint = repository.prepare(options.checkpoint)
        repository.place(checkpoint, options.model_repository)
        return run_demo(checkpoint, server_of(options, checkpoint))
    except (ServerError, BackendError, repository.RepositoryError, Qwen35Error) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
