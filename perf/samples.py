"""Raw samples of a benchmark run, and the few statistics that are quoted of them. Knows no models and no plots."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Sample:
    """One measured value. `subject` is who was measured (a peer, a draft length), `work` at what."""

    section: str
    work: str
    subject: str
    value: float
    unit: str  # tokens/s, seconds, GB/s, …
    round_index: int = 0
    details: Mapping[str, float] = field(default_factory=dict)  # what else was seen in the same turn


@dataclass(frozen=True)
class Summary:
    """Of the samples of one subject at one work."""

    median: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, values: Iterable[float]) -> Summary:
        """Raises ValueError without values."""
        values = list(values)
        if not values:
            raise ValueError("values: expected at least one sample, got none")
        return cls(statistics.median(values), min(values), max(values), len(values))


@dataclass(frozen=True)
class Run:
    """All samples of one run, what it ran on, and what it could not measure (subject -> reason)."""

    machine: Mapping[str, Any]
    samples: tuple[Sample, ...]
    missing: Mapping[str, str] = field(default_factory=dict)

    def values(self, section: str, work: str, subject: str, detail: str | None = None) -> list[float]:
        """In the order of the rounds; of a detail: of the samples that have it."""
        found = [s for s in self.samples if (s.section, s.work, s.subject) == (section, work, subject)]
        found.sort(key=lambda sample: sample.round_index)
        return [
            s.value if detail is None else s.details[detail] for s in found if detail is None or detail in s.details
        ]

    def summary(self, section: str, work: str, subject: str, detail: str | None = None) -> Summary | None:
        """None where nothing was measured."""
        values = self.values(section, work, subject, detail)
        return Summary.of(values) if values else None

    def ratio(self, section: str, work: str, subject: str, base: str) -> float | None:
        """Median of `subject` over that of `base` in this run; None where either is missing."""
        ours, theirs = self.summary(section, work, subject), self.summary(section, work, base)
        return None if ours is None or theirs is None else ours.median / theirs.median

    def works(self, section: str) -> list[str]:
        """In the order in which they were measured first."""
        return list(dict.fromkeys(sample.work for sample in self.samples if sample.section == section))

    def subjects(self, section: str) -> list[str]:
        return list(dict.fromkeys(sample.subject for sample in self.samples if sample.section == section))

    def unit(self, section: str) -> str:
        return next(sample.unit for sample in self.samples if sample.section == section)

    def merged(self, other: Run) -> Run:
        """Both runs' samples; sections that `other` measured replace ours."""
        sections = {sample.section for sample in other.samples}
        kept = tuple(sample for sample in self.samples if sample.section not in sections)
        return Run({**self.machine, **other.machine}, kept + other.samples, {**self.missing, **other.missing})

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Run:
        record = json.loads(path.read_text(encoding="utf-8"))
        samples = tuple(Sample(**sample) for sample in record["samples"])
        return cls(record["machine"], samples, record["missing"])
