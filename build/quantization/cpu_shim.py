"""Lets ModelOpt's NVFP4 fake quantisation run on a CPU.

ModelOpt 0.47 rounds dynamic blocks in CUDA or Triton kernels alone; on a CPU a quantised forward pass stops at "amax
must be a CUDA tensor for dynamic block quantization". Inside `cpu_fake_quant()` tensors on a CPU go through the
arithmetic of `qwen35.nvfp4` instead. It serves the forward passes of calibration and of the report; what is written to
disk is computed by ModelOpt itself. Tested against ModelOpt's `NVFP4QTensor`, and no oracle for any other test.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from qwen35.nvfp4 import BLOCK_WIDTH, fake_quantize_activation, global_scale_of

_E2M1_BLOCKS_WITH_E4M3_SCALES = (BLOCK_WIDTH, 4, 2, 8, 4)  # width; bits and exponent bits of values, then of scales


def fake_quantize(
    inputs: Tensor,
    block_size: int,
    amax: Tensor,
    num_bits: int,
    exponent_bits: int,
    scale_num_bits: int,
    scale_exponent_bits: int,
) -> Tensor:
    """`inputs` rounded through NVFP4 with the global scale amax / 2688; signature of ModelOpt's operator.

    Raises ValueError for other formats and without a calibrated `amax`: a scale is never taken from the batch.
    """
    asked = (block_size, num_bits, exponent_bits, scale_num_bits, scale_exponent_bits)
    if asked != _E2M1_BLOCKS_WITH_E4M3_SCALES:
        raise ValueError(f"fake quantisation on a CPU: expected NVFP4 {_E2M1_BLOCKS_WITH_E4M3_SCALES}, got {asked}")
    if amax is None:
        raise ValueError("fake quantisation on a CPU: expected a calibrated amax, got none; calibrate first")
    return fake_quantize_activation(inputs, global_scale_of(amax.amax()))


@contextmanager
def cpu_fake_quant() -> Iterator[None]:
    """Replaces ModelOpt's operator for CPU tensors while the context is open."""
    import modelopt.torch.quantization.tensor_quant as tensor_quant

    original = tensor_quant.dynamic_block_quantize_op

    def dispatch(inputs: Tensor, *arguments: object) -> Tensor:
        return original(inputs, *arguments) if inputs.is_cuda else fake_quantize(inputs, *arguments)

    tensor_quant.dynamic_block_quantize_op = dispatch
    try:
        yield
    finally:
        tensor_quant.dynamic_block_quantize_op = original
