"""Our engine and its peers on the same checkpoint in one interleaved run, and what speculation and context cost.

    python -m perf.engine --checkpoint BF16_DIR --quantised NVFP4_DIR [--sections …] [--peers …] [--repeats 3]

Sections
    bandwidth     what one reader of huge pages gets, for the floors
    peers         1 and 8 streams from 32-token prompts, prefill of 512 and 4096 tokens; --checkpoint, --quantised
    speculation   the trained demo checkpoint, k = 0 to 5 and chosen at run time; --demo
    context       a token's time with 1k to 32k tokens behind it, in a cache filled with noise; --wide

Every round gives each subject one turn, beginning with another one each time; what is quoted are medians of one run and
their ratios. Decoding is (time of 65 tokens - time of 1 token). Raw samples go to OUTPUT/engine.json, tables and plots
beside it. Peers: perf/peers/*.sh sets them up, and `python -m perf.peers.gguf` makes llama.cpp's files.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from build.backends import CACHE
from build.repository import DEMO_CHECKPOINT, prepare
from build.serve import exit_on_signals
from perf import context, machine, speculation
from perf.peers.catalogue import PEERS, Setting, memory_reader
from perf.peers.gguf import PEERS as PEERS_DIRECTORY
from perf.peers.peer import WORKS, Peer, PeerError, Work, in_rounds
from perf.plots import plot_all
from perf.samples import Run, Sample
from perf.tables import tables

SECTIONS = ("bandwidth", "peers", "speculation", "context")
OUTPUT = CACHE / "perf"
LOGS = OUTPUT / "logs"


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m perf.engine", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS), metavar="SECTION")
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS), metavar="PEER", help=", ".join(PEERS))
    parser.add_argument("--works", nargs="+", choices=WORKS, default=list(WORKS), metavar="WORK", help=", ".join(WORKS))
    parser.add_argument("--repeats", type=int, default=3, help="rounds")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall", help="cpu: seconds of all threads together")
    parser.add_argument("--checkpoint", type=Path, help="bf16, for the peers that have no NVFP4")
    parser.add_argument("--quantised", type=Path, help="NVFP4 export of the same")
    parser.add_argument("--demo", type=Path, default=DEMO_CHECKPOINT)
    parser.add_argument("--wide", type=Path, help="35B widths at reduced depth")
    parser.add_argument("--peers-directory", type=Path, default=PEERS_DIRECTORY)
    parser.add_argument("--output", type=Path, default=OUTPUT)
    return parser.parse_args(arguments)


def measure(options: argparse.Namespace) -> Run:
    """All sections that were asked for."""
    setting = Setting(
        checkpoint=options.checkpoint,
        quantised=options.quantised,
        peers_directory=options.peers_directory,
        log_directory=LOGS,
        num_threads=options.threads,
        tells_cpu_time=options.clock == "cpu",
    )
    run = Run({**machine.describe(), "num_threads": options.threads, "clock": options.clock}, ())
    if "bandwidth" in options.sections:
        run = run.merged(measure_bandwidth(setting, 5 * options.repeats))
    if "peers" in options.sections:
        run = run.merged(measure_peers(options, setting))
    if "speculation" in options.sections:
        samples = speculation.measure(prepare(options.demo), options.repeats)
        run = run.merged(Run({}, tuple(samples)))
    if "context" in options.sections:
        samples = context.measure(options.wide, options.threads, options.repeats)
        run = run.merged(Run({}, tuple(samples)))
    return run


def measure_bandwidth(setting: Setting, repeats: int) -> Run:
    reader = memory_reader(setting)
    reader.start()
    seconds = [reader.measure(Work("read 256 MiB", 1, 1, is_decode=False)).seconds for _ in range(repeats)]
    reader.close()
    samples = [
        Sample("bandwidth", "read 256 MiB", f"{setting.num_threads} threads", (256 << 20) / taken / 1e9, "GB/s", i)
        for i, taken in enumerate(seconds)
    ]
    return Run({}, tuple(samples))


def measure_peers(options: argparse.Namespace, setting: Setting) -> Run:
    """A peer that does not start, or fails at its turn, is left out and named with the reason."""
    works = [WORKS[name] for name in options.works]
    missing: dict[str, str] = {}
    peers: list[Peer] = []
    samples: list[Sample] = []
    try:
        for name in options.peers:
            _start(name, setting, works, peers, missing)
        for round_index, work, peer in in_rounds(works, peers, options.repeats):
            if peer.name in missing:
                continue
            try:
                timing = peer.measure(work)
            except PeerError as error:
                missing[peer.name] = str(error)
                peer.close()
                continue
            taken = timing.seconds if options.clock == "wall" else timing.cpu_seconds
            details = {"seconds": timing.seconds, "cpu_seconds": timing.cpu_seconds}
            rate = work.num_timed_tokens / taken
            samples.append(Sample("peers", work.name, peer.name, rate, "tokens/s", round_index, details))
            print(f"round {round_index + 1}  {work.name:<18} {peer.name:<18} {rate:9.1f} tokens/s", flush=True)
    finally:
        for peer in peers:
            peer.close()
    return Run({}, tuple(samples), missing)


def _start(name: str, setting: Setting, works: Sequence[Work], peers: list[Peer], missing: dict[str, str]) -> None:
    """Loads one peer and warms it up with every kind of work."""
    print(f"starting {name}", flush=True)
    try:
        peer = PEERS[name](name, setting)
        peers.append(peer)  # to be closed, whatever happens
        peer.start()
        for work in works:
            peer.warm_up(work)
    except PeerError as error:
        missing[name] = str(error)
        print(f"left out: {error}", flush=True)
        for peer in peers:
            if peer.name == name:
                peer.close()


def main() -> None:
    options = parse_arguments()
    exit_on_signals()
    if "peers" in options.sections and not (options.checkpoint and options.quantised):
        raise SystemExit("peers: expected --checkpoint and --quantised; make them with python -m build.synthetic")
    if "context" in options.sections and options.wide is None:
        raise SystemExit("context: expected --wide; make it with python -m build.synthetic")
    run = measure(options)
    run.save(options.output / "engine.json")
    (options.output / "engine.md").write_text(tables(run), encoding="utf-8")
    plot_all(run, options.output)
    print(tables(run))


if __name__ == "__main__":
    main()
