"""Target and draft as two exported graphs inside the eager wrapper: the same results as the modules themselves."""

from dataclasses import replace

import pytest
import torch

from qwen35.kernels.reference import ReferenceOps
from qwen35.nn.draft import DraftModel
from qwen35.nn.export import export_draft, export_language
from qwen35.nn.language import LanguageModel
from qwen35.nn.layers import weight_of
from qwen35.nn.vision import VisionTower
from qwen35.nn.vlm import VisionLanguageModel
from qwen35.nn.weight_types import ExpertWeights, LayerWeights
from qwen35.nvfp4 import NVFP4Tensor, quantize_weight
from qwen35.weights.loader import load_language, load_vision
from tests.caches import Piece, batch_view, cache_view

BLOCKS = range(5, 25)


def packed(layer: LayerWeights) -> LayerWeights:
    """The layer with its routed experts in NVFP4."""
    experts = layer.mlp.experts
    stacks = [quantize_weight(stack) for stack in (experts.gate_proj, experts.up_proj, experts.down_proj)]
    return replace(layer, mlp=replace(layer.mlp, experts=ExpertWeights(*stacks)))


@pytest.fixture(scope="module")
def ops():
    return ReferenceOps()


@pytest.fixture(scope="module")
def modules(tiny_directory, tiny_config, ops):
    """Target and draft; the target's experts are NVFP4."""
    target, draft, _ = load_language(tiny_directory, tiny_config, with_draft=True)
    target = replace(target, layers=tuple(map(packed, target.layers)))
    return LanguageModel(tiny_config.text, target, ops), DraftModel(tiny_config.text, draft, ops)


@pytest.fixture(scope="module")
def graphs(modules, tiny_config):
    example, cache = batch_view(Piece(4, 0, 1, BLOCKS), Piece(3, 0, 2, BLOCKS)), cache_view(tiny_config.text)
    programs = export_language(modules[0], example, cache), export_draft(modules[1], example, cache)
    assert torch.isnan(cache.attention[0].keys).all()  # nothing ran
    return programs


@pytest.fixture(scope="module")
def wrappers(tiny_directory, tiny_config, ops, modules, graphs):
    """The wrapper around the modules, and around their exported graphs."""
    tower = VisionTower(tiny_config.vision, load_vision(tiny_directory, tiny_config)[0], ops)
    pairs = modules, [program.module() for program in graphs]
    return [VisionLanguageModel(tiny_config, *pair, tower, ops) for pair in pairs]


def assert_equal_caches(one, other):
    pairs = zip(*(torch.utils._pytree.tree_leaves(cache) for cache in (one, other)), strict=True)
    for a, b in pairs:
        assert a == b if isinstance(a, float) else torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))


def test_prefill_verify_and_decode_equal_eager(wrappers, tiny_config):
    """One graph for every step: the state goes in and out through the caches."""
    results = []
    for model in wrappers:
        cache, ids = cache_view(tiny_config.text), torch.arange(40)
        steps = [
            (Piece(23, 0, 1, BLOCKS),),
            (Piece(4, 23, 1, BLOCKS, defer=True), Piece(6, 0, 2, [30])),
            (Piece(1, 25, 1, BLOCKS, num_pending=2),),
        ]
        hidden = []
        for pieces in steps:
            num_tokens = sum(piece.num_tokens for piece in pieces)
            hidden.append(model(ids[:num_tokens], batch=batch_view(*pieces), cache=cache))
        draft_batch = batch_view(Piece(22, 1, 1, BLOCKS, first_kv=1))
        hidden.append(model.propose(ids[1:23], hidden[0][:22], batch=draft_batch, cache=cache))
        results.append((torch.cat([model.logits(rows) for rows in hidden]), cache))
    (eager, eager_cache), (exported, exported_cache) = results
    assert torch.isfinite(eager).all() and torch.equal(eager, exported)
    assert_equal_caches(eager_cache, exported_cache)


def test_images_go_to_the_wrapper_and_their_embeddings_to_both_graphs(wrappers, tiny_config):
    ids = torch.tensor([5, 6, *[tiny_config.image_token_id] * 6, 7])
    pixels = torch.randn(24, 3 * 2 * 16 * 16)
    results = []
    for model in wrappers:
        cache, batch = cache_view(tiny_config.text), batch_view(Piece(9, 0, 1, BLOCKS))
        hidden = model(ids, pixels, [(1, 4, 6)], batch=batch, cache=cache)
        draft_batch = batch_view(Piece(8, 1, 1, BLOCKS, first_kv=1))
        results += [hidden, model.propose(ids[1:], hidden[:-1], pixels, [(1, 4, 6)], batch=draft_batch, cache=cache)]
    assert torch.equal(results[0], results[2]) and torch.equal(results[1], results[3])
    text = wrappers[1].embed(torch.tensor([5, 6]))
    merged = wrappers[1].embed(ids, pixels, [(1, 4, 6)])
    assert torch.equal(merged[:2], text)
    assert torch.equal(merged[2:8], wrappers[1].vision.forward(pixels, (1, 4, 6)))
    with pytest.raises(ValueError, match="expected 6 embeddings, got 4"):
        wrappers[1].embed(ids, pixels[:16], [(1, 4, 4)])


def test_each_graph_takes_its_own_arguments(wrappers, tiny_config):
    model, cache, batch = wrappers[1], cache_view(tiny_config.text), batch_view(Piece(2, 1, 1, BLOCKS, first_kv=1))
    ids, hidden = torch.tensor([1, 2]), torch.zeros(2, tiny_config.text.hidden_size)
    with pytest.raises(TypeError, match="language graph: expected the arguments embeds, batch, cache, got .*hidden"):
        model(ids, batch=batch, cache=cache, hidden=hidden)
    with pytest.raises(TypeError, match="draft graph: expected .*, got embeds, hidden, batch"):
        model.propose(ids, hidden, batch=batch)


def test_accessors_survive(wrappers):
    eager, exported = wrappers
    assert torch.equal(exported.embedding, eager.embedding)
    assert torch.equal(exported.final_norm, eager.final_norm)
    assert torch.equal(exported.head, eager.head)
    assert not isinstance(exported.language, LanguageModel)


def test_a_graph_survives_a_file(wrappers, graphs, tiny_config, tmp_path):
    torch.export.save(graphs[0], tmp_path / "language.pt2")
    loaded = torch.export.load(tmp_path / "language.pt2").module()
    embeds, batch = wrappers[0].embed(torch.arange(9)), batch_view(Piece(9, 0, 1, BLOCKS))
    results = [
        graph(embeds=embeds, batch=batch, cache=cache_view(tiny_config.text))
        for graph in (loaded, wrappers[0].language)
    ]
    assert torch.equal(*results)


def test_packed_weights_stay_packed_in_the_graph(wrappers):
    gate_proj = wrappers[1].language.get_submodule("layers.1.mlp.experts.gate_proj")
    assert gate_proj.weight.dtype == torch.uint8
    assert isinstance(weight_of(gate_proj), NVFP4Tensor)
