"""The quantiser end to end on the tiny checkpoint: what arrives, in which form, and what is refused.

One module-wide set of exports, since importing ModelOpt and transformers takes longer than quantising.
"""

import json
import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from build import quantize as quantizer
from build.quantization import ptq, reference, summary, verify
from build.quantization.calibration import calibration_inputs
from qwen35.config import ModelConfig
from qwen35.errors import CheckpointError
from qwen35.nvfp4 import NVFP4Tensor, dequantize
from qwen35.weights.loader import load_language
from qwen35.weights.reader import CheckpointReader
from qwen35.weights.scheme import Kind, QuantizationScheme
from tests.tiny_checkpoint import make_tiny_checkpoint, tiny_tensors, write_shards

ROOT = Path(__file__).parents[2]
NUM_SAMPLES = 6
EXPERTS = "model.language_model.layers.0.mlp.experts."


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """Source and the exports of three schemes, each with its Result."""
    folder = tmp_path_factory.mktemp("exports")
    source = make_tiny_checkpoint(folder / "source")
    runs = {
        "nvfp4": {"scheme": "nvfp4", "kv_cache": "fp8"},
        "w4a16_nvfp4": {"scheme": "w4a16_nvfp4"},
        "experts_only": {"scheme": "experts_only"},
    }
    results = {
        name: quantizer.quantize(source, folder / name, num_samples=NUM_SAMPLES, **options)
        for name, options in runs.items()
    }
    return SimpleNamespace(source=source, results=results, **{name: folder / name for name in runs})


def _modelopt_dequantize(tensors: dict[str, torch.Tensor], module: str) -> torch.Tensor:
    from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor

    codes = tensors[f"{module}.weight"]
    shape = torch.Size((*codes.shape[:-1], codes.shape[-1] * 2))
    return NVFP4QTensor(shape, torch.float32, codes).dequantize(
        torch.float32,
        scale=tensors[f"{module}.weight_scale"],
        double_scale=tensors[f"{module}.weight_scale_2"],
        block_sizes={-1: 16},
    )


def test_our_dequantisation_equals_modelopts_on_every_tensor(exports: SimpleNamespace) -> None:
    tensors = load_file(exports.nvfp4 / "model.safetensors")
    packed = [name.removesuffix(".weight") for name, tensor in tensors.items() if tensor.dtype == torch.uint8]
    assert len(packed) == 3 * 3 + 4 + 4 * (3 + 12)
    for module in packed:
        parts = (tensors[f"{module}.{part}"] for part in ("weight", "weight_scale", "weight_scale_2"))
        ours = dequantize(NVFP4Tensor(*parts))
        assert (ours - _modelopt_dequantize(tensors, module)).abs().max() == 0, module


def test_loaded_stacks_dequantise_like_modelopt(exports: SimpleNamespace) -> None:
    tensors = load_file(exports.nvfp4 / "model.safetensors")
    target, _, _ = load_language(exports.nvfp4, ModelConfig.from_directory(exports.nvfp4), with_draft=True)
    for projection in ("gate_proj", "up_proj", "down_proj"):
        stack = dequantize(getattr(target.layers[0].mlp.experts, projection))
        for expert in range(4):
            assert torch.equal(stack[expert], _modelopt_dequantize(tensors, f"{EXPERTS}{expert}.{projection}"))


@pytest.mark.parametrize(
    ("scheme", "experts", "attention"),
    [
        ("nvfp4", Kind.NVFP4, Kind.NVFP4),
        ("w4a16_nvfp4", Kind.W4A16_NVFP4, Kind.W4A16_NVFP4),
        ("experts_only", Kind.NVFP4, Kind.DENSE),
    ],
)
def test_files_and_tensors_agree(exports: SimpleNamespace, scheme: str, experts: Kind, attention: Kind) -> None:
    directory = getattr(exports, scheme)
    announced = QuantizationScheme.from_directory(directory)
    assert announced.announced_kind(f"{EXPERTS}0.up_proj") is experts
    assert announced.announced_kind("model.language_model.layers.3.self_attn.q_proj") is attention
    _, draft, report = load_language(directory, ModelConfig.from_directory(directory), with_draft=True)
    assert report.warnings == () and draft is not None
    assert exports.results[scheme].warnings == []
    assert report.num_layers[experts] == (73 if attention is experts else 48)


