"""The README's tables against the code that they describe."""

import re
from dataclasses import fields
from pathlib import Path

from qwen35.settings import Settings

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def table_after(heading: str) -> dict[str, str]:
    """First cell -> second cell, without backquotes, of the first table below a heading."""
    lines = README.partition(f"\n{heading}\n")[2].splitlines()
    begin = next(number for number, line in enumerate(lines) if line.startswith("|---"))
    rows = [line.split("|")[1:3] for line in lines[begin + 1 : lines.index("", begin)]]
    return {name.strip().strip("`"): default.strip().strip("`") for name, default in rows}


def test_configuration_table_lists_every_setting_with_its_default():
    assert table_after("## Configuration") == {field.name: str(field.default) for field in fields(Settings)}


def test_make_variables_are_those_of_the_makefile():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    defaults = dict(re.findall(r"^([A-Z_]+) \?= ?(.*)$", makefile, re.MULTILINE))
    described = table_after("## Two commands")
    names = [name.strip("`") for row in described for name in row.split(", ")]
    assert set(names) == set(defaults) - {"PYTEST_ARGS"}
    assert described["CHECKPOINT"] == defaults["CHECKPOINT"] and described["ADDRESS"] == defaults["ADDRESS"]
    ports = [defaults[name] for name in ("HTTP_PORT", "GRPC_PORT", "METRICS_PORT")]
    assert described["HTTP_PORT`, `GRPC_PORT`, `METRICS_PORT"] == ", ".join(ports)


def test_make_targets_named_in_the_readme_exist():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    named = set(re.findall(r"(?:^|`)make ([a-z-]+)", README, re.MULTILINE))
    assert {"demo", "serve", "test", "lint"} <= named <= targets
