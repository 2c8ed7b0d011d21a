"""The MTP head: proposes the token after next from a hidden state and the next token's embedding.

Letters: T tokens, H hidden."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from qwen35.config import TextConfig
from qwen35.kernels.ops import Ops
from qwen35.nn.language import DecoderLayer
from qwen35.nn.layers import Linear, RMSNorm
from qwen35.nn.rotary import RotaryTables
from qwen35.nn.weight_types import DraftWeights
from qwen35.views import BatchView, CacheView


class DraftModel(nn.Module):
    """One full-attention layer over pairs (hidden state h_t after the final norm, embedding of token t + 1).

    Embedding and head are the target's. The pair's rotary position is that of t; its key and value lie at KV position
    t + 1 (`BatchView.first_kv` is 1). Later drafts feed this model's own output as the hidden state.
    """

    def __init__(self, config: TextConfig, weights: DraftWeights, ops: Ops) -> None:
        super().__init__()
        self.dtype = weights.layer.mlp.gate.dtype
        self.fc = Linear(weights.fc, ops)
        self.pre_fc_norm_embedding = RMSNorm(weights.pre_fc_norm_embedding, config.rms_norm_eps, ops)
        self.pre_fc_norm_hidden = RMSNorm(weights.pre_fc_norm_hidden, config.rms_norm_eps, ops)
        self.layers = nn.ModuleList([DecoderLayer(config, weights.layer, ops)])
        self.norm = RMSNorm(weights.norm, config.rms_norm_eps, ops)
        self.rotary = RotaryTables(config, weights.norm.device, ops)

    def forward(self, embeds: Tensor, hidden: Tensor, batch: BatchView, cache: CacheView) -> Tensor:
        """embeds, hidden [T, H] -> [T, H] after the draft's norm; writes into `cache.draft`."""
        embedded = self.pre_fc_norm_embedding(embeds.to(self.dtype))
        x = self.fc(torch.cat((embedded, self.pre_fc_norm_hidden(hidden.to(self.dtype))), -1))
        x = self.layers[0](x, self.rotary(batch.positions), batch, cache.draft)
        return self.norm(x)
