"""The option that rounds the draft's dense experts to NVFP4 while they load."""

from pathlib import Path

import pytest
import torch

from qwen35 import LLM, SamplingParams
from qwen35.config import ModelConfig
from qwen35.nvfp4 import NVFP4Tensor, quantize_weight
from qwen35.weights import source
from qwen35.weights.loader import load_language
from qwen35.weights.report import IncompleteCheckpoint
from tests.tiny_checkpoint import make_tiny_checkpoint
from tests.tiny_quantised import make_tiny_quantised_checkpoint


def load(directory: Path, rounds: bool):
    config = ModelConfig.from_directory(directory)
    return load_language(directory, config, with_draft=True, rounds_draft_experts=rounds)


@pytest.mark.parametrize("mtp_layout", ["fused", "per_expert"])
def test_each_expert_is_rounded_with_a_scale_of_its_own(tmp_path: Path, mtp_layout: str) -> None:
    directory = make_tiny_checkpoint(tmp_path, mtp_layout=mtp_layout)
    (_, dense, stored), (target, draft, rounded) = load(directory, False), load(directory, True)
    for name in ("gate_proj", "up_proj", "down_proj"):
        expected = quantize_weight(getattr(dense.layer.mlp.experts, name))
        found = getattr(draft.layer.mlp.experts, name)
        for part in ("codes", "scales", "global_scale"):
            assert torch.equal(getattr(found, part).float(), getattr(expected, part).float())
        assert found.input_scale is None
        assert isinstance(getattr(target.layers[0].mlp.experts, name), torch.Tensor)
    assert isinstance(draft.layer.mlp.shared_expert.up_proj, torch.Tensor)
    num_weights = 3 * 4 * 32 * 64
    assert stored.num_bytes_held - rounded.num_bytes_held == 2 * num_weights - (num_weights * 9 // 16 + 3 * 4 * 4)


def test_experts_that_are_packed_already_stay_as_they_are(tmp_path: Path) -> None:
    directory = make_tiny_quantised_checkpoint(tmp_path, quantised_draft=True)
    (_, stored, _), (_, rounded, _) = load(directory, False), load(directory, True)
    one, other = stored.layer.mlp.experts.up_proj, rounded.layer.mlp.experts.up_proj
    assert isinstance(other, NVFP4Tensor) and torch.equal(one.codes, other.codes)
    assert torch.equal(one.input_scale, other.input_scale)


def test_an_expert_too_large_to_be_rounded_whole(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(source, "READ_BYTES", 4 * 32 * 64 - 1)
    with pytest.raises(IncompleteCheckpoint, match=r"gate_up_proj: experts can be rounded .* at most 2047 .* 32 x 64"):
        load(make_tiny_checkpoint(tmp_path, mtp_layout="fused"), True)


def test_answers_are_the_same(tmp_path: Path) -> None:
    directory = make_tiny_checkpoint(tmp_path)
    prompts, sampling = [[1, 2, 3], [4, 5]], SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    answers = []
    for options in ({}, {"draft_experts": "nvfp4"}):
        llm = LLM(directory, num_draft_tokens=3, kv_cache_bytes=1 << 20, num_slots=2, **options)
        answers.append([answer.token_ids for answer in llm.generate(prompts, sampling)])
        llm.close()
    assert answers[0] == answers[1] and len(answers[0][0]) == 12
