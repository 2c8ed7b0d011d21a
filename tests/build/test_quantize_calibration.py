"""Calibration data: built-in, of the demo, from a file; and the CPU shim against ModelOpt's own arithmetic."""

import base64
import io
import json
import random
from pathlib import Path

import pytest
import torch
from PIL import Image

from build.demo import docs, tasks
from build.quantization import calibration
from build.quantization.calibration import CalibrationError, calibration_inputs, demo_samples, is_demo, read_file
from build.quantization.cpu_shim import cpu_fake_quant, fake_quantize
from build.quantization.generic import draw_picture, generic_samples
from qwen35.config import ModelConfig
from tests.tiny_checkpoint import TOKEN_ID, make_tiny_checkpoint


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("calibration"))


def inputs(directory: Path, num_samples: int = 8, file: Path | None = None) -> list[calibration.CalibrationInput]:
    return calibration_inputs(directory, ModelConfig.from_directory(directory), num_samples, file)


def test_built_in_data_holds_texts_chats_and_images(tiny: Path) -> None:
    samples = generic_samples(8, with_images=True, with_chat=True)
    contents = [sample.get("messages", [{}])[0].get("content") for sample in samples]
    assert ["text" in sample for sample in samples] == [True, False, True, False] * 2
    assert [isinstance(content, list) for content in contents] == [False, False, False, True] * 2
    encoded = inputs(tiny)
    assert sum(sample.patches is not None for sample in encoded) == 2
    for sample in encoded:
        num_tokens = sample.token_ids.shape[1]
        assert sample.positions.shape == (3, 1, num_tokens) and num_tokens < 512
        num_pads = int((sample.token_ids == TOKEN_ID["<|image_pad|>"]).sum())
        num_patches = 0 if sample.patches is None else sample.patches.shape[0]
        assert num_pads == num_patches // 4
        if sample.grids is not None:
            assert num_patches == int(sample.grids.prod(dim=1).sum())


def test_built_in_data_is_seeded() -> None:
    first, second, other = (generic_samples(8, with_images=False, with_chat=True, seed=seed) for seed in (5, 5, 6))
    assert first == second != other
    one, two = (draw_picture(random.Random(3)).size for _ in range(2))
    assert one == two


def test_pictures_differ_in_size_and_content() -> None:
    rng = random.Random(1)
    pictures = [draw_picture(rng) for _ in range(8)]
    assert len({picture.size for picture in pictures}) > 1
    assert len({picture.tobytes() for picture in pictures}) == 8


def test_without_template_or_vision_everything_is_text() -> None:
    assert all("text" in sample for sample in generic_samples(6, with_images=True, with_chat=False))
    chats = generic_samples(8, with_images=False, with_chat=True)
    assert all(isinstance(sample["messages"][0]["content"], str) for sample in chats if "messages" in sample)


def test_demo_data_covers_every_task_and_no_held_out_item(monkeypatch) -> None:
    made = []

    def recording(task):
        return lambda rng, documents: made.append(task(rng, documents)) or made[-1]

    monkeypatch.setattr(docs, "training_documents", lambda: ["A documentation text about nothing in particular. " * 20])
    monkeypatch.setattr(tasks, "TASKS", tuple(map(recording, tasks.TASKS)))
    monkeypatch.setattr(tasks, "is_held_out", lambda key: len(made) % 3 == 0)  # every third item
    num_kinds = len(tasks.TASKS) + 1
    samples = demo_samples(2 * num_kinds)
    chats = [sample for sample in samples if "messages" in sample]
    assert len(samples) == 2 * num_kinds and len(chats) == 2 * (num_kinds - 1)
    assert [chat["answer"] for chat in chats] == [chat.answer for n, chat in enumerate(made, 1) if n % 3]
    assert sum(isinstance(chat["messages"][-1]["content"], list) for chat in chats) >= 2 * len(tasks.IMAGE_TASKS)
    parts = [part for chat in chats for part in chat["messages"][-1]["content"] if isinstance(part, dict)]
    assert {type(part["image"]) for part in parts if part["type"] == "image"} == {Image.Image}


def test_demo_is_recognised_by_its_tokenizer(tmp_path: Path, tiny: Path) -> None:
    assert not is_demo(tiny) and not is_demo(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes((calibration.DEMO_CHECKPOINT / "tokenizer.json").read_bytes())
    assert is_demo(tmp_path)


def _png() -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (64, 96), (200, 30, 30)).save(buffer, "PNG")
    return buffer.getvalue()


