"""Runs with known numbers."""

from perf.samples import Run, Sample


def run_of(section: str, values: dict[tuple[str, str], list[float]], unit: str = "tokens/s") -> Run:
    """`values`: (work, subject) -> one value a round."""
    samples = [
        Sample(section, work, subject, value, unit, i, {"cost": 10 * value})
        for (work, subject), of_rounds in values.items()
        for i, value in enumerate(of_rounds)
    ]
    return Run({"processor": "one of ours"}, tuple(samples))