def test_draft_is_kept_and_excluded_in_both_files(exports: SimpleNamespace) -> None:
    written = load_file(exports.nvfp4 / "model.safetensors")
    for name, tensor in tiny_tensors().items():
        if name.startswith("mtp."):
            assert written[name].dtype == torch.bfloat16 and torch.equal(written[name], tensor)
    beside = json.loads((exports.nvfp4 / "hf_quant_config.json").read_text())["quantization"]["exclude_modules"]
    inside = json.loads((exports.nvfp4 / "config.json").read_text())["quantization_config"]["ignore"]
    for excludes in (beside, inside):
        assert {"mtp*", "mtp.layers.0*"} <= set(excludes)
    announced = QuantizationScheme.from_directory(exports.nvfp4)
    assert announced.announced_kind("mtp.layers.0.self_attn.q_proj") is Kind.DENSE
    assert announced.announced_kind("model.language_model.layers.0.linear_attn.out_proj") is Kind.NVFP4


def test_kv_scales_belong_to_the_language_model_alone(exports: SimpleNamespace) -> None:
    names = [name for name in load_file(exports.nvfp4 / "model.safetensors") if name.endswith(("k_scale", "v_scale"))]
    root = "model.language_model.layers.3.self_attn."
    assert sorted(names) == [f"{root}k_proj.k_scale", f"{root}v_proj.v_scale"]
    assert QuantizationScheme.from_directory(exports.nvfp4).kv_cache == "FP8"
    assert QuantizationScheme.from_directory(exports.w4a16_nvfp4).kv_cache is None


def test_input_scales_are_those_of_the_calibration_data(exports: SimpleNamespace) -> None:
    """The largest input of some layers, seen by hooks on the reference model, over 2688."""
    config = ModelConfig.from_directory(exports.source)
    inputs = calibration_inputs(exports.source, config, NUM_SAMPLES)
    assert any(sample.patches is not None for sample in inputs) and any(sample.patches is None for sample in inputs)
    with CheckpointReader(exports.source) as reader:
        model = reference.load_reference(reader)
    layer = model.model.language_model.layers[3]
    modules = {"self_attn.q_proj": layer.self_attn.q_proj, "mlp.experts.2.up_proj": layer.mlp.experts}
    largest = dict.fromkeys(modules, 0.0)
    for name, module in modules.items():
        module.register_forward_pre_hook(
            lambda _, arguments, name=name: largest.update({name: max(largest[name], arguments[0].abs().max().item())})
        )
    ptq.logits_of(model, inputs)
    written = load_file(exports.nvfp4 / "model.safetensors")
    for name, amax in largest.items():
        scale = written[f"model.language_model.layers.3.{name}.input_scale"].item()
        assert math.isclose(scale, amax / 2688, rel_tol=1e-6), name


def test_companions_are_copied_and_the_config_keeps_its_keys(exports: SimpleNamespace) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "preprocessor_config.json"):
        assert (exports.nvfp4 / name).read_bytes() == (exports.source / name).read_bytes()
    assert (exports.nvfp4 / "generation_config.json").read_bytes() == (
        exports.source / "generation_config.json"
    ).read_bytes()
    before = json.loads((exports.source / "config.json").read_text())
    after = json.loads((exports.nvfp4 / "config.json").read_text())
    assert after.pop("quantization_config")["quant_method"] == "modelopt"
    assert after == before
    assert all(path.stat().st_mode & 0o044 == 0o044 for path in exports.nvfp4.iterdir())
    assert exports.nvfp4.stat().st_mode & 0o055 == 0o055


def test_groups_account_for_every_byte(exports: SimpleNamespace) -> None:
    result = exports.results["nvfp4"]
    groups = {group.name: group for group in result.groups}
    source_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tiny_tensors().values())
    assert sum(group.num_source_bytes for group in result.groups) == source_bytes
    kv_scales = 2 * 4
    assert sum(group.num_bytes for group in result.groups) + kv_scales == sum(result.dtype_bytes.values())
    assert {name for name, group in groups.items() if group.is_quantised} == {
        "routed experts", "shared experts", "attention", "gated delta nets",
    }  # fmt: skip
    assert groups["routed experts"].num_tensors == 48 and 0.05 < groups["routed experts"].mean_error < 0.12
    text = summary.table(result.groups, result.dtype_bytes)
    assert "MTP draft" in text and "output by type: bfloat16" in text
    for group in exports.results["experts_only"].groups:
        if group.name in ("attention", "gated delta nets", "shared experts"):
            assert group.why == "left out by the scheme experts_only"


