"""The target and the draft as native programs: the operations of their modules' forward passes, written down once.

Same operations, same order, same bits as `language.LanguageModel` and `draft.DraftModel` over `CpuOps`; those stay the
definition, and compute whatever the native library does not take.

Letters: T tokens, H hidden, Hq/Hkv query/KV heads, D head dim, Hv value heads, Dv value dim, I expert width."""

from __future__ import annotations

import torch
from torch import Tensor

from qwen35.kernels.cpu import CpuOps
from qwen35.kernels.cpu.program import INPUT, OUTPUT, Program, Unsupported
from qwen35.kernels.ops import Ops
from qwen35.nn.attention import Attention
from qwen35.nn.draft import DraftModel
from qwen35.nn.gated_delta import GatedDeltaNet
from qwen35.nn.language import DecoderLayer, LanguageModel
from qwen35.nn.layers import RMSNorm
from qwen35.nn.moe import SparseMoE
from qwen35.views import CacheView, GatedDeltaView, KVView

_FLOAT, _INTEGER = torch.float32, torch.int64


def accelerate(model: LanguageModel | DraftModel, ops: Ops) -> LanguageModel | DraftModel | NativeModel:
    """The model as programs where `ops` are native, else as it is."""
    return NativeModel(model, ops) if isinstance(ops, CpuOps) else model


class NativeModel:
    """In a model's place: `forward` is a program, the rest is the model's own."""

    def __init__(self, model: LanguageModel | DraftModel, ops: CpuOps) -> None:
        self._model, self._ops = model, ops
        self._cache: CacheView | None = None
        self._program: Program | None = None

    def __getattr__(self, name: str) -> object:
        return getattr(self._model, name)

    def forward(self, *tensors_batch_cache: object) -> Tensor:
        """As the model's: (embeds, batch, cache), the draft's (embeds, hidden, batch, cache)."""
        *inputs, batch, cache = tensors_batch_cache
        program = self._program_over(cache)
        if program is None or len(inputs[0]) == 0:
            return self._model.forward(*tensors_batch_cache)
        rows = [part.to(torch.bfloat16) for part in inputs]
        x = rows[0].contiguous() if len(rows) == 1 else torch.cat(rows, -1)
        out = torch.empty_like(rows[0], memory_format=torch.contiguous_format)
        program.run(x, out, self._model.rotary(batch.positions), batch)
        return out

    def _program_over(self, cache: CacheView) -> Program | None:
        """Kept for the cache seen last: an engine has one."""
        if self._cache is not cache:
            write = write_draft if isinstance(self._model, DraftModel) else write_language
            try:
                self._program = write(self._model, cache, self._ops) if self._model.dtype == torch.bfloat16 else None
            except Unsupported:
                self._program = None
            self._cache = cache
        return self._program


def write_language(model: LanguageModel, cache: CacheView, ops: CpuOps) -> Program:
    """Raises Unsupported."""
    writer = _Writer(Program(ops), model.config.hidden_size)
    source = INPUT
    for layer, view in zip(model.layers, model.views(cache), strict=True):
        writer.layer(layer, view, source)
        source = writer.x
    writer.norm(model.norm, writer.x, OUTPUT)
    return writer.program


def write_draft(model: DraftModel, cache: CacheView, ops: CpuOps) -> Program:
    """Its input holds embedding and hidden state side by side, [T, 2H]. Raises Unsupported."""
    hidden = len(model.norm.scale)
    writer = _Writer(Program(ops), hidden)
    both = writer.program.buffer(2 * hidden)
    for place, norm in enumerate((model.pre_fc_norm_embedding, model.pre_fc_norm_hidden)):
        writer.half_norm(norm, place, both)
    writer.program.linear(both, model.fc.value, writer.x)
    writer.layer(model.layers[0], cache.draft, writer.x)
    writer.norm(model.norm, writer.x, OUTPUT)
    return writer.program


