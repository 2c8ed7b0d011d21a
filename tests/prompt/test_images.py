"""Oracle: transformers' PIL image processor."""

import base64
import io
import struct
import zlib

import numpy as np
import pytest
import torch
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from qwen35.errors import InvalidArgument, Qwen35Error, Unsupported
from qwen35.prompt.images import load_image
from qwen35.prompt.pixels import PixelConfig
from qwen35.prompt.types import PromptLimits

CONFIG = PixelConfig(16, 2, 2, (0.5, 0.4, 0.3), (0.5, 0.6, 0.7), min_pixels=4096, max_pixels=65536)
WIDE = PixelConfig(16, 2, 2, (0.5,) * 3, (0.5,) * 3, min_pixels=65536, max_pixels=16777216)  # as published
LIMITS = PromptLimits(max_context_tokens=10**6, max_image_bytes=1_000_000, max_image_pixels=13_000_000)


def noise(width: int, height: int, mode: str = "RGB", seed: int = 0) -> Image.Image:
    """Smooth colours and some noise, so that a wrong filter or a swapped axis shows."""
    channels = {"L": 1, "LA": 2, "RGB": 3, "RGBA": 4, "CMYK": 4}[mode]
    rows, columns = np.mgrid[0:height, 0:width]
    ramp = (rows[..., None] * 3 + columns[..., None] * np.arange(1, channels + 1)) % 200
    values = ramp + np.random.default_rng(seed).integers(0, 56, (height, width, channels))
    return Image.fromarray(values.astype(np.uint8).squeeze(-1) if channels == 1 else values.astype(np.uint8), mode)


