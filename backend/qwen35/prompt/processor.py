"""The door of this folder: text, chat messages or token ids, with images, to a `Prompt`.

Placeholders are counted before any image is decoded, and the context limit is checked before any image is encoded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from numbers import Integral
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from qwen35.config import ModelConfig
from qwen35.errors import CheckpointError, InvalidArgument, Unsupported
from qwen35.prompt.images import ImageSource, load_image
from qwen35.prompt.messages import Media, Resolver, read_messages, read_template_kwargs, read_tools
from qwen35.prompt.pixels import PixelConfig
from qwen35.prompt.positions import rotary_positions
from qwen35.prompt.template import ChatTemplate, check_text
from qwen35.prompt.tokenizer import Tokenizer
from qwen35.prompt.types import ImageInput, Prompt, PromptLimits
from qwen35.prompt.video import VideoInput, load_video


class PromptProcessor:
    """Thread-safe: holds only the tokenizer, the template and the preprocessor files of one checkpoint.

    Every method raises InvalidArgument, or Unsupported, with the path of what is wrong.
    """

    def __init__(
        self,
        checkpoint_dir: str | Path,
        config: ModelConfig,
        limits: PromptLimits,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        directory = Path(checkpoint_dir)
        self.tokenizer = tokenizer or Tokenizer.from_directory(directory)
        self.template = ChatTemplate.from_directory(directory, self.tokenizer)
        self.limits = limits
        self._config = config
        self._image_pixels = self._video_pixels = None
        if config.vision is not None:
            self._image_pixels = PixelConfig.from_file(directory / "preprocessor_config.json", config.vision)
            video_path = directory / "video_preprocessor_config.json"
            if video_path.is_file():
                self._video_pixels = PixelConfig.from_file(video_path, config.vision)
        self._token_text = _vision_tokens(config, self.tokenizer)

    def from_text(self, text: str, images: Sequence[ImageSource] = (), images_field: str = "image") -> Prompt:
        """A raw prompt: special tokens are parsed, each image fills one placeholder in order; without a placeholder
        the images go before the text. An image is file bytes, base64, a data URI, a Path, a PIL image or an array
        [height, width, channels]; errors name it `images_field[i]`."""
        if not isinstance(text, str):
            raise InvalidArgument.field("text_input", "text", text)
        check_text("text_input", text)
        if not text and not images:
            raise InvalidArgument("text_input: expected a prompt, got nothing")
        media = [Media(f"{images_field}[{index}]", image) for index, image in enumerate(images)]
        before = ""
        if media and not self._count(text, self._config.image_token_id):
            before = self._wrapped(self._token_text.get(self._config.image_token_id)) * len(media)
        return replace(self._build(before + text, None, media, [], "text_input"), text=text)

    def from_messages(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        resolve: Resolver | None = None,
    ) -> Prompt:
        """A chat through the checkpoint's template. `resolve` turns the value of an image part into something to
        decode; the default takes data URIs and base64 only, as a server must; see also `resolve_local`."""
        chat = read_messages(messages, resolve or resolve_inline)
        if self.template is None:
            raise Unsupported("messages: expected a checkpoint with a chat template, this one has none; use text_input")
        rendered = self.template.render(chat.messages, read_tools(tools), read_template_kwargs(template_kwargs))
        return self._build(rendered.guarded_text, rendered.guard, chat.images, chat.videos, "messages")

    def from_token_ids(self, token_ids: Sequence[int], images: Sequence[ImageSource] = ()) -> Prompt:
        """Ids as they are; every image placeholder among them stands for one image."""
        if len(token_ids) == 0:
            raise InvalidArgument("prompt_token_ids: expected at least one token id, got none")
        for index, token_id in enumerate(token_ids):
            if not isinstance(token_id, Integral) or not 0 <= token_id < self.tokenizer.vocab_size:
                raise InvalidArgument.field(
                    f"prompt_token_ids[{index}]", f"a token id below {self.tokenizer.vocab_size}", token_id
                )
        ids = [int(token_id) for token_id in token_ids]
        media = [Media(f"image[{index}]", image) for index, image in enumerate(images)]
        placeholders = (self._config.image_token_id, self._config.video_token_id)
        self._check_counts(
            "prompt_token_ids", [ids.count(placeholder) for placeholder in placeholders], [len(media), 0]
        )
        text = self.tokenizer.decode(ids, skip_special_tokens=False)
        return self._assemble(ids, text, self._load_images(media, len(ids)), [], "prompt_token_ids")

    def _build(self, text: str, guard: str | None, images: list[Media], videos: list[Media], name: str) -> Prompt:
        placeholders = (self._config.image_token_id, self._config.video_token_id)
        counts = [self._count(text, token_id) for token_id in placeholders]
        self._check_counts(name, counts, [len(images), len(videos)])
        self._check_characters(name, len(text))
        loaded_images = self._load_images(images, 0)
        loaded_videos = self._load_videos(videos, sum(image.num_tokens for image in loaded_images))
        text = self._write_timestamps(text, loaded_videos)
        token_ids = self.tokenizer.encode(text, guard)
        patches = [patch for video in loaded_videos for patch in video.patches]
        shown = text.replace(guard, "") if guard else text
        return self._assemble(token_ids, shown, loaded_images, patches, name)

    def _assemble(
        self, token_ids: list[int], text: str, images: list[ImageInput], patches: list[ImageInput], name: str
    ) -> Prompt:
        """Expands each placeholder to one token for each row of its image, and numbers the positions."""
        waiting = {self._config.image_token_id: iter(images), self._config.video_token_id: iter(patches)}
        expanded: list[int] = []
        placed: list[ImageInput] = []
        for token_id in token_ids:
            if token_id in waiting:
                image = next(waiting[token_id])
                placed.append(image.at(len(expanded)))
                expanded.extend([token_id] * image.num_tokens)
            else:
                expanded.append(token_id)
        if not expanded:
            raise InvalidArgument(f"{name}: expected a prompt, got no token")
        self._check_length(name, len(expanded))
        positions, next_position = rotary_positions(len(expanded), placed)
        return Prompt(tuple(expanded), positions, next_position, tuple(placed), text)

    def _load_images(self, media: list[Media], num_tokens: int) -> list[ImageInput]:
        images = []
        for item in media:
            images.append(load_image(item.source, item.name, self._pixels(self._image_pixels, item.name), self.limits))
            num_tokens += images[-1].num_tokens
            self._check_length(item.name, num_tokens)
        return images

    def _load_videos(self, media: list[Media], num_tokens: int) -> list[VideoInput]:
        videos = []
        for item in media:
            videos.append(load_video(item.source, item.name, self._pixels(self._video_pixels, item.name), self.limits))
            num_tokens += sum(patch.num_tokens for patch in videos[-1].patches)
            self._check_length(item.name, num_tokens)
        return videos

    def _pixels(self, pixels: PixelConfig | None, name: str) -> PixelConfig:
        if pixels is None:
            raise Unsupported(f"{name}: expected text only, this checkpoint has no preprocessor for such input")
        return pixels

    def _write_timestamps(self, text: str, videos: list[VideoInput]) -> str:
        """Each video placeholder becomes one for each temporal patch, with its time before it."""
        if not videos:
            return text
        placeholder = self._token_text[self._config.video_token_id]
        pieces: Iterator[str] = iter(text.split(placeholder))
        written = next(pieces)
        wrapped = self._wrapped(placeholder)
        for video, piece in zip(videos, pieces, strict=True):
            written += "".join(f"<{seconds:.1f} seconds>{wrapped}" for seconds in video.timestamps) + piece
        return written

    def _wrapped(self, placeholder: str | None) -> str:
        """Empty for a checkpoint without vision, whose images are refused when they are counted."""
        if placeholder is None:
            return ""
        start, end = self._config.vision_start_token_id, self._config.vision_end_token_id
        return f"{self._token_text[start]}{placeholder}{self._token_text[end]}"

    def _count(self, text: str, token_id: int | None) -> int:
        """Placeholders in a text; guarded literals don't match."""
        placeholder = self._token_text.get(token_id)
        return text.count(placeholder) if placeholder else 0

    def _check_counts(self, name: str, num_placeholders: list[int], num_media: list[int]) -> None:
        if sum(num_media) and self._config.vision is None:
            raise Unsupported(f"{name}: expected text only, this checkpoint has no vision tower")
        for kind, expected, got in zip(("image", "video"), num_placeholders, num_media, strict=True):
            if expected != got:
                placeholder = self._token_text[getattr(self._config, f"{kind}_token_id")]
                raise InvalidArgument(
                    f"{name}: expected as many {kind}s as {placeholder} placeholders, "
                    f"got {got} {kind}s for {expected} placeholders"
                )

    def _check_characters(self, name: str, num_characters: int) -> None:
        """Refuses at once what no tokenizer could get into the context; to tokenize it would take seconds."""
        most = self.limits.max_context_tokens - 1
        max_characters = most * self.tokenizer.max_token_characters * _MAX_COMPOSED_CHARACTERS
        if num_characters > max_characters:
            raise InvalidArgument(f"{name}: expected at most {most} tokens, got {num_characters} characters")

    def _check_length(self, name: str, num_tokens: int) -> None:
        most = self.limits.max_context_tokens - 1
        if num_tokens > most:
            raise InvalidArgument(
                f"{name}: expected at most {most} tokens (a context of {most + 1} holds one more for the answer), "
                f"got {num_tokens}"
            )


