"""Linformer: attention to a few mixtures of the row instead of to the row.

    Y = softmax(Q (E K)ᵀ / √K_width) (F V),    E and F learned, k × length

"Linformer: self-attention with linear complexity" (Wang et al. 2020), section 4. Keys and values of a whole row are
projected to k of each, so time is O(T·k·D) and memory O(T·(D + k·H)): linear in T.

Shapes: B batch, T queries, S keys, D width, H heads, K head width, k projected keys. Masks are boolean, True = may
attend.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from headway.nn.attention import Attention, attend, check_heads, check_row, clear, join_heads, split_heads
from headway.nn.cache import LayerCache
from headway.nn.positions import InAttention
from headway.nn.synthesizer import check_places, columns_at, known_length

NOT_CAUSAL = (
    "Linformer cannot be causal: each of its projected keys mixes the whole row, the future included. Linear in "
    "T and causal are Local and BigBird"
)


class Linformer(Attention):
    """softmax(Q (E K)ᵀ / √K) (F V) with several heads, for rows of up to `length` tokens.

    E and F are the first and the last of `projections`: the same for every head, and with `shared` one and the same
    (the paper's key-value sharing, section 4). Their column s belongs to position s, so a shorter row uses the columns
    of its own positions. `projected` is k: 128 where not given, or `length` where that is less. Both are drawn from
    N(0, 1/length), so that a projected key of a full row is as large as a key.

    Tokens that do not count are left out of the projections, so padding changes nothing. `Rotary` turns queries and
    keys before they are projected; a scheme that adds to the scores of pairs finds no pairs here.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        dropout: float = 0.0,
        *,
        causal: bool = False,
        length: int | None = None,
        position: InAttention | None = None,
        projected: int | None = None,
        shared: bool = True,
    ) -> None:
        super().__init__()
        check_heads(width, heads)
        if causal:
            raise ValueError(NOT_CAUSAL)
        self.length = known_length("Linformer", length)
        projected = min(128, self.length) if projected is None else projected
        if projected < 1:
            raise ValueError(f"projected ({projected}) must be at least 1")
        self.heads = heads
        self.causal = False
        self.dropout = dropout
        self.position: InAttention | None = None
        if position is not None:
            self.take_position(position)
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.output = nn.Linear(width, width)
        self.projections = nn.Parameter(torch.randn(1 if shared else 2, projected, self.length) * self.length**-0.5)

    def forward(
        self, x: Tensor, positions: Tensor, cache: LayerCache | None = None, mask: Tensor | None = None
    ) -> Tensor:
        if cache is not None:
            raise ValueError(NOT_CAUSAL)
        check_row(x, positions, mask, self.query.in_features)
        q, k = self.compare(x, positions, mask)
        v = self.projection(-1, positions, mask) @ split_heads(self.value(x), self.heads)
        mixed = join_heads(attend(q, k, v, dropout=self.dropout if self.training else 0.0))
        return clear(self.output(mixed), mixed, mask)

    def take_position(self, scheme: InAttention) -> None:
        if not scheme.only_turns:
            raise ValueError(
                f"Linformer has no scores of pairs for {type(scheme).__name__} to add to: take Rotary, or positions "
                "on the embeddings"
            )
        self.position = scheme

    def compare(self, x: Tensor, positions: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Queries (B, H, T, K) and projected keys (B, H, k, K)."""
        check_places("Linformer", self.length, positions)
        q, k = (split_heads(linear(x), self.heads) for linear in (self.query, self.key))
        if self.position is not None:
            q, k = self.position.turn(q, positions), self.position.turn(k, positions)
        return q, self.projection(0, positions, mask) @ k

    def projection(self, which: int, positions: Tensor, mask: Tensor | None) -> Tensor:
        """E (0) or F (−1) for these rows, with zeros in the columns of tokens that do not count: (B or 1, 1, k, T)."""
        columns = columns_at(self.projections[which, None, None], positions)
        return columns if mask is None else columns.masked_fill(~mask[:, None, None, :], 0.0)

    def weights(self, x: Tensor, positions: Tensor, mask: Tensor | None = None) -> Tensor:
        """softmax(Q (E K)ᵀ / √K) F: (B, H, T, T), by which the values are in effect weighed.

        The softmax is over the k projected keys, so these numbers may be negative and need not sum to one.
        """
        q, k = self.compare(x, positions, mask)
        looks = (q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5).softmax(-1)  # (B, H, T, k)
        return looks @ self.projection(-1, positions, mask)

    def empty_cache(self, rows: int, length: int) -> LayerCache:
        raise ValueError(NOT_CAUSAL)
