"""Programs give the bits of the modules that they are written from: output, keys and values, states."""

import copy

import pytest
import torch

from qwen35.config import ModelConfig
from qwen35.kernels.cpu import CpuOps
from qwen35.kernels.reference import ReferenceOps
from qwen35.nn.draft import DraftModel
from qwen35.nn.language import LanguageModel
from qwen35.nn.program import NativeModel, accelerate
from qwen35.weights.loader import load_language
from tests.caches import Piece, batch_view, cache_view
from tests.kernels.conftest import native_library  # noqa: F401 (a fixture)
from tests.tiny_checkpoint import make_tiny_checkpoint
from tests.tiny_quantised import make_tiny_quantised_checkpoint

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
BLOCKS = range(3, 20)
# Two prompts, a verify beside a prompt's end, a decode with accepted inputs beside a plain one.
STEPS = (
    (Piece(19, 0, 1, BLOCKS, defer=False), Piece(5, 0, 2, range(20, 30))),
    (Piece(4, 19, 1, BLOCKS, defer=True), Piece(3, 5, 2, range(20, 30))),
    (Piece(1, 21, 1, BLOCKS, num_pending=2, defer=True), Piece(1, 8, 2, range(20, 30))),
)


@pytest.fixture(scope="module", params=["dense", "NVFP4", "MIXED_PRECISION"])
def models(request, tmp_path_factory, native_library):  # noqa: F811
    directory = tmp_path_factory.mktemp("tiny")
    if request.param == "dense":
        make_tiny_checkpoint(directory, with_vision=False)
    else:
        make_tiny_quantised_checkpoint(directory, algorithm=request.param, kv_scales=True, quantised_draft=True)
    config = ModelConfig.from_directory(directory)
    target, draft, _ = load_language(directory, config, with_draft=True)
    ops = CpuOps()
    return config.text, LanguageModel(config.text, target, ops), DraftModel(config.text, draft, ops), ops


def leaves(cache) -> list[torch.Tensor]:
    found = [leaf for leaf in torch.utils._pytree.tree_leaves(cache) if isinstance(leaf, torch.Tensor)]
    return [leaf.view(torch.uint8) for leaf in found]


def assert_same_runs(model, native, config, kv_dtype, num_inputs: int) -> None:
    """``num_inputs``: 1 for the target (embeds), 2 for the draft (embeds, hidden)."""
    torch.manual_seed(2)
    caches = [cache_view(config, dtype=BF16, kv_dtype=kv_dtype)]
    caches.append(copy.deepcopy(caches[0]))
    for pieces in STEPS:
        if num_inputs == 2:
            pieces = tuple(Piece(p.num_tokens, p.kv_start + 1, 0, p.blocks, first_kv=1) for p in pieces)
        num_tokens = sum(piece.num_tokens for piece in pieces)
        rows = [torch.randn(num_tokens, config.hidden_size).to(BF16) for _ in range(num_inputs)]
        outs = [
            one.forward(*rows, batch_view(*pieces), cache) for one, cache in zip((model, native), caches, strict=True)
        ]
        assert torch.equal(*outs)
        assert all(torch.equal(*pair) for pair in zip(leaves(caches[0]), leaves(caches[1]), strict=True))
    assert native._program is not None, "the modules computed both"


@pytest.mark.parametrize("kv_dtype", [BF16, FP8])
def test_target(models, kv_dtype):
    config, target, _, ops = models
    assert_same_runs(target, accelerate(target, ops), config, kv_dtype, 1)


def test_draft(models):
    config, _, draft, ops = models
    assert_same_runs(draft, accelerate(draft, ops), config, BF16, 2)


def test_what_the_library_does_not_take_is_left_to_the_modules(models):
    config, target, _, ops = models
    assert accelerate(target, ReferenceOps()) is target
    native = accelerate(target, ops)
    assert isinstance(native, NativeModel) and native.lm_head is target.lm_head
    batch, embeds = batch_view(Piece(3, 0, 1, BLOCKS)), torch.randn(3, config.hidden_size).to(BF16)
    caches = [cache_view(config, dtype=BF16, kv_dtype=torch.float32) for _ in range(2)]
    assert torch.equal(native.forward(embeds, batch, caches[0]), target.forward(embeds, batch, caches[1]))
    assert native._program is None


def test_more_deferred_inputs_than_a_slot_holds(models):
    config, target, _, ops = models
    native, cache = accelerate(target, ops), cache_view(config, dtype=BF16)
    batch, embeds = batch_view(Piece(7, 0, 1, BLOCKS, defer=True)), torch.randn(7, config.hidden_size).to(BF16)
    with pytest.raises(ValueError, match="deferred inputs of slot 1: expected at most 6"):
        native.forward(embeds, batch, cache)
