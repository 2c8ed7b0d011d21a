"""Gated delta rule: values against the plain recurrence, rollback by replay against running the same tokens."""

from dataclasses import fields, replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from qwen35.kernels.reference import ReferenceOps
from qwen35.views import GatedDeltaView
from tests.caches import MAX_PENDING, Piece, batch_view, garbage

KEY_HEADS, HEADS, KEY_WIDTH, VALUE_WIDTH, CONV = 2, 4, 16, 32, 4
KEY_DIM, CHANNELS = KEY_HEADS * KEY_WIDTH, 2 * KEY_HEADS * KEY_WIDTH + HEADS * VALUE_WIDTH
TAPS = torch.randn(CONV, CHANNELS, generator=torch.Generator().manual_seed(5)) * 0.4
OPS = ReferenceOps()


def make_view(dtype: torch.dtype, num_slots: int = 3) -> GatedDeltaView:
    return GatedDeltaView(
        recurrent=garbage(num_slots, HEADS, KEY_WIDTH, VALUE_WIDTH, dtype=torch.float32),
        conv=garbage(num_slots, CHANNELS, CONV - 1, dtype=dtype),
        pending_inputs=garbage(num_slots, MAX_PENDING, CHANNELS, dtype=dtype),
        pending_decay=garbage(num_slots, MAX_PENDING, HEADS, dtype=torch.float32),
        pending_beta=garbage(num_slots, MAX_PENDING, HEADS, dtype=torch.float32),
    )


