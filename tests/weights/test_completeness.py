"""Loading proves completeness: every way in which tensors and model can disagree is refused, by name."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from qwen35.config import ModelConfig
from qwen35.errors import CheckpointError
from qwen35.weights import builders, memory
from qwen35.weights.loader import load_language, load_vision
from qwen35.weights.report import IncompleteCheckpoint
from qwen35.weights.stream import BUFFER_BYTES
from tests.tiny_checkpoint import make_tiny_checkpoint, tiny_tensors, write_shards
from tests.tiny_quantised import make_tiny_quantised_checkpoint

ROOT = "model.language_model."
EXPERTS = f"{ROOT}layers.1.mlp.experts."


def load(directory: Path, *, with_draft: bool = True, **options):
    return load_language(directory, ModelConfig.from_directory(directory), with_draft=with_draft, **options)


def rewrite(directory: Path, edit, **layout) -> Path:
    """The tiny checkpoint with edited tensors."""
    make_tiny_checkpoint(directory)
    tensors = tiny_tensors(**layout)
    edit(tensors)
    write_shards(directory, tensors)
    return directory


def rename(old: str, new: str):
    return lambda tensors: tensors.update({new: tensors.pop(old)})


def replace(name: str, value: Tensor):
    return lambda tensors: tensors.update({name: value})


def forbid_reading(monkeypatch) -> None:
    """Of more than headers."""
    monkeypatch.setattr("os.preadv", lambda *_: pytest.fail("read a tensor"))
    monkeypatch.setattr("qwen35.weights.reader.CheckpointReader.map", lambda *_, **__: pytest.fail("mapped a tensor"))


FAULTS = [
    # edit, attribute that names it, names
    (lambda t: t.pop(f"{ROOT}norm.weight"), "missing", [f"{ROOT}norm.weight"]),
    (lambda t: t.pop(f"{EXPERTS}down_proj"), "missing", [f"{EXPERTS}down_proj"]),
    (replace(f"{ROOT}layers.3.self_attn.q_proj.bias", torch.zeros(256)), "unexpected",
     [f"{ROOT}layers.3.self_attn.q_proj.bias"]),
    (replace(f"{ROOT}layers.4.input_layernorm.weight", torch.zeros(64)), "unexpected",
     [f"{ROOT}layers.4.input_layernorm.weight"]),
    (replace("optimizer.step", torch.zeros(1)), "unexpected", ["optimizer.step"]),
    (replace("mtp.layers.1.input_layernorm.weight", torch.zeros(64)), "unexpected",
     ["mtp.layers.1.input_layernorm.weight"]),
    (replace(f"{EXPERTS}0.down_proj.weight", torch.zeros(64, 32)), "unexpected", [f"{EXPERTS}0.down_proj.weight"]),
    (replace(f"{ROOT}layers.3.self_attn.q_proj.weight_scale", torch.ones(())), "unexpected",
     [f"{ROOT}layers.3.self_attn.q_proj.weight_scale"]),
    (replace(f"{ROOT}norm.weight", torch.zeros(65)), "mismatched", ["expected bfloat16/float32/float16 [64]"]),
    (replace("lm_head.weight", torch.zeros(272, 64, dtype=torch.int8)), "mismatched", ["got int8 [272, 64]"]),
    (replace(f"{ROOT}layers.0.mlp.gate.weight", torch.zeros(4, 32, dtype=torch.uint8)), "mismatched", ["gate.weight"]),
]  # fmt: skip


@pytest.mark.parametrize(("edit", "attribute", "names"), FAULTS)
def test_faults_are_listed_by_name(tmp_path: Path, edit, attribute: str, names: list[str]) -> None:
    with pytest.raises(IncompleteCheckpoint) as raised:
        load(rewrite(tmp_path, edit))
    found = {what: getattr(raised.value, what) for what in ("missing", "unexpected", "mismatched", "unfilled")}
    assert len(found.pop(attribute)) == len(names)
    assert not any(found.values()), found
    for name in names:
        assert name in str(raised.value)


def test_renamed_tensor_is_missing_and_unexpected(tmp_path: Path) -> None:
    old, new = f"{ROOT}layers.0.linear_attn.dt_bias", f"{ROOT}layers.0.linear_attn.dt_bais"
    with pytest.raises(IncompleteCheckpoint) as raised:
        load(rewrite(tmp_path, rename(old, new)))
    assert (raised.value.missing, raised.value.unexpected) == ((old,), (new,))


def test_one_expert_incomplete(tmp_path: Path) -> None:
    name = f"{EXPERTS}2.up_proj.weight"
    with pytest.raises(IncompleteCheckpoint) as raised:
        load(rewrite(tmp_path, lambda tensors: tensors.pop(name), layout="per_expert"))
    assert raised.value.missing == (name,)


@pytest.mark.parametrize("mtp_layout", [None, "incomplete"])
def test_missing_draft_is_named_and_only_needed_with_drafting(tmp_path: Path, mtp_layout: str | None) -> None:
    if mtp_layout is None:
        make_tiny_checkpoint(tmp_path, mtp_layout=None)
        names = {"mtp.fc.weight", "mtp.layers.0.mlp.experts.gate_up_proj", "mtp.layers.0.self_attn.o_proj.weight"}
        count = 19
    else:
        rewrite(tmp_path, lambda tensors: tensors.pop("mtp.norm.weight"))
        names, count = {"mtp.norm.weight"}, 1
    with pytest.raises(IncompleteCheckpoint) as raised:
        load(tmp_path)
    assert len(raised.value.missing) == count and names <= set(raised.value.missing)
    assert all(name in str(raised.value) for name in names)
    assert "set num_draft_tokens to 0" in str(raised.value)
    assert load(tmp_path, with_draft=False)[1] is None


def test_more_than_one_draft_layer(tmp_path: Path) -> None:
    directory = make_tiny_checkpoint(tmp_path)
    config = json.loads((directory / "config.json").read_text())
    config["text_config"]["mtp_num_hidden_layers"] = 2
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="mtp_num_hidden_layers: expected 1, .* got 2"):
        load(directory)
    assert load(directory, with_draft=False)[1] is None


def test_vision_checks_the_whole_checkpoint_too(tmp_path: Path) -> None:
    directory = rewrite(tmp_path, replace("nobody.weight", torch.zeros(1)))
    with pytest.raises(IncompleteCheckpoint, match=r"1 unexpected: nobody.weight"):
        load_vision(directory, ModelConfig.from_directory(directory))
    text_only = make_tiny_checkpoint(tmp_path / "text", with_vision=False)
    config = json.loads((text_only / "config.json").read_text())
    del config["vision_config"]
    (text_only / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="no vision tower"):
        load_vision(text_only, ModelConfig.from_directory(text_only))
    load(text_only)


def test_quantised_weight_without_its_scales(tmp_path: Path) -> None:
    directory = make_tiny_quantised_checkpoint(tmp_path)
    _edit_quantised(directory, lambda tensors: tensors.pop(f"{EXPERTS}1.up_proj.weight_scale_2"))
    with pytest.raises(IncompleteCheckpoint) as raised:
        load(directory)
    assert raised.value.missing == (f"{EXPERTS}1.up_proj.weight_scale_2",)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
@pytest.mark.parametrize("suffix", ["weight_scale_2", "input_scale"])
def test_a_scale_that_no_quantisation_writes(tmp_path: Path, value: float, suffix: str) -> None:
    directory = make_tiny_quantised_checkpoint(tmp_path)
    name = f"{EXPERTS}1.up_proj.{suffix}"
    _edit_quantised(directory, replace(name, torch.tensor(value)))
    with pytest.raises(CheckpointError, match=f"{name}: expected a finite number, 0 or more, got {value}"):
        load(directory)


def test_experts_of_different_kinds(tmp_path: Path) -> None:
    directory = make_tiny_quantised_checkpoint(tmp_path)
    _edit_quantised(directory, lambda tensors: tensors.pop(f"{EXPERTS}1.up_proj.input_scale"))
    with pytest.raises(
        IncompleteCheckpoint, match=r"experts.1.up_proj: expected NVFP4 as in .*0.up_proj, got W4A16_NVFP4"
    ):
        load(directory)


def _edit_quantised(directory: Path, edit) -> None:
    tensors = load_file(directory / "model.safetensors")
    edit(tensors)
    write_shards(directory, tensors)


def test_a_draft_exclude_that_reaches_the_target_is_refused(tmp_path: Path) -> None:
    directory = make_tiny_quantised_checkpoint(tmp_path)
    _edit_quantised(directory, replace("mtp_adapter.weight", torch.zeros(1)))
    with pytest.raises(CheckpointError, match=r"exclude 'mtp\*': .* also excludes 'mtp_adapter'"):
        load(directory)


def test_a_tensor_that_the_second_pass_forgets_is_never_filled(tmp_path: Path, monkeypatch) -> None:
    directory = make_tiny_checkpoint(tmp_path)
    calls = []
    build = builders.language_weights

    def forgetful(source, layout, config):
        calls.append(source)
        if len(calls) == 2:
            source.vector = lambda name, shape: torch.zeros(shape)
        return build(source, layout, config)

    monkeypatch.setattr("qwen35.weights.loader.language_weights", forgetful)
    with pytest.raises(IncompleteCheckpoint, match="never filled") as raised:
        load(directory, with_draft=False)
    assert f"{ROOT}layers.0.linear_attn.A_log" in raised.value.unfilled and raised.value.missing == ()


def test_a_tensor_that_is_asked_for_twice(tmp_path: Path, monkeypatch) -> None:
    directory = make_tiny_checkpoint(tmp_path)
    build = builders.language_weights

    def greedy(source, layout, config):
        source.vector(f"{ROOT}norm.weight", (64,))
        return build(source, layout, config)

    monkeypatch.setattr("qwen35.weights.loader.language_weights", greedy)
    with pytest.raises(IncompleteCheckpoint, match=r"norm.weight: expected to be consumed once, got a second use"):
        load(directory)


def test_nothing_is_read_before_all_faults_are_known(tmp_path: Path, monkeypatch) -> None:
    directory = rewrite(tmp_path, lambda tensors: tensors.pop("mtp.fc.weight"))
    forbid_reading(monkeypatch)
    with pytest.raises(IncompleteCheckpoint, match=r"1 missing: mtp.fc.weight"):
        load(directory)


def test_what_does_not_fit_is_refused_with_both_numbers(tmp_path: Path, monkeypatch) -> None:
    directory = make_tiny_checkpoint(tmp_path)
    needed = load(directory)[2].num_bytes_held + BUFFER_BYTES
    monkeypatch.setattr(memory, "available_bytes", lambda device: needed - 1)
    forbid_reading(monkeypatch)
    with pytest.raises(CheckpointError, match=f"expected {needed} bytes of memory on cpu .* got {needed - 1} free"):
        load(directory)


def test_available_memory_of_this_machine() -> None:
    available = memory.available_bytes(torch.device("cpu"))
    assert available is not None and available > 2**20
