"""`CpuOps`: the protocol `kernels.ops.Ops` in native code for bfloat16 activations.

Row-invariant as the protocol asks: products have one chain an output element, threads share no output row. What is not
hot goes to the reference: rotary tables (once a pass), activations of another type than bfloat16, weights that are
dense in another type, FP8 activations, and shapes that the library does not take. Which of the two computes depends
on types and weights alone, never on the rows.

The bits are those of one instruction set: AMX, AVX-512, AVX2 and portable code agree within rounding only.
"""

from __future__ import annotations

import ctypes
import weakref

import torch
from torch import Tensor

from qwen35.kernels.cpu.library import Experts, find_library, load_library
from qwen35.kernels.cpu.records import Sequences, attention_record, gated_delta_record, takes_cache, takes_state
from qwen35.kernels.cpu.scan import NativeRowScan
from qwen35.kernels.cpu.weights import PanelLayout, WeightRecords
from qwen35.kernels.library import exportable, register
from qwen35.kernels.reference import ReferenceOps
from qwen35.nvfp4 import LinearWeight
from qwen35.views import BatchView, GatedDeltaView, KVView

_BF16 = torch.bfloat16


class CpuOps:
    """Methods and shapes: see `kernels.ops.Ops`. `activations` as in `ReferenceOps`.

    Threads belong to the process: the last `num_threads` holds. Raises OSError when the library is not built.
    """

    def __init__(self, num_threads: int = 1, activations: str = "dense") -> None:
        self.library = load_library(find_library())
        self.library.qwen35_set_num_threads(num_threads)
        self._reference = ReferenceOps(activations=activations)
        self._activations = activations
        self._weights = WeightRecords(activations)
        self.row_scan = NativeRowScan(self.library)
        self.weight_layout = PanelLayout()
        self._planned: tuple[weakref.ref[BatchView], Sequences] | None = None
        self.name = f"cpu/{activations}"
        register(self.name, self)

    @property
    def identity(self) -> str:
        return f"cpu-{self.library.qwen35_instruction_set().decode()}/{self._activations}"

    @property
    def native_seconds(self) -> float:
        """Spent inside the library by all callers so far."""
        return self.library.qwen35_seconds()

    @exportable
    def linear(
        self, x: Tensor, weight: LinearWeight, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
    ) -> Tensor:
        out_dtype = out_dtype or x.dtype
        address = self.address(weight) if x.dtype == _BF16 and out_dtype in (_BF16, torch.float32) else None
        if address is None:
            return self._reference.linear(x, weight, bias, out_dtype)
        x = x.contiguous()
        bias = None if bias is None else bias.float().contiguous()
        out = torch.empty(*x.shape[:-1], weight.shape[0], dtype=out_dtype)
        num_rows = x.numel() // x.shape[-1]
        self.library.qwen35_linear(
            address, x.data_ptr(), _pointer(bias), out.data_ptr(), num_rows, out_dtype == torch.float32
        )
        return out

    def rms_norm(self, x: Tensor, scale: Tensor, eps: float) -> Tensor:
        if x.dtype != _BF16 or scale.dtype != torch.float32:
            return self._reference.rms_norm(x, scale, eps)
        return self._norm(x, None, scale, eps)

    def gated_rms_norm(self, x: Tensor, gate: Tensor, scale: Tensor, eps: float) -> Tensor:
        if gate.dtype != _BF16 or x.dtype not in (_BF16, torch.float32) or scale.dtype != torch.float32:
            return self._reference.gated_rms_norm(x, gate, scale, eps)
        return self._norm(x, gate.contiguous(), scale, eps)

    def silu_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        if gate.dtype != _BF16 or up.dtype != _BF16:
            return self._reference.silu_mul(gate, up)
        gate, up = gate.contiguous(), up.contiguous()
        out = torch.empty_like(gate)
        self.library.qwen35_silu_mul(gate.data_ptr(), up.data_ptr(), out.data_ptr(), gate.numel())
        return out

    def sigmoid_mul(self, gate: Tensor, x: Tensor) -> Tensor:
        one_gate = gate.shape == (*x.shape[:-1], 1)
        if gate.dtype != _BF16 or x.dtype != _BF16 or not (one_gate or gate.shape == x.shape):
            return self._reference.sigmoid_mul(gate, x)
        gate, x = gate.contiguous(), x.contiguous()
        out, width, gate_width = torch.empty_like(x), x.shape[-1], gate.shape[-1]
        self.library.qwen35_sigmoid_mul(
            gate.data_ptr(), gate_width, gate_width, x.data_ptr(), out.data_ptr(), x.numel() // width, width
        )
        return out

    def rotary_tables(self, positions: Tensor, inv_freq: Tensor, axes: Tensor) -> tuple[Tensor, Tensor]:
        return self._reference.rotary_tables(positions, inv_freq, axes)

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        if x.dtype != _BF16 or cos.dtype != torch.float32:
            return self._reference.rotate(x, cos, sin)
        x, cos, sin = x.contiguous(), cos.contiguous(), sin.contiguous()
        out = torch.empty_like(x)
        pointers = (tensor.data_ptr() for tensor in (x, cos, sin, out))
        self.library.qwen35_rotate(*pointers, *x.shape, cos.shape[-1])
        return out

    @exportable
    def paged_attention(
        self, query: Tensor, key: Tensor, value: Tensor, view: KVView, batch: BatchView, scale: float
    ) -> Tensor:
        if query.dtype != _BF16 or not takes_cache(view):
            return self._reference.paged_attention(query, key, value, view, batch, scale)
        sequences, table = self.plan(batch).records, batch.block_table.contiguous()
        query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
        out = torch.empty_like(query)
        record = attention_record(view, query.shape[1], scale)
        record.query, record.key, record.value, record.out = (t.data_ptr() for t in (query, key, value, out))
        record.block_table, record.max_blocks = table.data_ptr(), table.shape[1]
        record.sequences, record.num_sequences = sequences.ctypes.data, len(sequences)
        self.library.qwen35_attention(ctypes.addressof(record))
        return out

    def delta_gates(self, a: Tensor, b: Tensor, rate: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
        if a.dtype != _BF16 or b.dtype != _BF16:
            return self._reference.delta_gates(a, b, rate, dt_bias)
        decay, beta = torch.empty(2, *a.shape, dtype=torch.float32).unbind(0)
        inputs = (a.contiguous(), b.contiguous(), rate, dt_bias, decay, beta)
        self.library.qwen35_delta_gates(*(part.data_ptr() for part in inputs), *a.shape)
        return decay, beta

    @exportable
    def gated_delta(
        self, inputs: Tensor, decay: Tensor, beta: Tensor, taps: Tensor, view: GatedDeltaView, batch: BatchView
    ) -> Tensor:
        if inputs.dtype != _BF16 or not takes_state(view):
            return self._reference.gated_delta(inputs, decay, beta, taps, view, batch)
        plan = self.plan(batch)
        plan.check_room(view.pending_inputs.shape[1])
        out = torch.empty(len(inputs), *view.recurrent.shape[1::2], dtype=torch.float32)  # [T, Hv, Dv]
        inputs, decay, beta = inputs.contiguous(), decay.float().contiguous(), beta.float().contiguous()
        taps = taps.contiguous()
        record = gated_delta_record(view, taps)
        record.inputs, record.decay, record.beta, record.out = (t.data_ptr() for t in (inputs, decay, beta, out))
        record.sequences, record.num_sequences = plan.records.ctypes.data, len(plan.records)
        self.library.qwen35_gated_delta(ctypes.addressof(record))
        return out

    @exportable
    def route(self, x: Tensor, gate: Tensor, num_experts_per_tok: int) -> tuple[Tensor, Tensor]:
        if x.dtype != _BF16 or gate.dtype != _BF16:
            return self._reference.route(x, gate, num_experts_per_tok)
        logits = self.linear(x, gate, out_dtype=torch.float32)
        ids = torch.empty(len(x), num_experts_per_tok, dtype=torch.int64)
        shares = torch.empty(len(x), num_experts_per_tok, dtype=torch.float32)
        pointers = (logits.data_ptr(), ids.data_ptr(), shares.data_ptr())
        self.library.qwen35_choose(*pointers, len(x), gate.shape[0], num_experts_per_tok)
        return ids, shares

    @exportable
    def moe_experts(
        self,
        x: Tensor,
        experts: Tensor,
        weights: Tensor,
        gate_proj: LinearWeight,
        up_proj: LinearWeight,
        down_proj: LinearWeight,
    ) -> Tensor:
        addresses = [self.address(weight) for weight in (gate_proj, up_proj, down_proj)]
        if x.dtype != _BF16 or None in addresses:
            return self._reference.moe_experts(x, experts, weights, gate_proj, up_proj, down_proj)
        x, experts, weights = x.contiguous(), experts.contiguous(), weights.contiguous()
        out = torch.empty_like(x)
        inputs = (x.data_ptr(), experts.data_ptr(), weights.data_ptr())
        record = Experts(*inputs, *addresses, out.data_ptr(), *experts.shape)
        self.library.qwen35_experts(ctypes.addressof(record))
        return out

    def _norm(self, x: Tensor, gate: Tensor | None, scale: Tensor, eps: float) -> Tensor:
        x, width = x.contiguous(), x.shape[-1]
        out = torch.empty(x.shape, dtype=_BF16)
        self.library.qwen35_rms_norm(
            x.data_ptr(),
            x.dtype == torch.float32,
            width,
            _pointer(gate),
            scale.data_ptr(),
            eps,
            out.data_ptr(),
            width,
            x.numel() // width,
            width,
        )
        return out

    def address(self, weight: LinearWeight) -> int | None:
        """Of the weight's record; None for one that the reference takes."""
        return self._weights.address(weight)

    def plan(self, batch: BatchView) -> Sequences:
        """The last batch's is kept: all layers of a pass ask for the same one."""
        if self._planned is None or self._planned[0]() is not batch:
            self._planned = (weakref.ref(batch), Sequences.of(batch))
        return self._planned[1]


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
