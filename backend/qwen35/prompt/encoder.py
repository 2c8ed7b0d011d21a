"""Image embeddings, each computed once: the vision tower behind a cache that is bounded in bytes."""

from __future__ import annotations

from collections import OrderedDict
from concurrent.futures import Future
from threading import Lock
from typing import Protocol

import torch
from torch import Tensor

from qwen35.prompt.types import ImageInput, Prompt


class Tower(Protocol):
    """What is used of `nn.vision.VisionTower`."""

    hidden_size: int
    dtype: torch.dtype

    def forward(self, patches: Tensor, grid: tuple[int, int, int]) -> Tensor: ...


class ImageEncoder:
    """Thread-safe. One image a tower call, so that an image's rows don't depend on its company.

    Threads that want the same image at the same time share one call. The least recently used rows leave the cache when
    it would hold more than `cache_bytes`; an image larger than that is never cached.
    """

    def __init__(self, tower: Tower, cache_bytes: int) -> None:
        self.tower = tower
        self.cache_bytes = cache_bytes
        self.num_hits = 0
        self.num_misses = 0
        self._cached: OrderedDict[str, Tensor] = OrderedDict()
        self._used_bytes = 0
        self._running: dict[str, Future[Tensor]] = {}
        self._lock = Lock()

    @property
    def used_bytes(self) -> int:
        return self._used_bytes

    def embed(self, prompt: Prompt) -> Tensor:
        """Rows of all images of a prompt, in order: [num_image_tokens, H] in the tower's dtype, on its device."""
        if not prompt.images:
            return torch.empty(0, self.tower.hidden_size, dtype=self.tower.dtype)
        return torch.cat([self.embed_image(image) for image in prompt.images])

    def embed_image(self, image: ImageInput) -> Tensor:
        """Rows of one image [num_tokens, H]; shared with the cache, not to be written."""
        with self._lock:
            rows = self._cached.get(image.digest)
            if rows is not None:
                self.num_hits += 1
                self._cached.move_to_end(image.digest)
                return rows
            future = self._running.get(image.digest)
            is_ours = future is None
            if is_ours:
                self.num_misses += 1
                future = self._running[image.digest] = Future()
            else:
                self.num_hits += 1
        return self._compute(image, future) if is_ours else future.result()

    def _compute(self, image: ImageInput, future: Future[Tensor]) -> Tensor:
        try:
            with torch.inference_mode():
                rows = self.tower.forward(image.patches, image.grid)
        except BaseException as error:  # the threads that wait must fail with this one, whatever it is
            with self._lock:
                del self._running[image.digest]
            future.set_exception(error)
            raise
        with self._lock:
            del self._running[image.digest]
            self._keep(image.digest, rows)
        future.set_result(rows)
        return rows

    def _keep(self, digest: str, rows: Tensor) -> None:
        num_bytes = rows.numel() * rows.element_size()
        if num_bytes > self.cache_bytes:
            return
        self._cached[digest] = rows
        self._used_bytes += num_bytes
        while self._used_bytes > self.cache_bytes:
            _, oldest = self._cached.popitem(last=False)
            self._used_bytes -= oldest.numel() * oldest.element_size()
