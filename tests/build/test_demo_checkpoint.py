"""The committed demo checkpoint: layout, templates, held-out sets, and agreement with transformers."""

import json
import random

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from build.demo import config, data, export, fake_quant, heldout, images, tasks
from build.demo.crosscheck import transformers_inputs
from build.demo.evaluate import prompt_of
from build.demo.model import DemoModel, Layout
from build.demo.tokenizer import load_tokenizer

CHECKPOINT = config.CHECKPOINT_DIR
MAX_BYTES = 16 * 1024 * 1024
IMAGE_SETS = ("colour", "shape", "count", "position", "compare")


@pytest.fixture(scope="module")
def tensors() -> dict[str, torch.Tensor]:
    return load_file(str(CHECKPOINT / "model.safetensors"))


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer()


@pytest.fixture(scope="module")
def stream() -> data.Stream:
    return data.Stream("test", 7, 4, 320)


def test_file_is_small_bf16_and_marked_pt(tensors):
    assert sum(path.stat().st_size for path in CHECKPOINT.iterdir()) <= MAX_BYTES
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    with safe_open(str(CHECKPOINT / "model.safetensors"), "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_target_experts_are_fused_and_draft_experts_single(tensors):
    prefix = "model.language_model.layers.0.mlp.experts."
    assert {name for name in tensors if name.startswith(prefix)} == {prefix + "gate_up_proj", prefix + "down_proj"}
    assert "mtp.layers.0.mlp.experts.7.up_proj.weight" in tensors
    assert not any(name.startswith("mtp.layers.0.mlp.experts.gate_up") for name in tensors)
    assert config.text_config()["mtp_num_hidden_layers"] == 1


def test_every_quantisable_input_width_is_a_multiple_of_16(tensors):
    widths = {name: tensor.shape[-1] for name, tensor in tensors.items() if fake_quant.is_quantised(name)}
    assert len(widths) == 2 * 4 + 6 * 3 + 8 * 5
    assert all(width % 16 == 0 for width in widths.values())


def test_enough_layers_for_a_cheap_draft():
    assert config.LAYER_TYPES.count("full_attention") == 2
    assert len(config.LAYER_TYPES) == 8


def test_transformers_loads_it_whole_and_agrees(stream):
    """Logits of our training model equal transformers' on a chat with a picture, a text of 129 tokens beside it."""
    from transformers import Qwen3_5MoeForConditionalGeneration

    hf, info = Qwen3_5MoeForConditionalGeneration.from_pretrained(
        CHECKPOINT, dtype=torch.float32, output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    ours = DemoModel()
    ours.load_state_dict(export.training_state(load_file(str(CHECKPOINT / "model.safetensors"))))
    picture = prompt_of(heldout.load("compare")[0], stream)
    with torch.no_grad():
        for sequence in (picture, stream.text(random.Random(1), 129)):
            batch = data.collate([[sequence]])
            hidden, _, _ = ours.hidden(batch, Layout.of(batch.positions, batch.segments))
            inputs = transformers_inputs(sequence)
            expected = hf(input_ids=batch.tokens, **inputs).logits
            torch.testing.assert_close(ours.lm_head(hidden), expected, atol=1e-3, rtol=1e-3)


def test_packed_sequences_do_not_see_each_other(stream):
    """Each sequence of a packed row has the hidden states that it has alone."""
    torch.manual_seed(0)
    model, rng = DemoModel(), random.Random(2)
    sequences = [stream.chat(rng, [(64, 64)]) for _ in range(4)]
    with torch.no_grad():
        packed = data.collate([sequences])
        together, _, _ = model.hidden(packed, Layout.of(packed.positions, packed.segments))
        start = 0
        for sequence in sequences:
            alone = data.collate([[sequence]])
            hidden, _, _ = model.hidden(alone, Layout.of(alone.positions, alone.segments))
            torch.testing.assert_close(together[:, start : start + hidden.shape[1]], hidden, atol=2e-4, rtol=2e-4)
            start += hidden.shape[1]


@pytest.mark.parametrize(
    ("thinking", "ending"),
    [(None, "<think>\n\n</think>\n\n"), (False, "<think>\n\n</think>\n\n"), (True, "<think>\n")],
)
def test_thinking_switch(tokenizer, thinking, ending):
    switch = {} if thinking is None else {"enable_thinking": thinking}
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi."}], tokenize=False, add_generation_prompt=True, **switch
    )
    assert text == "<|im_start|>user\nHi.<|im_end|>\n<|im_start|>assistant\n" + ending


def test_template_turns(tokenizer):
    """System first, pictures as parts, thoughts of earlier answers dropped, tools and their calls."""
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is it?"}]},
        {"role": "assistant", "content": "A star.", "reasoning_content": "I see a star."},
        {"role": "user", "content": "Call it."},
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "The tool.",
            "tool_calls": [{"type": "function", "function": {"name": "ring", "arguments": {"times": 2}}}],
        },
        {"role": "tool", "content": "done"},
    ]
    tools = [{"type": "function", "function": {"name": "ring"}}]
    text = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True)
    assert text.startswith("<|im_start|>system\n# Tools")
    assert "Be brief.<|im_end|>\n" in text
    assert "user\n<|vision_start|><|image_pad|><|vision_end|>What is it?<|im_end|>\n" in text
    assert "<|im_start|>assistant\nA star.<|im_end|>\n" in text and "I see a star." not in text
    call = "<tool_call>\n<function=ring>\n<parameter=times>\n2\n</parameter>\n</function>\n</tool_call><|im_end|>\n"
    assert "<think>\nThe tool.\n</think>\n\n" + call in text
    assert "<|im_start|>user\n<tool_response>\ndone\n</tool_response><|im_end|>\n" in text


