"""The language model against transformers, and its bits against other ways to run the same tokens."""

import pytest
import torch

from qwen35.config import FULL_ATTENTION
from tests.caches import MAX_PENDING, Piece, batch_view, cache_view

LENGTHS = [1, 2, 63, 64, 65, 129]
BLOCKS = range(5, 25)
SLOT = 3


def token_ids(count, seed=0):
    return torch.randint(0, 256, (count,), generator=torch.Generator().manual_seed(seed))


def run(model, cache, embeds, start, stop, positions=None, **piece):
    """Hidden states of tokens start:stop."""
    positions = None if positions is None else positions[:, start:stop]
    batch = batch_view(Piece(stop - start, start, SLOT, BLOCKS, positions=positions, **piece))
    return model(embeds[start:stop], batch, cache)


def image_positions(num_before, height, width, num_after):
    """3-axis positions: text, an image of height x width embeddings, text."""
    before = torch.arange(num_before).expand(3, -1)
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    image = num_before + torch.stack((torch.zeros_like(rows), rows, columns)).flatten(1)
    after = num_before + max(height, width) + torch.arange(num_after)
    return torch.cat((before, image, after.expand(3, -1)), 1)


@pytest.mark.parametrize("length", LENGTHS)
def test_logits_equal_transformers(load_models, oracle, length):
    """In one pass, and as a prefill followed by single tokens."""
    model, ids = load_models()[0], token_ids(length)
    expected = oracle(input_ids=ids[None]).logits[0].float()
    embeds = model.embed(ids)
    whole = model.logits(run(model, cache_view(model.config), embeds, 0, length))
    torch.testing.assert_close(whole, expected, atol=1e-4, rtol=0)
    cache, prefill = cache_view(model.config), max(1, length - 4)
    hidden = [run(model, cache, embeds, 0, prefill)]
    hidden += [run(model, cache, embeds, t, t + 1) for t in range(prefill, length)]
    assert torch.equal(model.logits(torch.cat(hidden)), whole)


def test_image_embeddings_and_positions_equal_transformers(load_models, oracle):
    model = load_models()[0]
    positions = image_positions(5, 6, 4, 20)
    length = positions.shape[1]
    embeds = model.embed(token_ids(length))
    embeds[5:29] = torch.randn(24, model.config.hidden_size) * 0.7
    hidden = oracle.model.language_model(
        inputs_embeds=embeds[None].double(), position_ids=positions[:, None]
    ).last_hidden_state
    expected = oracle.lm_head(hidden)[0].float()
    got = model.logits(run(model, cache_view(model.config), embeds, 0, length, positions))
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)
    cache = cache_view(model.config)
    parts = [run(model, cache, embeds, *bounds, positions) for bounds in ((0, 9), (9, 40), (40, 41), (41, length))]
    assert torch.equal(model.logits(torch.cat(parts)), got)


@pytest.mark.parametrize("index", range(4))
def test_layers_equal_transformers(load_models, oracle, index):
    model = load_models()[0]
    layer, reference = model.layers[index], oracle.model.language_model.layers[index]
    assert layer.is_attention == (model.config.layer_types[index] == FULL_ATTENTION)
    length = 21
    x, positions = torch.randn(length, model.config.hidden_size), image_positions(4, 3, 4, 5)
    cache, batch = cache_view(model.config), batch_view(Piece(length, 0, SLOT, BLOCKS, positions=positions))
    got = layer(x, model.rotary(positions), batch, model.views(cache)[index])
    tables = oracle.model.language_model.rotary_emb(x[None].double(), positions[:, None])
    mask = torch.full((1, 1, length, length), float("-inf"), dtype=torch.float64).triu(1)
    expected = reference(
        x[None].double(), position_embeddings=tables, attention_mask=mask if layer.is_attention else None
    )
    expected = expected[0] if isinstance(expected, tuple) else expected
    torch.testing.assert_close(got, expected[0].float(), atol=2e-5, rtol=1e-5)


def random_schedule(random, length):
    """Steps (start, stop, accepted inputs): chunks of the prompt first, then verifies with some drafts rejected."""
    position, prompt = 0, int(torch.randint(1, length // 2, (1,), generator=random))
    while position < length:
        if position < prompt:
            stop = min(prompt, position + int(torch.randint(1, 20, (1,), generator=random)))
            yield position, stop, None
        else:
            stop = min(length, position + int(torch.randint(1, MAX_PENDING + 1, (1,), generator=random)))
            accepted = int(torch.randint(0, stop - position + 1, (1,), generator=random))
            yield position, stop, accepted
            stop = position + accepted
        position = stop


@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float8_e4m3fn),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_any_schedule_gives_the_same_bits(load_models, dtype, kv_dtype):
    """Chunked prefill, verifies with rejected drafts and foreign sequences beside it, against one pass."""
    model, length = load_models(dtype)[0], 70
    ids, wrong = token_ids(length), token_ids(length, seed=6)
    stores = {"dtype": dtype, "kv_dtype": kv_dtype}
    expected = run(model, cache_view(model.config, **stores), model.embed(ids), 0, length)
    for seed in range(3):
        random, cache, pending = torch.Generator().manual_seed(seed), cache_view(model.config, **stores), 0
        for start, stop, accepted in random_schedule(random, length):
            is_verify = accepted is not None
            correct = start + accepted if is_verify else stop
            embeds = model.embed(torch.cat((ids[start:correct], wrong[correct:stop])))
            piece = Piece(stop - start, start, SLOT, BLOCKS, num_pending=pending, defer=is_verify)
            company = [Piece(seed + 2, 0, slot, [30 + slot]) for slot in range(seed)]
            others = torch.cat([embeds.new_empty(0, embeds.shape[1])] + [model.embed(wrong[: seed + 2])] * seed)
            out = model(torch.cat((others, embeds)), batch_view(*company, piece), cache)[len(others) :]
            assert torch.equal(out[: correct - start], expected[start:correct])
            pending = accepted if is_verify else 0


def test_apply_pending_brings_the_state_up_to_the_last_token(load_models):
    model, ids = load_models()[0], token_ids(20)
    embeds = model.embed(ids)
    cache, expected = cache_view(model.config), cache_view(model.config)
    run(model, cache, embeds, 0, 14)
    run(model, cache, embeds, 14, 20, defer=True)
    model.apply_pending(batch_view(Piece(0, 17, SLOT, BLOCKS, num_pending=3)), cache)
    run(model, expected, embeds, 0, 17)
    for view, other in zip(cache.gated_delta, expected.gated_delta, strict=True):
        assert torch.equal(view.recurrent[SLOT], other.recurrent[SLOT])
        assert torch.equal(view.conv[SLOT], other.conv[SLOT])


def test_logits_leave_out_padding_rows_of_the_head(load_models):
    model = load_models()[0]
    logits = model.logits(torch.randn(3, model.config.hidden_size))
    assert logits.shape == (3, model.config.vocab_size) and logits.dtype == torch.float32
