"""The target's head over a part of the vocabulary, for drafts alone: fewer weights are read for each of them.

A draft outside of the part is never proposed; what the target accepts and answers does not change. The part is made of
blocks of 16 neighbouring token ids, because packed weights lie in such blocks.

Letters: R rows, H hidden, V vocabulary, N tokens of the part."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from qwen35.errors import ConfigError
from qwen35.kernels.ops import Ops
from qwen35.nvfp4 import PANEL_ROWS, FP8Tensor, LinearWeight, NVFP4Panels, NVFP4Tensor


class DraftHead:
    """Logits of the tokens in ``blocks`` (ascending numbers of blocks of 16 ids), -inf for all others."""

    def __init__(self, head: LinearWeight, vocab_size: int, blocks: Sequence[int], ops: Ops) -> None:
        self._weight = _rows_of(head, torch.tensor(blocks))
        self._vocab_size, self._ops = vocab_size, ops
        token_ids = (torch.tensor(blocks)[:, None] * PANEL_ROWS + torch.arange(PANEL_ROWS)).flatten()
        self._token_ids = token_ids[token_ids < vocab_size]  # [N] padding rows are last

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [R, H] after the draft's norm -> [R, V] float32."""
        some = self._ops.linear(hidden, self._weight, out_dtype=torch.float32)[:, : len(self._token_ids)]
        every = some.new_full((len(hidden), self._vocab_size), -torch.inf)
        return every.index_copy_(1, self._token_ids.to(some.device), some)


def blocks_of(num_tokens: int, vocab_size: int, ranking: Sequence[int] = ()) -> list[int]:
    """Numbers, ascending, of the fewest blocks that hold ``num_tokens`` ids: those of the first in ``ranking``, then
    the lowest."""
    most = -(-vocab_size // PANEL_ROWS)
    order = dict.fromkeys([*(token_id // PANEL_ROWS for token_id in ranking), *range(most)])
    return sorted(list(order)[: min(most, -(-num_tokens // PANEL_ROWS))])


def read_ranking(path: str | Path, vocab_size: int) -> list[int]:
    """Token ids, one a line, the most frequent first. Raises ConfigError."""
    try:
        token_ids = [int(line) for line in Path(path).read_text(encoding="ascii").split()]
    except (OSError, ValueError) as error:
        raise ConfigError(f"draft_vocab_file: expected a file of token ids, one a line, got {path}: {error}") from error
    wrong = next((token_id for token_id in token_ids if not 0 <= token_id < vocab_size), None)
    if wrong is not None:
        raise ConfigError(f"draft_vocab_file: expected token ids from 0 to {vocab_size - 1}, got {wrong}")
    return token_ids


def _rows_of(weight: LinearWeight, blocks: Tensor) -> LinearWeight:
    """The rows [N, H] of some blocks; without a copy where these are the first ones."""
    if isinstance(weight, NVFP4Panels):
        codes, scales = (_blocks_of(part, blocks, 1) for part in (weight.codes, weight.scales))
        num_rows = int((weight.num_rows - blocks * PANEL_ROWS).clamp(max=PANEL_ROWS).sum())  # the last may not be full
        return NVFP4Panels(codes, scales, num_rows, weight.global_scale, weight.input_scale)
    if isinstance(weight, NVFP4Tensor):
        codes, scales = (_blocks_of(part, blocks, PANEL_ROWS) for part in (weight.codes, weight.scales))
        return NVFP4Tensor(codes, scales, weight.global_scale, weight.input_scale)
    if isinstance(weight, FP8Tensor):
        return FP8Tensor(_blocks_of(weight.weight, blocks, PANEL_ROWS), weight.weight_scale, weight.input_scale)
    return _blocks_of(weight, blocks, PANEL_ROWS)


def _blocks_of(part: Tensor, blocks: Tensor, rows_of_block: int) -> Tensor:
    if torch.equal(blocks, torch.arange(len(blocks))):
        return part[: len(blocks) * rows_of_block]
    rows = (blocks[:, None] * rows_of_block + torch.arange(rows_of_block)).flatten()
    rows = rows[rows < len(part)].to(part.device)
    is_byte = part.element_size() == 1  # torch does not index all types of one byte
    return (part.view(torch.uint8) if is_byte else part).index_select(0, rows).view(part.dtype)
