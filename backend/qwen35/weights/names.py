"""Where the parts of a model stand in a checkpoint's names, in every spelling that is in use.

The language model's tensors are found under `model.language_model.` (published), under `language_model.model.`,
`language_model.` or `model.` (text-only and re-rooted files); the vision tower under `model.visual.` or `visual.`; the
draft under `mtp.`, with or without a prefix. A local name is what follows the root: `layers.0.self_attn.q_proj`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum


class Part(Enum):
    """The parts of a checkpoint that can be loaded, or left out, by themselves."""

    TARGET = "target"
    DRAFT = "draft"
    VISION = "vision"


# Longest first: a shorter root is the beginning of a longer one.
ROOTS = {
    Part.DRAFT: ("model.language_model.mtp.", "language_model.mtp.", "model.mtp.", "mtp."),
    Part.VISION: ("model.visual.", "visual."),
    Part.TARGET: ("model.language_model.", "language_model.model.", "language_model.", "model."),
}
HEADS = ("lm_head", "language_model.lm_head", "model.lm_head", "model.language_model.lm_head")


def split_root(name: str) -> tuple[Part, str] | None:
    """Part and local name of a tensor or module name; None for a name under no known root."""
    for head in HEADS:
        if name == head or name.startswith(head + "."):
            return Part.TARGET, "lm_head" + name[len(head) :]
    for part, roots in ROOTS.items():  # the draft and the vision tower before the target's bare `model.`
        for root in roots:
            if name.startswith(root):
                return part, name[len(root) :]
    return None


def spellings(name: str) -> tuple[str, ...]:
    """The name itself and its re-rooted forms, the raw form first. A draft's name never takes a form without `mtp`."""
    found = split_root(name)
    if found is None:
        return (name,)
    part, local = found
    if part is Part.TARGET and (local == "lm_head" or local.startswith("lm_head.")):
        forms = tuple(head + local[len("lm_head") :] for head in HEADS)
    else:
        forms = tuple(root + local for root in ROOTS[part])
    return (name, *(form for form in forms if form != name))


@dataclass(frozen=True)
class Layout:
    """The roots that one checkpoint uses."""

    target_root: str
    draft_root: str
    vision_root: str
    head: str

    @classmethod
    def of(cls, tensor_names: Iterable[str]) -> Layout:
        """Finds the roots; a part that is not there gets its published root, so that errors name published tensors."""
        used: dict[Part, set[str]] = {part: set() for part in Part}
        heads = set()
        for name in tensor_names:
            found = split_root(name)
            if found is None:
                continue
            part, local = found
            if part is Part.TARGET and local.startswith("lm_head."):
                heads.add(name.removesuffix(local.removeprefix("lm_head")))
            else:
                used[part].add(name.removesuffix(local))
        roots = {part: next((root for root in ROOTS[part] if root in used[part]), None) for part in Part}
        return cls(
            target_root=roots[Part.TARGET] or "model.language_model.",
            draft_root=roots[Part.DRAFT] or "mtp.",
            vision_root=roots[Part.VISION] or "model.visual.",
            head=next((head for head in HEADS if head in heads), "lm_head"),
        )
