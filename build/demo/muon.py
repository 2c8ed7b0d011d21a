"""Muon: momentum made orthogonal by a few Newton-Schulz steps (K. Jordan et al., 2024), in batches by shape."""

import torch


def orthogonalise(x: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """Nearest orthogonal matrices, roughly, of x [n, rows, columns]."""
    a, b, c = 3.4445, -4.7750, 2.0315
    wide = x.shape[-2] <= x.shape[-1]
    x = (x if wide else x.mT).to(torch.bfloat16)
    x = x / (x.float().norm(dim=(-2, -1), keepdim=True) + 1e-7).to(x.dtype)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x if wide else x.mT).float()


class Muon(torch.optim.Optimizer):
    """For parameters of 2 or 3 dimensions; the last two are the matrix."""

    def __init__(self, params, lr: float, momentum: float = 0.95, weight_decay: float = 0.01):
        super().__init__(params, {"lr": lr, "peak": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[torch.nn.Parameter]] = {}
            for p in group["params"]:
                if p.grad is not None:
                    by_shape.setdefault(p.shape[-2:], []).append(p)
            for shape, parameters in by_shape.items():
                self._step_shape(group, shape, parameters)

    def _step_shape(self, group: dict, shape: torch.Size, parameters: list[torch.nn.Parameter]) -> None:
        updates = []
        for p in parameters:
            state = self.state[p]
            if not state:
                state["momentum"] = torch.zeros_like(p)
            state["momentum"].lerp_(p.grad, 1 - group["momentum"])
            updates.append(p.grad.lerp(state["momentum"], group["momentum"]).view(-1, *shape))
        orthogonal = orthogonalise(torch.cat(updates))
        scale = group["lr"] * max(1.0, shape[0] / shape[1]) ** 0.5
        for p, update in zip(parameters, orthogonal.split([u.shape[0] for u in updates]), strict=True):
            p.mul_(1 - group["lr"] * group["weight_decay"]).sub_(update.view_as(p), alpha=scale)
