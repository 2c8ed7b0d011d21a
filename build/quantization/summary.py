"""The table at the end: what was quantised, what was kept and why, in bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from build.quantization.verify import Arrival

# First match wins. (what the name contains, group, why it is kept when it is)
_GROUPS = (
    ("mtp.", "MTP draft", "in the source's type: the acceptance rate depends on it"),
    ("visual.", "vision tower", "runs once for an image; every answer depends on its embeddings"),
    (".mlp.experts.", "routed experts", ""),
    (".shared_expert_gate.", "routers and gates", "a few rows that decide for whole layers"),
    (".shared_expert.", "shared experts", ""),
    (".mlp.gate.", "routers and gates", "a few rows that decide for whole layers"),
    ("embed_tokens", "embedding", "read row by row, never multiplied"),
    ("lm_head", "lm_head", "its error reaches every logit directly"),
    ("norm", "norms and vectors", "vectors"),
    (".in_proj_a.", "GDN decay and beta", "a few rows that steer the recurrent state"),
    (".in_proj_b.", "GDN decay and beta", "a few rows that steer the recurrent state"),
    (".conv1d.", "norms and vectors", "vectors"),
    (".A_log", "norms and vectors", "vectors"),
    (".dt_bias", "norms and vectors", "vectors"),
    (".linear_attn.", "gated delta nets", ""),
    (".self_attn.", "attention", ""),
)
_BY_SCHEME = "left out by the scheme {scheme}"


@dataclass(frozen=True)
class Agreement:
    """The quantised model beside the original on some calibration samples (fake quantisation, before the export).

    kl        mean KL divergence of the next-token distributions, nats
    same_top  share of positions with the same most likely token
    """

    num_tokens: int
    kl: float
    same_top: float


@dataclass(frozen=True)
class Group:
    """Tensors of one role and one fate."""

    name: str
    is_quantised: bool
    num_tensors: int
    num_source_bytes: int
    num_bytes: int
    mean_error: float
    why: str


def agreement(before: Sequence[Tensor], after: Sequence[Tensor]) -> Agreement:
    """Logits [T, V] of each sample, before and after."""
    old, new = torch.cat(list(before)).log_softmax(-1), torch.cat(list(after)).log_softmax(-1)
    kl = (old.exp() * (old - new)).sum(-1).mean()
    return Agreement(len(old), float(kl), float((old.argmax(-1) == new.argmax(-1)).float().mean()))


def groups_of(arrivals: Sequence[Arrival], scheme: str) -> list[Group]:
    """One group for each (role, quantised or kept), largest source first."""
    found: dict[tuple[str, bool], list[Arrival]] = {}
    reasons: dict[tuple[str, bool], str] = {}
    for arrival in arrivals:
        name, why = _role(arrival.name)
        key = (name, arrival.is_quantised)
        found.setdefault(key, []).append(arrival)
        reasons[key] = "" if arrival.is_quantised else why or _BY_SCHEME.format(scheme=scheme)
    groups = [
        Group(
            name=name,
            is_quantised=is_quantised,
            num_tensors=len(members),
            num_source_bytes=sum(member.num_source_bytes for member in members),
            num_bytes=sum(member.num_bytes for member in members),
            mean_error=sum(member.relative_error for member in members) / len(members),
            why=reasons[name, is_quantised],
        )
        for (name, is_quantised), members in found.items()
    ]
    return sorted(groups, key=lambda group: -group.num_source_bytes)


def table(groups: Sequence[Group], dtype_bytes: dict[str, int]) -> str:
    """The groups, their sum, and the output's bytes by type."""
    rows = [("part", "tensors", "source", "output", "error", "fate")]
    for group in groups:
        fate = "NVFP4" if group.is_quantised else f"kept: {group.why}"
        error = f"{100 * group.mean_error:.1f} %" if group.is_quantised else "0"
        sizes = _size(group.num_source_bytes), _size(group.num_bytes)
        rows.append((group.name, str(group.num_tensors), *sizes, error, fate))
    total = [sum(getattr(group, field) for group in groups) for field in ("num_source_bytes", "num_bytes")]
    rows.append(("all", str(sum(group.num_tensors for group in groups)), _size(total[0]), _size(total[1]), "", ""))
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    lines = [_line(row, widths) for row in rows]
    by_type = sorted(dtype_bytes.items(), key=lambda item: -item[1])
    sizes = ", ".join(f"{name} {_size(size)}" for name, size in by_type)
    return "\n".join((lines[0], "-" * max(map(len, lines)), *lines[1:], f"output by type: {sizes}"))


def warnings_for(groups: Sequence[Group]) -> list[str]:
    """Experts that stayed as they were although every scheme quantises them."""
    kept = [group for group in groups if group.name == "routed experts" and not group.is_quantised]
    return [
        f"{group.num_tensors} tensors of routed experts ({_size(group.num_source_bytes)}) were NOT quantised: "
        "ModelOpt did not recognise the experts of this checkpoint"
        for group in kept
    ]


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    """Name to the left, numbers to the right, the last cell as it is."""
    numbers = (cell.rjust(width) for cell, width in zip(row[1:5], widths[1:], strict=True))
    return "  ".join((row[0].ljust(widths[0]), *numbers, row[5])).rstrip()


def _role(name: str) -> tuple[str, str]:
    return next(((group, why) for part, group, why in _GROUPS if part in name), ("other", "no linear layer"))


def _size(num_bytes: int) -> str:
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.2f} {unit}"
    return f"{num_bytes} B"
