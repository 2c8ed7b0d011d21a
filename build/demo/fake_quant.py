"""NVFP4 rounding of weights, as the served checkpoint will have them, for training through it and for evaluation.

E2M1 codes in blocks of 16 along the input width, one E4M3 scale a block, one fp32 scale a tensor (amax / 2688): the
layout that ModelOpt writes. Attention, delta net and expert projections only; everything else stays bf16.
"""

import re

import torch
from torch import nn

BLOCK = 16
E2M1_MAX, E4M3_MAX, E4M3_MIN = 6.0, 448.0, 2.0**-9
QUANTISED = re.compile(
    r"^model\.language_model\.layers\.\d+\."
    r"(self_attn\.[qkvo]_proj|linear_attn\.(in_proj_qkv|in_proj_z|out_proj)|mlp\.shared_expert\.(gate|up|down)_proj"
    r"|mlp\.experts\.(gate_up|down)_proj)(\.weight)?$"
)


def is_quantised(name: str) -> bool:
    """Whether the served model keeps this parameter in NVFP4."""
    return QUANTISED.match(name) is not None


def round_e2m1(x: torch.Tensor) -> torch.Tensor:
    """Nearest E2M1 value (0, 0.5, 1, 1.5, 2, 3, 4, 6); a tie goes to the even code; saturates at 6."""
    magnitude = x.abs()
    spacing = 0.5 * (1 + (magnitude >= 2).float() + 2 * (magnitude >= 4).float())
    return ((magnitude / spacing).round() * spacing).clamp(max=E2M1_MAX).copysign(x)


def round_nvfp4(weight: torch.Tensor) -> torch.Tensor:
    """weight [..., K], K a multiple of 16 -> its NVFP4 value; a leading expert dimension has a scale per expert."""
    blocks = weight.float().unflatten(-1, (-1, BLOCK))
    if weight.ndim == 3:
        amax = weight.float().abs().amax((-2, -1), keepdim=True).unsqueeze(-1)
    else:
        amax = weight.float().abs().amax()
    scale_2 = (amax / (E2M1_MAX * E4M3_MAX)).clamp(min=1e-30)
    scale = (blocks.abs().amax(-1, keepdim=True) / E2M1_MAX / scale_2).clamp(E4M3_MIN, E4M3_MAX)
    scale = scale.to(torch.float8_e4m3fn).float() * scale_2
    return (round_e2m1(blocks / scale) * scale).flatten(-2)


def quantised_state(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """bf16 rounding of every tensor, NVFP4 rounding of the quantised ones, in fp32."""
    rounded = {name: value.to(torch.bfloat16).float() for name, value in state.items()}
    return {name: round_nvfp4(value) if is_quantised(name) else value for name, value in rounded.items()}


class RoundedWeights:
    """Inside the context the model's quantised parameters hold their NVFP4 values, outside the full ones.

    Run forward and backward inside and the optimiser outside: the gradient at the rounded weights then moves the full
    ones (straight-through estimation).
    """

    def __init__(self, model: nn.Module):
        self.parameters = [p for name, p in model.named_parameters() if is_quantised(name)]

    def __enter__(self) -> None:
        self.full = [p.detach().clone() for p in self.parameters]
        for p in self.parameters:
            p.data.copy_(round_nvfp4(p.data))

    def __exit__(self, *_: object) -> None:
        for p, full in zip(self.parameters, self.full, strict=True):
            p.data.copy_(full)
        self.full = []