def test_the_exported_model_computes_what_was_calibrated(exports: SimpleNamespace) -> None:
    """Weights alone: the export, dequantised, through the plain reference; against ModelOpt's fake quantisation."""
    config = ModelConfig.from_directory(exports.source)
    inputs = calibration_inputs(exports.source, config, 2)
    with CheckpointReader(exports.source) as reader:
        model = reference.load_reference(reader)
        calibration = calibration_inputs(exports.source, config, NUM_SAMPLES)
        fake = ptq.logits_of(ptq.quantize_model(model, calibration, "w4a16_nvfp4"), inputs)
    tensors = load_file(exports.w4a16_nvfp4 / "model.safetensors")
    for module in [name.removesuffix(".weight") for name, value in tensors.items() if value.dtype == torch.uint8]:
        parts = [tensors.pop(f"{module}.{part}") for part in ("weight", "weight_scale", "weight_scale_2")]
        tensors[f"{module}.weight"] = dequantize(NVFP4Tensor(*parts), torch.bfloat16)
    folder = exports.source.parent / "dequantised"
    make_tiny_checkpoint(folder)
    write_shards(folder, tensors)
    with CheckpointReader(folder) as reader:
        plain = ptq.logits_of(reference.load_reference(reader), inputs)
    agreed = summary.agreement(fake, plain)
    original = exports.results["w4a16_nvfp4"].agreement
    assert agreed.kl < 0.35 * original.kl, (agreed, original)  # the export joins the scales of q/k/v, qkv/z, gate/up


SOURCES = [
    {"layout": "per_expert", "mtp_layout": "fused", "num_shards": 2},
    {"prefix": "language_model.model.", "float32_vectors": True},
    {"with_vision": False, "prefix": "model."},
    {"dtype": torch.float32, "mtp_layout": None},
]


@pytest.mark.parametrize("options", SOURCES)
def test_every_kind_of_source(tmp_path: Path, options: dict) -> None:
    source = make_tiny_checkpoint(tmp_path / "source", **options)
    if options.get("with_vision") is False:
        config = json.loads((source / "config.json").read_text())
        (source / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k != "vision_config"}))
    result = quantizer.quantize(source, tmp_path / "out", num_samples=4)
    has_draft = options.get("mtp_layout", "per_expert") is not None
    config = ModelConfig.from_directory(tmp_path / "out")
    target, draft, report = load_language(tmp_path / "out", config, with_draft=has_draft)
    assert isinstance(target.layers[0].mlp.experts.gate_proj, NVFP4Tensor)
    assert report.warnings == ()
    expected = tiny_tensors(**{key: value for key, value in options.items() if key != "num_shards"})
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(written[name], tensor) for name, tensor in expected.items() if name.startswith("mtp."))
    decay = next(name for name in written if name.endswith("layers.0.linear_attn.A_log"))
    source_decay = next(tensor for name, tensor in expected.items() if name.endswith("layers.0.linear_attn.A_log"))
    assert written[decay].dtype == source_decay.dtype and torch.equal(written[decay], source_decay)
    excludes = json.loads((tmp_path / "out" / "hf_quant_config.json").read_text())["quantization"]["exclude_modules"]
    assert ("mtp*" in excludes) is has_draft
    assert [note for note in result.warnings if "no mtp.*" in note] == ([] if has_draft else result.warnings)


def _verify(source: Path, output: Path) -> None:
    with CheckpointReader(source) as before, CheckpointReader(output) as after:
        verify.verify(before, after, has_vision=True)


def _swap(tensors: dict[str, torch.Tensor]) -> None:
    for part in ("weight", "weight_scale", "weight_scale_2"):
        gate, up = f"{EXPERTS}1.gate_proj.{part}", f"{EXPERTS}1.up_proj.{part}"
        tensors[gate], tensors[up] = tensors[up], tensors[gate]


