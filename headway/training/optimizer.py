"""AdamW with decay groups, and Muon on the hidden matrices.

Weight decay pulls on the matrices of linear layers only; embeddings, norms, biases and position tables are left alone
(decay = "all-but-biases" spares only the biases, as the course's code does).
With Muon, the matrices inside the blocks are stepped by their orthogonalised momentum (Jordan et al. 2024;
`torch.optim.Muon`, or `BatchedMuon` on a GPU and where bfloat16 is slow) and AdamW takes the rest.

On a GPU AdamW's step is fused, one kernel for all weights, and the learning rates are tensors there, so that a captured
step can be given another rate and can pass over an update without asking Python. Where each process holds a part of
every weight, it holds that part of the optimizer's state too, and Muon is `ShardedMuon`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from headway.files import one_line
from headway.models import Model
from headway.nn import Recurrent
from headway.training.device import has_bfloat16
from headway.training.loss_scale import LossScale
from headway.training.muon import BatchedMuon, ShardedMuon
from headway.training.sharded import is_sharded

NAMES = ("adamw", "muon")
DECAYS = ("matrices", "all-but-biases")
FUSED = ("auto", "on", "off")
SCALE = "loss scale"  # beside the names of parameters


class Optimizer:
    """One or two torch optimizers behind one step, with the peak rate of every group remembered.

    With a loss `scale`, gradients are those of the scaled loss until `unscale` divides them.
    """

    def __init__(
        self, parts: list[torch.optim.Optimizer], names: dict[Tensor, str], scale: LossScale | None = None
    ) -> None:
        self.parts = parts
        self.names = names
        self.scale = scale
        self.uncounted = False  # an update was begun, and whoever counts steps has not counted it
        self.fused = bool(parts[-1].param_groups[0].get("fused"))
        self.capturable = isinstance(parts[-1].param_groups[0]["lr"], Tensor)  # nothing of a step is decided in Python
        self.peaks = [[float(group["lr"]) for group in part.param_groups] for part in parts]

    def set_rate(self, share: float) -> None:
        """Every group's learning rate becomes `share` of its peak."""
        for part, peaks in zip(self.parts, self.peaks, strict=True):
            for group, peak in zip(part.param_groups, peaks, strict=True):
                if isinstance(group["lr"], Tensor):
                    group["lr"].fill_(peak * share)
                else:
                    group["lr"] = peak * share

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of the loss."""
        (loss if self.scale is None else loss * self.scale.value).backward()

    def unscale(self) -> None:
        """The gradients become those of the loss itself."""
        if self.scale is not None:
            gradients = [parameter.grad for parameter in self.names if parameter.grad is not None]
            torch._foreach_mul_(gradients, self.scale.value.reciprocal())

    def is_fine(self, loss: float, norm: float) -> bool:
        """Whether the loss and the gradient are numbers. A gradient may overflow if the scale was to blame, which is
        lowered then."""
        if not math.isfinite(norm) and (self.scale is None or float(self.scale.value) < 1.0):
            return False
        return math.isfinite(loss)

    def step_if_finite(self, loss: Tensor, norm: Tensor) -> None:
        """Update the weights, unless the loss or the norm of the gradient is no number: then nothing changes.

        Where the rates are tensors on a GPU, the decision is taken there, without waiting for it.
        """
        finite = loss.isfinite() & norm.isfinite()
        if self.scale is not None:
            self.scale.update(finite)
        if self.capturable:
            for part in self.parts:
                part.found_inf = (~finite).float()  # type: ignore[attr-defined]
        elif not finite:
            return
        self.uncounted = True
        for part in self.parts:
            part.step()

    def snapshot(self) -> list[tuple[Tensor, Tensor]]:
        """Weights and state as they are, with copies of them on the CPU, for `restore`."""
        tensors = [*self.names, *(value for part in self.parts for _, value in tensors_of(part))]
        tensors += self.scale.tensors().values() if self.scale is not None else ()
        return [(tensor, tensor.detach().to("cpu", copy=True)) for tensor in tensors]

    @torch.no_grad()
    def restore(self, saved: list[tuple[Tensor, Tensor]]) -> None:
        """Put back what `snapshot` saved; state that came into being since is set to zero, as it begins."""
        known = {id(tensor) for tensor, _ in saved}
        for part in self.parts:
            for _, value in tensors_of(part):
                if id(value) not in known:
                    value.zero_()
        for tensor, copy in saved:
            tensor.copy_(copy)
        self.uncounted = False

    def zero_grad(self) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none=True)

    def state(self) -> dict[str, Tensor]:
        """Everything the optimizers remember, as tensors under `parameter name/state name`."""
        tensors = {
            f"{self.names[parameter]}/{key}": torch.as_tensor(value)
            for part in self.parts
            for parameter, state in part.state.items()
            for key, value in state.items()
        }
        scale = self.scale.tensors() if self.scale is not None else {}
        return tensors | {f"{SCALE}/{key}": value for key, value in scale.items()}

    def room_for(self, label: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Zeros for one tensor of `state`, held by this process as it holds the parameter."""
        parameter = next((each for each, name in self.names.items() if name == label.rsplit("/", 1)[0]), None)
        if parameter is not None and shape == parameter.shape:
            return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
        return torch.zeros(shape, dtype=dtype)

    def load(self, tensors: dict[str, Tensor]) -> None:
        owners = {
            parameter: part for part in self.parts for group in part.param_groups for parameter in group["params"]
        }
        parameters = {name: parameter for parameter, name in self.names.items()}
        for part in self.parts:
            if not isinstance(part, BatchedMuon):
                part.state.clear()
        for label, tensor in tensors.items():
            name, key = label.rsplit("/", 1)
            if name == SCALE:
                if self.scale is not None:  # else the precision was changed since
                    self.scale.tensors()[key].copy_(tensor)
                continue
            parameter = parameters[name]
            fused = owners[parameter].param_groups[0].get("fused", False)
            place = parameter.device if key != "step" or fused else torch.device("cpu")  # as torch itself keeps them
            state = owners[parameter].state[parameter]
            if key in state:
                state[key].copy_(tensor)  # a part of something larger, which must stay one
            else:
                state[key] = tensor.to(place, copy=True)


