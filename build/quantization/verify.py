"""Proof that every tensor of the source is in the output: kept bit for bit, or quantised to the same numbers.

Works from the two directories alone, so it checks what was written and not what was meant.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from tqdm import tqdm

from build.quantization.reference import published_name
from qwen35.nvfp4 import NVFP4Tensor, dequantize
from qwen35.weights.reader import CheckpointReader

# NVFP4 leaves about 9.5 % on normal weights; wrong rows, swapped gate and up or a lost scale leave 100 % and more.
MAX_RELATIVE_ERROR = 0.3
_FUSED = re.compile(r"(.*\.experts\.)(gate_up|down)_proj")
_SCALES = re.compile(r"(.*)\.(weight_scale|weight_scale_2|input_scale|[kv]_scale)")


class VerificationError(RuntimeError):
    """The output does not hold what the source holds; the message names the tensors."""


@dataclass(frozen=True)
class Arrival:
    """One source tensor, or one expert's part of it, in the output.

    name            of the weight in the output
    is_quantised    packed as NVFP4; otherwise equal bit for bit
    relative_error  norm of the difference over norm of the source, 0 for what was kept
    """

    name: str
    is_quantised: bool
    num_source_bytes: int
    num_bytes: int
    dtype: torch.dtype
    relative_error: float


def verify(source: CheckpointReader, output: CheckpointReader, *, has_vision: bool) -> list[Arrival]:
    """Raises VerificationError listing tensors that did not arrive, differ, or came from nowhere."""
    arrivals, faults, owners = [], [], set()
    for name in tqdm(source.names, desc="verifying", unit="tensor"):
        published = published_name(name, has_vision=has_vision)
        for part_name, part in _parts(published, source.map(name), output):
            owners.add(part_name)
            arrival = _compare(part_name, part, output)
            if isinstance(arrival, str):
                faults.append(arrival)
            else:
                arrivals.append(arrival)
    modules = {owner.removesuffix(".weight") for owner in owners}
    for name in output.names:
        match = _SCALES.fullmatch(name)
        if name not in owners and (match is None or match.group(1) not in modules):
            faults.append(f"{name}: expected in the source, got it in the output alone")
    if faults:
        more = f"; and {len(faults) - 20} more" if len(faults) > 20 else ""
        raise VerificationError(f"{output.directory}: {'; '.join(faults[:20])}{more}")
    return arrivals


def _parts(name: str, tensor: Tensor, output: CheckpointReader) -> Iterator[tuple[str, Tensor]]:
    """Names and values as the output has them: fused experts that the output holds one by one are taken apart."""
    match = _FUSED.fullmatch(name)
    if match is None or name in output:
        yield name, tensor
        return
    root, projection = match.groups()
    for expert, matrix in enumerate(tensor):
        if projection == "down":
            yield f"{root}{expert}.down_proj.weight", matrix
        else:
            gate, up = matrix.chunk(2)
            yield f"{root}{expert}.gate_proj.weight", gate
            yield f"{root}{expert}.up_proj.weight", up


def _compare(name: str, tensor: Tensor, output: CheckpointReader) -> Arrival | str:
    """The arrival of one tensor, or what is wrong with it."""
    num_source_bytes = tensor.numel() * tensor.element_size()
    if name not in output:
        return f"{name}: expected in the output, got nothing"
    info = output.info(name)
    if info.dtype is not torch.uint8:
        found = output.map(name)
        if found.dtype != tensor.dtype or not torch.equal(found, tensor):
            expected = f"{tensor.dtype} {list(tensor.shape)} bit for bit"
            return f"{name}: expected {expected}, got {info.dtype} {list(info.shape)}"
        return Arrival(name, False, num_source_bytes, info.num_bytes, info.dtype, 0.0)
    module = name.removesuffix(".weight")
    scales = [f"{module}.weight_scale", f"{module}.weight_scale_2"]
    lost = [scale for scale in scales if scale not in output]
    if lost:
        return f"{name}: expected its scales, got no {', '.join(lost)}"
    packed = NVFP4Tensor(output.map(name), *(output.map(scale) for scale in scales))
    error = _relative_error(dequantize(packed), tensor.float())
    if packed.shape != tensor.shape or not error <= MAX_RELATIVE_ERROR:
        return f"{name}: expected the source's numbers within {MAX_RELATIVE_ERROR}, got a relative error of {error:.3f}"
    held = packed.num_bytes + sum(output.info(n).num_bytes for n in (f"{module}.input_scale",) if n in output)
    return Arrival(name, True, num_source_bytes, held, torch.uint8, error)


def _relative_error(found: Tensor, expected: Tensor) -> float:
    if found.shape != expected.shape:
        return float("inf")
    norm = expected.norm()
    difference = (found - expected).norm()
    return float(difference / norm) if norm else float(difference)
