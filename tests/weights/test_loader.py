"""What loading yields: every layout and kind of weights under the names of the model's parts."""

import json
import re
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from torch import Tensor

from qwen35.config import ModelConfig
from qwen35.nn.weight_types import AttentionWeights, GatedDeltaWeights
from qwen35.nvfp4 import FP8Tensor, NVFP4Tensor, dequantize
from qwen35.weights import memory
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
    assert len(seen) > 1
    embedding = EXPECTED[f"{ROOT}embed_tokens.weight"]  # is mapped, not read
    num_bytes = report.num_bytes_read - embedding.numel() * embedding.element_size()
    assert seen[-1] == (num_bytes, num_bytes)
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


def test_the_tensors_decide_and_disagreement_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory = make_tiny_quantised_checkpoint(tmp_path)
    for name in ("config.json", "hf_quant_config.json"):
        path = directory / name
        path.write_text(
            path.read_text().replace('"lm_head", ', "").replace('"mtp*", "mtp.layers.0*"', '"mtp.layers.0*"')
        )
    target, draft, report = load(directory)
    assert isinstance(target.lm_head, Tensor) and isinstance(draft.fc, Tensor)
    assert report.warnings == ("2 linear layers are dense on disk, NVFP4 in the configuration: lm_head, mtp.fc",)
    assert report.warnings[0] in caplog.text  # a server's log shows it


@pytest.mark.parametrize("with_scale", [[0], [1], [0, 1]])
def test_experts_that_have_an_input_scale_in_part_are_refused(tmp_path: Path, with_scale: list[int]) -> None:
    """Else a stack had rows that nobody filled (the first expert has one) or lost scales that are on disk."""

    def edit(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if re.fullmatch(r"mtp\..*experts\.\d+\.up_proj\.weight", name)]:
            module = name.removesuffix(".weight")
            tensors[name] = tensors[name].to(torch.float8_e4m3fn)
            tensors[f"{module}.weight_scale"] = torch.tensor(1.0)
            if int(module.split(".")[-2]) in with_scale:
                tensors[f"{module}.input_scale"] = torch.tensor(0.5)

    with pytest.raises(IncompleteCheckpoint, match="expected input_scale on all experts or on none") as caught:
        load(rewrite(tmp_path, edit))
    assert not caught.value.missing and not caught.value.unexpected
