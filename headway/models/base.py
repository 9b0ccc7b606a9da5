"""What every model that continues text offers, so that decoding and tasks need not know which one it is."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from torch import Tensor, nn

from headway.nn import Cache


class CausalModel(nn.Module):
    """A model that says, after each token, what may come next.

    Shapes: B batch, T length, D width, V vocabulary.
    """

    settings: Any
    head: nn.Module  # (…, D) → (…, V)

    def forward(self, tokens: Tensor, cache: Cache | None = None) -> Tensor:
        """Logits (B, T, V) of what follows each of `tokens` (B, T); with a cache, the tokens continue its rows."""
        return self.head(self.hidden(tokens, cache))

    @property
    def context(self) -> int:
        """How many tokens it can look at."""
        return int(self.settings.block)

    def hidden_matrices(self) -> list[Tensor]:
        """The matrices between the embedding and the head, which Muon may step."""
        return [part.weight for part in self.modules() if isinstance(part, nn.Linear) and part is not self.head]

    @abstractmethod
    def hidden(self, tokens: Tensor, cache: Cache | None = None) -> Tensor:
        """What the model makes of each token, ready for the head: (B, T, D)."""

    @abstractmethod
    def empty_cache(self, rows: int, length: int) -> Cache:
        """Room for `length` tokens in each of `rows` rows."""


def parameter_count(model: nn.Module) -> int:
    """Learned numbers in the model, shared ones counted once."""
    return sum(parameter.numel() for parameter in model.parameters())
