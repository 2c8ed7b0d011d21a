"""Loading proves completeness: layouts, kinds of weights, and every way in which tensors and model can disagree."""

import json
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from torch import Tensor

from qwen35.config import ModelConfig
from qwen35.errors import CheckpointError
from qwen35.nn.weight_types import AttentionWeights, GatedDeltaWeights
from qwen35.nvfp4 import FP8Tensor, NVFP4Tensor, dequantize
from qwen35.weights import builders, memory
from qwen35.weights.loader import load_language, load_vision
from qwen35.weights.names import Part
from qwen35.weights.report import IncompleteCheckpoint
from qwen35.weights.scheme import Kind
from tests.tiny_checkpoint import make_tiny_checkpoint, tiny_tensors, write_shards
from tests.tiny_quantised import INPUT_SCALE, make_tiny_quantised_checkpoint

ROOT = "model.language_model."
EXPERTS = f"{ROOT}layers.1.mlp.experts."
EXPECTED = tiny_tensors()


def load(directory: Path, *, with_draft: bool = True, **options):
    return load_language(directory, ModelConfig.from_directory(directory), with_draft=with_draft, **options)


def rewrite(directory: Path, edit, **layout) -> Path:
    """The tiny checkpoint with edited tensors."""
    make_tiny_checkpoint(directory)
    tensors = tiny_tensors(**layout)
    edit(tensors)
    write_shards(directory, tensors)
    return directory


def same(left: object, right: object) -> bool:
    """Bitwise equality of two records of weights."""
    if isinstance(left, Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, tuple):
        return len(left) == len(right) and all(map(same, left, right))
    if left is None:
        return right is None
    return type(left) is type(right) and all(
        same(getattr(left, field.name), getattr(right, field.name)) for field in fields(left)
    )