def tensors_of(part: torch.optim.Optimizer) -> Iterator[tuple[str, Tensor]]:
    for state in part.state.values():
        yield from ((name, value) for name, value in state.items() if isinstance(value, Tensor))


def build_optimizer(model: Model, settings: Any, precision: torch.dtype = torch.float32) -> Optimizer:
    """The optimizer that `[training]` asks for, to train at `precision`."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    if settings.decay == "matrices":
        linear = {weight for module in model.modules() for weight in matrices_of(module)}
        pulled = linear - {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    else:
        pulled = {parameter for parameter, name in names.items() if not name.endswith("bias")}
    decayed = [parameter for parameter in names if parameter in pulled]
    plain = [parameter for parameter in names if parameter not in pulled]
    parts: list[torch.optim.Optimizer] = []
    if settings.optimizer == "muon":
        hidden = model.hidden_matrices()
        decayed = [parameter for parameter in decayed if not any(parameter is each for each in hidden)]
        parts.append(muon(hidden, settings.muon_learning_rate, settings.muon_weight_decay))
    groups = [
        {"params": decayed, "weight_decay": settings.weight_decay},
        {"params": plain, "weight_decay": 0.0},
    ]
    device = next(iter(names)).device
    fused = choose_fused(device, settings.fused)[0]
    capturable = fused and device.type == "cuda" and not is_sharded(names)
    parts.append(
        torch.optim.AdamW(
            groups,
            lr=torch.tensor(settings.learning_rate, device=device) if capturable else settings.learning_rate,
            betas=(settings.beta1, settings.beta2),
            fused=fused or None,  # False would also forbid the kernels between one and one for each
            capturable=capturable,
        )
    )
    return Optimizer(parts, names, LossScale(device) if precision == torch.float16 else None)


def choose_fused(device: torch.device, wanted: str = "auto") -> tuple[bool, str]:
    """(whether one kernel of AdamW's steps all weights, and the same in words with the reason)."""
    if wanted == "off":
        return False, "AdamW without fused kernels, as asked"
    if wanted == "auto" and device.type not in ("cuda", "cpu"):
        return False, f"AdamW without fused kernels, which are slow or missing on {device.type}"
    try:
        torch.optim.AdamW([torch.zeros(1, device=device, requires_grad=True)], fused=True)
    except RuntimeError as error:  # this version of torch has none for the device
        return False, f"AdamW without fused kernels ({one_line(str(error))[:100]})"
    return True, "AdamW in one kernel" + (", as asked" if wanted == "on" else " (fused)")


def matrices_of(module: nn.Module) -> list[Tensor]:
    """What a module multiplies by, where it is a linear or a recurrent layer."""
    if not isinstance(module, nn.Linear | Recurrent):
        return []
    return [parameter for parameter in module.parameters(recurse=False) if parameter.dim() == 2]


def muon(matrices: list[Tensor], rate: float, decay: float) -> torch.optim.Optimizer:
    device = matrices[0].device
    if is_sharded(matrices):
        return ShardedMuon(matrices, rate, decay)
    if device.type == "cuda":
        return BatchedMuon(matrices, torch.tensor(rate, device=device), decay)
    if not has_bfloat16(device)[0]:
        return BatchedMuon(matrices, rate, decay)
    return torch.optim.Muon(matrices, lr=rate, weight_decay=decay, momentum=0.95)
