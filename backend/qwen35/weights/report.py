"""What a load did, and what was wrong with a checkpoint that could not be loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from qwen35.errors import CheckpointError
from qwen35.weights.names import Part
from qwen35.weights.scheme import Kind
from qwen35.weights.source import Scale

_MAX_NAMES = 40


class IncompleteCheckpoint(CheckpointError):
    """Tensors and model do not match. The message names them; the attributes hold them all.

    missing     the model needs them, the checkpoint has none
    unexpected  the checkpoint has them, nothing consumed them and no part that was left out owns them
    mismatched  shape, type or kind differ: one sentence each
    unfilled    the plan counted on them, loading did not read them
    """

    def __init__(
        self,
        checkpoint: str,
        *,
        missing: Sequence[str] = (),
        unexpected: Sequence[str] = (),
        mismatched: Sequence[str] = (),
        unfilled: Sequence[str] = (),
        remedy: str = "",
    ) -> None:
        self.missing, self.unexpected = tuple(missing), tuple(unexpected)
        self.mismatched, self.unfilled = tuple(mismatched), tuple(unfilled)
        faults = [
            _listed("missing", self.missing, ", "),
            _listed("unexpected", self.unexpected, ", "),
            _listed("mismatched", self.mismatched, "; "),
            _listed("never filled", self.unfilled, ", "),
        ]
        message = f"{checkpoint}: expected every tensor consumed once, got " + "; ".join(filter(None, faults))
        super().__init__(f"{message}; {remedy}" if remedy else message)


@dataclass(frozen=True)
class LoadReport:
    """A complete load.

    num_tensors     tensors consumed, each once
    num_bytes_read  their bytes in the checkpoint
    num_bytes_held  bytes of memory taken (without the file-mapped embedding)
    num_layers      linear layers by kind; an expert stack counts each expert's matrices
    skipped         names of the parts that were left out
    warnings        where the configuration and the tensors disagree
    kv_cache        type that the checkpoint announces for the KV cache, None: that of the model
    """

    checkpoint: str
    num_tensors: int
    num_bytes_read: int
    num_bytes_held: int
    num_layers: Mapping[Kind, int]
    skipped: Mapping[Part, tuple[str, ...]] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    kv_cache: str | None = None

    def __str__(self) -> str:
        kinds = ", ".join(f"{count} {kind.value}" for kind, count in self.num_layers.items())
        skipped = ", ".join(f"{part.value} ({len(names)} tensors)" for part, names in self.skipped.items())
        read, held = self.num_bytes_read / 2**20, self.num_bytes_held / 2**20
        text = f"{self.checkpoint}: {self.num_tensors} tensors, {read:.1f} MiB read, {held:.1f} MiB held; {kinds}"
        return f"{text}; left out: {skipped}" if skipped else text


def refuse_broken_scales(checkpoint: str, scales: Sequence[Scale]) -> None:
    """Raises CheckpointError for a scale of a whole matrix that no quantisation writes: not finite, or below zero."""
    for scale in scales:
        values = scale.values.reshape(-1)
        broken = ~(torch.isfinite(values) & (values >= 0))
        if broken.any():
            expert = int(broken.nonzero()[0])
            raise CheckpointError(
                f"{checkpoint}: {scale.modules[expert]}.{scale.suffix}: expected a finite number, 0 or more, got "
                f"{float(values[expert])}; copy the file again"
            )


def _listed(what: str, names: Sequence[str], separator: str) -> str:
    if not names:
        return ""
    more = f"{separator}and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return f"{len(names)} {what}: {separator.join(names[:_MAX_NAMES])}{more}"
