"""What models offer, so that decoding, tasks and training need not know which one it is."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, Protocol, Self

from torch import Tensor, nn

from headway.nn import Cache, Recurrent


class CausalModel(nn.Module):
    """A model that says, after each token, what may come next.

    Shapes: B batch, T length, D width, V vocabulary.
    """

    settings: Any
    head: nn.Module  # (…, D) → (…, V)
    compiles = True

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


class DecoderState(Protocol):
    """What a model remembers of its rows between two steps of decoding."""

    def select(self, rows: Tensor) -> Self:
        """Of these rows only, in this order; a row may be named several times."""
        ...


class Seq2SeqModel(nn.Module):
    """A model that reads a source and says, after each token of the target, what may come next.

    Sources and targets are padded on the right with id 0, which never changes what is said of the other tokens.
    Shapes: B batch, S source length, T target length, V vocabulary.
    """

    settings: Any
    head: nn.Module  # (…, D) → (…, V)
    compiles = True  # worth compiling; not where that would write every step of a row out

    @abstractmethod
    def forward(self, tokens: Tensor, source: Tensor) -> Tensor:
        """Logits (B, T, V) of what follows each of the target's `tokens` (B, T), given `source` (B, S)."""

    @abstractmethod
    def start(self, source: Tensor, room: int) -> DecoderState:
        """Read the sources (B, S) once; `room` is how many tokens of the target may come."""

    @abstractmethod
    def step(self, tokens: Tensor, state: DecoderState) -> Tensor:
        """Logits (B, V) of what follows when each row's target goes on with `tokens` (B,); the state moves on."""

    def alignment(self, tokens: Tensor, source: Tensor) -> Tensor | None:
        """How much each of the target's tokens looked at each of the source's, (B, T, S); None where nothing looks."""
        return None

    def hidden_matrices(self) -> list[Tensor]:
        """The matrices between the embeddings and the head, which Muon may step; single rows are none."""
        linear = [part.weight for part in self.modules() if isinstance(part, nn.Linear) and part is not self.head]
        return [weight for weight in linear if min(weight.shape) > 1] + recurrent_matrices(self)


Model = CausalModel | Seq2SeqModel
"""Whatever can be trained."""


def parameter_count(model: nn.Module) -> int:
    """Learned numbers in the model, shared ones counted once."""
    return sum(parameter.numel() for parameter in model.parameters())


def recurrent_matrices(model: nn.Module) -> list[Tensor]:
    """The matrices of its recurrent layers, those that read and those that carry on; single rows are none."""
    layers = [part for part in model.modules() if isinstance(part, Recurrent)]
    weights = [weight for layer in layers for weight in layer.parameters(recurse=False)]
    return [weight for weight in weights if weight.dim() == 2 and min(weight.shape) > 1]


TIED = ("all", "target", "none")


def tie(tied: str, source: nn.Embedding, target: nn.Embedding, head: nn.Linear) -> None:
    """One matrix for the embeddings of source and target and for the output ("all"), or for the latter two ("target").

    "Using the output embedding to improve language models" (Press and Wolf 2017), section 3: three-way weight tying.
    """
    if tied in ("all", "target"):
        head.weight = target.weight
    if tied == "all":
        source.weight = target.weight
