"""Who may import whom, read from the source: the layers of the package, and the two borders around it."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "backend" / "qwen35"

# Part of the package (a folder or a module) -> the other parts it may import. `errors` is for everybody.
ALLOWED = {
    "config": set(),
    "errors": set(),
    "settings": set(),
    "devices": set(),
    "views": set(),
    "nvfp4": set(),
    "kernels": {"config", "settings", "nvfp4", "views"},
    "nn": {"config", "nvfp4", "views", "kernels"},
    "state": {"config", "settings", "views"},
    "prompt": {"config"},
    "weights": {"config", "nvfp4", "kernels", "nn"},
    "engine": {"config", "settings", "devices", "nvfp4", "views", "kernels", "nn", "state", "weights", "prompt"},
    "llm": {"config", "settings", "devices", "views", "kernels", "nn", "state", "weights", "prompt", "engine"},
    "serving": {
        "config",
        "settings",
        "devices",
        "nvfp4",
        "views",
        "kernels",
        "nn",
        "state",
        "weights",
        "prompt",
        "engine",
    },
    "client": set(),
    "__init__": {"llm", "engine"},
}
TRITON_BACKEND = "triton_python_backend_utils"


def imported_modules(source: str, module: str) -> Iterator[str]:
    """Dotted names of everything that `source` imports anywhere, relative imports resolved against `module`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = module.split(".")[: -node.level]
                base = ".".join([*parents, base] if base else parents)
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            yield from (str(argument.value) for argument in node.args if isinstance(argument, ast.Constant))


def violations(source: str, module: str) -> set[str]:
    """Complaints about the imports of `module` (dotted, such as `qwen35.nn.moe`)."""
    part = module.split(".")[1] if "." in module else "__init__"
    if part not in ALLOWED:
        return {f"{module}: expected a part named in ALLOWED, got {part!r}"}
    found = set()
    for name in imported_modules(source, module):
        top, _, rest = name.partition(".")
        target = rest.split(".")[0]
        if top in ("build", "perf", "tests"):
            found.add(f"{module}: the package must not import {top}")
        if top == TRITON_BACKEND and part != "serving":
            found.add(f"{module}: only serving may import {TRITON_BACKEND}")
        if top == "qwen35" and target in ALLOWED and target not in {part, "errors", *ALLOWED[part]}:
            found.add(f"{module}: {part} must not import {target}")
    return found


def package_modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def module_name(path: Path) -> str:
    """Dotted name; a package's own name stands for its `__init__`, marked so that relative imports resolve."""
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)


@pytest.mark.parametrize("path", package_modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_follow_the_layers(path: Path):
    assert violations(path.read_text(encoding="utf-8"), module_name(path)) == set()


def test_every_part_is_listed_once_it_exists():
    parts = {path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in package_modules()}
    assert parts <= set(ALLOWED)


def test_the_allowed_imports_have_no_cycle():
    remaining = {part: set(targets) for part, targets in ALLOWED.items()}
    while remaining:
        leaves = {part for part, targets in remaining.items() if not targets & set(remaining)}
        assert leaves, f"cycle among {sorted(remaining)}"
        remaining = {part: targets for part, targets in remaining.items() if part not in leaves}


@pytest.mark.parametrize(
    ("module", "source", "complaint"),
    [
        ("qwen35.nn.moe", "from qwen35.engine import step", "nn must not import engine"),
        ("qwen35.kernels.reference", "import qwen35.nn.moe as moe", "kernels must not import nn"),
        ("qwen35.state.arena", "from qwen35 import nn", "state must not import nn"),
        ("qwen35.state.arena", "from ..nn import moe", "state must not import nn"),
        ("qwen35.state.__init__", "from ..nn import moe", "state must not import nn"),
        ("qwen35.prompt.chat", "def f():\n    from qwen35.nn import vision", "prompt must not import nn"),
        ("qwen35.weights.load", "from qwen35.engine.batch import Batch", "weights must not import engine"),
        ("qwen35.engine.loop", "import importlib\nimportlib.import_module('qwen35.serving.llm')", "import serving"),
        ("qwen35.engine.loop", "import triton_python_backend_utils as pb_utils", "only serving may import"),
        ("qwen35.client", "from qwen35.prompt import images", "client must not import prompt"),
        ("qwen35.nvfp4", "from build.quantize import main", "must not import build"),
        ("qwen35.novelty.x", "", "expected a part named in ALLOWED"),
    ],
)
def test_planted_violations_are_found(module: str, source: str, complaint: str):
    (found,) = violations(source, module)
    assert complaint in found


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("qwen35.serving.llm", "import triton_python_backend_utils\nfrom qwen35.engine import loop"),
        (
            "qwen35.nn.moe",
            "from qwen35.errors import InternalError\nfrom . import norm\nfrom ..kernels import ops",
        ),
        ("qwen35.nn.__init__", "from .moe import experts"),
        ("qwen35.__init__", "import importlib\nimportlib.import_module('qwen35.llm')"),
    ],
)
def test_allowed_imports_pass(module: str, source: str):
    assert violations(source, module) == set()