def test_file_of_texts_and_chats(tmp_path: Path, tiny: Path) -> None:
    (tmp_path / "red.png").write_bytes(_png())
    inline = "data:image/png;base64," + base64.b64encode(_png()).decode()
    image_chats = [
        {
            "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}],
            "answer": "Red.",
        }
        for url in ("red.png", inline)
    ]
    lines = [{"text": "plain"}, *image_chats, {"text": "x" * 3000}]
    file = tmp_path / "data.jsonl"
    file.write_text("\n\n".join(json.dumps(line) for line in lines))
    encoded = inputs(tiny, num_samples=10, file=file)
    assert len(encoded) == 4 and len(inputs(tiny, num_samples=2, file=file)) == 2
    assert encoded[0].token_ids.shape == (1, 5)
    assert encoded[1].grids.tolist() == [[1, 6, 4]] and torch.equal(encoded[1].patches, encoded[2].patches)
    assert torch.equal(encoded[1].token_ids, encoded[2].token_ids)
    assert encoded[3].token_ids.shape == (1, 511)
    answer = encoded[1].positions[:, 0, -4:]  # "Red." is four byte tokens; positions run on on all three axes
    assert (answer.diff(dim=1) == 1).all() and (answer[0] == answer[1]).all() and (answer[0] == answer[2]).all()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", r"data.jsonl:1: expected JSON"),
        ('{"text": "a"}\n[1]', r'data.jsonl:2: expected an object with either "text" or "messages"'),
        ('{"text": "a", "messages": []}', "expected an object with either"),
        ('{"messages": [{"role": "user", "content": [{"type": "image", "image": "gone.png"}]}]}', r"data.jsonl:1: "),
        ("\n", "expected at least one sample, got none"),
    ],
)
def test_bad_files(tmp_path: Path, tiny: Path, content: str, message: str) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text(content)
    with pytest.raises(CalibrationError, match=message):
        inputs(tiny, file=file)
    with pytest.raises(CalibrationError, match="readable text file"):
        read_file(tmp_path / "nowhere.jsonl")


# --- the CPU shim ---


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("factor", [1.0, 0.05, 20.0])
def test_shim_equals_modelopts_qtensor(dtype: torch.dtype, factor: float) -> None:
    from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor

    x = torch.randn(3, 5, 64, generator=torch.Generator().manual_seed(2)).to(dtype)
    x[0, 0] = 0
    x[1, 1] *= 1e-6  # below the smallest scale
    amax = x.abs().amax() * factor
    double_scale = amax.float() / 2688
    packed, scale, _ = NVFP4QTensor.quantize(x.clone(), 16, weights_scaling_factor_2=double_scale)
    expected = packed.dequantize(dtype, scale=scale, double_scale=double_scale, block_sizes={-1: 16})
    found = fake_quantize(x, 16, amax, 4, 2, 8, 4)
    assert found.dtype == dtype and torch.equal(found, expected)


def test_shim_is_in_place_only_inside_its_context() -> None:
    import modelopt.torch.quantization.tensor_quant as tensor_quant

    original = tensor_quant.dynamic_block_quantize_op
    x = torch.randn(2, 32)
    with pytest.raises(RuntimeError), cpu_fake_quant():
        assert tensor_quant.dynamic_block_quantize_op is not original
        assert tensor_quant.dynamic_block_quantize_op(x, 16, x.abs().amax(), 4, 2, 8, 4).shape == x.shape
        raise RuntimeError
    assert tensor_quant.dynamic_block_quantize_op is original


@pytest.mark.parametrize(
    ("position", "value", "message"),
    [
        (1, None, "expected a calibrated amax"),
        (0, 32, "expected NVFP4"),
        (2, 8, "expected NVFP4"),
        (5, 0, "expected NVFP4"),
    ],
)
def test_shim_refuses_other_formats_and_batch_scales(position: int, value: int | None, message: str) -> None:
    arguments = [16, torch.tensor(1.0), 4, 2, 8, 4]
    arguments[position] = value
    with pytest.raises(ValueError, match=message):
        fake_quantize(torch.zeros(2, 32), *arguments)
