import base64
import io
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from qwen35.errors import InvalidArgument, Qwen35Error, Unsupported
from qwen35.prompt.processor import resolve_local

PAD = "<|image_pad|>"
WRAPPED = f"<|vision_start|>{PAD}<|vision_end|>"


def png(width: int = 96, height: int = 64, colour: tuple[int, int, int] = (200, 30, 30)) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (width, height), colour).save(buffer, "PNG")
    return buffer.getvalue()


def uri(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


SMALL, LARGE = png(64, 64), png(96, 64, (0, 0, 200))  # 4 and 6 tokens


def ids(processor, text: str) -> list[int]:
    return processor.tokenizer.encode(text)


def test_text_alone(processor):
    prompt = processor.from_text("Hello <|im_end|>")
    assert list(prompt.token_ids) == ids(processor, "Hello <|im_end|>")
    assert prompt.images == () and prompt.next_position == len(prompt.token_ids)
    assert torch.equal(prompt.positions, torch.arange(len(prompt.token_ids)).expand(3, -1))
    assert prompt.text == "Hello <|im_end|>"


def test_images_fill_placeholders_in_order(processor):
    prompt = processor.from_text(f"a{WRAPPED}b{PAD}c", [SMALL, LARGE])
    expanded = f"a<|vision_start|>{PAD * 4}<|vision_end|>b{PAD * 6}c"
    assert list(prompt.token_ids) == ids(processor, expanded)
    assert [(image.grid, image.num_tokens) for image in prompt.images] == [((1, 4, 4), 4), ((1, 4, 6), 6)]
    assert [image.offset for image in prompt.images] == [2, 8]
    assert prompt.num_image_tokens == 10
    assert prompt.next_position == 1 + 1 + 2 + 1 + 1 + 3 + 1


def test_without_placeholder_images_go_before_the_text(processor):
    prompt = processor.from_text("What is it?", [SMALL, LARGE])
    assert prompt.token_ids == processor.from_text(WRAPPED * 2 + "What is it?", [SMALL, LARGE]).token_ids
    assert prompt.text == "What is it?"
    assert len(processor.from_text("", [SMALL]).token_ids) == 6


@pytest.mark.parametrize("source", [SMALL, base64.b64encode(SMALL), uri(SMALL), Image.open(io.BytesIO(SMALL))])
def test_forms_of_an_image(processor, source):
    assert processor.from_text("x", [source]).images[0].digest == processor.from_text("x", [SMALL]).images[0].digest


def test_token_ids(processor):
    text = f"a{WRAPPED}b"
    assert (
        processor.from_token_ids(ids(processor, text), [SMALL]).token_ids
        == processor.from_text(text, [SMALL]).token_ids
    )
    prompt = processor.from_token_ids(np.array([71, 72]))
    assert prompt.token_ids == (71, 72) and prompt.text == processor.tokenizer.decode([71, 72])


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": uri(SMALL), "detail": "high"}},
        {"type": "image_url", "image_url": uri(SMALL)},
        {"type": "image", "image": uri(SMALL)},
        {"type": "image", "image": base64.b64encode(SMALL).decode()},
    ],
)
def test_messages_with_an_image(processor, part):
    content = [{"type": "text", "text": "What?"}, part, {"type": "text", "text": PAD}]
    prompt = processor.from_messages([{"role": "user", "content": content}])
    literal = processor.tokenizer.encode_plain(PAD)
    start = ids(processor, f"<|im_start|>user\nWhat?<|vision_start|>{PAD * 4}<|vision_end|>")
    assert list(prompt.token_ids[: len(start)]) == start
    assert list(prompt.token_ids[len(start) : len(start) + len(literal)]) == literal
    assert [(image.offset, image.num_tokens) for image in prompt.images] == [(len(start) - 5, 4)]


def test_literal_placeholders_of_a_raw_prompt_are_places_for_images(processor):
    """In content of messages they are text; a raw prompt speaks the template's language, and must mean what it says."""
    for text, images in ((PAD, []), (f"{PAD}{PAD}", [SMALL]), (WRAPPED, [SMALL, LARGE]), ("<|video_pad|>", [])):
        with pytest.raises(InvalidArgument, match="expected"):
            processor.from_text(text, images)
    spelt = processor.from_messages([{"role": "user", "content": f"what is {PAD} or {WRAPPED}?"}])
    assert spelt.images == () and processor.tokenizer.encode(PAD)[0] not in spelt.token_ids


def test_local_forms(processor, tmp_path):
    (tmp_path / "a.png").write_bytes(SMALL)
    path = tmp_path / "a.png"
    values = [SMALL, path, str(path), path.as_uri(), uri(SMALL), Image.open(path), np.asarray(Image.open(path))]
    content = [{"type": "image", "image": value} for value in values]
    prompt = processor.from_messages([{"role": "user", "content": content}], resolve=resolve_local)
    assert len(prompt.images) == 7 and len({image.digest for image in prompt.images}) == 1
    with pytest.raises(InvalidArgument, match=r"content\[1\].image: expected a data URI"):
        processor.from_messages([{"role": "user", "content": content[1:2] * 2}], resolve=_inline_after_first())


