"""AdamW with decay groups, and Muon on the hidden matrices.

Weight decay pulls on the matrices of linear layers only; embeddings, norms, biases and position tables are left alone
(decay = "all-but-biases" spares only the biases, as the course's code does).
With Muon, the matrices inside the blocks are stepped by their orthogonalised momentum (Jordan et al. 2024;
`torch.optim.Muon`) and AdamW takes the rest.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from headway.models import CausalModel

NAMES = ("adamw", "muon")
DECAYS = ("matrices", "all-but-biases")


class Optimizer:
    """One or two torch optimizers behind one step, with the peak rate of every group remembered."""

    def __init__(self, parts: list[torch.optim.Optimizer], names: dict[Tensor, str]) -> None:
        self.parts = parts
        self.names = names
        self.peaks = [[group["lr"] for group in part.param_groups] for part in parts]

    def set_rate(self, share: float) -> None:
        """Every group's learning rate becomes `share` of its peak."""
        for part, peaks in zip(self.parts, self.peaks, strict=True):
            for group, peak in zip(part.param_groups, peaks, strict=True):
                group["lr"] = peak * share

    def step(self) -> None:
        for part in self.parts:
            part.step()

    def zero_grad(self) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none=True)

    def state(self) -> dict[str, Tensor]:
        """Everything the optimizers remember, as tensors under `parameter name/state name`."""
        return {
            f"{self.names[parameter]}/{key}": torch.as_tensor(value)
            for part in self.parts
            for parameter, state in part.state.items()
            for key, value in state.items()
        }

    def load(self, tensors: dict[str, Tensor]) -> None:
        owners = {
            parameter: part for part in self.parts for group in part.param_groups for parameter in group["params"]
        }
        parameters = {name: parameter for parameter, name in self.names.items()}
        for part in self.parts:
            part.state.clear()
        for label, tensor in tensors.items():
            name, key = label.rsplit("/", 1)
            parameter = parameters[name]
            fused = owners[parameter].param_groups[0].get("fused", False)
            place = parameter.device if key != "step" or fused else torch.device("cpu")  # as torch itself keeps them
            owners[parameter].state[parameter][key] = tensor.to(place, copy=True)


def build_optimizer(model: CausalModel, settings: Any) -> Optimizer:
    """The optimizer that `[training]` asks for."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    if settings.decay == "matrices":
        linear = {module.weight for module in model.modules() if isinstance(module, nn.Linear)}
        pulled = linear - {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    else:
        pulled = {parameter for parameter, name in names.items() if not name.endswith("bias")}
    decayed = [parameter for parameter in names if parameter in pulled]
    plain = [parameter for parameter in names if parameter not in pulled]
    parts: list[torch.optim.Optimizer] = []
    if settings.optimizer == "muon":
        hidden = model.hidden_matrices()
        decayed = [parameter for parameter in decayed if not any(parameter is each for each in hidden)]
        parts.append(
            torch.optim.Muon(
                hidden, lr=settings.muon_learning_rate, weight_decay=settings.muon_weight_decay, momentum=0.95
            )
        )
    groups = [
        {"params": decayed, "weight_decay": settings.weight_decay},
        {"params": plain, "weight_decay": 0.0},
    ]
    betas = (settings.beta1, settings.beta2)
    fused = all(parameter.device.type in ("cuda", "cpu") for parameter in names)
    parts.append(torch.optim.AdamW(groups, lr=settings.learning_rate, betas=betas, fused=fused))
    return Optimizer(parts, names)
