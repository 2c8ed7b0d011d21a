"""An image as a client sends it (file bytes, base64, data URI) to pixels for the vision tower.

Hostile input is expected: the limits on bytes and pixels apply before anything is decoded, only well-known formats are
opened, and every failure of a decoder is an InvalidArgument that names the image.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import re
from pathlib import Path
from typing import TypeAlias
from urllib.parse import unquote_to_bytes

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError

from qwen35.errors import InvalidArgument, Unsupported
from qwen35.prompt.pixels import PixelConfig, image_size
from qwen35.prompt.types import ImageInput, PromptLimits

ImageSource: TypeAlias = bytes | str | Path | Image.Image | np.ndarray
FORMATS = ("PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF", "PPM", "AVIF")
_BASE64 = re.compile(rb"[A-Za-z0-9+/_\-\s]+={0,2}\s*")
_WEB = ("http://", "https://", "ftp://")


def load_image(source: ImageSource, name: str, config: PixelConfig, limits: PromptLimits) -> ImageInput:
    """The first frame of a file, a PIL image or an array [height, width, channels]: rotated by its EXIF tag, on a white
    ground where it is transparent, resized."""
    image = to_rgb(open_source(source, name, limits), name, limits)
    height, width = image_size(name, image.height, image.width, config)
    return make_input([image.resize((width, height), config.resample)], config)


def make_input(frames: list[Image.Image], config: PixelConfig) -> ImageInput:
    """`frames`: RGB, already resized, all of one size: one of an image, `temporal_patch_size` of a video."""
    pixels = np.stack([np.asarray(frame) for frame in frames]).transpose(0, 3, 1, 2)  # [F, C, height, width]
    pixels = np.ascontiguousarray(pixels)
    grid = (1, pixels.shape[2] // config.patch_size, pixels.shape[3] // config.patch_size)
    digest = hashlib.sha256(f"{pixels.shape}".encode() + pixels.tobytes()).hexdigest()
    num_tokens = grid[1] * grid[2] // config.merge_size**2
    return ImageInput(torch.from_numpy(pixels), config, grid, digest, num_tokens)


def read_bytes(source: bytes | str | Path, name: str, limits: PromptLimits) -> bytes:
    """File bytes from raw bytes, base64 (standard or URL alphabet), a data URI or, for a Path, from a file.

    Web addresses are refused: a server that fetches what clients name can be turned against its own network.
    """
    if isinstance(source, Path):
        return _read_file(source, name, limits)
    data = source.encode("utf-8", "surrogatepass") if isinstance(source, str) else source
    head = data[:16].lstrip().lower()
    if not data:
        raise InvalidArgument(f"{name}: expected an image, got nothing")
    if head.startswith(tuple(prefix.encode() for prefix in _WEB)):
        raise Unsupported(f"{name}: expected a data URI or base64, got a web address; send the image itself")
    if head.startswith(b"data:"):
        data = _read_data_uri(data, name, limits)
    elif isinstance(source, str) or _BASE64.fullmatch(data[:256]):
        data = _decode_base64(data, name, limits)
    _check_num_bytes(len(data), name, limits)
    return data


def open_source(source: ImageSource, name: str, limits: PromptLimits) -> Image.Image:
    """An image whose header is read and whose pixels are not: see `to_rgb`."""
    if isinstance(source, np.ndarray):
        return _from_array(source, name)
    return source if isinstance(source, Image.Image) else open_image(read_bytes(source, name, limits), name, limits)


def open_image(data: bytes, name: str, limits: PromptLimits) -> Image.Image:
    """Reads the header only and checks the number of pixels; nothing is decoded yet."""
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
    except UnidentifiedImageError as error:
        raise InvalidArgument(
            f"{name}: expected an image ({', '.join(FORMATS)}), got {len(data)} bytes that aren't one "
            "or have a damaged header"
        ) from error
    except Exception as error:  # decoders raise many types on damaged headers; each is the client's fault
        raise InvalidArgument(f"{name}: the image does not decode: {error}") from error
    check_num_pixels(image.width * image.height, name, limits.max_image_pixels)
    return image


def to_rgb(image: Image.Image, name: str, limits: PromptLimits) -> Image.Image:
    """Decodes, rotates and converts. Raises InvalidArgument for truncated or corrupt data."""
    check_num_pixels(image.width * image.height, name, limits.max_image_pixels)
    try:
        image.load()
        return _flatten(_rotate(image))
    except Exception as error:  # as above: truncated and corrupt data come out as many types
        raise InvalidArgument(f"{name}: the image does not decode: {error}") from error


def check_num_pixels(num_pixels: int, name: str, max_pixels: int) -> None:
    if num_pixels > max_pixels:
        raise InvalidArgument(f"{name}: expected at most {max_pixels} pixels, got {num_pixels}; send a smaller image")
    if num_pixels == 0:
        raise InvalidArgument(f"{name}: expected at least one pixel, got none")


def _from_array(array: np.ndarray, name: str) -> Image.Image:
    if array.dtype != np.uint8 or array.ndim != 3 or array.shape[2] not in (1, 3, 4) or 0 in array.shape:
        raise InvalidArgument(
            f"{name}: expected uint8 pixels [height, width, 1, 3 or 4], got {array.dtype} {list(array.shape)}"
        )
    return Image.fromarray(array[:, :, 0] if array.shape[2] == 1 else array)


def _rotate(image: Image.Image) -> Image.Image:
    try:
        return ImageOps.exif_transpose(image)
    except Exception:  # a damaged EXIF block says nothing about the pixels, which are decoded already
        return image


def _flatten(image: Image.Image) -> Image.Image:
    """Any mode to RGB; 16-bit grey is scaled to 8 bits (a plain conversion would clip it to white)."""
    if image.mode.startswith("I"):
        grey = np.clip(np.asarray(image, dtype=np.float64) / 257, 0, 255).round().astype(np.uint8)
        return Image.fromarray(grey).convert("RGB")
    if "A" in image.getbands() or "a" in image.getbands() or image.info.get("transparency") is not None:
        image = image.convert("RGBA")
        ground = Image.new("RGBA", image.size, (255, 255, 255, 255))
        return Image.alpha_composite(ground, image).convert("RGB")
    return image.convert("RGB")


def _read_data_uri(data: bytes, name: str, limits: PromptLimits) -> bytes:
    header, comma, body = data.partition(b",")
    if not comma:
        raise InvalidArgument(f"{name}: expected a data URI 'data:image/…;base64,…', got one without a comma")
    if header.strip().lower().endswith(b";base64"):
        return _decode_base64(unquote_to_bytes(body) if b"%" in body else body, name, limits)
    return unquote_to_bytes(body)


def _decode_base64(data: bytes, name: str, limits: PromptLimits) -> bytes:
    _check_num_bytes(len(data) * 3 // 4 - 2, name, limits)
    compact = b"".join(data.split()).translate(bytes.maketrans(b"-_", b"+/")).rstrip(b"=")
    try:
        return base64.b64decode(compact + b"=" * (-len(compact) % 4), validate=True)
    except binascii.Error as error:
        raise InvalidArgument(f"{name}: expected base64 of an image, got text that isn't base64 ({error})") from error


def _read_file(path: Path, name: str, limits: PromptLimits) -> bytes:
    try:
        _check_num_bytes(path.stat().st_size, name, limits)
        return path.read_bytes()
    except OSError as error:
        raise InvalidArgument(f"{name}: expected a readable file, got {str(path)!r} ({error.strerror})") from error


def _check_num_bytes(num_bytes: int, name: str, limits: PromptLimits) -> None:
    if num_bytes > limits.max_image_bytes:
        raise InvalidArgument(f"{name}: expected at most {limits.max_image_bytes} encoded bytes, got {num_bytes}")
