"""Router and experts against a loop over tokens."""

import pytest
import torch
import torch.nn.functional as F

from qwen35.kernels.reference import ReferenceOps
from qwen35.nvfp4 import dequantize, quantize_weight

NUM_EXPERTS, HIDDEN, WIDTH, TOP = 8, 64, 32, 3


def stacks(kind):
    sizes = ((WIDTH, HIDDEN), (WIDTH, HIDDEN), (HIDDEN, WIDTH))
    dense = [torch.randn(NUM_EXPERTS, *size) * 0.2 for size in sizes]
    return [quantize_weight(stack) for stack in dense] if kind == "nvfp4" else dense


@pytest.mark.parametrize("kind", ["dense", "nvfp4"])
@pytest.mark.parametrize("num_tokens", [1, 5, 70])
def test_experts(kind, num_tokens):
    torch.manual_seed(num_tokens)
    ops, x, gate, weights = (
        ReferenceOps(),
        torch.randn(num_tokens, HIDDEN),
        torch.randn(NUM_EXPERTS, HIDDEN),
        stacks(kind),
    )
    ids, shares = ops.route(x, gate, TOP)
    got = ops.moe_experts(x, ids, shares, *weights)
    gate_proj, up_proj, down_proj = (dequantize(weight) for weight in weights)
    for token, row in enumerate(x):
        probabilities = F.softmax(gate @ row, -1)
        top, chosen = probabilities.topk(TOP)
        expected = sum(
            share / top.sum() * down_proj[e] @ (F.silu(gate_proj[e] @ row) * (up_proj[e] @ row))
            for share, e in zip(top, chosen.tolist(), strict=True)
        )
        torch.testing.assert_close(got[token], expected, atol=1e-5, rtol=1e-4)


def test_ids_ascend_and_ties_go_to_the_lowest():
    gate = torch.zeros(NUM_EXPERTS, HIDDEN)
    gate[6, 0] = 1.0
    ids, shares = ReferenceOps().route(torch.eye(2, HIDDEN), gate, TOP)
    assert ids.tolist() == [[0, 1, 6], [0, 1, 2]]
    assert shares[0, 2] > shares[0, 0] == shares[0, 1]
    torch.testing.assert_close(shares.sum(-1), torch.ones(2))


def test_experts_with_their_own_input_scales():
    weights = stacks("nvfp4")
    scales = torch.linspace(0.005, 0.05, NUM_EXPERTS)
    weights = [type(w)(w.codes, w.scales, w.global_scale, scales) for w in weights]
    x = torch.randn(6, HIDDEN)
    ids, shares = torch.arange(6).unsqueeze(1), torch.ones(6, 1)
    got = ReferenceOps(activations="nvfp4").moe_experts(x, ids, shares, *weights)
    for token in range(6):
        ops = ReferenceOps(activations="nvfp4")
        gate, up, down = (weight[token] for weight in weights)
        row = x[token : token + 1]
        expected = ops.linear(ops.silu_mul(ops.linear(row, gate), ops.linear(row, up)), down)
        torch.testing.assert_close(got[token : token + 1], expected, atol=1e-6, rtol=1e-5)
