"""The MTP head against a small reference written here from its definition, weights read from the checkpoint's files."""

import math

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from tests.caches import Piece, batch_view, cache_view

BLOCKS = range(2, 12)


@pytest.fixture(scope="module")
def tensors(tiny_directory):
    return {name: t.double() for name, t in load_file(tiny_directory / "model.safetensors").items()}


def norm(x, weight):
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * (1 + weight)


def rotate(x, positions, config):
    """x [T, heads, D]; the angle of pair i is inv_freq[i] times the position on the axis that i belongs to."""
    half = config.rotary_dim // 2
    out = x.clone()
    for i in range(half):
        axis = next((a for a in (1, 2) if i % 3 == a and i < 3 * config.mrope_section[a]), 0)
        angle = positions[axis].double() * config.rope_theta ** (-2 * i / config.rotary_dim)
        cos, sin = angle.cos()[:, None], angle.sin()[:, None]
        out[..., i] = x[..., i] * cos - x[..., i + half] * sin
        out[..., i + half] = x[..., i + half] * cos + x[..., i] * sin
    return out


def gated_mlp(x, tensors, name):
    gate, up, down = (tensors[f"{name}.{part}_proj.weight"] for part in ("gate", "up", "down"))
    return (F.silu(x @ gate.t()) * (x @ up.t())) @ down.t()


def reference_logits(tensors, config, embeds, hidden, positions):
    """Pairs (h_t, embedding of x_{t+1}) at positions t -> logits of x_{t+2}, one full causal pass in float64."""
    layer = {k.removeprefix("mtp.layers.0."): v for k, v in tensors.items() if k.startswith("mtp.layers.0.")}
    halves = (
        norm(embeds, tensors["mtp.pre_fc_norm_embedding.weight"]),
        norm(hidden, tensors["mtp.pre_fc_norm_hidden.weight"]),
    )
    x = torch.cat(halves, -1) @ tensors["mtp.fc.weight"].t()
    inner, count, width = norm(x, layer["input_layernorm.weight"]), len(x), config.head_dim
    both = (inner @ layer["self_attn.q_proj.weight"].t()).view(count, config.num_attention_heads, 2 * width)
    query, gate = both[..., :width], both[..., width:]
    key = (inner @ layer["self_attn.k_proj.weight"].t()).view(count, config.num_key_value_heads, width)
    value = (inner @ layer["self_attn.v_proj.weight"].t()).view(count, config.num_key_value_heads, width)
    query = rotate(norm(query, layer["self_attn.q_norm.weight"]), positions, config)
    key = rotate(norm(key, layer["self_attn.k_norm.weight"]), positions, config)
    mixed = torch.zeros_like(query)
    for head in range(config.num_attention_heads):
        shared = head * config.num_key_value_heads // config.num_attention_heads
        for t in range(count):
            weights = F.softmax(key[: t + 1, shared] @ query[t, head] / math.sqrt(width), 0)
            mixed[t, head] = weights @ value[: t + 1, shared]
    x = x + (mixed * torch.sigmoid(gate)).flatten(1) @ layer["self_attn.o_proj.weight"].t()
    inner = norm(x, layer["post_attention_layernorm.weight"])
    routed = torch.zeros_like(inner)
    for t, row in enumerate(inner):
        top, chosen = F.softmax(layer["mlp.gate.weight"] @ row, 0).topk(config.num_experts_per_tok)
        for share, expert in zip(top / top.sum(), chosen.tolist(), strict=True):
            routed[t] += share * gated_mlp(row, layer, f"mlp.experts.{expert}")
    shared = torch.sigmoid(inner @ layer["mlp.shared_expert_gate.weight"].t()) * gated_mlp(
        inner, layer, "mlp.shared_expert"
    )
    return norm(x + routed + shared, tensors["mtp.norm.weight"]) @ tensors["lm_head.weight"].t()


def pairs(config, count):
    """Embeddings, hidden states, and 3-axis positions of `count` pairs with an image of 2 x 3 among the tokens."""
    random = torch.Generator().manual_seed(4)
    embeds, hidden = (torch.randn(count, config.hidden_size, generator=random) for _ in range(2))
    image = torch.tensor([[4, 4, 4, 4, 4, 4], [4, 4, 4, 5, 5, 5], [4, 5, 6, 4, 5, 6]])
    text = torch.arange(7, 7 + count - 10)
    return embeds, hidden, torch.cat((torch.arange(4).expand(3, -1), image, text.expand(3, -1)), 1)


def test_logits_equal_the_reference(load_models, tensors):
    target, draft = load_models()
    embeds, hidden, positions = pairs(target.config, 40)
    expected = reference_logits(tensors, target.config, embeds.double(), hidden.double(), positions)
    batch = batch_view(Piece(40, 1, 0, BLOCKS, first_kv=1, positions=positions))
    got = target.logits(draft(embeds, hidden, batch, cache_view(target.config)))
    torch.testing.assert_close(got, expected.float(), atol=1e-4, rtol=0)


def test_steps_give_the_same_bits_and_write_only_the_draft_cache(load_models):
    target, draft = load_models(torch.bfloat16)
    embeds, hidden, positions = pairs(target.config, 40)
    whole = cache_view(target.config, dtype=torch.bfloat16)
    expected = draft(embeds, hidden, batch_view(Piece(40, 1, 0, BLOCKS, first_kv=1, positions=positions)), whole)
    cache, outs = cache_view(target.config, dtype=torch.bfloat16), []
    for start, stop in ((0, 17), (17, 18), (18, 22), (22, 40)):
        piece = Piece(stop - start, 1 + start, 0, BLOCKS, first_kv=1, positions=positions[:, start:stop])
        outs.append(draft(embeds[start:stop], hidden[start:stop], batch_view(piece), cache))
    assert torch.equal(torch.cat(outs), expected)
    assert torch.isnan(cache.attention[0].keys).all() and torch.isnan(cache.gated_delta[0].recurrent).all()


def test_the_halves_are_not_exchangeable(load_models):
    target, draft = load_models()
    embeds, hidden, _ = pairs(target.config, 12)
    batch = batch_view(Piece(12, 1, 0, BLOCKS, first_kv=1))
    one, other = (draft(*pair, batch, cache_view(target.config)) for pair in ((embeds, hidden), (hidden, embeds)))
    assert (one - other).abs().max() > 0.1
