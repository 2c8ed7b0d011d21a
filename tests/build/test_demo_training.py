"""The demo's training: reproducible batches, decoding against the full forward, the recursion of the drafts."""

import random

import pytest
import torch

from build.demo import data, evaluate, train
from build.demo.decode import generate
from build.demo.fake_quant import RoundedWeights, round_nvfp4
from build.demo.model import DemoModel, Layout, attend
from build.demo.muon import orthogonalise


@pytest.fixture(scope="module")
def stream() -> data.Stream:
    return data.Stream("test", 7, 3, 320)


@pytest.fixture(scope="module")
def model() -> DemoModel:
    torch.manual_seed(0)
    return DemoModel().eval()


def test_batch_depends_on_seed_stage_and_number_only(stream):
    first, again = stream.batch(5), data.Stream("test", 7, 3, 320).batch(5)
    assert torch.equal(first.tokens, again.tokens) and torch.equal(first.positions, again.positions)
    assert all(torch.equal(a.frames, b.frames) for a, b in zip(first.pictures, again.pictures, strict=True))
    assert not torch.equal(first.tokens, stream.batch(6).tokens)
    assert first.tokens.shape == (3, 320)


def test_placeholders_and_positions_of_a_picture(stream):
    """64x96 after three text tokens: T 3, H 3 and 4, W 3 to 5; text goes on at 3 + max(2, 3)."""
    spec = {"width": 96, "height": 64}
    places = data.positions_of([1, 2, 3] + [data.IMAGE_ID] * 6 + [4], [spec])
    assert places[3:9] == [(3, 3, 3), (3, 3, 4), (3, 3, 5), (3, 4, 3), (3, 4, 4), (3, 4, 5)]
    assert places[9] == (6, 6, 6)


@torch.no_grad()
def test_step_by_step_decoding_equals_the_full_forward(model, stream):
    """Greedy tokens of a batch of unequal prompts are the full forward's choices, pictures included."""
    rng = random.Random(4)
    prompts = [stream.text(rng, 21), stream.tokenise(rng, data.tasks.shape(rng, stream.documents))]
    for prompt, output in zip(prompts, generate(model, prompts, 6), strict=True):
        batch = data.collate([[data.Sequence3(prompt.tokens + output, [0.0] * 99, prompt.specs)]])
        hidden, _, _ = model.hidden(batch, Layout.of(batch.positions, batch.segments))
        choices = model.lm_head(hidden[0]).argmax(-1).tolist()
        assert choices[len(prompt.tokens) - 1 : -1] == output


@torch.no_grad()
def test_draft_recursion_equals_drafting_one_root_at_a_time(model, stream):
    """Step s at root t, all roots at once, against a cache of first-step entries and the root's own later ones."""
    batch = data.collate([[stream.text(random.Random(6), 24)]])
    layout = Layout.of(batch.positions, batch.segments)
    hidden, embedded, _ = model.hidden(batch, layout)
    parallel = model.mtp(hidden, embedded, layout, 3)
    layer, root = model.mtp.layers[0], 9
    keys, values, state = [], [], hidden[:, : root + 1]
    for step in range(3):
        window = slice(0, root + 1) if step == 0 else slice(root + step, root + step + 1)
        following = slice(window.start + 1, window.stop + 1)
        x = model.mtp.merge(embedded[:, following], state)
        inner = layer.input_layernorm(x)
        q, k, v, gate = layer.self_attn.project(inner, layout.cos[:, window], layout.sin[:, window])
        keys.append(k)
        values.append(v)
        hidden_mask = layout.hidden[:, :, window, : root + step + 1] if step == 0 else None
        attended = attend(q, torch.cat(keys, 2), torch.cat(values, 2), hidden_mask)
        x = x + layer.self_attn.finish(attended, gate)
        x = x + layer.mlp(layer.post_attention_layernorm(x))[0]
        state = model.mtp.norm(x)[:, -1:]
        torch.testing.assert_close(state[:, 0], parallel[step][:, root], atol=1e-4, rtol=1e-4)


def test_acceptance_walks_like_the_loop():
    """Three roots a step when two drafts are accepted; a rejected second draft leaves the third uncounted."""
    yes, no = [True, True, True], [False, True, True]
    result = evaluate.acceptance([[[True, True, False], no, no, yes], [no, [True, False, True], no]])
    # first output: two accepted (roots 0-2), then three; second: none, then one (roots 1-2)
    assert result["first"] == 3 / 4
    assert result["accepted/drafted"] == 6 / 12
    assert result["conditional_2"] == 2 / 3 and result["conditional_3"] == 1 / 2


def test_rounded_weights_come_back():
    model = DemoModel()
    weight = model.model.language_model.layers[0].linear_attn.out_proj.weight
    before = weight.detach().clone()
    with RoundedWeights(model):
        assert torch.equal(weight, round_nvfp4(before)) and not torch.equal(weight, before)
    assert torch.equal(weight, before)


def test_orthogonalised_updates_have_singular_values_near_one():
    torch.manual_seed(0)
    values = torch.linalg.svdvals(orthogonalise(torch.randn(3, 64, 128)))
    assert values.min() > 0.5 and values.max() < 1.4


def test_schedule_rises_holds_and_falls():
    assert train.schedule(0.0, 0) == pytest.approx(0.01)
    assert train.schedule(0.3, 500) == 1.0
    assert train.schedule(1.0, 500) == pytest.approx(0.05)
