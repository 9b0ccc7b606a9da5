"""Recurrent nets from sequence to sequence: an encoder reads the source, a decoder writes the target.

    encoder   h_j = RNN(h_{j−1}, E[x_j])
    decoder   s_t = RNN(s_{t−1}, [E[y_t]; c_t]),   o_t = tanh(W [s_t; c_t]),   logits = o_t W_Vᵀ

The first state s_0 of each layer is made of the states of the encoder's layer of the same number (`context`):
  last        h_S: "Sequence to sequence learning with neural networks" (Sutskever et al. 2014)
  transform   tanh(V h_S): "Learning phrase representations using RNN encoder-decoder" (Cho et al. 2014)
  all         Σ_j a_j h_j with a = softmax(uᵀ h_j): a weighted mean, the same for every step of the target
An LSTM's decoder takes the encoder's last cells besides. What a step sees of the source (`attention`):
  none        c is the top layer's s_0, at every step as in Cho et al.: one vector for the whole source
  additive    c_t = Σ_j a_tj h_j of the top layer, weighed by s_{t−1} (Bahdanau et al. 2015): step after step
  dot, general   the same, weighed by s_t and for the output alone (Luong et al. 2015, without input feeding): the
              decoder runs over the whole target first, then all steps look at once

Right padding never reaches the tokens of a net that runs from left to right. For the other direction each row is turned
round within its length. So fused kernels run over padded rows, and no length is needed on the host.

Shapes: B batch, T target length, S source length, E embedding width, D hidden width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headway.models.base import TIED, DecoderState, Seq2SeqModel, tie
from headway.nn import GRU, LSTM, RNN, Dropout, masked_softmax
from headway.nn.alignment import AdditiveScore, DotScore, GeneralScore
from headway.settings import setting

PAD = 0
FIXED = ("last", "transform", "all")
ATTENTIONS = ("none", "additive", "dot", "general")
CELLS: dict[str, Callable[..., nn.Module]] = {"rnn": RNN, "gru": GRU, "lstm": LSTM}
Carried = tuple[Tensor, ...]  # what a layer takes from step to step, (B, D) each: its state, and an LSTM's cell
Written = tuple[Tensor, list[Carried], Tensor | None]  # something of each step, what is carried on, where steps looked


@dataclass
class RNNSeq2SeqSettings:
    """`[model]` with kind = "rnn_seq2seq"."""

    reads_source = True

    kind: str = setting("rnn_seq2seq", "which model to build")
    cell: str = setting("gru", "what a step is", choices=tuple(CELLS))
    width: int = setting(256, "numbers in a token's embedding", least=1)
    hidden: int = setting(256, "numbers in a state; both directions of the encoder together", least=1)
    layers: int = setting(1, "recurrent layers of the encoder, and of the decoder", least=1)
    bidirectional: bool = setting(True, "the encoder reads in both directions, with half of hidden each")
    dropout: float = setting(0.1, "share dropped of embeddings, between layers and before the output", least=0, below=1)
    block: int = setting(128, "longest row, source or target, in tokens", least=2)
    context: str = setting("last", "what the decoder begins with: of the encoder's states", choices=FIXED)
    attention: str = setting("additive", "what each step sees of the source; none: the context", choices=ATTENTIONS)
    tied: str = setting(
        "none", "embeddings that share a matrix: source, target and output; or the last two", choices=TIED
    )

    sampling: float = setting(
        0.0, "in training, share of the target's tokens that are given as the model guessed them", least=0.0, most=1.0
    )

    def problems(self) -> Iterator[tuple[str, str]]:
        if self.bidirectional and self.hidden % 2:
            yield "hidden", f"each direction has half of it: hidden ({self.hidden}) must be even"

    def build(self, vocabulary: int) -> RNNSeq2Seq:
        return RNNSeq2Seq(self, vocabulary)


class RNNSeq2Seq(Seq2SeqModel):
    compiles = False

    def __init__(self, settings: RNNSeq2SeqSettings, vocabulary: int) -> None:
        super().__init__()
        s = self.settings = settings
        self.source = nn.Embedding(vocabulary, s.width)
        self.target = nn.Embedding(vocabulary, s.width)
        widths = [s.width, *[s.hidden] * (s.layers - 1)]
        self.encoder = nn.ModuleList(Reader(s, width) for width in widths)
        self.contexts = nn.ModuleList(CONTEXTS[s.context](s.hidden) for _ in range(s.layers))
        self.decoder = DECODERS[s.attention](s)
        self.output = nn.Linear(2 * s.hidden, s.width)
        self.head = nn.Linear(s.width, vocabulary, bias=False)
        self.dropout = Dropout(s.dropout)
        self.reset()
        tie(s.tied, self.source, self.target, self.head)

    def reset(self) -> None:
        """Embeddings and output from N(0, 1/E); everything else as torch makes it, uniform in ±1/√(inputs)."""
        for part in (self.source, self.target, self.head):
            nn.init.normal_(cast(Tensor, part.weight), std=self.settings.width**-0.5)

    def forward(self, tokens: Tensor, source: Tensor) -> Tensor:
        memory, first = self.read(source)
        if self.training and self.settings.sampling > 0.0:
            return self.with_guesses(tokens, memory, first)
        logits, _, _ = self.write(tokens, memory, first)
        return logits

    def with_guesses(self, tokens: Tensor, memory: Memory, carried: list[Carried]) -> Tensor:
        """The logits (B, T, V) where each step is given its token, or with probability `sampling` the last guess.

        "Scheduled sampling for sequence prediction with recurrent neural networks" (Bengio et al. 2015), at one rate.
        """
        logits: list[Tensor] = []
        given = tokens[:, :1]
        for place in range(tokens.shape[1]):
            if place:
                guessed = torch.rand(len(tokens), 1, device=tokens.device) < self.settings.sampling
                given = torch.where(guessed, logits[-1].detach().argmax(-1), tokens[:, place : place + 1])
            one, carried, _ = self.write(given, memory, carried)
            logits.append(one)
        return torch.cat(logits, 1)

    def read(self, source: Tensor) -> tuple[Memory, list[Carried]]:
        """What the decoder may look at, and what its layers begin with."""
        mask = source != PAD
        x = self.source(source)
        first: list[Carried] = []
        for layer, context in zip(self.encoder, self.contexts, strict=True):
            x, (last, *cell) = layer(self.dropout(x), mask)
            first.append((context(x, last, mask), *cell))
        return Memory(self.decoder.keys(x), x, mask, first[-1][0]), first

    def write(self, tokens: Tensor, memory: Memory, carried: list[Carried]) -> Written:
        """The logits (B, T, V) after `tokens` (B, T), what the layers carry on, where each step looked (B, T, S)."""
        both, carried, weights = self.decoder(self.dropout(self.target(tokens)), memory, carried)
        return self.head(self.dropout(torch.tanh(self.output(both)))), carried, weights

    def start(self, source: Tensor, room: int) -> State:
        return State(*self.read(source), sources=torch.arange(len(source), device=source.device))

    def step(self, tokens: Tensor, state: DecoderState) -> Tensor:
        state = cast(State, state)
        logits, state.carried, _ = self.write(tokens[:, None], state.memory, state.carried)
        return logits[:, 0]

    def alignment(self, tokens: Tensor, source: Tensor) -> Tensor | None:
        return self.write(tokens, *self.read(source))[2]


class Reader(nn.Module):
    """One layer of the encoder, in one direction or in both."""

    def __init__(self, settings: RNNSeq2SeqSettings, width: int) -> None:
        super().__init__()
        make, ways = CELLS[settings.cell], 2 if settings.bidirectional else 1
        self.ways = nn.ModuleList(make(width, settings.hidden // ways, batch_first=True) for _ in range(ways))

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Carried]:
        """Rows (B, S, E) of which `mask` (B, S) counts the first tokens → states (B, S, D), the last of each row."""
        turned, end = turn(mask), (mask.sum(1, keepdim=True) - 1).clamp(min=0)
        states, lasts = [], []
        for backward, way in enumerate(self.ways):
            row = take(x, turned) if backward else x
            out, carried = run_cell(way, row)
            last = take(out, end)[:, 0]
            lasts.append((last,) if len(carried) == 1 else (last, last_cell(way, row, out, mask)))
            states.append(take(out, turned) if backward else out)
        return torch.cat(states, -1), tuple(torch.cat(parts, -1) for parts in zip(*lasts, strict=True))


def run_cell(cell: nn.Module, x: Tensor, carried: Carried | None = None) -> tuple[Tensor, Carried]:
    """A recurrent net over x (B, T, …) in the precision of its weights: states (B, T, D), what it carries on."""
    dtype = next(cell.parameters()).dtype
    begin = tuple(each[None].to(dtype).contiguous() for each in carried or ())
    states, end = cell(x.to(dtype), *([begin] if len(begin) > 1 else begin))
    return states, tuple(each[0] for each in (end if isinstance(end, tuple) else (end,)))


def turn(mask: Tensor) -> Tensor:
    """For each place of a row (B, S) the place it changes with when the row is turned round within its length."""
    places = torch.arange(mask.shape[1], device=mask.device)
    return torch.where(mask, mask.sum(1, keepdim=True) - 1 - places, places)


def take(x: Tensor, places: Tensor) -> Tensor:
    """Of rows (B, S, D) those at `places` (B, N): (B, N, D)."""
    return x.gather(1, places[..., None].expand(-1, -1, x.shape[-1]))


def last_cell(lstm: nn.Module, x: Tensor, states: Tensor, mask: Tensor) -> Tensor:
    """An LSTM's cell after the last token of each padded row, (B, D), of which the fused kernel tells the states alone.

    Once the states are known, so are all gates at once, and c_S = Σ_j (Π_{k>j} f_k) i_j g_j.
    """
    before = F.pad(states, (0, 0, 1, 0))[:, :-1]
    inwards, onwards, *biases = lstm.parameters()
    gates = F.linear(x, inwards, biases[0]) + F.linear(before, onwards, biases[1])
    i, f, g, _ = gates.chunk(4, -1)
    kept = F.logsigmoid(f).masked_fill(~mask[..., None], 0.0)
    later = kept.flip(1).cumsum(1).flip(1) - kept  # Σ_{k>j} log f_k
    return (later.exp() * i.sigmoid() * g.tanh()).masked_fill(~mask[..., None], 0.0).sum(1)


class Last(nn.Module):
    """h_S."""

    def __init__(self, width: int) -> None:
        super().__init__()

    def forward(self, states: Tensor, last: Tensor, mask: Tensor) -> Tensor:
        """The encoder's states (B, S, D) and the last of each row (B, D) → (B, D)."""
        return last