def test_training_prompts_are_the_template(tokenizer, stream):
    """`render_prompt` (fast) writes what the template writes, placeholders repeated per merged patch."""
    rng = random.Random(3)
    for task in tasks.TASKS:
        chat = task(rng, stream.documents)
        messages = tasks.with_system(rng, chat)
        for thinking in (False, True):
            ours, specs = data.render_prompt(messages, thinking)
            text = tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True, enable_thinking=thinking
            )
            for spec in specs:
                rows, columns = data.grid_of(spec)
                text = text.replace("<|image_pad|>", "<PAD>" * (rows * columns // 4), 1)
            assert ours == text.replace("<PAD>", "<|image_pad|>")


def test_ids_of_configuration_and_tokenizer_agree(tokenizer):
    written = json.loads((CHECKPOINT / "config.json").read_text())
    assert written == config.model_config()
    for field, token in (("image_token_id", "<|image_pad|>"), ("vision_start_token_id", "<|vision_start|>")):
        assert written[field] == tokenizer.convert_tokens_to_ids(token) == config.TOKEN_ID[token]
    generation = json.loads((CHECKPOINT / "generation_config.json").read_text())
    assert tokenizer.eos_token_id in generation["eos_token_id"]
    assert len(tokenizer) <= config.VOCAB_SIZE and config.VOCAB_SIZE % 64 == 0


@pytest.mark.parametrize("name", heldout.SET_NAMES)
def test_held_out_sets(name):
    items = heldout.load(name)
    assert len(items) >= 200
    assert len({item.id for item in items}) == len(items)
    if name != "text":
        assert all(heldout.grade(item, item.reference) for item in items)
        assert not any(heldout.grade(item, "I do not know.") for item in items)


def test_grading_refuses_wrong_answers():
    wrong = {"arithmetic": "1 + 1 = 999.", "count": "There are 9 figures.", "compare": "maybe", "key_repeat": "ZZZZ"}
    for name, text in wrong.items():
        assert not any(heldout.grade(item, text) for item in heldout.load(name))
    item = heldout.load("colour")[0]
    assert not heldout.grade(item, "The figure is " + " and ".join(images.COLOURS))


def test_held_out_questions_never_occur_in_training(stream):
    """Training draws only keys that are not held out; the held-out items have only keys that are."""
    for name in ("arithmetic", "key_repeat"):
        for item in heldout.load(name):
            key = item.reference.split(" =")[0] if name == "arithmetic" else item.answer
            assert tasks.is_held_out(key)
    for item in heldout.load("chat"):
        assert tasks.is_held_out(item.messages[0]["content"])
    for name in IMAGE_SETS:
        assert all(tasks.is_held_out(tasks.image_key(item.specs())) for item in heldout.load(name))
    questions = {json.dumps(item.messages) for name in heldout.SET_NAMES[1:] for item in heldout.load(name)}
    rng = random.Random(5)
    for _ in range(500):
        task = rng.choice(tasks.TASKS)
        chat = task(rng, stream.documents)
        if not tasks.is_held_out(chat.key):
            assert json.dumps(chat.messages) not in questions


def test_renderer_is_deterministic_and_patches_have_the_published_layout():
    spec = heldout.load("count")[0].specs()[0]
    assert images.render(spec).tobytes() == images.render(json.loads(json.dumps(spec))).tobytes()
    picture = images.render(spec)
    patches, grid = images.to_patches(picture)
    assert patches.shape == (grid[1] * grid[2], 3 * 2 * 16 * 16)
    halves = patches.view(-1, 3, 2, 256)
    assert torch.equal(halves[:, :, 0], halves[:, :, 1])


@pytest.mark.parametrize(
    ("height", "width", "expected"),
    [(64, 64, (64, 64)), (10, 10, (64, 64)), (100, 70, (96, 64)), (1000, 500, (256, 128)), (192, 192, (192, 192))],
)
def test_smart_resize(height, width, expected):
    assert images.smart_resize(height, width) == expected


def test_rounding_of_weights_known_values():
    """Ties go to the even code, large values saturate; one block of sixteen with amax 6 has scale 1."""
    x = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.26, 7.0])
    assert fake_quant.round_e2m1(x).tolist() == [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, -0.5, 6.0]
    weight = torch.zeros(1, 16)
    weight[0, :3] = torch.tensor([6.0, 2.4, -0.7])
    torch.testing.assert_close(fake_quant.round_nvfp4(weight)[0, :3], torch.tensor([6.0, 2.0, -0.5]))