def encode(image: Image.Image, kind: str = "PNG", **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def oracle(image: Image.Image, config: PixelConfig) -> tuple[torch.Tensor, list[int]]:
    processor = Qwen2VLImageProcessorPil(
        patch_size=config.patch_size,
        merge_size=config.merge_size,
        temporal_patch_size=config.temporal_patch_size,
        image_mean=list(config.mean),
        image_std=list(config.std),
        size={"shortest_edge": config.min_pixels, "longest_edge": config.max_pixels},
    )
    features = processor(image, return_tensors="pt")
    return features["pixel_values"], features["image_grid_thw"][0].tolist()


SIZES = [(1, 1), (305, 30), (30, 305), (64, 96), (97, 65), (33, 31), (200, 1), (1, 200), (2, 399), (640, 480)]


@pytest.mark.parametrize("config", [CONFIG, WIDE])
@pytest.mark.parametrize(("width", "height"), SIZES)
def test_patches_equal_transformers(width, height, config):
    image = noise(width, height)
    ours = load_image(encode(image), "image[0]", config, LIMITS)
    patches, grid = oracle(image, config)
    assert list(ours.grid) == grid
    assert ours.num_tokens == grid[1] * grid[2] // 4
    torch.testing.assert_close(ours.patches, patches, rtol=0, atol=1e-5)


def test_large_photo_is_shrunk():
    data = encode(noise(40, 30).resize((4000, 3000)), "JPEG")
    ours = load_image(data, "image", CONFIG, LIMITS)
    patches, grid = oracle(Image.open(io.BytesIO(data)), CONFIG)
    assert list(ours.grid) == grid == [1, 12, 18]
    torch.testing.assert_close(ours.patches, patches, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("image", "kind"),
    [
        (noise(70, 50, "L"), "PNG"),
        (noise(70, 50, "LA"), "PNG"),
        (noise(70, 50, "RGBA"), "PNG"),
        (noise(70, 50).convert("P"), "PNG"),
        (noise(70, 50).convert("1"), "PNG"),
        (noise(70, 50), "GIF"),
        (noise(70, 50), "BMP"),
        (noise(70, 50), "JPEG"),
        (noise(70, 50), "WEBP"),
        (noise(70, 50), "PPM"),
        (noise(70, 50, "CMYK"), "JPEG"),
        (noise(70, 50, "CMYK"), "TIFF"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.mode,
)
def test_modes_and_formats_equal_transformers(image, kind):
    data = encode(image, kind)
    patches, _ = oracle(Image.open(io.BytesIO(data)), CONFIG)
    torch.testing.assert_close(load_image(data, "image", CONFIG, LIMITS).patches, patches, rtol=0, atol=1e-5)


def _colour(image) -> list[int]:
    return image.pixels[0, :, 20, 20].tolist()


def test_transparent_pixels_are_white():
    clear = Image.new("RGBA", (64, 64), (255, 0, 0, 0))
    assert _colour(load_image(encode(clear), "image", CONFIG, LIMITS)) == [255, 255, 255]
    palette = Image.new("P", (64, 64), 3)
    palette.putpalette([0, 0, 0, 9, 9, 9, 8, 8, 8, 7, 7, 7])
    data = encode(palette, transparency=3)
    assert _colour(load_image(data, "image", CONFIG, LIMITS)) == [255, 255, 255]
    assert _colour(load_image(encode(palette), "image", CONFIG, LIMITS)) == [7, 7, 7]


def test_sixteen_bits_are_scaled():
    grey = Image.fromarray(np.full((64, 64), 33_100, dtype=np.uint16))
    assert _colour(load_image(encode(grey), "image", CONFIG, LIMITS)) == [129, 129, 129]
    assert _colour(load_image(encode(grey, "TIFF"), "image", CONFIG, LIMITS)) == [129, 129, 129]


def test_exif_rotation():
    image = Image.new("RGB", (96, 64), (0, 0, 255))
    image.paste((255, 0, 0), (0, 0, 96, 32))
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees clockwise: the red upper half comes to the right
    turned = load_image(encode(image, exif=exif), "image", CONFIG, LIMITS)
    assert turned.grid == (1, 6, 4)
    assert turned.pixels[0, :, 48, 60].tolist() == [255, 0, 0]
    assert turned.pixels[0, :, 48, 4].tolist() == [0, 0, 255]


# Orientation -> where the corner that was stored first is seen.
CORNERS = {1: "top left", 2: "top right", 3: "bottom right", 4: "bottom left",
           5: "top left", 6: "top right", 7: "bottom right", 8: "bottom left"}  # fmt: skip


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
@pytest.mark.parametrize("orientation", [*CORNERS, 0, 9])
def test_every_exif_orientation(orientation, kind):
    image = Image.new("RGB", (96, 64), (0, 0, 255))
    image.paste((255, 0, 0), (0, 0, 48, 32))
    exif = Image.Exif()
    exif[0x0112] = orientation
    turned = load_image(encode(image, kind, exif=exif), "image", CONFIG, LIMITS)
    assert turned.grid == ((1, 6, 4) if orientation in (5, 6, 7, 8) else (1, 4, 6))
    _, height, width = turned.pixels[0].shape
    red = turned.pixels[0, 0, :: height - 1, :: width - 1] > 127  # the four corners
    seen = CORNERS.get(orientation, "top left").split()
    assert red.nonzero().tolist() == [[int(seen[0] == "bottom"), int(seen[1] == "right")]]


def test_damaged_exif_is_ignored():
    data = encode(Image.new("RGB", (64, 64), (1, 2, 3)), exif=b"Exif\x00\x00MM\x00\x2a\xff\xff\xff\xff\x00\x01\x00")
    assert _colour(load_image(data, "image", CONFIG, LIMITS)) == [1, 2, 3]


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
def test_first_frame_of_an_animation(kind):
    colours = [(200, 0, 0), (0, 200, 0)]
    frames = [Image.new("RGB", (64, 64), colour) for colour in colours]
    options = {"lossless": True} if kind == "WEBP" else {}
    data = encode(frames[0], kind, save_all=True, append_images=frames[1:], **options)
    assert _colour(load_image(data, "image", CONFIG, LIMITS)) == [200, 0, 0]


PNG = encode(noise(64, 64))
STANDARD = base64.b64encode(PNG)
WRAPPED = base64.encodebytes(PNG)
DATA_URI = b"data:image/png;base64," + STANDARD


@pytest.mark.parametrize(
    "source",
    [
        PNG,
        STANDARD,
        STANDARD.decode(),
        WRAPPED,
        base64.urlsafe_b64encode(PNG).rstrip(b"="),
        DATA_URI,
        DATA_URI.decode(),
        "data:image/png;charset=x;base64," + STANDARD.decode().replace("+", "%2B"),
        np.asarray(noise(64, 64)),
        noise(64, 64),
    ],
    ids=["bytes", "base64", "text", "lines", "url alphabet", "data URI", "data URI text", "escaped", "array", "PIL"],
)
def test_every_form_is_the_same_image(source):
    assert load_image(source, "image", CONFIG, LIMITS).digest == load_image(PNG, "image", CONFIG, LIMITS).digest


def test_path(tmp_path):
    (tmp_path / "a.png").write_bytes(PNG)
    assert load_image(tmp_path / "a.png", "image", CONFIG, LIMITS).grid == (1, 4, 4)
    with pytest.raises(InvalidArgument, match="image: expected a readable file, got .*b.png"):
        load_image(tmp_path / "b.png", "image", CONFIG, LIMITS)


def test_digest_tells_content_and_shape_apart():
    def digest(image):
        return load_image(image, "image", CONFIG, LIMITS).digest

    assert digest(noise(64, 64)) != digest(noise(64, 64, seed=1))
    assert digest(Image.new("RGB", (64, 128))) != digest(Image.new("RGB", (128, 64)))
    assert digest(encode(noise(64, 64), "BMP")) == digest(encode(noise(64, 64), "PNG"))


def _bomb() -> bytes:
    """A PNG whose header promises 50,000 x 50,000 pixels."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", 50_000, 50_000, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(1000))) + chunk(b"IEND", b"")
    )


def _wide_bomb() -> bytes:
    """Below Pillow's own limit, above ours."""
    return encode(Image.new("1", (5000, 3000)))


JPEG = encode(noise(200, 200), "JPEG")
REFUSED = {
    "nothing": (b"", "expected an image, got nothing"),
    "web address": (b"https://example.org/a.png", "got a web address"),
    "web address as text": (" HTTP://example.org/a.png", "got a web address"),
    "not an image": (b"\x00\x01\x02 hello", "expected an image .* got 9 bytes"),
    "text": ("hello!", "isn't base64"),
    "base64 of text": (base64.b64encode(b"hello world"), "expected an image .* got 11 bytes"),
    "data URI without comma": ("data:image/png;base64", "without a comma"),
    "svg": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "expected an image"),
    "postscript": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n", "expected an image"),
    "truncated": (JPEG[: len(JPEG) // 2], "does not decode: .*truncated"),
    "truncated png": (PNG[: len(PNG) // 2], "does not decode"),
    "header only": (PNG[:20], "expected an image|does not decode"),
    "corrupt": (PNG[:60] + bytes(200) + PNG[260:], "does not decode"),
    "bomb": (_bomb(), "pixels|decompression bomb"),
    "too many pixels": (_wide_bomb(), "expected at most 13000000 pixels, got 15000000"),
    "too many bytes": (PNG + bytes(1_000_000), "expected at most 1000000 encoded bytes, got"),
    "too many bytes in base64": (base64.b64encode(bytes(1_000_003)), "expected at most 1000000 encoded bytes, got"),
    "too long": (noise(201, 1), "expected an aspect ratio of at most 200:1, got 201x1"),
    "too high": (noise(1, 500), "got 1x500 \\(500:1\\)"),
    "array": (np.zeros((4, 4), dtype=np.uint8), "expected uint8 pixels"),
    "empty array": (np.zeros((0, 4, 3), dtype=np.uint8), "expected uint8 pixels"),
    "float array": (np.zeros((4, 4, 3)), "got float64"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    source, message = REFUSED[name]
    with pytest.raises(Qwen35Error, match=f"image\\[3\\]: .*({message})") as caught:
        load_image(source, "image[3]", CONFIG, LIMITS)
    assert isinstance(caught.value, Unsupported if name.startswith("web") else InvalidArgument)


def test_limit_on_pixels_applies_before_decoding(monkeypatch):
    decoded = []
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", lambda image: decoded.append(image))
    with pytest.raises(InvalidArgument, match="13000000 pixels"):
        load_image(_wide_bomb(), "image", CONFIG, LIMITS)
    assert decoded == []


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "WEBP", "TIFF", "BMP"])
def test_damaged_bytes_never_escape_as_other_errors(kind):
    num_refused = 0
    for position in range(0, 2000, 61):
        data = bytearray(encode(noise(40, 40), kind))
        for offset in range(4):
            data[(position + offset * 7) % len(data)] ^= 0xFF
        try:
            load_image(bytes(data), "image", CONFIG, LIMITS)
        except InvalidArgument as error:
            assert error.message.startswith("image: ")
            num_refused += 1
    assert num_refused
