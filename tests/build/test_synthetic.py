"""Synthetic checkpoints at tiny widths: every layout loads whole, without a warning, and runs."""

from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from build.synthetic.__main__ import main
from build.synthetic.companions import write_companions
from build.synthetic.generate import SyntheticError, generate
from build.synthetic.inventory import Recipe, entries_of
from build.synthetic.layouts import LAYOUTS
from build.synthetic.shapes import SHAPES, Shape
from build.synthetic.values import Values
from qwen35 import LLM, SamplingParams
from qwen35.config import ModelConfig
from qwen35.nvfp4 import FP8Tensor, NVFP4Tensor, dequantize, quantize_weight
from qwen35.prompt.tokenizer import Tokenizer
from qwen35.weights.loader import load_language, load_vision
from qwen35.weights.reader import CheckpointReader
from qwen35.weights.scheme import Kind
from tests.tiny_shape import TINY

ROOT = "model.language_model."
KV_WARNINGS = (
    "KV cache type: config.json has None, hf_quant_config.json has 'FP8'",
    "the configuration announces FP8 keys and values, no k_scale or v_scale is on disk: 1.0",
)


def load(directory: Path):
    return load_language(directory, ModelConfig.from_directory(directory), with_draft=True)


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_loads_whole_and_runs(tmp_path: Path, name: str) -> None:
    directory, layout = tmp_path / name, LAYOUTS[name]
    written = generate(TINY, layout, directory)
    target, draft, report = load(directory)
    vision_report = load_vision(directory, ModelConfig.from_directory(directory))[1]
    assert report.num_tensors + vision_report.num_tensors == written.num_tensors
    types = {Kind.DENSE: torch.Tensor, Kind.FP8: FP8Tensor, Kind.NVFP4: NVFP4Tensor, Kind.W4A16_NVFP4: NVFP4Tensor}
    linear, full = target.layers[0], target.layers[3]
    for role, weight in {
        "experts": full.mlp.experts.up_proj,
        "shared_expert": linear.mlp.shared_expert.down_proj,
        "attention": full.mixer.o_proj,
        "gated_delta": linear.mixer.in_proj_z,
        "lm_head": target.lm_head,
    }.items():
        assert isinstance(weight, types[layout.kind(role)]), role
    assert isinstance(draft.layer.mlp.experts.gate_proj, torch.Tensor)
    assert report.warnings == (KV_WARNINGS if layout.has_fp8_kv else ())
    llm = LLM(directory, num_draft_tokens=1, kv_cache_bytes=1 << 20, num_slots=2)
    [answer] = llm.generate(
        [[{"role": "user", "content": "What is a list?"}]], SamplingParams(max_tokens=3, temperature=0)
    )
    llm.close()
    assert len(answer.token_ids) == 3 and answer.finish_reason == "length"


def tensors_of(directory: Path) -> dict[str, torch.Tensor]:
    with CheckpointReader(directory) as reader:
        return {name: reader.read(name) for name in reader.names}


def test_one_seed_gives_the_same_values_in_every_layout(tmp_path: Path) -> None:
    fused, single, other = (tmp_path / name for name in ("fused", "single", "other"))
    generate(TINY, LAYOUTS["qwen3.6"], fused, seed=3)
    generate(TINY, LAYOUTS["bf16"], single, seed=3, max_shard_bytes=1 << 18)
    generate(TINY, LAYOUTS["bf16"], other, seed=4)
    tensors, apart = tensors_of(fused), tensors_of(single)
    draft = "mtp.layers.0.mlp.experts."
    halves = [apart[f"{draft}2.{half}_proj.weight"] for half in ("gate", "up")]
    assert torch.equal(tensors[f"{draft}gate_up_proj"][2], torch.cat(halves))
    assert torch.equal(tensors[f"{ROOT}layers.1.mlp.experts.down_proj"], apart[f"{ROOT}layers.1.mlp.experts.down_proj"])
    assert not torch.equal(tensors["lm_head.weight"], tensors_of(other)["lm_head.weight"])
    assert len(list(single.glob("model-*.safetensors"))) > 3
    assert tensors[f"{ROOT}layers.0.linear_attn.A_log"].dtype is torch.float32
    assert apart[f"{ROOT}layers.0.linear_attn.A_log"].dtype is torch.bfloat16


def test_rounded_weights_are_those_of_the_dense_layout(tmp_path: Path) -> None:
    generate(TINY, LAYOUTS["bf16"], tmp_path / "dense")
    layout = LAYOUTS["nvfp4"].with_head(Kind.NVFP4)
    generate(TINY, layout, tmp_path / "rounded", rounds_dense=True)
    dense, rounded = load(tmp_path / "dense")[0], load(tmp_path / "rounded")[0]
    pairs = [(dense.lm_head, rounded.lm_head)]
    pairs += [(dense.layers[3].mixer.q_proj, rounded.layers[3].mixer.q_proj)]
    pairs += [(dense.layers[1].mlp.experts.down_proj, rounded.layers[1].mlp.experts.down_proj)]
    for exact, packed in pairs:
        expected = quantize_weight(exact, packed.global_scale)
        assert torch.equal(packed.codes, expected.codes)
        assert torch.equal(packed.scales.view(torch.uint8), expected.scales.view(torch.uint8))
    assert torch.equal(dense.embed_tokens, rounded.embed_tokens)


