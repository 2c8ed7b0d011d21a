"""Batched token-by-token decoding of the training model, for evaluation and for distilling on the model's own outputs.

Every row starts at step 0 and reads one token a step: its prompt first, then what it chose itself. So prompts of any
length share a batch without padding.

Letters: B rows, T steps so far, H hidden, V value heads, D head width.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from .config import TOKEN_ID
from .data import Sequence3, collate, positions_of
from .model import Attention, DeltaNet, DemoModel, rotary, rotate

STOPS = (TOKEN_ID["<|im_end|>"], TOKEN_ID["<|endoftext|>"])


@dataclass
class DeltaState:
    """Convolution window [B, 3, C] and recurrent state [B, V, D, D]; updated in place by `delta_step`."""

    window: torch.Tensor
    recurrent: torch.Tensor


@dataclass
class AttentionState:
    """Keys and values [B, heads, T_max, D] and the number of filled steps."""

    keys: torch.Tensor
    values: torch.Tensor
    length: int = 0


def new_states(model: DemoModel, rows: int, max_steps: int) -> list[DeltaState | AttentionState]:
    states: list[DeltaState | AttentionState] = []
    for layer in model.model.language_model.layers:
        if layer.is_attention:
            shape = (rows, layer.self_attn.kv_heads, max_steps, layer.self_attn.dim)
            states.append(AttentionState(torch.zeros(shape), torch.zeros(shape)))
        else:
            net = layer.linear_attn
            states.append(
                DeltaState(torch.zeros(rows, 3, sum(net.widths)), torch.zeros(rows, net.v_heads, net.dim, net.dim))
            )
    return states


def delta_step(net: DeltaNet, x: torch.Tensor, state: DeltaState) -> torch.Tensor:
    """x [B, H] -> [B, H]."""
    mixed, z, g, beta = net.project(x.unsqueeze(1))
    window = torch.cat((state.window, mixed), 1)  # [B, 4, C]
    state.window = window[:, 1:]
    convolved = (window * net.conv1d.weight[:, 0].T).sum(1, keepdim=True)
    q, k, v = (t[:, 0] for t in net.heads(convolved))  # [B, V, D]
    memory = state.recurrent * g[:, 0].exp()[..., None, None]
    error = (v - (memory * k.unsqueeze(-1)).sum(-2)) * beta[:, 0].unsqueeze(-1)
    state.recurrent = memory + k.unsqueeze(-1) * error.unsqueeze(-2)
    out = (state.recurrent * q.unsqueeze(-1)).sum(-2)
    return net.out_proj(net.norm(out, z[:, 0]).flatten(1))


def attention_step(attention: Attention, x: torch.Tensor, state: AttentionState, cos, sin) -> torch.Tensor:
    """x [B, H], cos and sin [B, 1, R] -> [B, H]."""
    x = x.unsqueeze(1)
    q, gate = attention.q_proj(x).unflatten(-1, (attention.heads, 2 * attention.dim)).chunk(2, -1)
    k, v = (p(x).unflatten(-1, (attention.kv_heads, attention.dim)) for p in (attention.k_proj, attention.v_proj))
    q = rotate(attention.q_norm(q).transpose(1, 2), cos, sin)  # [B, heads, 1, D]
    state.keys[:, :, state.length] = rotate(attention.k_norm(k).transpose(1, 2), cos, sin)[:, :, 0]
    state.values[:, :, state.length] = v[:, 0]
    state.length += 1
    keys, values = state.keys[:, :, : state.length], state.values[:, :, : state.length]
    attended = F.scaled_dot_product_attention(q, keys, values, enable_gqa=True)
    return attention.finish(attended, gate.flatten(2))[:, 0]


def step(model: DemoModel, x: torch.Tensor, positions: torch.Tensor, states: list) -> torch.Tensor:
    """Input embeddings [B, H], positions [3, B] -> hidden after the final norm [B, H]."""
    cos, sin = rotary(positions.unsqueeze(-1))
    for layer, state in zip(model.model.language_model.layers, states, strict=True):
        inner = layer.input_layernorm(x)
        if layer.is_attention:
            x = x + attention_step(layer.self_attn, inner, state, cos, sin)
        else:
            x = x + delta_step(layer.linear_attn, inner, state)
        x = x + layer.mlp(layer.post_attention_layernorm(x))[0]
    return model.model.language_model.norm(x)


def embeddings_of(model: DemoModel, prompts: Sequence[Sequence3]) -> list[torch.Tensor]:
    """Merged input embeddings of each prompt, [T, H]."""
    return [model.embed(collate([[prompt]]))[0] for prompt in prompts]


@torch.no_grad()
def generate(
    model: DemoModel, prompts: Sequence[Sequence3], max_new_tokens: int, temperature: float = 0.0, seed: int = 0
) -> list[list[int]]:
    """New tokens of each prompt, the stop token included; greedy at temperature 0."""
    generator = torch.Generator().manual_seed(seed)
    embedded = embeddings_of(model, prompts)
    places = [positions_of(prompt.tokens, prompt.specs) for prompt in prompts]
    lengths = [len(prompt.tokens) for prompt in prompts]
    following = [max(max(p) for p in place) + 1 for place in places]  # rotary position of the first new token
    states = new_states(model, len(prompts), max(lengths) + max_new_tokens)
    new_tokens: list[list[int]] = [[] for _ in prompts]
    table = model.model.language_model.embed_tokens.weight
    done = [False] * len(prompts)
    for t in range(max(lengths) + max_new_tokens - 1):
        inputs, where = [], []
        for row in range(len(prompts)):
            if t < lengths[row]:
                inputs.append(embedded[row][t])
                where.append(places[row][t])
            else:
                index = min(t - lengths[row], len(new_tokens[row]) - 1)
                inputs.append(table[new_tokens[row][index]])
                where.append((following[row] + t - lengths[row],) * 3)
        hidden = step(model, torch.stack(inputs), torch.tensor(where).T, states)
        active = [r for r in range(len(prompts)) if t >= lengths[r] - 1 and not done[r]]
        if active:
            logits = model.lm_head(hidden[active])
            for row, token in zip(active, _choose(logits, temperature, generator), strict=True):
                new_tokens[row].append(token)
                done[row] = token in STOPS or len(new_tokens[row]) >= max_new_tokens
        if all(done):
            break
    return new_tokens


def _choose(logits: torch.Tensor, temperature: float, generator: torch.Generator) -> list[int]:
    if temperature == 0.0:
        return logits.argmax(-1).tolist()
    probabilities = (logits.float() / temperature).softmax(-1)
    return torch.multinomial(probabilities, 1, generator=generator)[:, 0].tolist()
