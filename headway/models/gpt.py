"""GPT: token embeddings, positions, a stack of causal pre-norm blocks, a final norm, logits.

    h_0 = E[tokens] (+ positions);   h_l = Block_l(h_{l-1});   logits = Norm(h_L) W_Vᵀ

"Improving language understanding by generative pre-training" (Radford et al. 2018), with the pre-norm of its successor.
Shapes: B batch, T length, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from headway.errors import SettingsError, nearest
from headway.models.attentions import KINDS
from headway.models.base import CausalModel
from headway.nn import Attention, Block, Cache, Dropout, FeedForward, InAttention, make_position
from headway.nn.positions import IN_ATTENTION
from headway.nn.positions import NAMES as POSITIONS
from headway.settings import setting


@dataclass
class GPTSettings:
    """`[model]` with kind = "gpt"."""

    kind: str = setting("gpt", "which model to build")
    width: int = setting(128, "numbers a token is carried in", least=1)
    layers: int = setting(4, "Transformer blocks on top of each other", least=1)
    heads: int = setting(4, "attention heads a block; must divide width", least=1)
    block: int = setting(128, "longest row, in tokens", least=2)
    dropout: float = setting(0.1, "share dropped in training", least=0.0, below=1.0)
    positions: str = setting("rotary", "how a token knows its place", choices=POSITIONS)
    attention: Any = setting("dot-product", "which attention: a kind, or a table [model.attention]", kinds=KINDS)
    hidden: int = setting(0, "width inside the feed-forward layers; 0: four times width", least=0)
    tied: bool = setting(False, "use the embedding matrix for the output too")
    rotary_base: float = setting(10_000.0, "how slowly the slowest pair of rotary positions turns", above=1.0)
    small_residuals: bool = setting(True, "begin with the matrices that write into the residual stream ÷ √(2·layers)")

    def __post_init__(self) -> None:
        if isinstance(self.attention, str):
            if self.attention not in KINDS:
                raise SettingsError([f"model.attention = {self.attention!r}: unknown{nearest(self.attention, KINDS)}"])
            self.attention = KINDS[self.attention](kind=self.attention)

    def problems(self) -> Iterator[tuple[str, str]]:
        if self.width % self.heads:
            yield "heads", f"heads ({self.heads}) must divide width ({self.width})"
        elif self.positions == "rotary" and self.width // self.heads % 2:
            yield (
                "heads",
                f"rotary positions turn pairs: width / heads ({self.width // self.heads}) must be even",
            )
        if self.positions == "sinusoidal" and self.width % 2:
            yield "width", f"sinusoidal positions come in pairs: width ({self.width}) must be even"
        length = getattr(self.attention, "length", 0)
        if 0 < length < self.block - 1:  # a row of block tokens has one input less
            yield "attention.length", f"{length} columns are too few for rows of model.block = {self.block}"
        if self.positions in IN_ATTENTION and self.attention is not None and not self.attention.has_keys:
            yield (
                "positions",
                f"{self.attention.kind} attention has no queries and keys for {self.positions} positions to act on; "
                "choose learned, sinusoidal or none",
            )

    def build(self, vocabulary: int) -> GPT:
        return GPT(self, vocabulary)


class GPT(CausalModel):
    def __init__(self, settings: GPTSettings, vocabulary: int) -> None:
        super().__init__()
        width = settings.width
        self.settings = settings
        self.embedding = nn.Embedding(vocabulary, width)
        position = self.make_position()
        self.positions = None if isinstance(position, InAttention) else position
        self.dropout = Dropout(settings.dropout)
        self.blocks = self.make_blocks()
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.reset()
        if settings.tied:
            self.head.weight = self.embedding.weight

    def make_position(self) -> nn.Module | None:
        s = self.settings
        return make_position(s.positions, s.width, s.heads, s.block, causal=True, base=s.rotary_base)

    def make_blocks(self) -> nn.ModuleList:
        s = self.settings
        return nn.ModuleList(
            Block(s.width, self.make_attention(s.block), self.make_feed_forward(), s.dropout) for _ in range(s.layers)
        )

    def make_attention(self, length: int) -> Attention:
        s, position = self.settings, self.make_position()
        position = position if isinstance(position, InAttention) else None
        return cast(Attention, s.attention.build(s.width, s.heads, s.dropout, length, position))

    def make_feed_forward(self) -> FeedForward:
        return FeedForward(self.settings.width, self.settings.hidden or 4 * self.settings.width)

    def reset(self) -> None:
        """Linear and Embedding from N(0, 0.02), biases zero; norms and positions as they are made."""
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                writes = name.endswith("output") and self.settings.small_residuals
                nn.init.normal_(module.weight, std=0.02 / (2 * self.settings.layers) ** 0.5 if writes else 0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    @property
    def context(self) -> int:
        return min(self.settings.block, getattr(self.settings.attention, "length", 0) or self.settings.block)

    def hidden(self, tokens: Tensor, cache: Cache | None = None) -> Tensor:
        x, positions = self.embed(tokens, cache)
        for layer, block in enumerate(self.stack()):
            x = block(x, positions, cache.layers[layer] if cache is not None else None)
        return self.norm(x)

    def stack(self) -> Iterator[Block]:
        """The blocks, from the first to the last."""
        return (cast(Block, block) for block in self.blocks)

    def embed(self, tokens: Tensor, cache: Cache | None = None) -> tuple[Tensor, Tensor]:
        """The first block's input (B, T, D), and the positions: (T,), or (B, T) with a cache."""
        count = tokens.shape[1]
        positions = torch.arange(count, device=tokens.device) if cache is None else cache.positions(count)
        x = self.embedding(tokens)
        if self.positions is not None:
            x = self.positions(x, positions)
        return self.dropout(x), positions

    def empty_cache(self, rows: int, length: int) -> Cache:
        lengths = torch.zeros(rows, dtype=torch.long, device=self.norm.weight.device)
        return Cache([block.empty_cache(rows, length) for block in self.stack()], lengths)