class _Writer:
    """Writes layers; ``x`` holds what runs through them."""

    def __init__(self, program: Program, hidden: int) -> None:
        self.program, self._hidden = program, hidden
        self.x, self._inner, self._branch = (program.buffer(hidden) for _ in range(3))

    def norm(self, norm: RMSNorm, x: int, out: int) -> None:
        self.program.norm(x, norm.scale, norm.eps, out)

    def half_norm(self, norm: RMSNorm, place: int, out: int) -> None:
        """Of one half of the input into the same half of ``out``."""
        width = {"stride": 2 * self._hidden, "out_stride": 2 * self._hidden}
        offset = place * self._hidden
        self.program.norm(INPUT, norm.scale, norm.eps, out, offset=offset, out_offset=offset, **width)

    def layer(self, layer: DecoderLayer, view: KVView | GatedDeltaView, source: int) -> None:
        program = self.program
        self.norm(layer.input_layernorm, source, self._inner)
        with program.scope():
            if layer.is_attention:
                self._attention(layer.self_attn, view)
            else:
                self._gated_delta(layer.linear_attn, view)
        program.add(source, self._branch, self.x, self._hidden)
        self.norm(layer.post_attention_layernorm, self.x, self._inner)
        with program.scope():
            self._moe(layer.mlp)
        program.add(self.x, self._branch, self.x, self._hidden)

    def _attention(self, mixer: Attention, view: KVView) -> None:
        program, heads, kv_heads, width = self.program, mixer.num_heads, mixer.num_kv_heads, mixer.head_dim
        both, query = program.buffer(heads * 2 * width), program.buffer(heads * width)
        key, value, mixed = (program.buffer(count * width) for count in (kv_heads, kv_heads, heads))
        for projection, out in ((mixer.q_proj, both), (mixer.k_proj, mixed), (mixer.v_proj, value)):
            program.linear(self._inner, projection.value, out)
        program.norm(both, mixer.q_norm.scale, mixer.q_norm.eps, query, rows=heads, stride=2 * width)
        program.norm(mixed, mixer.k_norm.scale, mixer.k_norm.eps, key, rows=kv_heads)
        program.rotate(query, heads=heads, width=width)
        program.rotate(key, heads=kv_heads, width=width)
        program.attention(query, key, value, mixer.scaled(view), heads, width**-0.5, mixed)
        gate = {"offset": width, "stride": 2 * width, "gate_width": width}
        program.sigmoid_mul(both, mixed, mixed, rows=heads, width=width, **gate)
        program.linear(mixed, mixer.o_proj.value, self._branch)

    def _gated_delta(self, mixer: GatedDeltaNet, view: GatedDeltaView) -> None:
        program, heads, width = self.program, mixer.num_heads, mixer.value_width
        inputs, gate, normed = (program.buffer(count) for count in (mixer.taps.shape[1], heads * width, heads * width))
        a, b = program.buffer(heads), program.buffer(heads)
        decay, beta, mixed = (program.buffer(count, _FLOAT) for count in (heads, heads, heads * width))
        program.linear(self._inner, mixer.in_proj_a.value, a)
        program.linear(self._inner, mixer.in_proj_b.value, b)
        program.delta_gates(a, b, mixer.rate, mixer.dt_bias, decay, beta)
        program.linear(self._inner, mixer.in_proj_qkv.value, inputs)
        program.gated_delta(inputs, decay, beta, mixer.taps, view, mixed)
        program.linear(self._inner, mixer.in_proj_z.value, gate)
        program.norm(mixed, mixer.norm, mixer.eps, normed, rows=heads, gate=gate, is_float=True)
        program.linear(normed, mixer.out_proj.value, self._branch)

    def _moe(self, moe: SparseMoE) -> None:
        program, router, top = self.program, moe.gate.value, moe.num_experts_per_tok
        if not isinstance(router, Tensor):
            raise Unsupported("a packed router")
        shared_width, hidden = moe.shared_expert.gate_proj.value.shape[0], self._hidden
        logits, shares = program.buffer(len(router), _FLOAT), program.buffer(top, _FLOAT)
        ids, gate = program.buffer(top, _INTEGER), program.buffer(1)
        shared_gate, shared_up, shared = (program.buffer(n) for n in (shared_width, shared_width, hidden))
        program.linear(self._inner, router, logits, is_float=True)
        program.choose(logits, ids, shares, num_experts=len(router), top=top)
        experts = moe.experts
        stacks = (experts.gate_proj.value, experts.up_proj.value, experts.down_proj.value)
        program.experts(self._inner, ids, shares, stacks, self._branch, top)
        program.linear(self._inner, moe.shared_expert_gate.value, gate)
        program.linear(self._inner, moe.shared_expert.gate_proj.value, shared_gate)
        program.linear(self._inner, moe.shared_expert.up_proj.value, shared_up)
        program.silu_mul(shared_gate, shared_up, shared_gate, shared_width)
        program.linear(shared_gate, moe.shared_expert.down_proj.value, shared)
        program.sigmoid_mul(gate, shared, shared, rows=1, width=hidden, stride=1, gate_width=1)
        program.add(self._branch, shared, self._branch, hidden)
