"""Loads a checkpoint directory, or one part of it, into typed weights and proves that the load is whole.

Every tensor of the checkpoint is either consumed, once, or named in the report as part of what was left out: the vision
tower and, with drafting off, the draft for the language model; language model and draft for the vision encoder.
Anything else is refused by name before the first byte is read.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch

from qwen35.config import ModelConfig
from qwen35.errors import CheckpointError
from qwen35.kernels.weight_layout import WeightLayout
from qwen35.nn.weight_types import DraftWeights, LanguageWeights, VisionWeights
from qwen35.weights.builders import draft_weights, language_weights, vision_weights
from qwen35.weights.memory import held_bytes, refuse_what_does_not_fit
from qwen35.weights.names import Layout, Part, split_root
from qwen35.weights.passes import Loader, Planner
from qwen35.weights.progress import LoadProgress
from qwen35.weights.reader import CheckpointReader
from qwen35.weights.report import IncompleteCheckpoint, LoadReport, refuse_broken_scales
from qwen35.weights.scheme import QuantizationScheme
from qwen35.weights.source import TensorSource
from qwen35.weights.stream import BUFFER_BYTES, Progress

_LOGGER = logging.getLogger(__name__)

_Weights = TypeVar("_Weights")
_Build = Callable[[TensorSource, Layout], _Weights]
_OWN_TENSORS = re.compile(r"\.(weight|bias|weight_scale|weight_scale_2|input_scale)$")
_DRAFT_REMEDY = "set num_draft_tokens to 0, or use a checkpoint that kept its mtp.* tensors"


def load_language(
    checkpoint_dir: Path | str,
    config: ModelConfig,
    *,
    with_draft: bool,
    progress: Progress | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    weight_layout: WeightLayout | None = None,
    rounds_draft_experts: bool = False,
) -> tuple[LanguageWeights, DraftWeights | None, LoadReport]:
    """The target and, with drafting on, the MTP head.

    with_draft     False leaves `mtp.*` out; True makes them required
    progress       called with (bytes read, bytes to read) after each read; None: a bar, or lines in the log
    device         "meta" reads nothing and gives the shapes
    dtype          of the dense matrices, None: as stored. Norms are float32, `embed_tokens` stays as stored
    weight_layout  of the kernels that will read the weights; None: as on disk
    rounds_draft_experts  dense experts of the draft become NVFP4 on the way: 0.28 of their memory

    Raises IncompleteCheckpoint (a CheckpointError) naming missing, unexpected and mismatched tensors, CheckpointError
    for unreadable files and for a checkpoint that does not fit into memory.
    """
    if with_draft and config.text.mtp_num_hidden_layers > 1:
        raise CheckpointError(
            f"mtp_num_hidden_layers: expected 1, the only count that is supported, got "
            f"{config.text.mtp_num_hidden_layers}; set num_draft_tokens to 0"
        )

    def build(source: TensorSource, layout: Layout) -> tuple[LanguageWeights, DraftWeights | None]:
        target = language_weights(source, layout, config.text)
        if not with_draft:
            return target, None
        return target, draft_weights(source, layout, config.text, rounds_experts=rounds_draft_experts)

    left_out = {Part.VISION} if with_draft else {Part.VISION, Part.DRAFT}
    (target, draft), report = _load(
        checkpoint_dir, build, left_out, progress, torch.device(device), dtype, weight_layout
    )
    return target, draft, report


def load_vision(
    checkpoint_dir: Path | str,
    config: ModelConfig,
    *,
    progress: Progress | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    weight_layout: WeightLayout | None = None,
) -> tuple[VisionWeights, LoadReport]:
    """The vision tower alone; arguments and errors as for `load_language`."""
    vision = config.vision
    if vision is None:
        raise CheckpointError(f"{checkpoint_dir}: expected a vision_config in config.json, got none: no vision tower")

    def build(source: TensorSource, layout: Layout) -> VisionWeights:
        return vision_weights(source, layout, vision)

    left_out = {Part.TARGET, Part.DRAFT}
    return _load(checkpoint_dir, build, left_out, progress, torch.device(device), dtype, weight_layout)


def _load(
    checkpoint_dir: Path | str,
    build: _Build[_Weights],
    left_out: set[Part],
    progress: Progress | None,
    device: torch.device,
    dtype: torch.dtype | None,
    weight_layout: WeightLayout | None,
) -> tuple[_Weights, LoadReport]:
    checkpoint = str(checkpoint_dir)
    with CheckpointReader(checkpoint_dir) as reader:
        layout = Layout.of(reader.names)
        scheme = QuantizationScheme.from_directory(checkpoint_dir, _modules_beside_draft(reader))
        plan = Planner(reader, dtype, weight_layout)
        planned = build(plan, layout)
        skipped = {part: _names_of(part, reader) for part in left_out}
        _refuse_faults(checkpoint, plan, skipped)
        num_bytes_held = held_bytes(planned) - (plan.num_bytes_mapped if device.type == "cpu" else 0)
        refuse_what_does_not_fit(checkpoint, num_bytes_held + BUFFER_BYTES, device)
        weights = planned if device.type == "meta" else _fill(checkpoint, plan, build, layout, device, progress)
    report = _report(checkpoint, scheme, plan, num_bytes_held, skipped)
    if device.type != "meta":
        _LOGGER.info("%s", report)
        for warning in report.warnings:
            _LOGGER.warning("%s: %s", checkpoint, warning)
    return weights, report


def _fill(
    checkpoint: str,
    plan: Planner,
    build: _Build[_Weights],
    layout: Layout,
    device: torch.device,
    progress: Progress | None,
) -> _Weights:
    loader = Loader(plan, device)
    weights = build(loader, layout)
    if loader.unfilled:
        raise IncompleteCheckpoint(checkpoint, unfilled=loader.unfilled)
    with LoadProgress(checkpoint) as display:
        loader.read(progress or display)
    refuse_broken_scales(checkpoint, loader.scales)
    return weights


def _refuse_faults(checkpoint: str, plan: Planner, skipped: dict[Part, tuple[str, ...]]) -> None:
    known = set(plan.taken).union(*skipped.values())
    unexpected = [name for name in plan.reader.names if name not in known]
    if plan.missing or unexpected or plan.mismatched:
        parts = {found[0] for name in plan.missing if (found := split_root(name))}
        raise IncompleteCheckpoint(
            checkpoint,
            missing=plan.missing,
            unexpected=unexpected,
            mismatched=plan.mismatched,
            remedy=_DRAFT_REMEDY if parts == {Part.DRAFT} else "",
        )


def _report(
    checkpoint: str,
    scheme: QuantizationScheme,
    plan: Planner,
    num_bytes_held: int,
    skipped: dict[Part, tuple[str, ...]],
) -> LoadReport:
    warnings = [*scheme.warnings, *scheme.disagreements(plan.kinds)]
    scales = [name for name in plan.taken if name.endswith((".k_scale", ".v_scale"))]
    if scheme.kv_cache is not None and not scales and Part.TARGET not in skipped:
        warnings.append(
            f"the configuration announces {scheme.kv_cache} keys and values, no k_scale or v_scale is on disk: 1.0"
        )
    return LoadReport(
        checkpoint=checkpoint,
        num_tensors=len(plan.taken),
        num_bytes_read=sum(info.num_bytes for info in plan.taken.values()),
        num_bytes_held=num_bytes_held,
        num_layers=dict(Counter(plan.kinds.values())),
        skipped={part: names for part, names in skipped.items() if names},
        warnings=tuple(warnings),
        kv_cache=scheme.kv_cache,
    )


def _names_of(part: Part, reader: CheckpointReader) -> tuple[str, ...]:
    return tuple(name for name in reader.names if (found := split_root(name)) and found[0] is part)


def _modules_beside_draft(reader: CheckpointReader) -> list[str]:
    """Modules that no exclude of the draft may reach."""
    names = (name for name in reader.names if (found := split_root(name)) is None or found[0] is not Part.DRAFT)
    return list(dict.fromkeys(_OWN_TENSORS.sub("", name) for name in names))