class Transform(Last):
    """tanh(V h_S)."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.linear = nn.Linear(width, width)

    def forward(self, states: Tensor, last: Tensor, mask: Tensor) -> Tensor:
        return torch.tanh(self.linear(last))


class WeightedMean(Last):
    """Σ_j a_j h_j with a = softmax(uᵀ h_j)."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.weight = nn.Linear(width, 1, bias=False)

    def forward(self, states: Tensor, last: Tensor, mask: Tensor) -> Tensor:
        return (masked_softmax(self.weight(states)[..., 0], mask)[:, None] @ states)[:, 0]


CONTEXTS: dict[str, type[Last]] = {"last": Last, "transform": Transform, "all": WeightedMean}


class FixedContext(nn.Module):
    """Every step sees the same context: c_t = c."""

    feeds = True  # is c_t given to the step, beside the embedding?

    def __init__(self, settings: RNNSeq2SeqSettings) -> None:
        super().__init__()
        s = settings
        widths = [s.width + self.feeds * s.hidden, *[s.hidden] * (s.layers - 1)]
        self.cells = nn.ModuleList(CELLS[s.cell](width, s.hidden, batch_first=True) for width in widths)
        self.dropout = Dropout(s.dropout)

    def keys(self, states: Tensor) -> Tensor:
        """What the encoder's states (B, S, D) are compared as."""
        return states

    def forward(self, x: Tensor, memory: Memory, carried: list[Carried]) -> Written:
        """Embeddings (B, T, E) → [s_t; c_t] (B, T, 2D), what the layers carry on, the weights (B, T, S) if any."""
        context = memory.context[:, None].expand(-1, x.shape[1], -1)
        states, carried = self.run(torch.cat([x, context], -1), carried)
        return torch.cat([states, context], -1), carried, None

    def run(self, x: Tensor, carried: list[Carried]) -> tuple[Tensor, list[Carried]]:
        """Layer after layer over the whole of x (B, T, …): the last one's states (B, T, D)."""
        after: list[Carried] = []
        for number, (cell, given) in enumerate(zip(self.cells, carried, strict=True)):
            x, end = run_cell(cell, self.dropout(x) if number else x, given)
            after.append(end)
        return x, after


