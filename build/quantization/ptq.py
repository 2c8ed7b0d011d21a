"""ModelOpt's post-training quantisation of the reference model, and its export to a directory."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from build.quantization.calibration import CalibrationInput
from build.quantization.cpu_shim import cpu_fake_quant
from qwen35.weights.excludes import refuse_clash

SCHEMES = {  # our name: ModelOpt's configuration
    "nvfp4": "NVFP4_DEFAULT_CFG",
    "w4a16_nvfp4": "W4A16_NVFP4_CFG",
    "experts_only": "NVFP4_EXPERTS_ONLY_CFG",
}
KV_CACHES = {"fp8": "FP8_KV_CFG"}
# After all other rules. A disabled quantiser still has its format, and a 3-D convolution in NVFP4 format calls a CUDA
# kernel, disabled or not. The rules of a KV cache mean every attention, the vision tower's too, which has no cache.
_VISION_RULES = (
    {"quantizer_name": "*visual.patch_embed*", "cfg": {"num_bits": 8, "axis": None}},
    {"quantizer_name": "*visual*", "enable": False},
)
DRAFT_PREFIXES = ("mtp", "mtp.layers.0")  # ModelOpt excludes `<prefix>*`


def quantize_model(
    model: nn.Module, inputs: Sequence[CalibrationInput], scheme: str, kv_cache: str | None = None
) -> nn.Module:
    """Inserts ModelOpt's quantisers and takes their ranges from `inputs`; the model is changed in place."""
    import modelopt.torch.quantization as mtq

    config = copy.deepcopy(getattr(mtq, SCHEMES[scheme]))
    kv_rules = getattr(mtq, KV_CACHES[kv_cache])["quant_cfg"] if kv_cache is not None else []
    config["quant_cfg"] = copy.deepcopy([*config["quant_cfg"], *kv_rules, *_VISION_RULES])

    def calibrate(calibrated: nn.Module) -> None:
        for sample in tqdm(inputs, desc="calibrating", unit="sample"):
            calibrated(**sample.model_arguments(), logits_to_keep=1)

    with torch.inference_mode(False), torch.no_grad(), cpu_fake_quant(), redirect_stdout(StringIO()):
        return mtq.quantize(model, config, calibrate)


@torch.no_grad()
def logits_of(model: nn.Module, inputs: Iterable[CalibrationInput]) -> list[Tensor]:
    """Logits [T, V] in float32 for each sample; a quantised model rounds as it will be served (fake quantisation)."""
    with cpu_fake_quant():
        return [model(**sample.model_arguments()).logits[0].float() for sample in inputs]


def export_model(model: nn.Module, directory: Path, kept: Mapping[str, Tensor], target_modules: Iterable[str]) -> None:
    """ModelOpt's export with `kept` added bit for bit; `mtp*` joins the excludes when tensors of the draft are kept.

    kept            tensors that overrule the model's, under published names: the draft, vectors of another type
    target_modules  modules that the excludes of the draft may not reach: CheckpointError otherwise
    """
    from modelopt.torch.export import export_hf_checkpoint

    if any(name.startswith("mtp.") for name in kept):
        refuse_clash([f"{prefix}*" for prefix in DRAFT_PREFIXES], target_modules)
        model._mtp_layer_prefixes = list(DRAFT_PREFIXES)  # the attribute that ModelOpt's exporter reads
    with warnings.catch_warnings(), redirect_stdout(StringIO()):
        warnings.simplefilter("ignore", DeprecationWarning)
        export_hf_checkpoint(model, export_dir=directory, extra_state_dict=dict(kept))


def write_configs(source: Path, directory: Path) -> None:
    """`config.json` of the source, every key of it, with ModelOpt's `quantization_config` added."""
    exported = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    config: dict[str, Any] = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = exported["quantization_config"]
    (directory / "config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
