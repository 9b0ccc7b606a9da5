"""The loss scale of float16 training ("Mixed precision training", Micikevicius et al. 2018).

float16 has three bits of precision more than bfloat16, and no small numbers: gradients under 6e-8 vanish. So the loss
is multiplied by a power of two before the backward pass, and the gradients are divided by it after. A step whose
gradients overflow changes no weight and halves the scale; CALM steps without one double it.
"""

from __future__ import annotations

import torch
from torch import Tensor

FIRST = 2.0**16
CALM = 2000


class LossScale:
    """Lives on the device, so that a captured step can change it."""

    def __init__(self, device: torch.device) -> None:
        self.value = torch.tensor(FIRST, device=device)
        self.calm = torch.tensor(0.0, device=device)  # steps since it last changed

    def tensors(self) -> dict[str, Tensor]:
        return {"value": self.value, "calm": self.calm}

    def update(self, fits: Tensor) -> None:
        """After a step whose loss and gradient were numbers, or were not."""
        calm = (self.calm + 1.0) * fits
        grows = calm >= CALM
        self.value.mul_(torch.where(fits, 1.0 + grows, 0.5))
        self.calm.copy_(calm * ~grows)