def test_values_land_under_their_names(tmp_path: Path) -> None:
    target, draft, report = load(make_tiny_checkpoint(tmp_path))
    assert torch.equal(target.embed_tokens, EXPECTED[f"{ROOT}embed_tokens.weight"])
    assert torch.equal(target.lm_head, EXPECTED["lm_head.weight"])
    assert torch.equal(target.norm, EXPECTED[f"{ROOT}norm.weight"].float())
    assert [type(layer.mixer) for layer in target.layers] == [GatedDeltaWeights] * 3 + [AttentionWeights]
    delta, attention = target.layers[1].mixer, target.layers[3].mixer
    for name in ("in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "conv1d", "out_proj"):
        assert torch.equal(getattr(delta, name), EXPECTED[f"{ROOT}layers.1.linear_attn.{name}.weight"])
    assert torch.equal(delta.A_log, EXPECTED[f"{ROOT}layers.1.linear_attn.A_log"].float())
    assert torch.equal(delta.dt_bias, EXPECTED[f"{ROOT}layers.1.linear_attn.dt_bias"].float())
    assert torch.equal(delta.norm, EXPECTED[f"{ROOT}layers.1.linear_attn.norm.weight"].float())
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        assert torch.equal(getattr(attention, name), EXPECTED[f"{ROOT}layers.3.self_attn.{name}.weight"])
    assert attention.k_scale is None and attention.v_scale is None
    moe = target.layers[1].mlp
    assert torch.equal(moe.gate, EXPECTED[f"{ROOT}layers.1.mlp.gate.weight"])
    gate_up = EXPECTED[f"{EXPERTS}gate_up_proj"]
    assert torch.equal(moe.experts.gate_proj, gate_up[:, :32]) and torch.equal(moe.experts.up_proj, gate_up[:, 32:])
    assert moe.experts.gate_proj.is_contiguous() and moe.experts.up_proj.is_contiguous()
    assert torch.equal(moe.experts.down_proj, EXPECTED[f"{EXPERTS}down_proj"])
    assert torch.equal(draft.fc, EXPECTED["mtp.fc.weight"])
    assert torch.equal(draft.layer.mlp.experts.up_proj[2], EXPECTED["mtp.layers.0.mlp.experts.2.up_proj.weight"])
    assert report.num_tensors + len(report.skipped[Part.VISION]) == len(EXPECTED)
    assert report.warnings == ()


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model.", "language_model.", "model."])
@pytest.mark.parametrize("layout", ["fused", "per_expert"])
@pytest.mark.parametrize(("mtp_layout", "num_shards"), [("fused", 1), ("per_expert", 3)])
def test_every_layout_loads_the_same(
    tmp_path: Path, prefix: str, layout: str, mtp_layout: str, num_shards: int
) -> None:
    reference = load(make_tiny_checkpoint(tmp_path / "reference"))
    directory = make_tiny_checkpoint(
        tmp_path / "other", prefix=prefix, layout=layout, mtp_layout=mtp_layout, num_shards=num_shards
    )
    target, draft, _ = load(directory)
    assert same(target, reference[0])
    assert same(draft, reference[1])


def test_vectors_may_be_float32_on_disk(tmp_path: Path) -> None:
    target, _, _ = load(make_tiny_checkpoint(tmp_path, float32_vectors=True))
    exact = tiny_tensors(float32_vectors=True)[f"{ROOT}layers.0.linear_attn.A_log"]
    assert exact.dtype == torch.float32
    assert torch.equal(target.layers[0].mixer.A_log, exact)


def test_dtype_is_for_dense_matrices(tmp_path: Path) -> None:
    target, _, report = load(make_tiny_checkpoint(tmp_path), dtype=torch.float32)
    assert target.layers[3].mixer.q_proj.dtype == target.lm_head.dtype == torch.float32
    assert target.layers[0].mlp.experts.down_proj.dtype == torch.float32
    assert target.embed_tokens.dtype == torch.bfloat16
    kept, _, kept_report = load(tmp_path)
    assert kept.layers[3].mixer.q_proj.dtype == torch.bfloat16
    assert report.num_bytes_read == kept_report.num_bytes_read
    assert report.num_bytes_held > 1.9 * kept_report.num_bytes_held


def test_the_embedding_is_not_copied(tmp_path: Path) -> None:
    target, _, report = load(make_tiny_checkpoint(tmp_path))
    address = target.embed_tokens.data_ptr()
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    (file,) = [f[-1] for f in lines if int(f[0].split("-")[0], 16) <= address < int(f[0].split("-")[1], 16)]
    assert file == str(tmp_path / "model.safetensors")
    everything = memory.held_bytes((target,)) - target.embed_tokens.numel() * 2
    assert load(tmp_path, with_draft=False)[2].num_bytes_held == everything


def test_tied_head(tmp_path: Path) -> None:
    rewrite(tmp_path, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(IncompleteCheckpoint, match="1 missing: lm_head.weight"):
        load(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    target, _, _ = load(tmp_path)
    assert target.lm_head is target.embed_tokens


def test_progress_ends_at_all_bytes(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    _, _, report = load(make_tiny_checkpoint(tmp_path), progress=lambda done, total: seen.append((done, total)))
    assert len(seen) == report.num_tensors
    assert seen[-1] == (report.num_bytes_read, report.num_bytes_read)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_vision_alone(tmp_path: Path) -> None:
    directory = make_tiny_checkpoint(tmp_path)
    vision, report = load_vision(directory, ModelConfig.from_directory(directory))
    patch = EXPECTED["model.visual.patch_embed.proj.weight"]
    assert torch.equal(vision.patch_embed.weight, patch.reshape(32, 3 * 2 * 16 * 16))
    block = "model.visual.blocks.1."
    assert torch.equal(vision.blocks[1].qkv.weight, EXPECTED[f"{block}attn.qkv.weight"])
    assert torch.equal(vision.blocks[1].qkv.bias, EXPECTED[f"{block}attn.qkv.bias"])
    assert torch.equal(vision.blocks[1].linear_fc2.weight, EXPECTED[f"{block}mlp.linear_fc2.weight"])
    assert torch.equal(vision.merger.norm.bias, EXPECTED["model.visual.merger.norm.bias"].float())
    assert {part: len(names) for part, names in report.skipped.items()} == {
        Part.TARGET: sum(name.startswith(ROOT) or name == "lm_head.weight" for name in EXPECTED),
        Part.DRAFT: sum(name.startswith("mtp.") for name in EXPECTED),
    }


def test_left_out_parts_are_named(tmp_path: Path) -> None:
    _, draft, report = load(make_tiny_checkpoint(tmp_path), with_draft=False)
    assert draft is None
    assert set(report.skipped[Part.DRAFT]) == {name for name in EXPECTED if name.startswith("mtp.")}
    assert set(report.skipped[Part.VISION]) == {name for name in EXPECTED if name.startswith("model.visual.")}


# --- quantised ---


def test_nvfp4_weights_stay_packed_with_their_own_scales(tmp_path: Path) -> None:
    target, draft, report = load(make_tiny_quantised_checkpoint(tmp_path))
    experts = target.layers[2].mlp.experts
    dense = EXPECTED[f"{ROOT}layers.2.mlp.experts.gate_up_proj"].float()
    for weight, expected in ((experts.gate_proj, dense[:, :32]), (experts.up_proj, dense[:, 32:])):
        assert isinstance(weight, NVFP4Tensor) and weight.shape == expected.shape
        assert torch.equal(weight.global_scale, expected.abs().amax(dim=(1, 2)) / 2688)
        assert torch.equal(weight.input_scale, torch.full((4,), INPUT_SCALE))
        assert (dequantize(weight) - expected).norm() < 0.12 * expected.norm()
    assert not torch.equal(experts.gate_proj.global_scale, experts.up_proj.global_scale)
    assert isinstance(target.layers[0].mixer.out_proj, NVFP4Tensor)
    assert isinstance(target.layers[0].mixer.in_proj_a, Tensor)
    assert isinstance(draft.layer.mixer.q_proj, Tensor)
    assert report.warnings == () and report.kv_cache is None
    assert report.num_layers[Kind.NVFP4] == 3 * 3 + 4 + 4 * (3 + 12)


@pytest.mark.parametrize(
    ("options", "kinds"),
    [
        ({"algorithm": "W4A16_NVFP4"}, {"experts": NVFP4Tensor, "attention": NVFP4Tensor, "head": Tensor}),
        ({"algorithm": "MIXED_PRECISION"}, {"experts": NVFP4Tensor, "attention": FP8Tensor, "head": Tensor}),
        (
            {"algorithm": "MIXED_PRECISION", "quantised_head": True},
            {"experts": NVFP4Tensor, "attention": FP8Tensor, "head": NVFP4Tensor},
        ),
        (
            {"quantised_draft": True, "num_shards": 2},
            {"experts": NVFP4Tensor, "attention": NVFP4Tensor, "head": Tensor},
        ),
    ],
)
def test_published_kinds(tmp_path: Path, options: dict, kinds: dict) -> None:
    target, draft, report = load(make_tiny_quantised_checkpoint(tmp_path, **options))
    assert isinstance(target.layers[3].mlp.experts.down_proj, kinds["experts"])
    assert isinstance(target.layers[3].mixer.k_proj, kinds["attention"])
    assert isinstance(target.lm_head, kinds["head"])
    assert isinstance(draft.layer.mlp.experts.up_proj, NVFP4Tensor if "quantised_draft" in options else Tensor)
    has_input_scale = options.get("algorithm", "NVFP4") == "NVFP4"
    assert (target.layers[3].mlp.experts.down_proj.input_scale is not None) is has_input_scale
    expected = EXPECTED[f"{ROOT}layers.3.self_attn.k_proj.weight"].float()
    assert (dequantize(target.layers[3].mixer.k_proj) - expected).norm() < 0.12 * expected.norm()
    assert report.warnings == ()


def test_kv_scales(tmp_path: Path) -> None:
    target, _, report = load(make_tiny_quantised_checkpoint(tmp_path / "with", kv_scales=True))
    assert target.layers[3].mixer.k_scale == target.layers[3].mixer.v_scale == 0.25
    assert report.kv_cache == "FP8" and report.warnings == ()
    directory = make_tiny_quantised_checkpoint(tmp_path / "without")
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"]["kv_cache_scheme"] = {"num_bits": 8, "type": "float"}
    (directory / "config.json").write_text(json.dumps(config))
    warnings = load(directory)[2].warnings
    assert [warning for warning in warnings if "no k_scale or v_scale" in warning]


def test_the_tensors_decide_and_disagreement_is_a_warning(tmp_path: Path) -> None:
    directory = make_tiny_quantised_checkpoint(tmp_path)
    for name in ("config.json", "hf_quant_config.json"):
        path = directory / name
        path.write_text(
            path.read_text().replace('"lm_head", ', "").replace('"mtp*", "mtp.layers.0*"', '"mtp.layers.0*"')
        )
    target, draft, report = load(directory)
    assert isinstance(target.lm_head, Tensor) and isinstance(draft.fc, Tensor)
    assert report.warnings == ("2 linear layers are dense on disk, NVFP4 in the configuration: lm_head, mtp.fc",)


# --- faults ---


def rename(old: str, new: str):
    return lambda tensors: tensors.update({new: tensors.pop(old)})


def replace(name: str, value: Tensor):
    return lambda tensors: tensors.update({name: value})


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


def test_experts_of_different_kinds(tmp_path: Path) -> None:
    directory = make_tiny_quantised_checkpoint(tmp_path)
    _edit_quantised(directory, lambda tensors: tensors.pop(f"{EXPERTS}1.up_proj.input_scale"))
    with pytest.raises(
        IncompleteCheckpoint, match=r"experts.1.up_proj: expected NVFP4 as in .*0.up_proj, got W4A16_NVFP4"
    ):
        load(directory)


def _edit_quantised(directory: Path, edit) -> None:
    from safetensors.torch import load_file

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
    monkeypatch.setattr("qwen35.weights.reader.CheckpointReader.map", lambda *_: pytest.fail("read a tensor"))
    with pytest.raises(IncompleteCheckpoint, match=r"1 missing: mtp.fc.weight"):
        load(directory)


def test_what_does_not_fit_is_refused_with_both_numbers(tmp_path: Path, monkeypatch) -> None:
    directory = make_tiny_checkpoint(tmp_path)
    needed = load(directory)[2].num_bytes_held
    monkeypatch.setattr(memory, "available_bytes", lambda device: needed - 1)
    monkeypatch.setattr("qwen35.weights.reader.CheckpointReader.map", lambda *_: pytest.fail("read a tensor"))
    with pytest.raises(CheckpointError, match=f"expected {needed} bytes of memory on cpu .* got {needed - 1} free"):
        load(directory)


def test_available_memory_of_this_machine() -> None:
    available = memory.available_bytes(torch.device("cpu"))
    assert available is not None and available > 2**20
