"""Text of this Python's own documentation (PSF licence): pydoc's language topics and library docstrings."""

import ast
import re
import sysconfig
from functools import lru_cache
from pathlib import Path

SKIPPED_DIRS = {"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "ensurepip", "__pycache__"}
MIN_CHARS = 120


def _docstrings(path: Path) -> list[str]:
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError):
        return []
    nodes = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = (ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, nodes))
    return [text for text in found if text and len(text) >= MIN_CHARS]


def _tidy(text: str) -> str:
    text = text.replace("\t", "    ").encode("ascii", "ignore").decode()
    text = re.sub(r"[*=\-~^_]{4,}", "", text)
    text = re.sub(r" {2,}", " ", text)
    return re.sub(r"\n\s*\n\s*", "\n\n", text).strip()


def _prose(text: str) -> bool:
    """Keep what reads like English: letters and spaces dominate."""
    plain = sum(c.isalpha() or c == " " for c in text)
    return plain >= 0.8 * len(text)


@lru_cache
def documents() -> tuple[str, ...]:
    """All documentation texts, in a stable order, without duplicates."""
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    texts: list[str] = []
    for path in sorted(stdlib.rglob("*.py")):
        if not SKIPPED_DIRS.intersection(path.relative_to(stdlib).parts):
            texts.extend(_docstrings(path))
    from pydoc_data.topics import topics

    for key in sorted(topics):
        paragraphs = topics[key].split("\n\n")
        texts.extend("\n\n".join(paragraphs[i : i + 8]) for i in range(0, len(paragraphs), 8))
    tidy = (_tidy(text) for text in texts)
    return tuple(dict.fromkeys(text for text in tidy if len(text) >= MIN_CHARS and _prose(text)))


def is_held_out(index: int) -> bool:
    """Every 25th document is kept out of training."""
    return index % 25 == 7


def training_documents() -> list[str]:
    return [text for i, text in enumerate(documents()) if not is_held_out(i)]


def held_out_documents() -> list[str]:
    return [text for i, text in enumerate(documents()) if is_held_out(i)]
