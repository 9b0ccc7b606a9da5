"""The encoder-decoder Transformer: an encoder reads the source, a decoder writes the target and looks at both.

    encoder   x = √D · E[source] + positions;   x ← x + Attention(x);   x ← x + FeedForward(x)
    decoder   y = √D · E[target] + positions;   y ← y + Attention(y);   y ← y + Attention(y, x);  y ← y + FeedForward(y)
    logits    y W_Vᵀ

with a norm around every "+" (`norm`). "Attention is all you need" (Vaswani et al. 2017). A target's token costs
O((T + S)·D + D²) a layer; in decoding, keys and values of the source are computed once and those of the target kept.

Shapes: B batch, T target length, S source length, D width, H heads, K head width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from headway.models.base import TIED, DecoderState, Seq2SeqModel, tie
from headway.nn import (
    Cache,
    CrossAttention,
    Dropout,
    FeedForward,
    InAttention,
    LayerCache,
    PostNorm,
    PreNorm,
    SelfAttention,
    make_position,
)
from headway.nn.cache import SPARE
from headway.nn.gelu import GELU
from headway.settings import setting

PAD = 0
NORMS = {"post": PostNorm, "pre": PreNorm}
ACTIVATIONS = {"relu": nn.ReLU, "gelu": GELU}
Pair = tuple[Tensor, Tensor]  # keys and values, (B, H, S, K) each


@dataclass
class EncoderDecoderSettings:
    """`[model]` with kind = "encoder_decoder"."""

    reads_source = True

    kind: str = setting("encoder_decoder", "which model to build")
    width: int = setting(256, "numbers a token is carried in", least=1)
    layers: int = setting(3, "layers of the encoder", least=1)
    decoder_layers: int = setting(0, "layers of the decoder; 0: as many as the encoder's", least=0)
    heads: int = setting(4, "attention heads a layer; must divide width", least=1)
    hidden: int = setting(0, "width inside the feed-forward layers; 0: four times width", least=0)
    block: int = setting(128, "longest row, source or target, in tokens", least=2)
    dropout: float = setting(0.1, "share dropped of the embeddings and of what each part adds", least=0.0, below=1.0)
    inner_dropout: float = setting(0.0, "share dropped inside attention and feed-forward layers", least=0.0, below=1.0)
    norm: str = setting("post", "norm after each part, as published, or before it", choices=tuple(NORMS))
    positions: str = setting(
        "sinusoidal", "how a token knows its place", choices=("sinusoidal", "learned", "rotary", "none")
    )
    tied: str = setting("all", "which share a matrix: source, target and output; or the last two", choices=TIED)
    activation: str = setting("relu", "function inside the feed-forward layers", choices=tuple(ACTIVATIONS))

    def problems(self) -> Iterator[tuple[str, str]]:
        if self.width % self.heads:
            yield "heads", f"heads ({self.heads}) must divide width ({self.width})"
        elif self.positions == "rotary" and self.width // self.heads % 2:
            yield "heads", f"rotary positions turn pairs: width / heads ({self.width // self.heads}) must be even"
        if self.positions == "sinusoidal" and self.width % 2:
            yield "width", f"sinusoidal positions come in pairs: width ({self.width}) must be even"

    def build(self, vocabulary: int) -> EncoderDecoder:
        return EncoderDecoder(self, vocabulary)


class EncoderDecoder(Seq2SeqModel):
    def __init__(self, settings: EncoderDecoderSettings, vocabulary: int) -> None:
        super().__init__()
        s = self.settings = settings
        self.source = Embedding(s, vocabulary)
        self.target = Embedding(s, vocabulary)
        self.encoder = nn.ModuleList(EncoderLayer(s) for _ in range(s.layers))
        self.decoder = nn.ModuleList(DecoderLayer(s) for _ in range(s.decoder_layers or s.layers))
        self.encoder_norm, self.decoder_norm = (
            nn.LayerNorm(s.width) if s.norm == "pre" else nn.Identity() for _ in range(2)
        )
        self.head = nn.Linear(s.width, vocabulary, bias=False)
        self.reset()
        tie(s.tied, self.source.table, self.target.table, self.head)

    def reset(self) -> None:
        """Matrices by Xavier's uniform rule, each by itself; biases zero; embeddings and output from N(0, 1/D)."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        for part in (self.source.table, self.target.table, self.head):
            nn.init.normal_(cast(Tensor, part.weight), std=self.settings.width**-0.5)

    def forward(self, tokens: Tensor, source: Tensor) -> Tensor:
        return self.head(self.hidden(tokens, source))

    def hidden(self, tokens: Tensor, source: Tensor) -> Tensor:
        """What the decoder makes of each of the target's tokens, ready for the head: (B, T, D)."""
        y, positions = self.target(tokens)
        memory, mask = self.read(self.encode(source)), may_look(source)
        for layer, pair in zip(self.decoder_layers(), memory, strict=True):
            y = layer(y, positions, pair, mask)
        return self.decoder_norm(y)

    def encode(self, source: Tensor) -> Tensor:
        """What the encoder makes of each of the source's tokens: (B, S, D)."""
        x, positions = self.source(source)
        for layer in self.encoder:
            x = layer(x, positions, source != PAD)
        return self.encoder_norm(x)

    def read(self, encoded: Tensor) -> list[Pair]:
        """The keys and values that each layer of the decoder looks at."""
        return [layer.cross_attention.read(encoded) for layer in self.decoder_layers()]

    def decoder_layers(self) -> Iterator[DecoderLayer]:
        return (cast(DecoderLayer, layer) for layer in self.decoder)

    def start(self, source: Tensor, room: int) -> State:
        rows = torch.arange(len(source), device=source.device)
        slots = min(room, SPARE)  # they grow with the target: few slots are quickly copied when rows change places
        caches = [layer.attention.empty_cache(len(source), slots) for layer in self.decoder_layers()]
        return State(
            Cache(caches, torch.zeros_like(rows)), self.read(self.encode(source)), may_look(source), sources=rows
        )

    def step(self, tokens: Tensor, state: DecoderState) -> Tensor:
        state = cast(State, state)
        y, positions = self.target(tokens[:, None], state.cache.positions(1))
        for layer, pair, cache in zip(self.decoder_layers(), state.memory, state.cache.layers, strict=True):
            y = layer(y, positions, pair, state.mask, cache)
        state.cache.lengths += 1
        return self.head(self.decoder_norm(y))[:, 0]

    def alignment(self, tokens: Tensor, source: Tensor) -> Tensor:
        """What the last layer looks at, the mean over its heads."""
        y, positions = self.target(tokens)
        encoded, mask = self.encode(source), may_look(source)
        *before, last = self.decoder_layers()
        for layer in before:
            y = layer(y, positions, layer.cross_attention.read(encoded), mask)
        return last.looks(y, positions, encoded, mask).mean(1)


