"""Exclusion patterns of a quantised checkpoint: which modules stayed as they were.

Patterns are globs on module names, case-sensitive; one without wildcards names a module and everything below it. Files
write them with the names of the checkpoint or with those of some engine, so a module is matched in its raw and in all
its re-rooted spellings.

The draft has a namespace of its own. Its patterns (`mtp*`, `model.mtp.layers.0*`, …) are re-rooted to `mtp.` and
matched against draft modules only, patterns of the target against everything else. So the two layers numbered 0 can't
be confused, as they are when the draft's exclude is renamed to `model.layers.0*` and then applied to the target.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from qwen35.errors import CheckpointError
from qwen35.weights.names import ROOTS, Part, spellings, split_root

_WILDCARDS = re.compile(r"[*?\[]")


@dataclass(frozen=True)
class PatternSet:
    """Globs and literal module names, matched together."""

    patterns: tuple[str, ...]

    @cached_property
    def _literals(self) -> frozenset[str]:
        return frozenset(pattern.rstrip(".") for pattern in self.patterns if not _WILDCARDS.search(pattern))

    @cached_property
    def _globs(self) -> re.Pattern[str] | None:
        globs = [fnmatch.translate(pattern) for pattern in self.patterns if _WILDCARDS.search(pattern)]
        return re.compile("|".join(globs)) if globs else None

    def match(self, module: str) -> bool:
        """True when a pattern matches this one spelling, or a literal names it or one of its ancestors."""
        if self._globs is not None and self._globs.match(module):
            return True
        if not self._literals:
            return False
        parts = module.split(".")
        return any(".".join(parts[:depth]) in self._literals for depth in range(1, len(parts) + 1))


@dataclass(frozen=True)
class Excludes:
    """The patterns of one checkpoint, parted into the two namespaces."""

    target: PatternSet
    draft: PatternSet

    @classmethod
    def parse(cls, patterns: Iterable[str], target_modules: Iterable[str] = ()) -> Excludes:
        """Parts the patterns; `target_modules` are the modules of the target that a draft pattern must not reach.

        Raises CheckpointError when a pattern of the draft would exclude one of them in any spelling.
        """
        target, draft = [], []
        for pattern in dict.fromkeys(patterns):
            local = _draft_local(pattern)
            if local is None:
                target.append(pattern)
            else:
                draft.append(pattern)
        refuse_clash(draft, target_modules)
        re_rooted = dict.fromkeys(
            form for pattern in draft for form in (pattern, "mtp" + (_draft_local(pattern) or ""))
        )
        return cls(PatternSet(tuple(target)), PatternSet(tuple(re_rooted)))

    def exclude(self, module: str) -> bool:
        """True when the module is excluded, in whichever spelling."""
        found = split_root(module)
        is_draft = found is not None and found[0] is Part.DRAFT
        if is_draft and any(self.draft.match(form) for form in spellings(module)):
            return True
        # A pattern without a root (`*mlp.gate`) means modules of every part, but only as they are spelled on disk.
        return self.target.match(module) if is_draft else any(self.target.match(form) for form in spellings(module))


def refuse_clash(draft_patterns: Iterable[str], target_modules: Iterable[str]) -> None:
    """Raises CheckpointError when a pattern of the draft reaches a module outside the draft, in any spelling."""
    patterns = tuple(draft_patterns)
    together = PatternSet(patterns)
    for module in target_modules if patterns else ():
        forms = [form for form in spellings(module) if together.match(form)]
        if forms:
            culprit = next(pattern for pattern in patterns if PatternSet((pattern,)).match(forms[0]))
            raise CheckpointError(
                f"exclude {culprit!r}: expected to reach the draft alone, but it also excludes {module!r}; "
                "narrow the pattern (for example 'mtp.*')"
            )


def _draft_local(pattern: str) -> str | None:
    """What follows `mtp` in a pattern that is rooted at the draft; None for every other pattern."""
    for root in ROOTS[Part.DRAFT]:
        stem = root.removesuffix(".")
        if pattern.startswith(stem):
            return pattern[len(stem) :]
    return None
