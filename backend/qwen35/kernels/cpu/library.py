"""The native library behind ctypes: records as in ``common.h``, argument types, the choice of instruction set."""

from __future__ import annotations

import ctypes
import functools
import os
from ctypes import c_char_p, c_double, c_float, c_int64, c_uint64, c_void_p
from pathlib import Path

from qwen35.kernels.cpu.recipe import library_path

LIBRARY_VARIABLE = "QWEN35_NATIVE_LIBRARY"  # another build of the same sources, as one with sanitizers
ISA_VARIABLE = "QWEN35_NATIVE_ISA"  # amx, avx512, avx2 or portable; unset: the best that this CPU has


def record(*fields: tuple[str, type]) -> type[ctypes.Structure]:
    """A C struct."""
    return type("Record", (ctypes.Structure,), {"_fields_": list(fields)})


def fields(kind: type, names: str) -> list[tuple[str, type]]:
    """Fields of one type."""
    return [(name, kind) for name in names.split()]


Weight = record(
    ("kind", c_int64),
    *fields(c_void_p, "values scales factor input_scale"),
    *fields(c_int64, "factor_stride input_stride num_experts num_rows width arithmetic"),
)
Attention = record(
    *fields(c_void_p, "query key value keys values block_table sequences out"),
    *fields(c_int64, "num_sequences max_blocks block_tokens num_heads num_kv_heads head_dim is_fp8"),
    *fields(c_float, "key_scale value_scale scale"),
)
GatedDelta = record(
    *fields(c_void_p, "inputs decay beta taps recurrent conv pending_inputs pending_decay pending_beta sequences out"),
    *fields(c_int64, "num_sequences num_heads key_width value_width channels conv_width max_pending"),
)
Experts = record(*fields(c_void_p, "x ids shares gate up down out"), *fields(c_int64, "num_tokens top"))
RowRecord = record(
    ("values", c_void_p), *fields(c_int64, "count is_double num_depths"), *fields(c_double, "peak rate inverse")
)

_SIGNATURES = {
    "qwen35_set_num_threads": (c_int64,),
    "qwen35_lay_out_codes": (c_void_p, c_void_p, c_int64, c_int64),
    "qwen35_lay_out_scales": (c_void_p, c_void_p, c_int64, c_int64),
    "qwen35_linear": (c_void_p, c_void_p, c_void_p, c_void_p, c_int64, c_int64),
    "qwen35_experts": (c_void_p,),
    "qwen35_choose": (c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_int64),
    "qwen35_rms_norm": (
        *(c_void_p, c_int64, c_int64, c_void_p, c_void_p, c_float),
        *(c_void_p, c_int64, c_int64, c_int64),
    ),
    "qwen35_silu_mul": (c_void_p, c_void_p, c_void_p, c_int64),
    "qwen35_sigmoid_mul": (c_void_p, c_int64, c_int64, c_void_p, c_void_p, c_int64, c_int64),
    "qwen35_run": (c_void_p,),
    "qwen35_rotate": (c_void_p, c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_int64, c_int64),
    "qwen35_gated_delta": (c_void_p,),
    "qwen35_attention": (c_void_p,),
    "qwen35_delta_gates": (c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_int64, c_int64),
    "qwen35_scan_depths": (c_void_p, c_void_p, c_void_p),
}
_COUNTING_SIGNATURES = {  # these return a number
    "qwen35_scan_between": (c_void_p, c_double, c_double, c_void_p),
    "qwen35_scan_contenders": (c_void_p, c_double, c_uint64, c_int64, c_void_p, c_void_p),
}


def find_library() -> Path:
    """Where the library is looked for."""
    named = os.environ.get(LIBRARY_VARIABLE)
    return Path(named) if named else library_path()


@functools.cache
def load_library(path: Path) -> ctypes.CDLL:
    """Loads it and chooses the instruction set. Raises OSError when it is not there or cannot run on this CPU."""
    library = ctypes.CDLL(str(path))
    for signatures, result in ((_SIGNATURES, None), (_COUNTING_SIGNATURES, c_int64)):
        for name, arguments in signatures.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, result
    library.qwen35_seconds.argtypes, library.qwen35_seconds.restype = (), c_double
    library.qwen35_select.argtypes, library.qwen35_select.restype = (c_char_p,), c_char_p
    library.qwen35_instruction_set.argtypes, library.qwen35_instruction_set.restype = (), c_char_p
    wanted = os.environ.get(ISA_VARIABLE, "")
    if library.qwen35_select(wanted.encode()) is None:
        raise OSError(f"{ISA_VARIABLE}: expected an instruction set of this CPU, got {wanted!r}")
    return library