def _inline_after_first():
    from qwen35.prompt.processor import resolve_inline

    seen = []

    def resolve(value, name):
        seen.append(name)
        return resolve_local(value, name) if len(seen) == 1 else resolve_inline(value, name)

    return resolve


def test_a_server_reads_no_files(processor, tmp_path):
    (tmp_path / "a.png").write_bytes(SMALL)
    for value in (str(tmp_path / "a.png"), "file:///etc/hostname"):
        with pytest.raises(InvalidArgument, match="base64|expected an image"):
            processor.from_messages([{"role": "user", "content": [{"type": "image", "image": value}]}])


def test_video_frames(processor):
    frames = [uri(png(64, 64, (index * 60, 0, 0))) for index in range(3)]
    video = {"type": "video", "video": frames, "fps": 1}
    prompt = processor.from_messages([{"role": "user", "content": [{"type": "text", "text": "See:"}, video]}])
    pads = "<|video_pad|>" * prompt.images[0].num_tokens
    expanded = "".join(f"<{t} seconds><|vision_start|>{pads}<|vision_end|>" for t in ("0.5", "2.0"))
    start = ids(processor, f"<|im_start|>user\nSee:<|vision_start|>{expanded}<|vision_end|><|im_end|>")
    assert list(prompt.token_ids[: len(start)]) == start
    assert [image.grid for image in prompt.images] == [(1, 4, 4)] * 2
    assert "0.5 seconds" in prompt.text


def test_scatter(processor):
    prompt = processor.from_text(f"a{PAD}b{PAD}", [SMALL, LARGE])
    rows = torch.arange(1, 11).float()[:, None].expand(-1, 2)
    full = prompt.scatter(rows)
    assert full[:, 0].tolist() == [0, 1, 2, 3, 4, 0, 5, 6, 7, 8, 9, 10]
    assert processor.from_text("a").scatter(torch.empty(0, 2)).shape == (1, 2)


USER = {"role": "user", "content": "hi"}


def _parts(*parts):
    return [USER, {"role": "user", "content": list(parts)}]


BAD_MESSAGES = [
    (None, "messages: expected a list"),
    ([], "messages: expected a list of at least one"),
    ("hi", "messages: expected a list"),
    (["hi"], r"messages\[0\]: expected an object"),
    ([{"content": "hi"}], r"messages\[0\].role: expected one of system, .* got None"),
    ([{"role": "root", "content": "hi"}], r"messages\[0\].role: expected one of .* got 'root'"),
    ([{"role": ["user"], "content": "hi"}], r"messages\[0\].role: expected one of"),
    ([{"role": "user"}], r"messages\[0\].content: expected text or a list of parts, got nothing"),
    ([{"role": "user", "content": 3}], r"messages\[0\].content: expected text or a list of parts, got 3"),
    ([{"role": "user", "content": "a\ud800"}], r"messages\[0\].content: .* lone surrogate at character 1"),
    ([{"role": "user", "content": "a", "name": {1: 2}}], r"messages\[0\].name: expected strings as keys"),
    ([{"role": "user", "content": "a", "name": b"x"}], r"messages\[0\].name: expected a JSON value, got bytes"),
    (_parts("hi"), r"messages\[1\].content\[0\]: expected an object with a type"),
    (_parts({"text": "hi"}), r"messages\[1\].content\[0\].type: expected one of text, .* got None"),
    (_parts({"type": "audio"}), r"messages\[1\].content\[0\].type: expected one of text, image, .* got 'audio'"),
    (_parts({"type": "text"}), r"messages\[1\].content\[0\].text: expected text, got None"),
    (_parts({"type": "image"}), r"messages\[1\].content\[0\].image: expected the image, got nothing"),
    (_parts({"type": "image", "image": 3}), r"messages\[1\].content\[0\].image: expected a data URI or base64 text"),
    (_parts({"type": "image_url", "image_url": {}}), r"content\[0\].image_url.url: expected a data URI"),
    (_parts({"type": "image_url", "image_url": {"url": "http://x/y.png"}}), r"image_url.url: .* got a web address"),
    (
        _parts({"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}),
        r"image_url.url: expected an image",
    ),
    (_parts({"type": "video", "video": ["aGk="]}), r"messages\[1\].content\[0\].video\[0\]: expected an image"),
    (
        _parts({"type": "video", "video": [uri(SMALL)], "fps": "2"}),
        r"content\[0\].fps: expected a positive number, got '2'",
    ),
    (_parts({"type": "video", "video": [uri(SMALL)], "timestamps": 1}), r"content\[0\].timestamps: expected a list"),
    ([USER, {"role": "assistant", "tool_calls": {}}], r"messages\[1\].tool_calls: expected a list of calls"),
    ([USER, {"role": "assistant", "tool_calls": [{}]}], r"tool_calls\[0\].function: expected an object with name"),
    ([USER, {"role": "assistant", "tool_calls": [{"name": "f", "arguments": "[1]"}]}], "arguments: expected an object"),
    ([USER, {"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{"}]}], "arguments: expected an object"),
]


