"""What perf_analyzer and aiperf say of a server of our own; perf/server.sh sets both up and starts this.

    perf_analyzer   ensemble `qwen35` over gRPC streaming, 1 to 16 requests at a time
    aiperf          the same over HTTP `generate_stream`

Rates and times come from the tools' own exports. Without drafts one response is one token, but for tokens that end no
character.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from build.backends import CACHE
from build.repository import DEMO_CHECKPOINT, prepare
from build.server import Server
from perf import machine
from perf.samples import Run, Sample
from perf.server import random_prompts
from perf.tables import tables

CONCURRENCIES = (1, 2, 4, 8, 16)
REQUESTS_PER_STREAM = 4
TIMEOUT_SECONDS = 600.0


def perf_analyzer(tools: Path, server: Server, concurrency: int, num_tokens: int, folder: Path) -> dict[str, float]:
    """One run of the tool; tokens/s and milliseconds."""
    data, export = folder / "input.json", folder / f"perf_analyzer-{concurrency}.json"
    prompts = random_prompts(concurrency * REQUESTS_PER_STREAM, seed=concurrency)
    entries = [
        {"text_input": [prompt], "stream": [True], "sampling_parameters": [json.dumps(_sampling(num_tokens))]}
        for prompt in prompts
    ]
    data.write_text(json.dumps({"data": entries}), encoding="utf-8")
    command = [tools / "bin" / "perf_analyzer", "-m", "qwen35", "-u", server.grpc_url, "-i", "grpc", "--streaming"]
    command += ["--input-data", data, "--concurrency-range", concurrency, "--request-count", len(prompts)]
    command += ["--profile-export-file", export]
    _run(command, {"LD_LIBRARY_PATH": str(tools / "lib")})
    return of_profile(json.loads(export.read_text(encoding="utf-8")))


def of_profile(profile: dict[str, Any]) -> dict[str, float]:
    """Of perf_analyzer's export: nanoseconds of each request and its responses; an empty last response is none."""
    requests = profile["experiments"][0]["requests"]
    starts = [request["timestamp"] for request in requests]
    arrivals = [_with_text(request) for request in requests]
    gaps = [later - earlier for times in arrivals for earlier, later in zip(times, times[1:], strict=False)]
    firsts = [times[0] - start for start, times in zip(starts, arrivals, strict=True)]
    seconds = (max(times[-1] for times in arrivals) - min(starts)) / 1e9
    return {
        "rate": sum(map(len, arrivals)) / seconds,
        "first_token_ms": statistics.median(firsts) / 1e6,
        "inter_token_ms": statistics.median(gaps) / 1e6,
    }


def _with_text(request: dict[str, Any]) -> list[int]:
    outputs = request.get("response_outputs") or [{"text_output": "?"}] * len(request["response_timestamps"])
    times = zip(request["response_timestamps"], outputs, strict=True)
    return [time for time, output in times if output.get("text_output")]


def aiperf(tools: Path, server: Server, concurrency: int, num_tokens: int, folder: Path) -> dict[str, float]:
    """The same by aiperf, which makes prompts of its own with the checkpoint's tokenizer."""
    template = folder / "payload.jinja"
    sampling = json.dumps(json.dumps(_sampling(num_tokens)))
    template.write_text(
        f'{{"text_input": {{{{ text|tojson }}}}, "stream": true, "sampling_parameters": {sampling}}}', encoding="utf-8"
    )
    artifacts = folder / f"aiperf-{concurrency}"
    command: list[object] = [tools / "aiperf" / "bin" / "aiperf", "profile", "--model", "qwen35", "--streaming"]
    command += ["--url", f"http://{server.http_url}", "--endpoint-type", "template"]
    command += ["--custom-endpoint", "/v2/models/qwen35/generate_stream", "--tokenizer", server.settings["checkpoint"]]
    command += ["--extra-inputs", f"payload_template:{template}", "--extra-inputs", "response_field:text_output"]
    command += ["--concurrency", concurrency, "--request-count", concurrency * REQUESTS_PER_STREAM]
    command += ["--synthetic-input-tokens-mean", 32, "--artifact-dir", artifacts, "--ui", "none"]
    _run(command, {})
    export = json.loads(next(artifacts.rglob("profile_export_aiperf.json")).read_text(encoding="utf-8"))
    return {
        "rate": export["output_token_throughput"]["avg"],
        "first_token_ms": export["time_to_first_token"]["p50"],
        "inter_token_ms": export["inter_token_latency"]["p50"],
    }


def _sampling(num_tokens: int) -> dict[str, Any]:
    return {"max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}


def _run(command: Sequence[object], environment: dict[str, str]) -> None:
    """Raises RuntimeError with the end of what the tool printed."""
    words = [str(word) for word in command]
    done = subprocess.run(
        words,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        check=False,
    )
    if done.returncode != 0:
        text = (done.stdout + done.stderr)[-2000:]
        raise RuntimeError(f"{Path(words[0]).name}: expected exit code 0, got {done.returncode}:\n{text}")


TOOLS = {"perf_analyzer, gRPC": perf_analyzer, "aiperf, HTTP": aiperf}


def measure(options: argparse.Namespace) -> Iterator[Sample]:
    settings = {"num_threads": str(options.threads), "num_draft_tokens": "0"}
    with (
        tempfile.TemporaryDirectory() as folder,
        Server(checkpoint=options.checkpoint, settings=settings, start_timeout_s=600.0) as server,
    ):
        for concurrency in options.concurrency:
            for name in options.only:
                found = TOOLS[name](options.tools, server, concurrency, options.tokens, Path(folder))
                rate = found.pop("rate")
                print(f"{name:<20} {concurrency:>3} at a time {rate:9.1f} tokens/s  {found}", flush=True)
                yield Sample("load", f"{concurrency} at a time", name, rate, "tokens/s", 0, found)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="perf/server.sh", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tools", type=Path, required=True, help="set up by perf/server.sh")
    parser.add_argument("--checkpoint", type=Path, default=DEMO_CHECKPOINT)
    parser.add_argument("--concurrency", type=int, nargs="+", default=list(CONCURRENCIES))
    parser.add_argument("--only", nargs="+", choices=TOOLS, default=list(TOOLS), metavar="TOOL")
    parser.add_argument("--tokens", type=int, default=32, help="of each answer")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path, default=CACHE / "perf" / "load.json")
    options = parser.parse_args()
    options.checkpoint = prepare(options.checkpoint)
    run = Run(machine.describe(), tuple(measure(options)))
    run.save(options.output)
    print(tables(run))


if __name__ == "__main__":
    main()
