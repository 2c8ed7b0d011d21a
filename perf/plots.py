"""PNG plots of a run, one a section. matplotlib is a development dependency; it is imported here alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from perf.samples import Run
from perf.tables import TITLES

BARS = ("peers", "speculation", "server")
LINES = ("context", "passes")


def plot_all(run: Run, directory: Path) -> list[Path]:
    """Files of the sections that were measured."""
    directory.mkdir(parents=True, exist_ok=True)
    sections = [section for section in (*BARS, *LINES) if run.works(section)]
    return [plot(run, section, directory / f"{section}.png") for section in sections]


def plot(run: Run, section: str, path: Path) -> Path:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    works = run.works(section)
    columns = len(works) if section in BARS else 1
    figure, axes = pyplot.subplots(1, columns, figsize=(4.2 * columns + 1, 3.6), squeeze=False)
    if section in BARS:
        for axis, work in zip(axes[0], works, strict=True):
            _bars(axis, run, section, work)
    else:
        _lines(axes[0][0], run, section)
    figure.suptitle(TITLES[section])
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return path


def _bars(axis: Any, run: Run, section: str, work: str) -> None:
    """Medians, with whiskers from the lowest to the highest sample."""
    found = {subject: run.summary(section, work, subject) for subject in run.subjects(section)}
    shown = {subject: summary for subject, summary in reversed(found.items()) if summary is not None}
    medians = [summary.median for summary in shown.values()]
    below = [summary.median - summary.low for summary in shown.values()]
    above = [summary.high - summary.median for summary in shown.values()]
    axis.barh(list(shown), medians, xerr=[below, above], capsize=3, color="#4c72b0")
    axis.set_title(work, fontsize=10)
    axis.set_xlabel(run.unit(section))
    axis.tick_params(labelsize=8)


def _lines(axis: Any, run: Run, section: str) -> None:
    works = run.works(section)
    for subject in run.subjects(section):
        summaries = [run.summary(section, work, subject) for work in works]
        points = [(work, summary) for work, summary in zip(works, summaries, strict=True) if summary is not None]
        medians = [summary.median for _, summary in points]
        axis.plot([work for work, _ in points], medians, marker="o", label=subject)
        axis.fill_between(
            range(len(points)), [summary.low for _, summary in points], [s.high for _, s in points], alpha=0.2
        )
    axis.set_ylim(bottom=0)
    axis.set_ylabel(run.unit(section))
    axis.tick_params(labelsize=8)
    axis.legend(fontsize=8)