# Characters that become one when the tokenizer composes them (Unicode's NFC): at most a letter and three marks.
_MAX_COMPOSED_CHARACTERS = 4


def _vision_tokens(config: ModelConfig, tokenizer: Tokenizer) -> dict[int | None, str]:
    """Text of the four special tokens around images, by id; empty without a vision tower."""
    if config.vision is None:
        return {}
    texts = {token_id: text for text, token_id in tokenizer.special_tokens.items()}
    names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    for name in names:
        if getattr(config, name) not in texts:
            raise CheckpointError(f"config.json.{name}: expected a special token's id, got {getattr(config, name)}")
    return {getattr(config, name): texts[getattr(config, name)] for name in names}


def resolve_inline(value: Any, name: str) -> ImageSource:
    """For servers: data URIs and base64 text; neither paths nor web addresses."""
    if not isinstance(value, str):
        raise InvalidArgument.field(name, "a data URI or base64 text", value)
    return value


def resolve_local(value: Any, name: str) -> ImageSource:
    """For callers in the same process: also PIL images, arrays, file bytes and paths (text too)."""
    if isinstance(value, (bytes, Path, Image.Image, np.ndarray)):
        return value
    text = resolve_inline(value, name)
    if len(text) < 4096 and not text.startswith("data:") and Path(text.removeprefix("file://")).is_file():
        return Path(text.removeprefix("file://"))
    return text