@pytest.mark.parametrize(("messages", "message"), BAD_MESSAGES)
def test_bad_messages(processor, messages, message):
    with pytest.raises(Qwen35Error, match=message):
        processor.from_messages(messages)


def test_deep_nesting(processor):
    deep = "x"
    for _ in range(2000):
        deep = [deep]
    with pytest.raises(InvalidArgument, match="nested levels"):
        processor.from_messages([{**USER, "extra": deep}])
    with pytest.raises(InvalidArgument, match="nested levels"):
        processor.from_messages([USER], template_kwargs={"x": deep})


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda p: p.from_text(""), "text_input: expected a prompt, got nothing"),
        (lambda p: p.from_text(b"hi"), "text_input: expected text, got b'hi'"),
        (lambda p: p.from_text("\udc00"), "text_input: .* lone surrogate"),
        (lambda p: p.from_text(PAD), "got 0 images for 1 placeholders"),
        (lambda p: p.from_text(PAD, [SMALL, SMALL]), "got 2 images for 1 placeholders"),
        (lambda p: p.from_text(PAD * 3, [SMALL]), "got 1 images for 3 placeholders"),
        (lambda p: p.from_text("<|video_pad|>"), "got 0 videos for 1 placeholders"),
        (lambda p: p.from_text("x", [SMALL, b"\0"]), r"image\[1\]: expected an image"),
        (lambda p: p.from_text("x", [b"\0"], "image_bytes_input"), r"image_bytes_input\[0\]: expected an image"),
        (lambda p: p.from_text("x " * 600), r"text_input: expected at most 511 tokens .* got \d{4}"),
        (
            lambda p: p.from_text("x", [Image.new("RGB", (192, 192))] * 20),
            r"image\[14\]: expected at most 511 tokens .* got 540",
        ),
        (lambda p: p.from_token_ids([]), "prompt_token_ids: expected at least one"),
        (lambda p: p.from_token_ids([1, -1]), r"prompt_token_ids\[1\]: expected a token id below 1016, got -1"),
        (lambda p: p.from_token_ids([1016]), r"prompt_token_ids\[0\]: expected a token id below 1016"),
        (lambda p: p.from_token_ids([1002]), "got 0 images for 1 placeholders"),
        (lambda p: p.from_messages([USER], tools={}), "tools: expected a list"),
        (lambda p: p.from_messages([USER], template_kwargs=[1]), "chat_template_kwargs: expected an object"),
    ],
)
def test_refused(processor, call, message):
    with pytest.raises(InvalidArgument, match=message):
        call(processor)


def test_context_limit_is_exact(processor):
    word = ids(processor, "x")
    assert len(processor.from_token_ids(word * 511).token_ids) == 511
    with pytest.raises(InvalidArgument, match="at most 511 tokens .* got 512"):
        processor.from_token_ids(word * 512)


def test_a_prompt_far_beyond_the_limit_is_not_tokenized(processor, monkeypatch):
    monkeypatch.setattr(processor.tokenizer, "encode", lambda *_: pytest.fail("tokenized"))
    with pytest.raises(InvalidArgument, match=r"text_input: expected at most \d+ tokens, got \d+ characters"):
        processor.from_text("a " * (processor.limits.max_context_tokens * processor.tokenizer.max_token_characters * 4))


@pytest.mark.parametrize("extra", [{"fps": 10**400}, {"timestamps": [0, 10**400]}, {"timestamps": [0, 1e308]}])
def test_times_beyond_any_float_are_refused(processor, extra):
    parts = [{"type": "video", "video": [uri(SMALL)] * 2, **extra}]
    with pytest.raises(InvalidArgument, match=next(iter(extra))):
        processor.from_messages([{"role": "user", "content": parts}])


def test_counts_are_checked_before_anything_is_decoded(processor):
    with pytest.raises(InvalidArgument, match="got 2 images for 1 placeholders"):
        processor.from_text(PAD, [b"\0", b"\0"])


def test_checkpoint_without_vision(tmp_path, limits):
    from qwen35.config import ModelConfig
    from qwen35.prompt.processor import PromptProcessor
    from tests.tiny_checkpoint import make_tiny_checkpoint

    directory = make_tiny_checkpoint(tmp_path, with_vision=False)
    config = ModelConfig.from_directory(directory)
    blind = PromptProcessor(directory, _without_vision(config), limits)
    assert blind.from_text(f"a{PAD}").token_ids[0] == ids(blind, "a")[0]
    for call in (
        lambda: blind.from_text("a", [SMALL]),
        lambda: blind.from_messages([{"role": "user", "content": [{"type": "image", "image": uri(SMALL)}]}]),
    ):
        with pytest.raises(Unsupported, match="no vision tower"):
            call()
    assert Path(directory).is_dir()


def _without_vision(config):
    import dataclasses

    return dataclasses.replace(
        config,
        vision=None,
        image_token_id=None,
        video_token_id=None,
        vision_start_token_id=None,
        vision_end_token_id=None,
    )
