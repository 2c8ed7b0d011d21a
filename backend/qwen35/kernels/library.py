"""The operations that `torch.export` must not look into, as custom ones of the library `qwen35`.

They decide by tensor values, loop over tiles, or write into caches; an exported graph calls them by name and finds the
implementation by its name in this process. Outside of an export nothing comes this way: calling the methods directly
saves 20 to 50 us a call.

Letters as in `kernels.ops`.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from qwen35.nvfp4 import FP8Tensor, LinearWeight, NVFP4Panels, NVFP4Tensor
from qwen35.views import BatchView, CacheView, GatedDeltaView, KVView

_VIEWS = (BatchView, KVView, GatedDeltaView, CacheView)
torch.serialization.add_safe_globals(list(_VIEWS))  # a saved graph holds its example inputs
for _view in _VIEWS:
    torch.export.register_dataclass(_view, serialized_type_name=f"qwen35.views.{_view.__name__}")

_implementations: weakref.WeakValueDictionary[str, object] = weakref.WeakValueDictionary()
_Method = TypeVar("_Method", bound=Callable)


def register(name: str, implementation: object) -> None:
    """Makes `implementation` the one that exported graphs call by `name`; the last one of a name holds."""
    _implementations[name] = implementation


def exportable(method: _Method) -> _Method:
    """A method of an `Ops` with an attribute `name`, which becomes one custom operation while a model is exported."""
    exported = _EXPORTED[method.__name__]

    @functools.wraps(method)
    def dispatch(self, *args, **kwargs):
        if torch.compiler.is_exporting():
            return exported(self.name, *args, **kwargs)
        return method(self, *args, **kwargs)

    return dispatch


def _find(name: str):
    implementation = _implementations.get(name)
    if implementation is None:
        raise RuntimeError(
            f"operations {name!r}: expected one of {sorted(_implementations)}; "
            "create them with kernels.select.select_ops before calling an exported graph"
        )
    return implementation


def _parts(weight: LinearWeight) -> list[Tensor]:
    """Tensors of a weight; their number and types tell its kind."""
    if isinstance(weight, NVFP4Panels):
        weight = weight.to_rows()
    if isinstance(weight, NVFP4Tensor):
        parts = [weight.codes, weight.scales, weight.global_scale, weight.input_scale]
    elif isinstance(weight, FP8Tensor):
        parts = [weight.weight, weight.weight_scale, weight.input_scale]
    else:
        parts = [weight]
    return [part for part in parts if part is not None]


def _weight(parts: list[Tensor]) -> LinearWeight:
    if parts[0].dtype == torch.uint8:
        return NVFP4Tensor(*parts)
    return FP8Tensor(*parts) if parts[0].dtype == torch.float8_e4m3fn else parts[0]


@torch.library.custom_op("qwen35::linear", mutates_args=())
def _linear(name: str, x: Tensor, weight: list[Tensor], bias: Tensor | None, out_dtype: torch.dtype | None) -> Tensor:
    return _find(name).linear(x, _weight(weight), bias, out_dtype)


@_linear.register_fake
def _(name, x, weight, bias, out_dtype):
    return x.new_empty(*x.shape[:-1], weight[0].shape[0], dtype=out_dtype or x.dtype)


@torch.library.custom_op("qwen35::route", mutates_args=())
def _route(name: str, x: Tensor, gate: Tensor, num_experts_per_tok: int) -> tuple[Tensor, Tensor]:
    return _find(name).route(x, gate, num_experts_per_tok)


@_route.register_fake
def _(name, x, gate, num_experts_per_tok):
    shape = (x.shape[0], num_experts_per_tok)
    return x.new_empty(shape, dtype=torch.int64), x.new_empty(shape, dtype=torch.float32)


@torch.library.custom_op("qwen35::moe_experts", mutates_args=())
def _moe_experts(
    name: str,
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    gate_proj: list[Tensor],
    up_proj: list[Tensor],
    down_proj: list[Tensor],
) -> Tensor:
    stacks = (_weight(parts) for parts in (gate_proj, up_proj, down_proj))
    return _find(name).moe_experts(x, experts, weights, *stacks)


@_moe_experts.register_fake
def _(name, x, experts, weights, gate_proj, up_proj, down_proj):
    return torch.empty_like(x)


@torch.library.custom_op("qwen35::paged_attention", mutates_args=("keys", "values"))
def _paged_attention(
    name: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keys: Tensor,
    values: Tensor,
    key_scale: float,
    value_scale: float,
    batch: list[Tensor],
    scale: float,
) -> Tensor:
    view = KVView(keys, values, key_scale, value_scale)
    return _find(name).paged_attention(query, key, value, view, BatchView(*batch), scale)


@_paged_attention.register_fake
def _(name, query, key, value, keys, values, key_scale, value_scale, batch, scale):
    return query.new_empty(query.shape)


@torch.library.custom_op(
    "qwen35::gated_delta",
    mutates_args=("recurrent", "conv", "pending_inputs", "pending_decay", "pending_beta"),
)
def _gated_delta(
    name: str,
    inputs: Tensor,
    decay: Tensor,
    beta: Tensor,
    taps: Tensor,
    recurrent: Tensor,
    conv: Tensor,
    pending_inputs: Tensor,
    pending_decay: Tensor,
    pending_beta: Tensor,
    batch: list[Tensor],
) -> Tensor:
    view = GatedDeltaView(recurrent, conv, pending_inputs, pending_decay, pending_beta)
    return _find(name).gated_delta(inputs, decay, beta, taps, view, BatchView(*batch))


@_gated_delta.register_fake
def _(name, inputs, decay, beta, taps, recurrent, conv, pending_inputs, pending_decay, pending_beta, batch):
    return recurrent.new_empty(inputs.shape[0], recurrent.shape[1], recurrent.shape[3])


def _export_linear(name, x, weight, bias=None, out_dtype=None):
    return _linear(name, x, _parts(weight), bias, out_dtype)


def _export_moe_experts(name, x, experts, weights, gate_proj, up_proj, down_proj):
    return _moe_experts(name, x, experts, weights, _parts(gate_proj), _parts(up_proj), _parts(down_proj))


def _export_paged_attention(name, query, key, value, view, batch, scale):
    places = (view.keys, view.values, view.key_scale, view.value_scale)
    return _paged_attention(name, query, key, value, *places, list(vars(batch).values()), scale)


def _export_gated_delta(name, inputs, decay, beta, taps, view, batch):
    return _gated_delta(name, inputs, decay, beta, taps, *vars(view).values(), list(vars(batch).values()))


_EXPORTED = {
    "linear": _export_linear,
    "route": _route,
    "moe_experts": _export_moe_experts,
    "paged_attention": _export_paged_attention,
    "gated_delta": _export_gated_delta,
}
