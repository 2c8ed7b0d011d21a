"""Markdown tables of a run. Medians, in brackets the lowest and the highest; ratios are of medians of the same run."""

from __future__ import annotations

from collections.abc import Sequence

from perf.peers.catalogue import OURS
from perf.samples import Run, Summary
from perf.speculation import NO_DRAFT

TITLES = {
    "bandwidth": "Read bandwidth",
    "peers": "Peers on the 344 M checkpoint",
    "speculation": "Speculation on the demo checkpoint",
    "passes": "Cost of a verify and of a draft pass, in target steps",
    "context": "Time of a token against its context",
    "server": "Server through the ensemble, against the engine alone",
    "load": "Load tools against a server of our own",
}
BASES = {"peers": OURS, "speculation": NO_DRAFT, "server": "engine alone"}  # what ratios are told against


def tables(run: Run) -> str:
    """One table a section that was measured, then what is missing."""
    parts = [f"## {title}\n\n{table(run, section)}" for section, title in TITLES.items() if run.works(section)]
    if run.missing:
        parts.append("## Left out\n\n" + "\n".join(f"- {name}: {reason}" for name, reason in run.missing.items()))
    return "\n\n".join(parts) + "\n"


def table(run: Run, section: str) -> str:
    """A row a subject, a column a work."""
    works, base = run.works(section), BASES.get(section)
    rows = [["", *works]]
    for subject in run.subjects(section):
        cells = []
        for work in works:
            found = run.summary(section, work, subject)
            ratio = None if base is None or subject == base else run.ratio(section, work, subject, base)
            cells.append("" if found is None else cell(found, ratio))
        rows.append([subject, *cells])
    note = f"{run.unit(section)}" + (f"; x: times {base}" if base else "")
    return f"{note}\n\n{markdown(rows)}"


def cell(summary: Summary, ratio: float | None = None) -> str:
    text = f"{number(summary.median)} ({number(summary.low)}..{number(summary.high)})"
    return text if ratio is None else f"{text}, x {ratio:.2f}"


def number(value: float) -> str:
    """Three significant digits, no exponent."""
    if abs(value) >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """The first row is the head."""
    head, *body = (f"| {' | '.join(row)} |" for row in rows)
    return "\n".join([head, "|" + "---|" * len(rows[0]), *body])
