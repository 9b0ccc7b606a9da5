"""A recurrent language model: an embedding, a stack of recurrent layers, logits.

    h_t^0 = E[token_t];   h_t^l = step(h_t^{l−1}, h_{t−1}^l);   logits_t = h_t^L W_Vᵀ

"Recurrent neural network based language model" (Mikolov et al. 2010), as a rule with LSTM layers ("LSTM neural networks
for language modeling", Sundermeyer et al. 2012). Dropout acts on what goes up, never on what goes on in time
("Recurrent neural network regularization", Zaremba et al. 2014).

Every row begins with a state of zeros, in training too: nothing is carried from one window of a text to the next, so
that a step stays a function of its own rows. What the model knows of a row is its state, L · D numbers (an LSTM: twice
as many), however long the row is. A token costs O(L · D²) at any place; those of a row come one after the other.

Shapes: B batch, T length, E embedding width, D state width, L layers, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from headway.models.base import CausalModel, recurrent_matrices
from headway.models.rnn_seq2seq import CELLS, run_cell
from headway.nn import Cache, Dropout, LayerStates, Recurrent
from headway.nn.recurrent import every_state
from headway.settings import setting


@dataclass
class RNNLanguageModelSettings:
    """`[model]` with kind = "rnn"."""

    kind: str = setting("rnn", "which model to build")
    cell: str = setting("lstm", "what a step is", choices=tuple(CELLS))
    width: int = setting(128, "numbers in a token's embedding", least=1)
    hidden: int = setting(0, "numbers in a layer's state; 0: as many as width", least=0)
    layers: int = setting(2, "recurrent layers on top of each other", least=1)
    block: int = setting(128, "longest row, in tokens", least=2)
    dropout: float = setting(0.1, "share dropped of embeddings, between layers and before the output", least=0, below=1)
    tied: bool = setting(False, "use the embedding matrix for the output too; the state is then as wide as it")

    def problems(self) -> Iterator[tuple[str, str]]:
        if self.tied and self.hidden not in (0, self.width):
            yield (
                "hidden",
                f"with tied = true the output is the embedding, so hidden ({self.hidden}) must be width "
                f"({self.width}); set hidden = 0 or tied = false",
            )

    def build(self, vocabulary: int) -> RNNLanguageModel:
        return RNNLanguageModel(self, vocabulary)


class RNNLanguageModel(CausalModel):
    compiles = False

    def __init__(self, settings: RNNLanguageModelSettings, vocabulary: int) -> None:
        super().__init__()
        s = self.settings = settings
        hidden = s.hidden or s.width
        widths = [s.width, *[hidden] * (s.layers - 1)]
        self.embedding = nn.Embedding(vocabulary, s.width)
        self.blocks = nn.ModuleList(CELLS[s.cell](width, hidden, batch_first=True) for width in widths)
        self.head = nn.Linear(hidden, vocabulary, bias=False)
        self.dropout = Dropout(s.dropout)
        self.reset()
        if s.tied:
            self.head.weight = self.embedding.weight

    def reset(self) -> None:
        """Embedding and output from N(0, 1/E) and N(0, 1/D); the layers as torch makes them, uniform in ±1/√D."""
        for weight in (self.embedding.weight, cast(Tensor, self.head.weight)):
            nn.init.normal_(weight, std=weight.shape[1] ** -0.5)

    def hidden(self, tokens: Tensor, cache: Cache | None = None) -> Tensor:
        x = self.embedding(tokens)
        for number, layer in enumerate(self.stack()):
            x = self.dropout(x)
            x = run_cell(layer, x)[0] if cache is None else go_on(layer, x, cache.layers[number], cache.lengths)
        return self.dropout(x)

    def empty_cache(self, rows: int, length: int) -> Cache:
        weight = self.embedding.weight
        layers = [LayerStates.empty(rows, layer.equation.parts, layer.hidden_size, weight) for layer in self.stack()]
        return Cache(layers, torch.zeros(rows, dtype=torch.long, device=weight.device))

    def stack(self) -> Iterator[Recurrent]:
        """The layers, from the first to the last."""
        return (cast(Recurrent, layer) for layer in self.blocks)

    def hidden_matrices(self) -> list[Tensor]:
        return recurrent_matrices(self)


def go_on(layer: Recurrent, x: Tensor, kept: LayerStates, lengths: Tensor) -> Tensor:
    """The states (B, T, D) over x (B, T, …), which continues rows that hold `lengths` (B,) tokens; they are kept."""
    states = every_state(layer, x, kept.at(lengths))
    kept.keep(states, lengths)
    return states[0][:, 1:]