def _set(name: str, edit):
    return lambda tensors: tensors.update({name: edit(tensors[name])})


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda tensors: tensors.pop("mtp.fc.weight"), "mtp.fc.weight: expected in the output, got nothing"),
        (lambda tensors: tensors.pop(f"{EXPERTS}3.up_proj.weight"), "3.up_proj.weight: expected in the output"),
        (lambda tensors: tensors.pop(f"{EXPERTS}3.up_proj.weight_scale"), "expected its scales, got no"),
        (_set("lm_head.weight", lambda tensor: tensor * 1.01), "lm_head.weight: expected torch.bfloat16"),
        (_set("lm_head.weight", lambda tensor: tensor.float()), "bit for bit, got torch.float32"),
        (_swap, "1.gate_proj.weight: expected the source's numbers within 0.3, got a relative error of 1"),
        (_set(f"{EXPERTS}0.down_proj.weight_scale_2", lambda tensor: tensor * 2), "0.down_proj.weight: expected the"),
        (lambda tensors: tensors.update({"extra.weight": torch.zeros(1)}), "extra.weight: expected in the source"),
    ],
)
def test_verification_finds(exports: SimpleNamespace, tmp_path: Path, edit, message: str) -> None:
    tensors = load_file(exports.nvfp4 / "model.safetensors")
    edit(tensors)
    write_shards(tmp_path, tensors)
    with pytest.raises(verify.VerificationError, match=message):
        _verify(exports.source, tmp_path)


def test_experts_that_stayed_dense_draw_a_warning(exports: SimpleNamespace) -> None:
    with CheckpointReader(exports.source) as reader:
        arrivals = verify.verify(reader, reader, has_vision=True)
    groups = summary.groups_of(arrivals, "nvfp4")
    (warning,) = summary.warnings_for(groups)
    assert "8 tensors of routed experts" in warning and "NOT quantised" in warning


def test_output_directory_is_all_or_nothing(exports: SimpleNamespace, tmp_path: Path, monkeypatch) -> None:
    output = tmp_path / "out"
    output.mkdir()
    (output / "mine.txt").write_text("keep")
    with pytest.raises(quantizer.QuantizeError, match="use --force"):
        quantizer.quantize(exports.source, output)
    monkeypatch.setattr(quantizer, "verify", lambda *_, **__: pytest.fail("broken"))
    with pytest.raises(BaseException, match="broken"):
        quantizer.quantize(exports.source, output, num_samples=2, force=True)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (output / "mine.txt").read_text() == "keep"
    monkeypatch.undo()
    quantizer.quantize(exports.source, output, num_samples=2, force=True)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert not (output / "mine.txt").exists() and (output / "model.safetensors").exists()


def test_what_is_refused(exports: SimpleNamespace, tmp_path: Path) -> None:
    with pytest.raises(quantizer.QuantizeError, match="quantised already"):
        quantizer.quantize(exports.nvfp4, tmp_path / "out")
    with pytest.raises(quantizer.QuantizeError, match="outside the checkpoint"):
        quantizer.quantize(exports.source, exports.source / "below")
    (tmp_path / "file").write_text("")
    with pytest.raises(quantizer.QuantizeError, match="is a file"):
        quantizer.quantize(exports.source, tmp_path / "file")
    tensors = tiny_tensors()
    tensors.pop("model.language_model.norm.weight")
    write_shards(make_tiny_checkpoint(tmp_path / "incomplete"), tensors)
    with pytest.raises(CheckpointError, match=r"missing: \['model.language_model.norm.weight'\]"):
        quantizer.quantize(tmp_path / "incomplete", tmp_path / "out", num_samples=2)
    assert not (tmp_path / "out").exists()


def test_a_target_that_the_draft_excludes_would_hit(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"exclude 'mtp\*': expected to reach the draft alone"):
        ptq.export_model(torch.nn.Module(), tmp_path, {"mtp.fc.weight": torch.zeros(1)}, ["mtp_base.layers.0.mlp.gate"])


def test_command_line(exports: SimpleNamespace, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    arguments = ["--checkpoint", str(exports.source), "--output", str(tmp_path / "out"), "--num-samples", "2"]
    command = [sys.executable, str(ROOT / "build" / "quantize.py"), *arguments]
    run = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert run.returncode == 0, run.stderr
    assert "every source tensor arrived" in run.stdout and "routed experts" in run.stdout
    assert "calibrating: 100%" in run.stderr and "Warning" not in run.stderr
    assert quantizer.main(arguments) == 1
    assert "use --force" in capsys.readouterr().err
