"""The transformers model of a checkpoint, whatever the checkpoint's spelling and expert layout.

Tensors are read by our own reader, renamed to the published names and fused to the published expert layout, so that
transformers converts nothing on load and ModelOpt has nothing to convert back on export.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from qwen35.errors import CheckpointError
from qwen35.weights.names import Part, split_root
from qwen35.weights.reader import CheckpointReader

_PER_EXPERT = re.compile(r"(.*\.experts\.)(\d+)\.(gate|up|down)_proj\.weight")


def published_name(name: str, *, has_vision: bool) -> str:
    """Our spelling of a source tensor in the output: that of transformers' class. Unknown names stay as they are."""
    found = split_root(name)
    if found is None:
        return name
    part, local = found
    if part is Part.DRAFT:
        return f"mtp.{local}"
    if part is Part.VISION:
        return f"model.visual.{local}"
    if local.startswith("lm_head."):
        return local
    return f"model.language_model.{local}" if has_vision else f"model.{local}"


def load_reference(reader: CheckpointReader) -> nn.Module:
    """Target and vision tower as transformers' own module, in evaluation mode; the draft is not part of it.

    Experts run one by one ("eager"): ModelOpt sees the inputs of fused experts only so.
    Raises CheckpointError when names do not fit, naming them.
    """
    import transformers

    config = json.loads((reader.directory / "config.json").read_text(encoding="utf-8"))
    has_vision = bool(config.get("vision_config"))
    if has_vision:
        model_class = transformers.Qwen3_5MoeForConditionalGeneration
        model_config = transformers.Qwen3_5MoeConfig(**config)
    else:
        model_class = transformers.Qwen3_5MoeForCausalLM
        model_config = transformers.Qwen3_5MoeTextConfig(**config.get("text_config", config))
    model, info = model_class.from_pretrained(
        None,
        config=model_config,
        state_dict=_state_dict(reader, has_vision),
        dtype=_main_dtype(reader),
        experts_implementation="eager",
        output_loading_info=True,
    )
    _refuse_differences(reader.directory, info)
    model.config.architectures = [model_class.__name__]  # ModelOpt's export reads it; a text section does not have it
    return model.eval()


def _state_dict(reader: CheckpointReader, has_vision: bool) -> dict[str, Tensor]:
    """All tensors but the draft's under published names, experts fused."""
    tensors: dict[str, Tensor] = {}
    experts: dict[str, dict[int, str]] = {}
    for name in reader.names:
        found = split_root(name)
        if found is not None and found[0] is Part.DRAFT:
            continue
        published = published_name(name, has_vision=has_vision)
        match = _PER_EXPERT.fullmatch(published)
        if match is None:
            tensors[published] = reader.map(name)
        else:
            root, expert, projection = match.groups()
            experts.setdefault(f"{root}{projection}", {})[int(expert)] = name
    for stem in [stem for stem in experts if stem.endswith(".gate")]:
        gate, up = _stack(reader, experts.pop(stem)), _stack(reader, experts.pop(stem.removesuffix("gate") + "up", {}))
        tensors[stem.removesuffix("gate") + "gate_up_proj"] = torch.cat((gate, up), dim=1)  # [E, 2I, H]
    for stem, names in experts.items():
        tensors[f"{stem}_proj"] = _stack(reader, names)
    return tensors


def _stack(reader: CheckpointReader, names: dict[int, str]) -> Tensor:
    if not names or sorted(names) != list(range(len(names))):
        raise CheckpointError(
            f"{reader.directory}: expected experts numbered from 0 without a gap in every projection, "
            f"got {len(names)}: {', '.join(list(names.values())[:3])}"
        )
    return torch.stack([reader.map(names[expert]) for expert in range(len(names))])


def _main_dtype(reader: CheckpointReader) -> torch.dtype:
    """Type that holds most of the bytes."""
    num_bytes: dict[torch.dtype, int] = {}
    for name in reader.names:
        info = reader.info(name)
        num_bytes[info.dtype] = num_bytes.get(info.dtype, 0) + info.num_bytes
    dtype = max(num_bytes, key=num_bytes.__getitem__)
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise CheckpointError(
            f"{reader.directory}: expected an unquantised checkpoint, most of this one is {dtype}; "
            "use the original bfloat16 files"
        )
    return dtype


def _refuse_differences(directory: Path, info: dict[str, Any]) -> None:
    kinds = ("missing_keys", "unexpected_keys", "mismatched_keys")
    faults = [f"{kind.removesuffix('_keys')}: {sorted(map(str, info[kind]))[:20]}" for kind in kinds if info[kind]]
    if faults:
        raise CheckpointError(f"{directory}: expected the tensors of the model, got {'; '.join(faults)}")
