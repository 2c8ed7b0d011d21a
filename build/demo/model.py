"""The demo model for training: the arithmetic of transformers' Qwen3_5MoeForConditionalGeneration, and the MTP head.

Parameter names are the published ones, so that an export is a cast and a file. All experts are computed densely
(8 experts, two of them weighted above zero): on a CPU that is faster than gathering rows.

Letters: B sequences, T tokens, H hidden, E experts, I expert width, V value heads of the delta net, D head width, C
chunk or convolution channels, N patches, R rotary width.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from .config import LAYER_TYPES, MERGE, VOCAB_SIZE, text_config, vision_config

TEXT = text_config()
VISION = vision_config()
HIDDEN = TEXT["hidden_size"]
EPS = TEXT["rms_norm_eps"]
CHUNK = 32
FORGET = 30.0  # e^-30: nothing of another sequence is left


class Norm(nn.Module):
    """RMS norm with a zero-centred weight."""

    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * (1.0 + self.weight)


class GatedNorm(nn.Module):
    """RMS norm with a plain weight, then a SiLU gate."""

    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * F.silu(gate)


def _linear(n_in: int, n_out: int) -> nn.Linear:
    layer = nn.Linear(n_in, n_out, bias=False)
    nn.init.normal_(layer.weight, std=n_in**-0.5)
    return layer


def l2norm(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-6)


class Conv(nn.Module):
    """Causal depthwise convolution, kernel [C, 1, 4]."""

    def __init__(self, channels: int, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(channels, 1, width) * 0.3)

    def forward(self, x: torch.Tensor, taps: torch.Tensor) -> torch.Tensor:
        """x [B, T, C], taps [B, T, 4] (0 where a tap would reach into another sequence) -> [B, T, C]."""
        width = self.weight.shape[-1]
        padded = F.pad(x, (0, 0, width - 1, 0))
        return sum(padded[:, j : j + x.shape[1]] * taps[..., j : j + 1] * self.weight[:, 0, j] for j in range(width))


def delta_rule(q, k, v, g, beta):
    """Chunked gated delta rule from a zero state; q, k (normalised) and v [B, V, T, D], g and beta [B, V, T]."""
    num_tokens = q.shape[2]
    chunk = min(CHUNK, num_tokens)
    pad = -num_tokens % chunk
    if pad:
        q, k, v = (F.pad(x, (0, 0, 0, pad)) for x in (q, k, v))
        g, beta = (F.pad(x, (0, pad)) for x in (g, beta))
    num_chunks = q.shape[2] // chunk
    q, k, v = (x.unflatten(2, (num_chunks, chunk)) for x in (q, k, v))  # [B, V, n, C, D]
    g, beta = (x.unflatten(2, (num_chunks, chunk)) for x in (g, beta))
    decay = g.cumsum(-1)
    upper = torch.ones(chunk, chunk, dtype=torch.bool).triu(1)
    pairwise = (decay.unsqueeze(-1) - decay.unsqueeze(-2)).masked_fill(upper, float("-inf")).exp()  # [B, V, n, C, C]
    k_beta = k * beta.unsqueeze(-1)
    system = (k_beta @ k.mT) * pairwise
    rhs = torch.cat((v * beta.unsqueeze(-1), k_beta * decay.exp().unsqueeze(-1)), -1)
    solved = torch.linalg.solve_triangular(system, rhs, upper=False, unitriangular=True)
    new_v, k_decayed = solved.split((v.shape[-1], k.shape[-1]), -1)
    intra = (q @ k.mT) * pairwise
    if num_chunks == 1:
        return (intra @ new_v).flatten(2, 3)[:, :, :num_tokens]
    q = q * decay.exp().unsqueeze(-1)
    k = k * (decay[..., -1:] - decay).exp().unsqueeze(-1)
    total = decay[..., -1].exp()[..., None, None]
    state, out = None, []
    for i in range(num_chunks):
        if state is None:
            step_v = new_v[:, :, i]
            out.append(intra[:, :, i] @ step_v)
            state = k[:, :, i].mT @ step_v
        else:
            step_v = new_v[:, :, i] - k_decayed[:, :, i] @ state
            out.append(q[:, :, i] @ state + intra[:, :, i] @ step_v)
            state = state * total[:, :, i] + k[:, :, i].mT @ step_v
    return torch.cat(out, 2)[:, :, :num_tokens]


class DeltaNet(nn.Module):
    """Gated delta net layer."""

    def __init__(self):
        super().__init__()
        self.k_heads, self.v_heads = TEXT["linear_num_key_heads"], TEXT["linear_num_value_heads"]
        self.dim = TEXT["linear_key_head_dim"]
        key_width, value_width = self.k_heads * self.dim, self.v_heads * TEXT["linear_value_head_dim"]
        self.widths = (key_width, key_width, value_width)
        self.in_proj_qkv = _linear(HIDDEN, sum(self.widths))
        self.in_proj_z = _linear(HIDDEN, value_width)
        self.in_proj_a = _linear(HIDDEN, self.v_heads)
        self.in_proj_b = _linear(HIDDEN, self.v_heads)
        self.conv1d = Conv(sum(self.widths), TEXT["linear_conv_kernel_dim"])
        self.A_log = nn.Parameter(torch.linspace(0.02, 4.0, self.v_heads).log())
        self.dt_bias = nn.Parameter(torch.full((self.v_heads,), -2.0))
        self.norm = GatedNorm(self.dim)
        self.out_proj = _linear(value_width, HIDDEN)

    def project(self, x: torch.Tensor):
        """x [B, T, H] -> conv input [B, T, C], z [B, T, V, D], g and beta [B, T, V]."""
        g = -self.A_log.exp() * F.softplus(self.in_proj_a(x) + self.dt_bias)
        z = self.in_proj_z(x).unflatten(-1, (self.v_heads, self.dim))
        return self.in_proj_qkv(x), z, g, self.in_proj_b(x).sigmoid()

    def heads(self, mixed: torch.Tensor):
        """Convolved [B, T, C] -> q, k, v, each [B, T, V, D]; q scaled."""
        q, k, v = (part.unflatten(-1, (-1, self.dim)) for part in F.silu(mixed).split(self.widths, -1))
        repeat = self.v_heads // self.k_heads
        q, k = l2norm(q) * self.dim**-0.5, l2norm(k)
        return q.repeat_interleave(repeat, 2), k.repeat_interleave(repeat, 2), v

    def forward(self, x: torch.Tensor, layout: "Layout") -> torch.Tensor:
        mixed, z, g, beta = self.project(x)
        q, k, v = self.heads(self.conv1d(mixed, layout.taps))
        g = g.float() + layout.reset
        out = delta_rule(*(t.transpose(1, 2) for t in (q, k, v, g, beta)))  # [B, V, T, D]
        return self.out_proj(self.norm(out.transpose(1, 2), z).flatten(2))


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, hidden: torch.Tensor | None = None) -> torch.Tensor:
    """Plain softmax attention [B, heads, T, D]; its backward pass is three times faster on a CPU than the fused one.

    `hidden` [B, 1, T, T] is true where a query must not look.
    """
    scores = (q * q.shape[-1] ** -0.5) @ k.mT
    if hidden is not None:
        scores = scores.masked_fill(hidden, float("-inf"))
    return scores.softmax(-1).to(v.dtype) @ v


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Partial rotary embedding of x [B, heads, T, D] with cos, sin [B, T, R]."""
    width = cos.shape[-1]
    turned, kept = x[..., :width], x[..., width:]
    first, second = turned.chunk(2, -1)
    half = torch.cat((-second, first), -1)
    return torch.cat((turned * cos.unsqueeze(1) + half * sin.unsqueeze(1), kept), -1)