class Embedding(nn.Module):
    """√D · E[tokens], with positions where they act on embeddings."""

    def __init__(self, settings: EncoderDecoderSettings, vocabulary: int) -> None:
        super().__init__()
        self.table = nn.Embedding(vocabulary, settings.width)
        position = make_position(settings.positions, settings.width, settings.heads, settings.block)
        self.positions = None if isinstance(position, InAttention) else position
        self.dropout = Dropout(settings.dropout)

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The first layer's input (B, T, D) and the positions, from 0 where none are given."""
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.table(tokens) * self.table.embedding_dim**0.5
        return self.dropout(x if self.positions is None else self.positions(x, positions)), positions


class EncoderLayer(nn.Module):
    def __init__(self, settings: EncoderDecoderSettings) -> None:
        super().__init__()
        self.attention = self_attention(settings, causal=False)
        self.feed_forward = feed_forward(settings)
        self.around_attention, self.around_feed_forward = (residual(settings) for _ in range(2))

    def forward(self, x: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        x = self.around_attention(x, lambda x: self.attention(x, positions, mask=mask))
        return self.around_feed_forward(x, self.feed_forward)


class DecoderLayer(nn.Module):
    def __init__(self, settings: EncoderDecoderSettings) -> None:
        super().__init__()
        self.attention = self_attention(settings, causal=True)
        self.cross_attention = CrossAttention(settings.width, settings.heads, settings.inner_dropout)
        self.feed_forward = feed_forward(settings)
        self.around_attention, self.around_cross, self.around_feed_forward = (residual(settings) for _ in range(3))

    def forward(
        self, y: Tensor, positions: Tensor, memory: Pair, mask: Tensor, cache: LayerCache | None = None
    ) -> Tensor:
        """y (B, T, D) looks at itself and at the source's keys and values, of which `mask` (B, 1, 1, S) hides some."""
        y = self.around_attention(y, lambda y: self.attention(y, positions, cache))
        y = self.around_cross(y, lambda y: self.cross_attention.look(y, *memory, mask))
        return self.around_feed_forward(y, self.feed_forward)

    def looks(self, y: Tensor, positions: Tensor, encoded: Tensor, mask: Tensor) -> Tensor:
        """How much each token of y takes of each of the `encoded` (B, S, D): (B, H, T, S)."""
        y = self.around_attention(y, lambda y: self.attention(y, positions))
        return self.cross_attention.weights(self.around_cross.enter(y), encoded, mask)


def self_attention(s: EncoderDecoderSettings, causal: bool) -> SelfAttention:
    position = make_position(s.positions, s.width, s.heads, s.block, causal)
    position = position if isinstance(position, InAttention) else None
    return SelfAttention(s.width, s.heads, s.inner_dropout, causal=causal, position=position)


def feed_forward(s: EncoderDecoderSettings) -> FeedForward:
    return FeedForward(
        s.width, s.hidden or 4 * s.width, nn.Sequential(ACTIVATIONS[s.activation](), Dropout(s.inner_dropout))
    )


def residual(s: EncoderDecoderSettings) -> PostNorm:
    return NORMS[s.norm](s.width, s.dropout)


def may_look(source: Tensor) -> Tensor:
    """Which of the source's tokens (B, S) the target may look at: (B, 1, 1, S)."""
    return (source != PAD)[:, None, None, :]


@dataclass
class State:
    """The target's keys and values so far, the source's for good, and which source each row reads."""

    cache: Cache
    memory: list[Pair]
    mask: Tensor  # (B, 1, 1, S)
    sources: Tensor  # (B,)

    def select(self, rows: Tensor) -> State:
        sources = self.sources[rows]
        if torch.equal(sources, self.sources):  # as when beams change places: what they look at stays
            return State(self.cache.select(rows), self.memory, self.mask, sources)
        memory = [(keys.index_select(0, rows), values.index_select(0, rows)) for keys, values in self.memory]
        return State(self.cache.select(rows), memory, self.mask[rows], sources)