class LookAfter(FixedContext):
    """The states look at the encoder's when all of them are there: c_t depends on s_t (Luong)."""

    feeds = False

    def __init__(self, settings: RNNSeq2SeqSettings) -> None:
        super().__init__(settings)
        self.score = SCORES[settings.attention](settings.hidden)

    def keys(self, states: Tensor) -> Tensor:
        return self.score.keys(states)

    def forward(self, x: Tensor, memory: Memory, carried: list[Carried]) -> Written:
        states, carried = self.run(x, carried)
        context, weights = self.look(states, memory)
        return torch.cat([states, context], -1), carried, weights

    def look(self, queries: Tensor, memory: Memory) -> tuple[Tensor, Tensor]:
        """Of the encoder's states what each query (B, T, D) takes, (B, T, D), and how much of each, (B, T, S)."""
        weights = masked_softmax(self.score(queries, memory.keys), memory.mask[:, None])
        return weights @ memory.states, weights


class LookBefore(LookAfter):
    """A step looks before it is taken: c_t depends on s_{t−1}, and s_t on c_t (Bahdanau)."""

    feeds = True

    def forward(self, x: Tensor, memory: Memory, carried: list[Carried]) -> Written:
        both, looks = [], []
        for one in x.split(1, dim=1):
            context, weights = self.look(carried[-1][0][:, None], memory)
            state, carried = self.run(torch.cat([one, context], -1), carried)
            both.append(torch.cat([state, context], -1))
            looks.append(weights)
        return torch.cat(both, 1), carried, torch.cat(looks, 1)


SCORES: dict[str, type[DotScore]] = {"dot": DotScore, "general": GeneralScore, "additive": AdditiveScore}
DECODERS: dict[str, type[FixedContext]] = {
    "none": FixedContext,
    "dot": LookAfter,
    "general": LookAfter,
    "additive": LookBefore,
}


@dataclass
class Memory:
    """What the decoder sees of the source."""

    keys: Tensor  # (B, S, D)
    states: Tensor  # (B, S, D)
    mask: Tensor  # (B, S)
    context: Tensor  # (B, D)

    def select(self, rows: Tensor) -> Memory:
        return Memory(self.keys[rows], self.states[rows], self.mask[rows], self.context[rows])


@dataclass
class State:
    """What each row sees, what its layers carry, and which source it reads."""

    memory: Memory
    carried: list[Carried]
    sources: Tensor  # (B,)

    def select(self, rows: Tensor) -> State:
        sources = self.sources[rows]
        same = torch.equal(sources, self.sources)  # as when beams change places: what they look at stays
        carried = [tuple(each[rows] for each in layer) for layer in self.carried]
        return State(self.memory if same else self.memory.select(rows), carried, sources)
