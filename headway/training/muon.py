"""Muon, all matrices of one shape stepped at once, with a learning rate that may live on the device.

    B ← μ B + (1 − μ) g                 momentum
    O = NS₅((1 − μ) g + μ B)            its orthogonal part, by five Newton–Schulz steps
    θ ← (1 − η λ) θ − η √max(1, m/n) O  for θ of m × n

Jordan et al. 2024, "Muon: an optimizer for hidden layers". The arithmetic is that of `torch.optim.Muon` (tested), which
takes one matrix at a time, keeps its rate in Python, where a captured step could not change it, and orthogonalises in
bfloat16 always. Here that is for devices that compute in it: a CPU without such instructions takes thirty times as long
for the same product.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from headway.training.device import has_bfloat16

COEFFICIENTS = (3.4445, -4.7750, 2.0315)


class BatchedMuon(torch.optim.Optimizer):
    """Steps matrices by their orthogonalised momentum. `found_inf`, where set, is 1 for a step that must not happen."""

    found_inf: Tensor | None = None

    def __init__(
        self, matrices: Iterable[Tensor], lr: float | Tensor, weight_decay: float, momentum: float = 0.95
    ) -> None:
        matrices = list(matrices)
        super().__init__(matrices, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})
        self.shapes: dict[torch.Size, list[Tensor]] = {}
        for matrix in matrices:
            if matrix.dim() != 2:
                raise ValueError(f"Muon steps matrices, not a tensor of shape {tuple(matrix.shape)}")
            self.shapes.setdefault(matrix.shape, []).append(matrix)
        for same in self.shapes.values():
            stack = torch.zeros(len(same), *same[0].shape, device=same[0].device, dtype=same[0].dtype)
            for matrix, part in zip(same, stack.unbind(), strict=True):
                self.state[matrix]["momentum_buffer"] = part  # a view of the stack

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        group = self.param_groups[0]
        rate, momentum = group["lr"], group["momentum"]
        for shape, matrices in self.shapes.items():
            buffers = [self.state[matrix]["momentum_buffer"] for matrix in matrices]
            gradients = torch.stack([torch.zeros_like(each) if each.grad is None else each.grad for each in matrices])
            share: float | Tensor = 1.0 - momentum
            if self.found_inf is not None:
                gradients = gradients.masked_fill(self.found_inf > 0, 0.0)
                share = share * (1.0 - self.found_inf)
                rate = rate * (1.0 - self.found_inf)
            before = torch.stack(buffers)
            after = before + (gradients - before) * share
            torch._foreach_copy_(buffers, list(after.unbind()))
            update = orthogonal(gradients + (after - gradients) * momentum)
            scale = rate * max(1.0, shape[0] / shape[1]) ** 0.5
            values = torch.stack(list(matrices))
            values = values * (1.0 - rate * group["weight_decay"]) - scale * update
            torch._foreach_copy_(list(matrices), list(values.unbind()))


class ShardedMuon(torch.optim.Optimizer):
    """Muon on matrices of which every process holds some rows (DTensors).

    Momentum is kept in parts. The orthogonal part is one of the whole matrix: each is put together in every process,
    computed there, and cut again, so that all processes do the same work on it.
    """

    def __init__(self, matrices: Iterable[Tensor], lr: float, weight_decay: float, momentum: float = 0.95) -> None:
        super().__init__(matrices, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        from torch.distributed.tensor import DTensor, Replicate

        group = self.param_groups[0]
        rate, momentum = group["lr"], group["momentum"]
        for matrix in group["params"]:
            state = self.state[matrix]
            if not state:
                state["momentum_buffer"] = torch.zeros_like(matrix)
            buffer = state["momentum_buffer"].lerp_(matrix.grad, 1.0 - momentum)
            update = orthogonal(matrix.grad.lerp(buffer, momentum).full_tensor()[None])[0]
            everywhere = DTensor.from_local(update, matrix.device_mesh, [Replicate()], run_check=False)
            scale = rate * max(1.0, matrix.shape[0] / matrix.shape[1]) ** 0.5
            matrix.mul_(1.0 - rate * group["weight_decay"])
            matrix.sub_(everywhere.redistribute(placements=matrix.placements), alpha=scale)


def orthogonal(matrices: Tensor, steps: int = 5) -> Tensor:
    """The nearest semi-orthogonal matrix to each of (N, m, n), roughly: singular values end near 1, not at it."""
    a, b, c = COEFFICIENTS
    x = matrices.to(torch.bfloat16 if has_bfloat16(matrices.device)[0] else torch.float32)
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).to(matrices.dtype)
