"""All measurements of perf/REPORT.md in one command, and the report itself.

    python -m perf.report --checkpoint BF16 --quantised NVFP4 --wide NVFP4_WIDE [--peers-directory DIR] [--repeats 3]
    python -m perf.report --render          writes the report again from perf/results/run.json, measures nothing

Writes perf/results/run.json (every raw sample), perf/results/*.png and perf/REPORT.md. `--only` measures some sections
again and keeps the others' samples; the report then says so.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

from build.backends import ROOT
from build.serve import exit_on_signals
from perf import engine, server
from perf.bars import SMALL, WIDE, bars_table
from perf.peers.catalogue import OURS
from perf.plots import BARS, LINES, plot_all
from perf.samples import Run
from perf.tables import number, tables

RESULTS = ROOT / "perf" / "results"
REPORT = ROOT / "perf" / "REPORT.md"
NOTES = ROOT / "perf" / "notes.md"
FULL_SIZE = RESULTS / "full_size.json"  # of python -m perf.full_size --json
SECTIONS = (*engine.SECTIONS, "server")
SMALL_TOKEN_BYTES = 85.6e6  # read and written a token of one stream: 344 M checkpoint, NVFP4 with an NVFP4 lm_head
_SERVER_TOKENS = 96


def measure(options: argparse.Namespace) -> Run:
    """The engine's sections with the options of `perf.engine`, then the server's two checkpoints."""
    arguments = ["--repeats", str(options.repeats), "--output", str(RESULTS), "--wide", str(options.wide)]
    arguments += ["--checkpoint", str(options.checkpoint), "--quantised", str(options.quantised)]
    arguments += ["--peers-directory", str(options.peers_directory), "--threads", str(options.threads)]
    sections = [section for section in options.only if section != "server"]
    run = engine.measure(engine.parse_arguments([*arguments, "--sections", *sections])) if sections else Run({}, ())
    if "server" not in options.only:
        return run
    samples = []
    for name, checkpoint in ((WIDE, options.wide), (SMALL, options.quantised)):
        words = ["--checkpoint", str(checkpoint), "--name", name, "--threads", str(options.threads)]
        words += ["--repeats", str(options.repeats), "--tokens", str(_SERVER_TOKENS), "--output", str(RESULTS)]
        samples += server.measure(server.parse_arguments(words))
    return run.merged(Run({}, tuple(samples)))


def render(run: Run) -> str:
    """REPORT.md."""
    parts = [
        "# Performance\n\nWritten by `python -m perf.report` from [results/run.json](results/run.json), which "
        "has every raw sample. Medians of one run, lowest and highest in brackets; ratios are of its medians.",
        f"## Machine\n\n{_machine(run)}",
        f"## Bars\n\n{bars_table(run)}",
        _full_size(),
        *([_floor(run)] if run.works("bandwidth") and run.works("peers") else []),
        tables(run).rstrip(),
        *(f"![{section}](results/{section}.png)" for section in (*BARS, *LINES) if run.works(section)),
        *([_processor_time(run)] if run.works("server") else []),
        NOTES.read_text(encoding="utf-8").rstrip(),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _machine(run: Run) -> str:
    return "\n".join(f"- {key.replace('_', ' ')}: {value}" for key, value in run.machine.items())


def _floor(run: Run) -> str:
    """The engine's share of the bandwidth that its bytes allow."""
    bandwidth = run.summary("bandwidth", run.works("bandwidth")[0], run.subjects("bandwidth")[0])
    rate = run.summary("peers", "decode, 1 stream", OURS)
    if bandwidth is None or rate is None:
        return ""
    floor = bandwidth.median * 1e9 / SMALL_TOKEN_BYTES
    return (
        f"One stream of the 344 M checkpoint reads and writes {SMALL_TOKEN_BYTES / 1e6:.1f} MB a token; at the "
        f"{number(bandwidth.median)} GB/s of this run that allows {number(floor)} tokens/s, of which "
        f"{number(rate.median)} ({rate.median / floor:.2f}) are reached."
    )


def _full_size() -> str:
    """The bar that has a run of its own."""
    name = "35B-A3B shape at full depth, 1 stream, k = 0, wanted >= 0.6 of the bandwidth floor"
    if not FULL_SIZE.is_file():
        return f"{name}: not in this report, see `python -m perf.full_size --json {FULL_SIZE.relative_to(ROOT)}`."
    found = json.loads(FULL_SIZE.read_text(encoding="utf-8"))
    return (
        f"{name}: {found['share_of_floor']:.2f}, {number(statistics.median(found['tokens_per_s']))} tokens/s with "
        f"{found['threads']} threads, loaded in {found['load_seconds']:.0f} s, "
        f"peak {found['peak_bytes'] / 2**30:.1f} GiB."
    )


def _processor_time(run: Run) -> str:
    """Of client and server in the server's turns."""
    lines = []
    for work in run.works("server"):
        names = ("client_cpu_ms_per_token", "server_cpu_ms_per_token", "responses_per_token")
        found = [run.summary("server", work, server.SERVER, name) for name in names]
        client, of_server, responses = (0.0 if summary is None else summary.median for summary in found)
        lines.append(
            f"- {work}: client {client:.2f} ms of CPU a token, all processes of the server {of_server:.2f} ms, "
            f"{responses:.2f} responses a token"
        )
    return "\n".join(lines)


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m perf.report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--render", action="store_true")
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--quantised", type=Path)
    parser.add_argument("--wide", type=Path)
    parser.add_argument("--peers-directory", type=Path, default=engine.PEERS_DIRECTORY)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS), metavar="SECTION")
    options = parser.parse_args(arguments)
    if not (options.render or (options.checkpoint and options.quantised and options.wide)):
        parser.error("expected --checkpoint, --quantised and --wide (make them with python -m build.synthetic)")
    return options


def main() -> None:
    options = parse_arguments()
    exit_on_signals()
    path = RESULTS / "run.json"
    if options.render:
        run = Run.load(path)
    else:
        started = time.monotonic()
        run = measure(options)
        print(f"measured in {time.monotonic() - started:.0f} s")
        if set(options.only) != set(SECTIONS) and path.is_file():
            again = {"measured_again": ", ".join(options.only)}
            run = Run.load(path).merged(Run({**run.machine, **again}, run.samples, run.missing))
        run.save(path)
    plot_all(run, RESULTS)
    REPORT.write_text(render(run), encoding="utf-8")
    print(f"{REPORT}\n\n{bars_table(run)}")


if __name__ == "__main__":
    main()
