"""The vision-language model: an eager wrapper around two graphs, the language model and the draft.

Images, placeholders and embeddings are dealt with here; each graph is handed the arguments that it takes and no
other. The graphs are modules, or what `torch.export` made of them: embedding, head and final norm are reached by their
names in either. Knows nothing of prompts and files.

Letters: T tokens, N patches of all images, P features of a patch, M image embeddings, H hidden, R rows, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qwen35.config import ModelConfig
from qwen35.kernels.ops import Ops
from qwen35.nn.draft import DraftModel
from qwen35.nn.language import LanguageModel
from qwen35.nn.layers import weight_of
from qwen35.nn.vision import VisionTower
from qwen35.nn.weight_types import LinearWeight

_GRAPH_ARGUMENTS = {
    "language": tuple(inspect.signature(LanguageModel.forward).parameters)[1:],
    "draft": tuple(inspect.signature(DraftModel.forward).parameters)[1:],
}


class VisionLanguageModel(nn.Module):
    """Target and draft over token ids and pixels. `language` and `draft` may be exported graphs."""

    def __init__(
        self,
        config: ModelConfig,
        language: nn.Module,
        draft: nn.Module | None,
        vision: VisionTower | None,
        ops: Ops,
    ) -> None:
        super().__init__()
        self.config, self.vision, self.ops = config, vision, ops
        self.language, self.draft = language, draft

    @property
    def embedding(self) -> Tensor:
        """Token embeddings [V, H]."""
        return self.language.get_buffer("embed_tokens")

    @property
    def head(self) -> LinearWeight:
        """Weight of the language model's head [V or more, H]."""
        return weight_of(self.language.get_submodule("lm_head"))

    @property
    def final_norm(self) -> Tensor:
        """Zero-centred weight of the norm before the head [H]."""
        return self.language.get_buffer("norm.weight")

    def embed(self, token_ids: Tensor, pixel_values: Tensor | None = None, grids: Sequence = ()) -> Tensor:
        """token_ids [T], pixel_values [N, P] of images with grids (t, h, w) -> [T, H], images in their placeholders.

        Raises ValueError when the images do not fill the placeholders exactly.
        """
        dtype = self.language.get_buffer("layers.0.mlp.gate.weight").dtype
        embeds = F.embedding(token_ids, self.embedding).to(dtype)
        is_placeholder = (token_ids == self.config.image_token_id) | (token_ids == self.config.video_token_id)
        rows = self._image_rows(pixel_values, grids, embeds)
        if int(is_placeholder.sum()) != len(rows):
            raise ValueError(f"images: expected {int(is_placeholder.sum())} embeddings, got {len(rows)} from the tower")
        embeds[is_placeholder] = rows
        return embeds

    def forward(
        self,
        token_ids: Tensor,
        pixel_values: Tensor | None = None,
        grids: Sequence = (),
        **graph_arguments: object,
    ) -> Tensor:
        """Hidden states of the target after the final norm [T, H]. `graph_arguments`: batch, cache."""
        embeds = self.embed(token_ids, pixel_values, grids)
        return self.language(**_take("language", {"embeds": embeds}, graph_arguments))

    def propose(
        self,
        token_ids: Tensor,
        hidden: Tensor,
        pixel_values: Tensor | None = None,
        grids: Sequence = (),
        **graph_arguments: object,
    ) -> Tensor:
        """Hidden states of the draft [T, H] for pairs (hidden [T, H] of t, token t + 1), the same images merged in."""
        embeds = self.embed(token_ids, pixel_values, grids)
        return self.draft(**_take("draft", {"embeds": embeds, "hidden": hidden}, graph_arguments))

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [R, H] of the target or the draft -> [R, V] float32."""
        return self.ops.linear(hidden, self.head, out_dtype=torch.float32)[:, : self.config.text.vocab_size]

    def _image_rows(self, pixel_values: Tensor | None, grids: Sequence, embeds: Tensor) -> Tensor:
        """[M, H], one temporal patch of one image a tower call."""
        frames = [(1, int(height), int(width)) for count, height, width in grids for _ in range(int(count))]
        if not frames:
            return embeds[:0]
        if self.vision is None or pixel_values is None:
            raise ValueError(f"images: expected a vision tower and pixel_values for {len(frames)} grids, got none")
        patches = pixel_values.split([height * width for _, height, width in frames])
        rows = [self.vision.forward(part, frame) for part, frame in zip(patches, frames, strict=True)]
        return torch.cat(rows).to(embeds)


def _take(graph: str, own: Mapping[str, object], given: Mapping[str, object]) -> dict[str, object]:
    """All arguments of a graph, by name; one too many or too few is refused."""
    arguments = {**own, **given}
    expected = _GRAPH_ARGUMENTS[graph]
    if set(arguments) != set(expected) or set(own) & set(given):
        raise TypeError(f"{graph} graph: expected the arguments {', '.join(expected)}, got {', '.join([*own, *given])}")
    return {name: arguments[name] for name in expected}
