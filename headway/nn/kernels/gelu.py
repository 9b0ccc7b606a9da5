"""The kernel of `headway.nn.gelu`, in Triton: GELU's gradient and that of the bias before it, both read once.

A program goes down some rows of a few columns and keeps the sums of these columns in registers; what the programs found
is added up afterwards, in the same order every time.

Shapes: N rows, D columns; a program takes `ROWS` rows of C columns, R rows at a time.
"""

from __future__ import annotations

import triton
import triton.language as tl

from headway.nn.gelu import EXPONENT, FAR, PEAK, TAIL

EXPO, MOST, TOP = tl.constexpr(EXPONENT), tl.constexpr(FAR), tl.constexpr(PEAK)  # what Triton may read here
T0, T1, T2, T3, T4, T5, T6 = map(tl.constexpr, TAIL)


@triton.jit
def slope(x):
    """GELU's derivative, as `headway.nn.gelu.slope` has it."""
    near = tl.clamp(x, -MOST, MOST, propagate_nan=tl.PropagateNan.ALL)
    u = tl.abs(near)
    tail = tl.exp2(u * (u * (u * (u * (u * (u * T6 + T5) + T4) + T3) + T2) + T1) + T0)
    return tl.where(x < 0, tail, 1.0 - tail) + near * tl.exp2(near * near * EXPO) * TOP


@triton.jit
def gelu_gradients(
    gradient,
    x,
    bias,
    out,
    sums,
    N,
    D,
    ROWS: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
):
    """∂x = G ∘ GELU′(x + b)    ∂b = Σ ∂x"""
    across = tl.cdiv(D, C)  # programs beside one another; those that follow go on below
    chunk = tl.program_id(0) // across
    column = tl.program_id(0) % across * C + tl.arange(0, C)[None, :]
    b = tl.load(bias + column, column < D, 0.0).to(tl.float32)
    total = tl.zeros((R, C), tl.float32)
    for first in tl.range(0, ROWS, R):
        row = chunk * ROWS + first + tl.arange(0, R)[:, None]
        here = (row < N) & (column < D)
        place = row.to(tl.int64) * D + column
        g = tl.load(gradient + place, here, 0.0).to(tl.float32)
        g *= slope(tl.load(x + place, here, 0.0).to(tl.float32) + b)
        total += g
        tl.store(out + place, g.to(out.dtype.element_ty), here)
    tl.store(sums + chunk * D + column, tl.sum(total, 0)[None, :], column < D)
