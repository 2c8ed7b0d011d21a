"""View types: what the model's mathematics sees of a batch and of the caches. Tensors and integers only; who owns the
bytes, and for how long, is the business of ``state``; which sequences meet in a batch is the business of ``engine``.

Letters: S sequences, T tokens of the batch (all sequences, one after the other), B blocks, P tokens a block, C slots,
Hkv KV heads, D head dim, Hv GDN value heads, Dk/Dv GDN key/value dims, Cc conv channels (2*Hk*Dk + Hv*Dv), W conv
width, R pending inputs a slot (largest draft length + 1), H hidden size."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class BatchView:
    """T tokens of S sequences. Sequence s owns the half-open token range ``cu_tokens[s]:cu_tokens[s + 1]``.

    Its i-th token has KV position ``kv_start[s] + i``; it sees KV positions ``first_kv[s] <= p <= own position``.
    KV position p lies in block ``block_table[s, p // P]`` at row ``p % P``. Rotary positions are something else.

    ``num_pending[s]`` inputs of the sequence's last verify are accepted but not yet in its GDN state: they are applied
    first. A sequence with ``defer[s]`` leaves its own T_s <= R inputs pending (the engine then decides how many are
    accepted); without it they go into the state at once and nothing stays pending.
    """

    cu_tokens: Tensor  # [S + 1] int64
    positions: Tensor  # [3, T] int64, rotary positions (temporal, height, width)
    kv_start: Tensor  # [S] int64
    first_kv: Tensor  # [S] int64, 0 for the target, 1 for the draft (its entry 0 does not exist)
    block_table: Tensor  # [S, max_blocks] int64, unused entries 0
    slots: Tensor  # [S] int64
    num_pending: Tensor  # [S] int64
    defer: Tensor  # [S] bool


@dataclass(frozen=True)
class KVView:
    """Paged keys and values of one attention layer, written in place."""

    keys: Tensor  # [B, P, Hkv, D] in the cache's dtype
    values: Tensor  # [B, P, Hkv, D]
    key_scale: float = 1.0  # stored = value / scale (FP8 caches with calibrated scales)
    value_scale: float = 1.0


@dataclass(frozen=True)
class GatedDeltaView:
    """State of one gated delta net layer for every slot, written in place.

    ``conv`` holds the last W - 1 pre-convolution inputs and ``recurrent`` the state after the last *applied* token;
    the pending tensors hold the inputs of the last verify in the dtype in which the recurrence uses them.
    """

    recurrent: Tensor  # [C, Hv, Dk, Dv] fp32
    conv: Tensor  # [C, Cc, W - 1] in the model's dtype, oldest first
    pending_inputs: Tensor  # [C, R, Cc] in the model's dtype, pre-convolution
    pending_decay: Tensor  # [C, R, Hv] fp32, g (log decay)
    pending_beta: Tensor  # [C, R, Hv] in the dtype in which the recurrence uses it


@dataclass(frozen=True)
class CacheView:
    """Everything that a forward pass reads and writes beside the weights."""

    attention: tuple[KVView, ...]  # one for each full-attention layer of the target, in layer order
    gated_delta: tuple[GatedDeltaView, ...]  # one for each GDN layer, in layer order
    draft: KVView | None  # the draft layer's keys and values, same blocks, same block table
    boundary_hidden: Tensor  # [C, H] in the model's dtype: of the last token in a checkpoint's slot; no layer reads it
