"""The kernel of `headway.nn.norm`, in Triton: all gradients of a layer norm, its rows read once.

A program takes every P-th group of rows, and keeps its sums for the weight and the bias in registers until it has seen
all of them. What the programs found is added up afterwards, in the same order every time.

Shapes: N rows, D width, padded to a power of two; P programs, R rows at a time.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def norm_gradients(
    gradient,
    beside,
    x,
    weight,
    mean,
    rstd,
    out,
    sums,
    N,
    D,
    R: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """With y = w ∘ n + b, n = (x − mean) · rstd, G the gradient of y and H that of what stands beside it:

    ∂x = H + rstd · (w ∘ G − mean(w ∘ G) − n · mean(w ∘ G ∘ n))    ∂w = Σ G ∘ n    ∂b = Σ G
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    d = tl.arange(0, WIDTH)[None, :]
    w = tl.load(weight + d, d < D, 0.0).to(tl.float32)
    of_weight = tl.zeros((R, WIDTH), tl.float32)
    of_bias = tl.zeros((R, WIDTH), tl.float32)
    for first in tl.range(program * R, N, programs * R):
        row = first + tl.arange(0, R)[:, None]
        here = (row < N) & (d < D)
        place = row.to(tl.int64) * D + d
        g = tl.load(gradient + place, here, 0.0).to(tl.float32)
        value = tl.load(x + place, here, 0.0).to(tl.float32)
        h = tl.load(beside + place, here, 0.0).to(tl.float32)
        share = tl.load(rstd + row, row < N, 0.0)
        n = (value - tl.load(mean + row, row < N, 0.0)) * share
        of_weight += g * n
        of_bias += g
        g *= w
        level = tl.sum(g, 1)[:, None] / D
        slope = tl.sum(g * n, 1)[:, None] / D
        tl.store(out + place, (h + share * (g - level - n * slope)).to(out.dtype.element_ty), here)
    target = sums + program * 2 * D + d
    tl.store(target, tl.sum(of_weight, 0)[None, :], d < D)
    tl.store(target + D, tl.sum(of_bias, 0)[None, :], d < D)
