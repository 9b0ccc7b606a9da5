"""A GPT with a bottleneck: m latents read the row, the layers between work on the latents, the row reads them.

    h = E[tokens] + positions                                        (T, D)
    l = C + Down(Norm C, Norm h);      l = l + FeedForward(Norm l)   (m, D)
    l = Block(l)                       layers − 2 times              (m, D)
    h = h + Up(Norm h, Norm l);        h = h + FeedForward(Norm h)   (T, D)

After "Perceiver" (Jaegle et al. 2021), in the form that a university course gives it. How it stays causal is the matter
of `headway.nn.perceiver`: `reading = "first"` is the course's way, in which only the first m positions enter the
bottleneck; `reading = "segments"` lets every position in. The layers between cost O(m·D² + m²·D), whatever T is.

Shapes: B batch, T length, m latents, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from headway.models.gpt import GPT, GPTSettings
from headway.nn import Block, Cache, Dropout, FeedForward, FirstPositions, Perceiver
from headway.nn.norm import beside
from headway.nn.perceiver import keep
from headway.settings import setting

READINGS = {"segments": Perceiver, "first": FirstPositions}


@dataclass
class PerceiverGPTSettings(GPTSettings):
    """`[model]` with kind = "perceiver"."""

    kind: str = setting("perceiver", "which model to build")
    positions: str = setting("learned", "how a token knows its place", choices=("learned", "sinusoidal", "none"))
    bottleneck: int = setting(32, "latents through which a row is read", least=1)
    reading: str = setting("segments", "how latents read a row and stay causal", choices=tuple(READINGS))

    def problems(self) -> Iterator[tuple[str, str]]:
        yield from super().problems()
        if 0 < getattr(self.attention, "length", 0) < self.bottleneck:
            yield "attention.length", f"fewer columns ({self.attention.length}) than latents ({self.bottleneck})"
        if self.layers < 2:
            yield "layers", f"one layer reads and one writes, so {self.layers} is too few; at least 2"

    def build(self, vocabulary: int) -> PerceiverGPT:
        return PerceiverGPT(self, vocabulary)


class Edge(nn.Module):
    """What the first and the last layer have besides their attention: two norms and a feed-forward layer."""

    def __init__(self, width: int, feed_forward: FeedForward, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.feed_forward_norm = nn.LayerNorm(width)
        self.feed_forward = feed_forward
        self.dropout = Dropout(dropout)

    def add(self, x: Tensor, attended: Tensor) -> Tensor:
        x, normed = beside(x + self.dropout(attended), self.feed_forward_norm)
        return x + self.dropout(self.feed_forward(normed))


class PerceiverGPT(GPT):
    settings: PerceiverGPTSettings

    def make_blocks(self) -> nn.ModuleList:
        s = self.settings
        self.bottleneck = READINGS[s.reading](
            s.width, s.heads, s.dropout, causal=True, length=s.block, bottleneck=s.bottleneck
        )
        self.down, self.up = (Edge(s.width, self.make_feed_forward(), s.dropout) for _ in range(2))
        return nn.ModuleList(
            Block(s.width, self.make_attention(s.bottleneck), self.make_feed_forward(), s.dropout)
            for _ in range(s.layers - 2)
        )

    @property
    def context(self) -> int:
        return self.settings.block

    def hidden(self, tokens: Tensor, cache: Cache | None = None) -> Tensor:
        x, positions = self.embed(tokens, cache)
        rows = x if cache is None else keep(cache.layers[0], x, positions)  # (B, S, D): all tokens so far
        start, norm = self.bottleneck.latents, self.down.attention_norm
        latents = self.down.add(start, self.bottleneck.read(norm(rows), norm(start)))  # (B, m, D)
        places = torch.arange(len(start), device=x.device)
        for block in self.stack():
            latents = block(latents, places)
        norm = self.up.attention_norm
        if cache is None:
            written = self.bottleneck.write(norm(x), norm(latents))
        else:
            written = self.bottleneck.write_next(norm(x), positions, norm(latents), norm(rows))
        return self.norm(self.up.add(x, written))  # (B, T, D)

    def empty_cache(self, rows: int, length: int) -> Cache:
        lengths = torch.zeros(rows, dtype=torch.long, device=self.norm.weight.device)
        return Cache([self.bottleneck.empty_cache(rows, length)], lengths)