class Attention(nn.Module):
    """Gated attention; the query gate is interleaved per head."""

    def __init__(self):
        super().__init__()
        self.heads, self.kv_heads, self.dim = (
            TEXT["num_attention_heads"], TEXT["num_key_value_heads"], TEXT["head_dim"],
        )  # fmt: skip
        self.q_proj = _linear(HIDDEN, self.heads * self.dim * 2)
        self.k_proj = _linear(HIDDEN, self.kv_heads * self.dim)
        self.v_proj = _linear(HIDDEN, self.kv_heads * self.dim)
        self.o_proj = _linear(self.heads * self.dim, HIDDEN)
        self.q_norm = Norm(self.dim)
        self.k_norm = Norm(self.dim)

    def project(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor):
        """x [B, T, H] -> q [B, heads, T, D], k and v [B, heads, T, D] (repeated), gate [B, T, heads*D]."""
        q, gate = self.q_proj(x).unflatten(-1, (self.heads, 2 * self.dim)).chunk(2, -1)
        k, v = (p(x).unflatten(-1, (self.kv_heads, self.dim)) for p in (self.k_proj, self.v_proj))
        q, k = self.q_norm(q).transpose(1, 2), self.k_norm(k).transpose(1, 2)
        repeat = self.heads // self.kv_heads
        k = rotate(k, cos, sin).repeat_interleave(repeat, 1)
        return rotate(q, cos, sin), k, v.transpose(1, 2).repeat_interleave(repeat, 1), gate.flatten(2)

    def finish(self, attended: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return self.o_proj(attended.transpose(1, 2).flatten(2) * torch.sigmoid(gate))

    def forward(self, x: torch.Tensor, layout: "Layout") -> torch.Tensor:
        q, k, v, gate = self.project(x, layout.cos, layout.sin)
        return self.finish(attend(q, k, v, layout.hidden), gate)


class Experts(nn.Module):
    """Fused expert weights as on disk: gate_up_proj [E, 2I, H], down_proj [E, H, I]."""

    def __init__(self, experts: int, inter: int):
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(experts, 2 * inter, HIDDEN) * HIDDEN**-0.5)
        self.down_proj = nn.Parameter(torch.randn(experts, HIDDEN, inter) * inter**-0.5)

    def forward(self, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """x [..., H], weights [..., E] (zero where not chosen) -> [..., H]."""
        gate, up = self.gate_up_proj.chunk(2, 1)
        hidden = F.silu(F.linear(x, gate.flatten(0, 1))) * F.linear(x, up.flatten(0, 1))
        hidden = (hidden.unflatten(-1, (weights.shape[-1], -1)) * weights.unsqueeze(-1)).flatten(-2)
        return F.linear(hidden, self.down_proj.transpose(0, 1).flatten(1))


class SharedExpert(nn.Module):
    def __init__(self, inter: int):
        super().__init__()
        self.gate_proj, self.up_proj = _linear(HIDDEN, inter), _linear(HIDDEN, inter)
        self.down_proj = _linear(inter, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Moe(nn.Module):
    """Top-k routed experts and a gated shared expert; keeps the router's mean load for the balance loss."""

    def __init__(self):
        super().__init__()
        self.top_k = TEXT["num_experts_per_tok"]
        self.gate = _linear(HIDDEN, TEXT["num_experts"])
        self.experts = Experts(TEXT["num_experts"], TEXT["moe_intermediate_size"])
        self.shared_expert = SharedExpert(TEXT["shared_expert_intermediate_size"])
        self.shared_expert_gate = _linear(HIDDEN, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x [..., H] -> (output [..., H], balance loss scalar)."""
        probs = self.gate(x).softmax(-1)
        top, index = probs.topk(self.top_k, -1)
        chosen = torch.zeros_like(probs).scatter(-1, index, 1.0)
        weights = probs * chosen / top.sum(-1, keepdim=True)
        flat = tuple(range(probs.ndim - 1))
        balance = probs.shape[-1] / self.top_k * (probs.mean(flat) * chosen.mean(flat)).sum()
        shared = torch.sigmoid(self.shared_expert_gate(x)) * self.shared_expert(x)
        return self.experts(x, weights) + shared, balance


class Layer(nn.Module):
    """One decoder layer of either kind."""

    def __init__(self, kind: str):
        super().__init__()
        self.is_attention = kind == "full_attention"
        if self.is_attention:
            self.self_attn = Attention()
        else:
            self.linear_attn = DeltaNet()
        self.mlp = Moe()
        self.input_layernorm = Norm(HIDDEN)
        self.post_attention_layernorm = Norm(HIDDEN)

    def forward(self, x: torch.Tensor, layout: "Layout") -> tuple[torch.Tensor, torch.Tensor]:
        inner = self.input_layernorm(x)
        x = x + (self.self_attn if self.is_attention else self.linear_attn)(inner, layout)
        out, balance = self.mlp(self.post_attention_layernorm(x))
        return x + out, balance


def rotary(positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """3-axis positions [3, B, T] -> cos, sin [B, T, R] with interleaved mrope."""
    rope = TEXT["rope_parameters"]
    width = int(TEXT["head_dim"] * rope["partial_rotary_factor"])
    inv_freq = 1.0 / (rope["rope_theta"] ** (torch.arange(0, width, 2, dtype=torch.float) / width))
    angles = positions.unsqueeze(-1).float() * inv_freq  # [3, B, T, R/2]
    merged = angles[0].clone()
    for axis in (1, 2):
        index = slice(axis, rope["mrope_section"][axis] * 3, 3)
        merged[..., index] = angles[axis][..., index]
    merged = torch.cat((merged, merged), -1)
    return merged.cos(), merged.sin()


class Layout(NamedTuple):
    """What the layers must know of a packed batch: positions, and which tokens belong together."""

    cos: torch.Tensor  # [B, T, R]
    sin: torch.Tensor  # [B, T, R]
    hidden: torch.Tensor  # [B, 1, T, T], true where attention must not look
    taps: torch.Tensor  # [B, T, 4], 0 where the convolution would reach into another sequence
    reset: torch.Tensor  # [B, T, 1], added to the log decay: forgets the state at the start of a sequence

    @classmethod
    def of(cls, positions: torch.Tensor, segments: torch.Tensor) -> "Layout":
        """positions [3, B, T], segments [B, T] (consecutive tokens of one number are one sequence)."""
        cos, sin = rotary(positions)
        num_tokens = segments.shape[1]
        other = segments.unsqueeze(2) != segments.unsqueeze(1)
        upper = torch.ones(num_tokens, num_tokens, dtype=torch.bool).triu(1)
        padded = F.pad(segments, (3, 0), value=-1)
        taps = torch.stack([padded[:, j : j + num_tokens] == segments for j in range(4)], -1).float()
        reset = -FORGET * (padded[:, 2 : 2 + num_tokens] != segments).float()
        return cls(cos, sin, (other | upper).unsqueeze(1), taps, reset.unsqueeze(-1))


class TextModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB_SIZE, HIDDEN)
        nn.init.normal_(self.embed_tokens.weight, std=0.5)
        self.layers = nn.ModuleList(Layer(kind) for kind in LAYER_TYPES)
        self.norm = Norm(HIDDEN)

    def forward(self, x: torch.Tensor, layout: Layout) -> tuple[torch.Tensor, torch.Tensor]:
        """Embeddings [B, T, H] -> (hidden after the final norm [B, T, H], balance loss)."""
        balance = 0.0
        for layer in self.layers:
            x, layer_balance = layer(x, layout)
            balance = balance + layer_balance
        return self.norm(x), balance / len(self.layers)


class Mtp(nn.Module):
    """The draft head: one full-attention layer over pairs (hidden after the final norm at t, embedding of t + 1)."""

    def __init__(self):
        super().__init__()
        self.fc = _linear(2 * HIDDEN, HIDDEN)
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden = Norm(HIDDEN), Norm(HIDDEN)
        self.layers = nn.ModuleList([Layer("full_attention")])
        self.norm = Norm(HIDDEN)

    def merge(self, embedding: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        return self.fc(torch.cat((self.pre_fc_norm_embedding(embedding), self.pre_fc_norm_hidden(hidden)), -1))

    def forward(self, hidden: torch.Tensor, embedding: torch.Tensor, layout: Layout, depth: int) -> list[torch.Tensor]:
        """All recursion depths at once, each rooted at t.

        hidden [B, T, H], embedding [B, T, H] of the same tokens. Returns `depth` tensors [B, T - depth, H]; entry s at
        root t predicts token t + 2 + s, having read the true tokens up to t + 1 + s. The s-th step attends the first
        step's entries up to t and its own root's later ones, as drafting does.
        """
        layer, roots = self.layers[0], hidden.shape[1] - depth
        state, keys, values, outputs = hidden[:, :roots], [], [], []
        for step in range(depth):
            window = slice(step, step + roots)
            x = self.merge(embedding[:, step + 1 : step + 1 + roots], state)
            q, k, v, gate = layer.self_attn.project(
                layer.input_layernorm(x), layout.cos[:, window], layout.sin[:, window]
            )
            keys.append(k)
            values.append(v)
            x = x + layer.self_attn.finish(_rooted(q, keys, values, layout.hidden[:, :, :roots, :roots]), gate)
            x = x + layer.mlp(layer.post_attention_layernorm(x))[0]
            state = self.norm(x)
            outputs.append(state)
        return outputs


def _rooted(q, keys, values, hidden):
    """Attention of one draft step: causal over the first step's entries, and the root's own later entries."""
    if len(keys) == 1:
        return attend(q, keys[0], values[0], hidden)
    scale, roots = q.shape[-1] ** -0.5, q.shape[2]
    scores = [((q * scale) @ keys[0].mT).masked_fill(hidden, float("-inf"))]
    scores += [(q * k).sum(-1, keepdim=True) * scale for k in keys[1:]]
    weights = torch.cat(scores, -1).softmax(-1).to(q.dtype)
    out = weights[..., :roots] @ values[0]
    return out + sum(weights[..., roots + i, None] * v for i, v in enumerate(values[1:]))


class VisionAttention(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x, cos, sin):
        """x [B, N, H], cos and sin [N, D]."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        q, k = (rotate(t, cos.unsqueeze(0), sin.unsqueeze(0)) for t in (q, k))
        return self.proj(attend(q, k, v).transpose(1, 2).flatten(2))


class VisionMlp(nn.Module):
    def __init__(self, width: int, inter: int):
        super().__init__()
        self.linear_fc1, self.linear_fc2 = nn.Linear(width, inter), nn.Linear(inter, width)

    def forward(self, x):
        return self.linear_fc2(F.gelu(self.linear_fc1(x), approximate="tanh"))


class VisionBlock(nn.Module):
    def __init__(self, width: int, heads: int, inter: int):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width, eps=1e-6), nn.LayerNorm(width, eps=1e-6)
        self.attn, self.mlp = VisionAttention(width, heads), VisionMlp(width, inter)

    def forward(self, x, cos, sin):
        x = x + self.attn(self.norm1(x), cos, sin)
        return x + self.mlp(self.norm2(x))


class PatchEmbed(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.proj = nn.Conv3d(3, width, (VISION["temporal_patch_size"], VISION["patch_size"], VISION["patch_size"]))


class Merger(nn.Module):
    def __init__(self, width: int, out: int):
        super().__init__()
        merged = width * MERGE**2
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.linear_fc1, self.linear_fc2 = nn.Linear(merged, merged), nn.Linear(merged, out)

    def forward(self, x):
        """x [B, N, H] -> [B, N / 4, out]."""
        return self.linear_fc2(F.gelu(self.linear_fc1(self.norm(x).unflatten(1, (-1, MERGE**2)).flatten(2))))


class Vision(nn.Module):
    """The tower; a batch holds images of one size."""

    def __init__(self):
        super().__init__()
        width = VISION["hidden_size"]
        self.head_dim = width // VISION["num_heads"]
        self.patch_embed = PatchEmbed(width)
        self.pos_embed = nn.Embedding(VISION["num_position_embeddings"], width)
        nn.init.normal_(self.pos_embed.weight, std=0.1)
        self.blocks = nn.ModuleList(
            VisionBlock(width, VISION["num_heads"], VISION["intermediate_size"]) for _ in range(VISION["depth"])
        )
        self.merger = Merger(width, VISION["out_hidden_size"])

    def forward(self, frames: torch.Tensor, grid_h: int, grid_w: int) -> torch.Tensor:
        """One-frame patches [B, N, 768] in merge order (the frame is both temporal halves) -> [B, N / 4, out]."""
        weight = self.patch_embed.proj.weight.sum(2).flatten(1)  # both temporal halves see the same frame
        x = F.linear(frames, weight, self.patch_embed.proj.bias)
        row, col = merge_order(grid_h, grid_w)
        x = x + self._positions(row, col, grid_h, grid_w)
        cos, sin = self._rotary(row, col)
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.merger(x)

    def _positions(self, row, col, grid_h: int, grid_w: int) -> torch.Tensor:
        side = int(VISION["num_position_embeddings"] ** 0.5)
        (r0, r1, rf), (c0, c1, cf) = _taps(row, grid_h, side), _taps(col, grid_w, side)
        table = self.pos_embed.weight.unflatten(0, (side, side))
        top = table[r0, c0] * (1 - cf) + table[r0, c1] * cf
        bottom = table[r1, c0] * (1 - cf) + table[r1, c1] * cf
        return top * (1 - rf) + bottom * rf

    def _rotary(self, row, col):
        spatial = self.head_dim // 2
        inv_freq = 1.0 / (10000.0 ** (torch.arange(0, spatial, 2, dtype=torch.float) / spatial))
        angles = torch.cat((row[:, None] * inv_freq, col[:, None] * inv_freq), -1)
        angles = torch.cat((angles, angles), -1)
        return angles.cos(), angles.sin()


def _taps(index: torch.Tensor, length: int, side: int):
    """Two taps and the fraction [N, 1] of a bilinear resampling with aligned corners."""
    place = index.float() * ((side - 1) / (length - 1) if length > 1 else 0.0)
    low = place.floor().clamp(max=side - 1)
    return low.long(), (low + 1).clamp(max=side - 1).long(), (place - low).unsqueeze(-1)


def merge_order(grid_h: int, grid_w: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Row and column of each patch in merge-block order, each [N]."""
    rows, cols = torch.meshgrid(torch.arange(grid_h), torch.arange(grid_w), indexing="ij")
    shape = (grid_h // MERGE, MERGE, grid_w // MERGE, MERGE)
    return tuple(x.reshape(shape).transpose(1, 2).flatten() for x in (rows, cols))


class Body(nn.Module):
    def __init__(self):
        super().__init__()
        self.language_model = TextModel()
        self.visual = Vision()


@dataclass(frozen=True)
class Pictures:
    """Pictures of one size: patches of one frame, and the flat indices of their placeholder tokens."""

    frames: torch.Tensor  # [n, N, 768]
    grid_h: int
    grid_w: int
    places: torch.Tensor  # [n, N / 4]
    cells: torch.Tensor  # [2, n, N / 4], shape and colour per merged patch, for the auxiliary loss


@dataclass(frozen=True)
class Batch:
    """Sequences packed into rows of one length."""

    tokens: torch.Tensor  # [B, T]
    positions: torch.Tensor  # [3, B, T]
    segments: torch.Tensor  # [B, T]
    weights: torch.Tensor  # [B, T]; weight of predicting this token from those before it
    pictures: tuple[Pictures, ...] = ()


class DemoModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = Body()
        self.lm_head = _linear(HIDDEN, VOCAB_SIZE)
        self.mtp = Mtp()

    def picture_features(self, batch: Batch) -> list[torch.Tensor]:
        """The tower's output for each group of pictures, [n, N / 4, H]."""
        return [self.model.visual(p.frames, p.grid_h, p.grid_w) for p in batch.pictures]

    def embed(self, batch: Batch, features: list[torch.Tensor] | None = None) -> torch.Tensor:
        """Token embeddings with image embeddings in their places, [B, T, H]."""
        x = self.model.language_model.embed_tokens(batch.tokens)
        if not batch.pictures:
            return x
        index = torch.cat([group.places.flatten() for group in batch.pictures])
        features = features or self.picture_features(batch)
        merged = torch.cat([f.flatten(0, 1) for f in features]).to(x.dtype)
        return x.flatten(0, 1).index_put((index,), merged).view_as(x)

    def hidden(
        self, batch: Batch, layout: Layout, features: list[torch.Tensor] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(hidden after the final norm [B, T, H], input embeddings [B, T, H], balance loss)."""
        embedded = self.embed(batch, features)
        hidden, balance = self.model.language_model(embedded, layout)
        return hidden, embedded, balance