def make_tokens(count: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs [T, Cc], log decay and beta [T, Hv]."""
    random = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, CHANNELS, generator=random).to(dtype)
    return inputs, -torch.rand(count, HEADS, generator=random), torch.rand(count, HEADS, generator=random)


def run(view, tokens, start, stop, *, slot=1, num_pending=0, defer=False):
    batch = batch_view(Piece(stop - start, start, slot, [0], num_pending=num_pending, defer=defer))
    return OPS.gated_delta(*(part[start:stop] for part in tokens), TAPS, view, batch)


def plain(inputs: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """One token after the other in float64, every head by itself."""
    inputs, decay, beta, taps = inputs.double(), decay.double(), beta.double(), TAPS.double()
    padded = torch.cat((inputs.new_zeros(CONV - 1, CHANNELS), inputs))
    out = inputs.new_empty(len(inputs), HEADS, VALUE_WIDTH)
    state = inputs.new_zeros(HEADS, KEY_WIDTH, VALUE_WIDTH)
    for t in range(len(inputs)):
        mixed = F.silu((padded[t : t + CONV] * taps).sum(0))
        for head in range(HEADS):
            shared = head // (HEADS // KEY_HEADS) * KEY_WIDTH
            query, key = (mixed[i * KEY_DIM + shared :][:KEY_WIDTH] for i in (0, 1))
            query, key = (part / (part.square().sum() + 1e-6).sqrt() for part in (query, key))
            value = mixed[2 * KEY_DIM + head * VALUE_WIDTH :][:VALUE_WIDTH]
            state[head] *= decay[t, head].exp()
            update = (value - key @ state[head]) * beta[t, head]
            state[head] += key[:, None] * update
            out[t, head] = query @ state[head] / KEY_WIDTH**0.5
    return out


def test_512_steps_do_not_drift():
    """Single steps stay at the plain recurrence, and one chunk of 512 has the same bits."""
    tokens = make_tokens(512)
    tokens = (tokens[0], tokens[1] * 0.02, tokens[2])  # slow decay: errors would pile up
    expected = plain(*tokens)
    single, view = [], make_view(torch.float32)
    for t in range(512):
        single.append(run(view, tokens, t, t + 1))
    torch.testing.assert_close(torch.cat(single).double(), expected, atol=2e-5, rtol=1e-4)
    assert torch.equal(torch.cat(single), run(make_view(torch.float32), tokens, 0, 512))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("sizes", [[1] * 70, [3, 64, 1, 2], [64, 6], [69, 1]])
def test_chunks_give_the_same_bits(dtype, sizes):
    tokens, view, whole = make_tokens(70, dtype), make_view(dtype), make_view(dtype)
    expected = run(whole, tokens, 0, 70)
    bounds = torch.tensor([0, *sizes]).cumsum(0).tolist()
    outs = [run(view, tokens, *pair) for pair in zip(bounds, bounds[1:], strict=False)]
    assert torch.equal(expected, torch.cat(outs))
    assert torch.equal(whole.recurrent[1], view.recurrent[1]) and torch.equal(whole.conv[1], view.conv[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("prompt", [0, 1, 2, 20])
@pytest.mark.parametrize("num_drafts", [0, 1, 5])
def test_commit_equals_replay(dtype, prompt, num_drafts):
    """After a verify of k + 1 inputs, n of them accepted: the next step gives the bits of a run of those n alone."""
    for accepted in range(num_drafts + 2):
        tokens = make_tokens(prompt + accepted + 5, dtype)
        rejected = make_tokens(prompt + num_drafts + 1, dtype, seed=8)
        verify = tuple(
            torch.cat((a[: prompt + accepted], b[prompt + accepted :])) for a, b in zip(tokens, rejected, strict=True)
        )
        view, plain_view = make_view(dtype), make_view(dtype)
        if prompt:
            run(view, verify, 0, prompt)
        before = view.recurrent[1].clone(), view.conv[1].clone()
        run(view, verify, prompt, prompt + num_drafts + 1, defer=True)
        if prompt:  # the committed state is untouched
            assert torch.equal(before[0], view.recurrent[1]) and torch.equal(before[1], view.conv[1])
        stop = prompt + accepted
        expected = run(plain_view, tokens, 0, stop + 5)[stop:]
        assert torch.equal(expected, run(view, tokens, stop, stop + 5, num_pending=accepted))
        assert torch.equal(plain_view.recurrent[1], view.recurrent[1])
        assert torch.equal(plain_view.conv[1], view.conv[1])


def test_a_run_of_verifies_equals_single_steps():
    tokens, junk, view = make_tokens(60), make_tokens(70, seed=4), make_view(torch.float32)
    expected = run(make_view(torch.float32), tokens, 0, 60)
    run(view, tokens, 0, 7)
    position, pending = 7, 0
    for step in range(20):
        accepted = step % 5  # 0: the step was abandoned, yet what was pending before it is in the state now
        stop = min(position + accepted, 60)
        verify = tuple(torch.cat((a[:stop], b[stop:])) for a, b in zip(tokens, junk, strict=True))
        out = run(view, verify, position, position + 4, num_pending=pending, defer=True)
        assert torch.equal(out[: stop - position], expected[position:stop])
        position, pending = stop, stop - position
    assert position > 40


def test_pending_inputs_alone():
    """A batch without tokens applies what is pending and no more."""
    tokens, view, expected = make_tokens(12), make_view(torch.float32), make_view(torch.float32)
    run(view, tokens, 0, 8)
    run(view, tokens, 8, 12, defer=True)
    run(view, tokens, 11, 11, num_pending=3)
    run(expected, tokens, 0, 11)
    assert torch.equal(view.recurrent[1], expected.recurrent[1]) and torch.equal(view.conv[1], expected.conv[1])


def test_sequences_do_not_see_each_other():
    first, second = make_tokens(9, seed=1), make_tokens(30, seed=2)
    view, alone = make_view(torch.float32), make_view(torch.float32)
    run(view, second, 0, 26, slot=2)
    run(view, second, 26, 29, slot=2, defer=True)
    untouched = [getattr(view, field.name)[0].clone() for field in fields(view)]
    both = [torch.cat((b[28:30], a)) for a, b in zip(first, second, strict=True)]
    batch = batch_view(Piece(2, 28, 2, [0], num_pending=2, defer=True), Piece(9, 0, 1, [0]))
    out = OPS.gated_delta(*both, TAPS, view, batch)
    assert torch.equal(out[2:], run(alone, first, 0, 9))
    assert torch.equal(out[:2], run(alone, second, 0, 30, slot=2)[28:])
    after = [getattr(view, field.name)[0] for field in fields(view)]
    assert all(torch.equal(a.nan_to_num(7), b.nan_to_num(7)) for a, b in zip(untouched, after, strict=True))


@pytest.mark.parametrize("narrow", [("pending_beta",), ("conv", "pending_inputs")])
def test_values_are_used_as_they_are_stored(narrow):
    """Where the state is narrower than what comes in, the first use is rounded too."""
    tokens = make_tokens(10)

    def narrow_view():
        view = make_view(torch.float32)
        return replace(view, **{name: getattr(view, name).bfloat16() for name in narrow})

    whole, view = run(narrow_view(), tokens, 0, 10), narrow_view()
    run(view, tokens, 0, 4)
    outs = [run(view, tokens, 4, 7, defer=True), run(view, tokens, 7, 10, num_pending=3)]
    assert torch.equal(torch.cat(outs), whole[4:])


def test_too_many_deferred_inputs_are_refused():
    with pytest.raises(ValueError, match="deferred inputs of slot 1: expected at most 6"):
        run(make_view(torch.float32), make_tokens(7), 0, 7, defer=True)
