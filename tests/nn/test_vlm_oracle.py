"""The whole vision-language model against transformers, from image bytes to logits: our prompt processing, tower,
positions and language model, in float32 on random weights. The reference runs the same weights in float64, since its
own rounding in float32 (6e-5 on these prompts) would eat most of the tolerance."""

import io

import numpy as np
import pytest
import torch
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from qwen35.config import ModelConfig
from qwen35.kernels.reference import ReferenceOps
from qwen35.nn.language import LanguageModel
from qwen35.nn.vision import VisionTower
from qwen35.prompt.encoder import ImageEncoder
from qwen35.prompt.processor import PromptProcessor, resolve_local
from qwen35.prompt.types import Prompt, PromptLimits
from qwen35.weights.loader import load_language, load_vision
from tests.caches import BLOCK_TOKENS, Piece, batch_view, cache_view
from tests.tiny_checkpoint import make_tiny_checkpoint

TOLERANCE = 1e-4


class Models:
    """Ours, and transformers' from the same directory."""

    def __init__(self, directory):
        from transformers import Qwen3_5MoeForConditionalGeneration

        self.config = ModelConfig.from_directory(directory)
        self.processor = PromptProcessor(directory, self.config, PromptLimits(max_context_tokens=512))
        ops = ReferenceOps()
        target, _, _ = load_language(directory, self.config, with_draft=False)
        self.model = LanguageModel(self.config.text, target, ops)
        tower = VisionTower(self.config.vision, load_vision(directory, self.config)[0], ops)
        self.encoder = ImageEncoder(tower, cache_bytes=1 << 20)
        self.reference = Qwen3_5MoeForConditionalGeneration.from_pretrained(directory, dtype=torch.float32).eval()
        self.reference.double().set_experts_implementation("eager")  # its batched experts take no float64
        self.pixels = Qwen2VLImageProcessorPil.from_pretrained(directory)

    def embeds(self, prompt: Prompt) -> torch.Tensor:
        token_ids = torch.tensor(prompt.token_ids)
        is_image = (token_ids == self.config.image_token_id) | (token_ids == self.config.video_token_id)
        rows = prompt.scatter(self.encoder.embed(prompt))
        return torch.where(is_image[:, None], rows, self.model.embed(token_ids))

    @torch.no_grad()
    def logits(self, prompt: Prompt, chunks: list[int] | None = None) -> torch.Tensor:
        """[T, V]; `chunks`: numbers of tokens of consecutive prefill steps."""
        embeds, cache = self.embeds(prompt), cache_view(self.config.text)
        blocks = list(range(3, 3 + -(-len(prompt.token_ids) // BLOCK_TOKENS)))
        hidden, start = [], 0
        for num_tokens in chunks or [len(prompt.token_ids)]:
            stop = start + num_tokens
            piece = Piece(num_tokens, start, slot=2, blocks=blocks, positions=prompt.positions[:, start:stop])
            hidden.append(self.model(embeds[start:stop], batch_view(piece), cache))
            start = stop
        assert start == len(prompt.token_ids)
        return self.model.logits(torch.cat(hidden))

    @torch.no_grad()
    def expected(self, prompt: Prompt, **vision: torch.Tensor) -> torch.Tensor:
        ids = torch.tensor([prompt.token_ids])
        kinds = (ids == self.config.image_token_id).int() + 2 * (ids == self.config.video_token_id).int()
        return self.reference(input_ids=ids, mm_token_type_ids=kinds, **vision).logits[0].float()


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    directory = make_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), dtype=torch.float32, seed=11)
    pixels = (directory / "preprocessor_config.json").read_text()
    (directory / "video_preprocessor_config.json").write_text(pixels)
    return Models(directory)


def picture(width: int, height: int, seed: int) -> Image.Image:
    values = np.random.default_rng(seed).integers(0, 256, (height, width, 3))
    return Image.fromarray(values.astype(np.uint8))


def png(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def chat(*parts) -> list[dict]:
    content = [{"type": "text", "text": p} if isinstance(p, str) else {"type": "image", "image": p} for p in parts]
    return [{"role": "user", "content": content}]


@pytest.mark.parametrize(
    "sizes", [[], [(64, 96)], [(96, 64), (70, 200)], [(1, 1), (30, 150), (64, 64)]], ids=["text", "one", "two", "three"]
)
def test_logits_equal_transformers(models, sizes):
    images = [picture(width, height, seed) for seed, (width, height) in enumerate(sizes)]
    parts = [part for image in images for part in ("see", png(image))]
    prompt = models.processor.from_messages(chat(*parts, "What is in it?"), resolve=resolve_local)
    vision = models.pixels(images, return_tensors="pt") if images else {}
    expected = models.expected(prompt, **vision)
    torch.testing.assert_close(models.logits(prompt), expected, rtol=0, atol=TOLERANCE)


def test_the_images_matter(models):
    """So that the comparison above can't pass with images that nobody looks at."""
    one, other = (models.processor.from_text("<|image_pad|>?", [png(picture(64, 64, seed))]) for seed in (1, 2))
    assert (models.logits(one)[-1] - models.logits(other)[-1]).abs().max() > 100 * TOLERANCE


def test_video_logits_equal_transformers(models):
    frames = [picture(64, 96, seed) for seed in range(5)]
    content = [{"type": "video", "video": frames, "fps": 2}, {"type": "text", "text": "What happens?"}]
    prompt = models.processor.from_messages([{"role": "user", "content": content}], resolve=resolve_local)
    assert "<0.2 seconds>" in prompt.text and "<2.0 seconds>" in prompt.text
    _, height, width = prompt.images[0].grid
    video = {
        "pixel_values_videos": torch.cat([patch.patches for patch in prompt.images]),
        "video_grid_thw": torch.tensor([[3, height, width]]),
    }
    torch.testing.assert_close(models.logits(prompt), models.expected(prompt, **video), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("chunk_tokens", [1, 7, 16])
def test_chunks_may_end_inside_an_image(models, chunk_tokens):
    prompt = models.processor.from_messages(
        chat("a", png(picture(96, 64, 0)), "b", png(picture(64, 64, 1)), "c"), resolve=resolve_local
    )
    num_tokens = len(prompt.token_ids)
    chunks = [chunk_tokens] * (num_tokens // chunk_tokens) + [num_tokens % chunk_tokens] * bool(
        num_tokens % chunk_tokens
    )
    assert torch.equal(models.logits(prompt, chunks), models.logits(prompt))


def test_generation_goes_on_at_the_next_position(models):
    """Greedy tokens after an image, one at a time, equal transformers' generate, which carries the position delta."""
    image = picture(96, 64, 3)
    prompt = models.processor.from_text("<|vision_start|><|image_pad|><|vision_end|>And", [png(image)])
    ids = torch.tensor([prompt.token_ids])
    expected = models.reference.generate(
        input_ids=ids,
        mm_token_type_ids=(ids == models.config.image_token_id).int(),
        **models.pixels([image], return_tensors="pt"),
        max_new_tokens=6,
        do_sample=False,
        eos_token_id=None,
    )[0, ids.shape[1] :].tolist()
    cache, blocks, num_tokens = cache_view(models.config.text), list(range(8)), ids.shape[1]
    embeds, positions, start, generated = models.embeds(prompt), prompt.positions, 0, []
    with torch.no_grad():
        for index in range(6):
            piece = Piece(embeds.shape[0], start, slot=0, blocks=blocks, positions=positions)
            hidden = models.model(embeds, batch_view(piece), cache)
            generated.append(models.model.logits(hidden[-1:]).argmax().item())
            embeds, start = models.model.embed(torch.tensor(generated[-1:])), num_tokens + index
            positions = torch.full((3, 1), prompt.next_position + index)
    assert generated == expected