@pytest.mark.parametrize("name", ["bf16", "nvfp4", "mixed"])
def test_values_have_the_deviation_of_the_recipe(tmp_path: Path, name: str) -> None:
    generate(TINY, LAYOUTS[name], tmp_path / name)
    layer = load(tmp_path / name)[0].layers[3]
    for weight in (layer.mlp.experts.gate_proj, layer.mixer.q_proj):
        values = dequantize(weight)
        assert (
            abs(float(values.std()) / TINY.matrix_std - 1) < 0.06
        )  # drawn codes and scales know nothing of each other
        assert abs(float(values.mean())) < 0.1 * TINY.matrix_std
        assert float((values.abs() < 1.65 * TINY.matrix_std).float().mean()) == pytest.approx(0.9, abs=0.03)
    assert abs(float(layer.mlp.gate.float().std()) / 0.1 - 1) < 0.2


def test_gate_and_up_of_mixed_files_differ_in_their_global_scales(tmp_path: Path) -> None:
    generate(TINY, LAYOUTS["mixed"], tmp_path / "mixed")
    experts = load(tmp_path / "mixed")[0].layers[0].mlp.experts
    assert torch.equal(experts.up_proj.global_scale, 1.25 * experts.gate_proj.global_scale)


def test_bytes_of_the_35b_by_part(tmp_path: Path) -> None:
    """The published sizes, without writing the weights."""
    write_companions(tmp_path, SHAPES["35b"].config(), None, None)
    config = ModelConfig.from_directory(tmp_path)
    assert (config.image_token_id, config.vision_start_token_id, config.text.num_gated_delta_layers) == (
        248056, 248053, 30,
    )  # fmt: skip
    num_bytes = Counter()
    for entry in entries_of(config, LAYOUTS["nvfp4"], Recipe(Values(0), 0.02)):
        part = next((part for part in ("mtp.", "visual.", "lm_head", ".experts.") if part in entry.name), "rest")
        num_bytes[part] += entry.num_bytes
    gigabytes = {part: round(count / 1e9, 2) for part, count in num_bytes.items()}
    assert gigabytes.pop("rest") == 1.86  # embeddings, shared experts, mixers, routers
    assert gigabytes == {".experts.": 18.12, "mtp.": 1.69, "visual.": 0.89, "lm_head": 1.02}


def test_the_tokenizer_reaches_over_the_vocabulary(tmp_path: Path) -> None:
    write_companions(tmp_path, TINY.config(), None, None)
    tokenizer, config = Tokenizer.from_directory(tmp_path), ModelConfig.from_directory(tmp_path)
    assert tokenizer.special_tokens["<|endoftext|>"] == 1344 - 276
    assert tokenizer.special_tokens["<|image_pad|>"] == config.image_token_id
    assert config.eos_token_ids == {1344 - 276, 1344 - 274}
    assert tokenizer.decode([1000]) == " 1000"
    assert tokenizer.decode(tokenizer.encode("def f(): return 12")) == "def f(): return 12"


def test_what_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SyntheticError, match="expected no directory or an empty one"):
        generate(TINY, LAYOUTS["bf16"], tmp_path)
    small = Shape({**TINY.text, "vocab_size": 1000}, TINY.vision, TINY.matrix_std)
    with pytest.raises(SyntheticError, match="vocab_size: expected at least 1300, got 1000"):
        generate(small, LAYOUTS["bf16"], tmp_path / "new")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_disk_that_is_too_small(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(SyntheticError, match=r"expected \d+ bytes free at .*, got 1000"):
        generate(TINY, LAYOUTS["bf16"], tmp_path / "new")
    assert not list(tmp_path.iterdir())


def test_command_line(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr("build.synthetic.__main__.SHAPES", {"tiny": TINY})
    arguments = ["--shape", "tiny", "--layout", "nvfp4", "--nvfp4-head", "--layers", "2", "--output"]
    assert main([*arguments, str(tmp_path / "out")]) == 0
    assert "tensors" in capsys.readouterr().out
    target, _, report = load(tmp_path / "out")
    assert len(target.layers) == 2 and isinstance(target.lm_head, NVFP4Tensor) and report.warnings == ()
    without = ["--shape", "tiny", "--layout", "bf16", "--no-draft", "--output", str(tmp_path / "without")]
    assert main(without) == 0
    assert not any("mtp" in name for name in tensors_of(tmp_path / "without"))
    assert main([*arguments, str(tmp_path / "out")]) == 1
    assert "has files" in capsys.readouterr().err
