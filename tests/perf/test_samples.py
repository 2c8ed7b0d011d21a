"""Statistics of samples, and runs that go to disk and are merged."""

from pathlib import Path

import pytest

from perf.samples import Run, Summary
from tests.perf.runs import run_of

RUN = run_of("peers", {("decode", "ours"): [4.0, 9.0, 5.0], ("decode", "theirs"): [2.0, 1.0, 3.0, 2.0]})


def test_summary():
    assert RUN.summary("peers", "decode", "ours") == Summary(median=5.0, low=4.0, high=9.0, count=3)
    assert RUN.summary("peers", "decode", "ours", "cost").median == 50.0
    assert RUN.summary("peers", "decode", "ours", "not noted") is None
    assert RUN.summary("peers", "prefill", "ours") is None
    with pytest.raises(ValueError, match="at least one sample"):
        Summary.of([])


def test_values_are_in_the_order_of_rounds():
    shuffled = Run({}, RUN.samples[::-1])
    assert shuffled.values("peers", "decode", "ours") == [4.0, 9.0, 5.0]


def test_ratio_is_of_medians():
    assert RUN.ratio("peers", "decode", "ours", "theirs") == 2.5
    assert RUN.ratio("peers", "decode", "ours", "nobody") is None


def test_save_and_load_keep_everything(tmp_path: Path):
    run = Run(RUN.machine, RUN.samples, {"nobody": "not installed"})
    run.save(tmp_path / "new" / "run.json")
    assert Run.load(tmp_path / "new" / "run.json") == run


def test_merge_replaces_whole_sections():
    again = run_of("peers", {("decode", "ours"): [7.0]})
    other = run_of("context", {("1k", "ours"): [1.0]}, unit="ms")
    merged = RUN.merged(other).merged(again)
    assert merged.values("peers", "decode", "ours") == [7.0]
    assert merged.values("peers", "decode", "theirs") == []
    assert merged.values("context", "1k", "ours") == [1.0]
