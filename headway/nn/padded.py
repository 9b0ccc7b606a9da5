"""Recurrent networks over rows of unequal length, without packing by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from headway.nn.recurrent import Recurrent, rearranged


def run_padded(rnn: Recurrent, x: Tensor, lengths: Tensor | Sequence[int], hx: Any = None) -> tuple[Tensor, Any]:
    """The network over padded rows, as if each row came alone: x (B, T, D), lengths (B,) → outputs (B, T, H), state.

    Padding stands on the right and is not looked at, whatever it holds. Outputs there are zeros; the state of a row is
    the one after its last real token, backwards after its first. A row of length 0 keeps the state it began with.
    Without `batch_first` x and the outputs are (T, B, ·), as everywhere in `rnn`. On a GPU the lengths are fetched.
    """
    batch = 0 if rnn.batch_first else 1
    rows, longest = x.shape[batch], x.shape[1 - batch]
    lengths = torch.as_tensor(lengths).cpu()
    check_lengths(lengths, rows, longest)
    shortest = min(lengths.tolist(), default=longest)
    if shortest == longest > 0:
        return rnn(x, hx)
    if shortest > 0:
        packed = pack_padded_sequence(x, lengths, rnn.batch_first, enforce_sorted=False)
        output, state = rnn(packed, hx)
        return pad_packed_sequence(output, rnn.batch_first, total_length=longest)[0], state

    before = rnn.zero_state(x, rows) if hx is None else rnn.read_state(hx, rows)
    some = lengths.nonzero().squeeze(1)
    shape = (*x.shape[:2], rnn.directions * (rnn.proj_size or rnn.hidden_size))
    if not len(some):
        return x.new_zeros(shape), rnn.equation.show(before)
    here = some.to(x.device)
    begun = rnn.equation.show(rearranged(before, here))
    output, state = run_padded(rnn, x.index_select(batch, here), lengths[some], begun)
    after = tuple(
        old.to(new.dtype).index_copy(1, here, new) for old, new in zip(before, rnn.equation.read(state), strict=True)
    )
    return output.new_zeros(shape).index_copy(batch, here, output), rnn.equation.show(after)


def check_lengths(lengths: Tensor, rows: int, longest: int) -> None:
    if lengths.shape != (rows,) or lengths.is_floating_point() or lengths.dtype == torch.bool:
        raise ValueError(
            f"lengths has the shape {tuple(lengths.shape)} and holds {lengths.dtype}; a whole number for each of the "
            f"{rows} rows is wanted"
        )
    for row, length in enumerate(lengths.tolist()):
        if not 0 <= length <= longest:
            raise ValueError(f"lengths[{row}] is {length}, and rows have 0 to {longest} tokens")
