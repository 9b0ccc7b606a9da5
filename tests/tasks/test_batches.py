"""Cutting a batch by length computes less padding and the same gradients."""

from __future__ import annotations

import torch

from headway.tasks import Batch
from headway.tasks.base import next_token_loss
from tests.conftest import tiny_gpt


def make_batch() -> Batch:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([12, 3, 7, 12, 5, 4, 9])
    rows = torch.randint(1, 19, (7, 12), generator=generator)
    return Batch.next_token(rows.masked_fill(torch.arange(12) >= lengths[:, None], 0), lengths)


def gradients(batches: list[Batch]) -> list[torch.Tensor]:
    model = tiny_gpt()
    for batch in batches:
        next_token_loss(model, batch).backward()
    return [parameter.grad for parameter in model.parameters()]


def test_pieces_have_the_same_gradients_as_the_whole() -> None:
    batch = make_batch()
    whole = gradients([batch])
    for count in (1, 2, 3, 7, 50):
        for ours, expected in zip(gradients(batch.pieces(count)), whole, strict=True):
            torch.testing.assert_close(ours, expected, atol=1e-10, rtol=1e-10)


def test_pieces_are_narrow_and_lose_nothing() -> None:
    batch = make_batch()
    pieces = batch.pieces(3)
    assert sum(piece.tokens for piece in pieces) == batch.tokens
    assert sum(piece.learned() for piece in pieces) == batch.learned() == int((batch.lengths).sum())
    assert sum(piece.inputs.numel() for piece in pieces) < 0.8 * batch.inputs.numel()
    assert all(piece.inputs.shape[1] == int(piece.lengths.max()) for piece in pieces)
