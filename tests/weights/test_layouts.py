"""Checkpoints as people have them: configuration files that leave things out, spell them otherwise or say too much."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from build.synthetic.generate import generate
from build.synthetic.layouts import LAYOUTS
from qwen35.config import ModelConfig
from qwen35.weights.loader import load_language
from qwen35.weights.report import IncompleteCheckpoint
from tests.tiny_shape import TINY

ROOT = "model.language_model."
ATTENTION, DELTA, MLP = f"{ROOT}layers.3.self_attn.", f"{ROOT}layers.0.linear_attn.", f"{ROOT}layers.1.mlp."


def make(directory: Path, layout: str) -> Path:
    generate(TINY, LAYOUTS[layout], directory / layout)
    return directory / layout


def load(directory: Path):
    return load_language(directory, ModelConfig.from_directory(directory), with_draft=True)


def edit_tensors(directory: Path, edit: Callable[[dict[str, Tensor]], object]) -> None:
    path = directory / "model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path)


def edit_excludes(directory: Path, edit: Callable[[list[str]], list[str]]) -> None:
    """In both files."""
    for name, section, key in (
        ("config.json", "quantization_config", "ignore"),
        ("hf_quant_config.json", "quantization", "exclude_modules"),
    ):
        path = directory / name
        content = json.loads(path.read_text())
        content[section][key] = edit(content[section][key])
        path.write_text(json.dumps(content))


def respell(old: str, new: str) -> Callable[[list[str]], list[str]]:
    return lambda patterns: [new + pattern.removeprefix(old) if old in pattern else pattern for pattern in patterns]


GLOBS = ["lm_head", "*visual*", "mtp*", "*linear_attn.conv1d", "*linear_attn.in_proj_[ab]", "*mlp.gate", "*expert_gate"]
SPELLINGS = {
    "as exported": lambda patterns: patterns,
    "model.": respell(ROOT, "model."),
    "language_model.model.": respell(ROOT, "language_model.model."),
    "language_model.": respell(ROOT, "language_model."),
    "head of an engine": respell("lm_head", "language_model.lm_head"),
    "draft under the model": respell("mtp", "model.mtp"),
    "draft under the language model": respell("mtp", "model.language_model.mtp"),
    "globs": lambda patterns: GLOBS,
    "globs below the root": lambda patterns: [f"{ROOT}layers.*{pattern[1:]}" for pattern in GLOBS[3:]] + GLOBS[:3],
    "whole modules": lambda patterns: [*patterns, "model.visual", "visual.*", "mtp", f"{ROOT}embed_tokens"],
}


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("layout", ["nvfp4", "experts-only", "mixed"])
def test_excludes_in_every_spelling_agree_with_the_tensors(tmp_path: Path, layout: str, spelling: str) -> None:
    directory = make(tmp_path, layout)
    edit_excludes(directory, SPELLINGS[spelling])
    if layout == "experts-only" and "globs" in spelling:
        edit_excludes(directory, lambda patterns: [*patterns, "*self_attn*", "*linear_attn*", "*shared_expert*"])
    if layout == "mixed":
        edit_excludes(directory, lambda patterns: [pattern for pattern in patterns if "lm_head" not in pattern])
    warnings = load(directory)[2].warnings
    assert not [warning for warning in warnings if "linear layers" in warning]


@pytest.mark.parametrize(
    ("layout", "forgotten", "warned"),
    [
        ("nvfp4", "mlp.gate", ()),  # a router is never anything but dense
        ("nvfp4", "shared_expert_gate", ()),
        ("nvfp4", "in_proj_a", ("3 linear layers are dense on disk, NVFP4 in the configuration",)),
        ("nvfp4", "lm_head", ("1 linear layers are dense on disk, NVFP4 in the configuration: lm_head",)),
        ("experts-only", "shared_expert.", ("12 linear layers are dense on disk, NVFP4 in the configuration",)),
        ("experts-only", "self_attn", ("4 linear layers are dense on disk, NVFP4 in the configuration",)),
        ("mixed", "mlp.gate", ()),
        ("mixed", "in_proj_a", ()),  # it lists what is quantised
        ("nvfp4", "mtp", ("20 linear layers are dense on disk, NVFP4 in the configuration: mtp.fc",)),
    ],
)
def test_what_the_excludes_forget_is_dense_all_the_same(
    tmp_path: Path, layout: str, forgotten: str, warned: tuple[str, ...]
) -> None:
    directory = make(tmp_path, layout)
    expected = load(directory)[0]
    edit_excludes(directory, lambda patterns: [pattern for pattern in patterns if forgotten not in pattern])
    target, _, report = load(directory)
    warnings = [warning for warning in report.warnings if "linear layers" in warning]
    assert len(warnings) == len(warned)
    assert all(found.startswith(text) for found, text in zip(warnings, warned, strict=True)), warnings
    assert torch.equal(target.layers[1].mlp.gate, expected.layers[1].mlp.gate)
    assert torch.equal(target.layers[1].mlp.shared_expert_gate, expected.layers[1].mlp.shared_expert_gate)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["A_log", "norm.weight", "dt_bias"])
def test_types_of_vectors(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    directory = make(tmp_path, "nvfp4")
    before = load(directory)[0].layers[0].mixer
    edit_tensors(directory, lambda tensors: tensors.update({DELTA + name: tensors[DELTA + name].to(dtype)}))
    after = load(directory)[0].layers[0].mixer
    field = name.split(".")[0]
    assert getattr(after, field).dtype is torch.float32
    assert torch.allclose(getattr(after, field), getattr(before, field), rtol=2**-7)


@pytest.mark.parametrize("shape", [(), (1,)])
def test_kv_scales_of_either_shape(tmp_path: Path, shape: tuple[int, ...]) -> None:
    directory = make(tmp_path, "mixed")
    without = load(directory)
    assert without[0].layers[3].mixer.k_scale is None
    scales = {
        f"{ATTENTION}{kind}_proj.{kind}_scale": torch.full(shape, value) for kind, value in (("k", 0.5), ("v", 2))
    }
    edit_tensors(directory, lambda tensors: tensors.update({name: scale.float() for name, scale in scales.items()}))
    target, _, report = load(directory)
    mixer = target.layers[3].mixer
    assert (float(mixer.k_scale), float(mixer.v_scale)) == (0.5, 2.0) and mixer.k_scale.shape == ()
    assert report.kv_cache == "FP8" and len(report.warnings) == len(without[2].warnings) - 1


EXPERT = f"{MLP}experts.2.up_proj"
LOST_OR_EXTRA = [
    # layout, tensor, shape to add (None: taken away), attribute of the error that names it
    ("nvfp4", f"{EXPERT}.weight_scale", None, "missing"),
    ("nvfp4", f"{EXPERT}.weight_scale_2", None, "missing"),
    ("nvfp4", f"{ATTENTION}q_proj.weight_scale", None, "missing"),
    ("mixed", f"{ATTENTION}q_proj.weight_scale", None, "missing"),
    ("mixed", "lm_head.weight_scale_2", None, "missing"),
    ("mixed", f"{ATTENTION}q_proj.weight_scale_2", (), "unexpected"),
    ("mixed", f"{EXPERT}.pre_quant_scale", (64,), "unexpected"),
    ("nvfp4", "lm_head.weight_scale", (), "unexpected"),
    ("nvfp4", "lm_head.input_scale", (), "unexpected"),
    ("nvfp4", f"{MLP}gate.input_scale", (), "unexpected"),
    ("experts-only", f"{MLP}shared_expert.up_proj.weight_scale_2", (), "unexpected"),
    ("experts-only", f"{ATTENTION}o_proj.input_scale", (), "unexpected"),
    ("bf16", f"{MLP}experts.gate_up_proj.weight_scale", (), "unexpected"),
    ("bf16", f"{ATTENTION}k_proj.q_scale", (), "unexpected"),
    ("qwen3.6", "mtp.layers.0.mlp.experts.down_proj_scale", (4,), "unexpected"),
]


@pytest.mark.parametrize(("layout", "name", "shape", "attribute"), LOST_OR_EXTRA)
def test_lost_and_extra_scales_are_named(
    tmp_path: Path, layout: str, name: str, shape: tuple[int, ...] | None, attribute: str
) -> None:
    directory = make(tmp_path, layout)
    edit_tensors(
        directory, lambda tensors: tensors.pop(name) if shape is None else tensors.update({name: torch.ones(shape)})
    )
    with pytest.raises(IncompleteCheckpoint) as raised:
        load(directory)
    assert getattr(raised.value, attribute) == (name,) and name in str(raised.value)
    others = {"missing", "unexpected", "mismatched"} - {attribute}
    assert not any(getattr(raised.value, other) for other in others)


def test_a_scale_of_the_wrong_shape(tmp_path: Path) -> None:
    directory = make(tmp_path, "nvfp4")
    edit_tensors(directory, lambda tensors: tensors.update({f"{EXPERT}.weight_scale_2": torch.ones(32)}))
    with pytest.raises(IncompleteCheckpoint, match=r"2.up_proj.weight_scale_2: expected .* \[\], got .* \[32\]"):
        load(directory)
