"""What was to be reached, and what a run says about it. A bar that was not measured is told as such."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from perf.peers.catalogue import OURS
from perf.samples import Run
from perf.server import ENGINE, SERVER
from perf.speculation import ADAPTIVE, NO_DRAFT
from perf.tables import markdown

SMALL, WIDE = "344 M", "35B widths"  # names of the server's checkpoints


@dataclass(frozen=True)
class Bar:
    """The median of one subject over that of another, at one work or at two."""

    name: str
    section: str
    work: str
    subject: str
    base: str
    limit: float
    base_work: str | None = None  # when it is another work than `work`
    is_upper: bool = False  # reached at or below the limit

    def ratio(self, run: Run) -> float | None:
        ours = run.summary(self.section, self.work, self.subject)
        theirs = run.summary(self.section, self.base_work or self.work, self.base)
        return None if ours is None or theirs is None else ours.median / theirs.median

    def is_reached(self, ratio: float) -> bool:
        return ratio <= self.limit if self.is_upper else ratio >= self.limit

    def row(self, run: Run) -> list[str]:
        ratio, sign = self.ratio(run), "<=" if self.is_upper else ">="
        verdict = "not measured" if ratio is None else "yes" if self.is_reached(ratio) else "**no**"
        return [self.name, f"{sign} {self.limit:g}", "" if ratio is None else f"{ratio:.2f}", verdict]


def _server(name: str, limit: float) -> Bar:
    work = f"{name}, 8 streams, k = 0"
    return Bar(f"server through the ensemble / engine alone, {work}", "server", work, SERVER, ENGINE, limit)


BARS: Sequence[Bar] = (
    Bar("1 stream / llama.cpp NVFP4", "peers", "decode, 1 stream", OURS, "llama.cpp nvfp4", 2.5),
    Bar("1 stream / llama.cpp Q4_0", "peers", "decode, 1 stream", OURS, "llama.cpp q4_0", 1.5),
    Bar("8 streams / vLLM-cpu bf16", "peers", "decode, 8 streams", OURS, "vllm bf16", 2.0),
    Bar("prefill 512 / vLLM-cpu bf16 (aim 1.2)", "peers", "prefill 512", OURS, "vllm bf16", 1.0),
    Bar("demo, k at run time / k = 0, chat, 1 stream", "speculation", "chat, 1 stream", ADAPTIVE, NO_DRAFT, 1.4),
    Bar("demo, k at run time / k = 0, text, 1 stream", "speculation", "text, 1 stream", ADAPTIVE, NO_DRAFT, 1.4),
    _server(WIDE, 0.95),
    _server(SMALL, 0.80),
    Bar(
        "a token at 32k / at 1k, 35B widths, FP8 KV",
        "context",
        "32k",
        "qwen35 nvfp4, fp8 KV",
        "qwen35 nvfp4, fp8 KV",
        1.3,
        base_work="1k",
        is_upper=True,
    ),
)


def bars_table(run: Run) -> str:
    return markdown([["bar", "wanted", "measured", "reached"], *(bar.row(run) for bar in BARS)])
