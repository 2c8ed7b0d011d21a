"""Programs: many native operations in one call, over as many tokens as come. See `program.h`.

A program is written once, with the operations in the order in which the methods of `CpuOps` would be called, and gives
the same bits: what it saves is the way through Python and torch from one to the next, 3 to 10 us each.

Letters: T tokens."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import c_double, c_int64, c_void_p

import torch
from torch import Tensor

from qwen35.kernels.cpu.library import fields, record
from qwen35.kernels.cpu.ops import CpuOps
from qwen35.kernels.cpu.records import attention_record, gated_delta_record, takes_cache, takes_state
from qwen35.nvfp4 import LinearWeight
from qwen35.views import BatchView, GatedDeltaView, KVView

INPUT, OUTPUT = 0, 1
_ALIGN_BYTES = 64
_KINDS = (
    "linear", "norm", "silu_mul", "sigmoid_mul", "rotate", "add", "attention", "delta_gates", "gated_delta", "choose",
    "experts",
)  # fmt: skip
_Instruction = record(
    *fields(c_int64, "kind x y z out"),
    *fields(c_void_p, "a b c"),
    *fields(c_int64, "rows width offset stride out_offset out_stride gate_width is_float"),
    ("factor", c_double),
)
_Run = record(
    *fields(c_void_p, "instructions offsets workspace input output cos sin sequences block_table"),
    *fields(c_int64, "num_instructions num_tokens half num_sequences max_blocks"),
)


class Unsupported(Exception):
    """The library does not take a weight or a cache of this kind: there is no program."""


class Program:
    """Buffers are numbers; each holds a row of a given width for every token. Not for two threads at a time."""

    def __init__(self, ops: CpuOps) -> None:
        self._ops = ops
        self._instructions: list = []
        self._kept: list[object] = []  # what instructions point to
        self._offsets = [0, 0]  # bytes of one token
        self._row_bytes = self._most_row_bytes = 0
        self._workspace = torch.empty(0, dtype=torch.uint8)
        self._largest_pending = 0
        self._run: ctypes.Structure | None = None

    def buffer(self, width: int, dtype: torch.dtype = torch.bfloat16) -> int:
        """A new one; its contents are undefined."""
        self._offsets.append(self._row_bytes)
        num_bytes = width * dtype.itemsize
        self._row_bytes += -(-num_bytes // _ALIGN_BYTES) * _ALIGN_BYTES
        self._most_row_bytes = max(self._most_row_bytes, self._row_bytes)
        return len(self._offsets) - 1

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Buffers made inside are forgotten behind it, and their memory used again."""
        before = self._row_bytes
        yield
        self._row_bytes = before

    def linear(self, x: int, weight: LinearWeight, out: int, *, is_float: bool = False) -> None:
        self._add("linear", x=x, a=self._weight(weight), out=out, is_float=is_float)

    def norm(
        self,
        x: int,
        scale: Tensor,
        eps: float,
        out: int,
        *,
        rows: int = 1,
        offset: int = 0,
        stride: int | None = None,
        out_offset: int = 0,
        out_stride: int | None = None,
        gate: int = -1,
        is_float: bool = False,
    ) -> None:
        """``rows`` of each token, as wide as ``scale``; strides default to that width."""
        width = len(scale)
        strides = {
            "offset": offset,
            "stride": stride or width,
            "out_offset": out_offset,
            "out_stride": out_stride or width,
        }
        shape = {"rows": rows, "width": width, "is_float": is_float}
        self._add("norm", x=x, y=gate, a=self._floats(scale), factor=eps, out=out, **shape, **strides)

    def silu_mul(self, gate: int, up: int, out: int, width: int) -> None:
        self._add("silu_mul", x=gate, y=up, out=out, width=width)

    def sigmoid_mul(
        self, gate: int, x: int, out: int, *, rows: int, width: int, offset: int = 0, stride: int, gate_width: int
    ) -> None:
        """``rows`` of each token; their gates begin at ``offset``, ``stride`` apart; ``gate_width`` 1 or ``width``."""
        places = {"offset": offset, "stride": stride, "gate_width": gate_width}
        self._add("sigmoid_mul", x=gate, y=x, out=out, rows=rows, width=width, **places)

    def rotate(self, x: int, *, heads: int, width: int) -> None:
        """In place."""
        self._add("rotate", x=x, out=x, rows=heads, width=width)

    def add(self, x: int, y: int, out: int, width: int) -> None:
        self._add("add", x=x, y=y, out=out, width=width)

    def attention(self, query: int, key: int, value: int, view: KVView, num_heads: int, scale: float, out: int) -> None:
        if not takes_cache(view):
            raise Unsupported(f"keys and values of {view.keys.dtype} and width {view.keys.shape[-1]}")
        self._kept.append(view)
        made = self._keep(attention_record(view, num_heads, scale))
        self._add("attention", x=query, y=key, z=value, a=made, out=out)

    def delta_gates(self, a: int, b: int, rate: Tensor, dt_bias: Tensor, decay: int, beta: int) -> None:
        addresses = {"a": self._floats(rate), "b": self._floats(dt_bias)}
        self._add("delta_gates", x=a, y=b, out=decay, z=beta, width=len(rate), **addresses)

    def gated_delta(self, x: int, decay: int, beta: int, taps: Tensor, view: GatedDeltaView, out: int) -> None:
        if not takes_state(view):
            raise Unsupported(f"a state of {view.recurrent.dtype} and conv inputs of {view.conv.dtype}")
        self._floats(taps)
        self._kept.append(view)
        self._largest_pending = view.pending_inputs.shape[1]
        made = self._keep(gated_delta_record(view, taps))
        self._add("gated_delta", x=x, y=decay, z=beta, a=made, out=out)

    def choose(self, logits: int, ids: int, shares: int, *, num_experts: int, top: int) -> None:
        self._add("choose", x=logits, out=ids, z=shares, width=num_experts, rows=top)

    def experts(
        self, x: int, ids: int, shares: int, stacks: tuple[LinearWeight, LinearWeight, LinearWeight], out: int, top: int
    ) -> None:
        addresses = dict(zip("abc", map(self._weight, stacks), strict=True))
        self._add("experts", x=x, y=ids, z=shares, out=out, rows=top, **addresses)

    def run(self, x: Tensor, out: Tensor, rotary: tuple[Tensor, Tensor], batch: BatchView) -> None:
        """x, out [T, …] bfloat16, T > 0; rotary: cos, sin [T, R/2] float32."""
        run = self._run or self._finish()
        plan, table = self._ops.plan(batch), batch.block_table.contiguous()
        if self._largest_pending:
            plan.check_room(self._largest_pending)
        cos, sin = (part.contiguous() for part in rotary)
        if len(x) * self._most_row_bytes > len(self._workspace):
            self._workspace = torch.empty(len(x) * self._most_row_bytes, dtype=torch.uint8)
            run.workspace = self._workspace.data_ptr()
        run.input, run.output, run.num_tokens = x.data_ptr(), out.data_ptr(), len(x)
        run.cos, run.sin, run.half = cos.data_ptr(), sin.data_ptr(), cos.shape[1]
        run.sequences, run.num_sequences = plan.records.ctypes.data, len(plan.records)
        run.block_table, run.max_blocks = table.data_ptr(), table.shape[1]
        self._ops.library.qwen35_run(ctypes.addressof(run))

    def _finish(self) -> ctypes.Structure:
        instructions = (_Instruction * len(self._instructions))(*self._instructions)
        offsets = (c_int64 * len(self._offsets))(*self._offsets)
        self._run = _Run(self._keep(instructions), self._keep(offsets), num_instructions=len(instructions))
        return self._run

    def _add(self, kind: str, **values: object) -> None:
        self._run = None
        self._instructions.append(_Instruction(kind=_KINDS.index(kind), **values))

    def _weight(self, weight: LinearWeight) -> int:
        address = self._ops.address(weight)
        if address is None:
            raise Unsupported(f"a weight of {type(weight).__name__}")
        self._kept.append(weight)
        return address

    def _floats(self, values: Tensor) -> int:
        if values.dtype != torch.float32 or not values.is_contiguous():
            raise Unsupported(f"a vector of {values.dtype}")
        self._kept.append(values)
        return values.data_ptr()

    def _keep(self, made: ctypes.Structure | ctypes.Array) -> int:
        self._kept.append(made)
        return ctypes.addressof(made)
