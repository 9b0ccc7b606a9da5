"""The two kernels of `headway.nn.short`, in Triton. One program takes one head of one row.

Triton reads the annotations of a kernel's arguments, so they have none but its own.

Shapes: T tokens, K head width, both padded to a power of two; H heads. Packed rows are (T, 3, H, K).
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def hashed(number, first, second):
    """32 bits of a number and two random ones, as `headway.nn.dropout.hashed_bits` mixes them."""
    x = (number + first).to(tl.uint32)
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ second.to(tl.uint32) ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def kept(seeds, program, t, s, BLOCK: tl.constexpr, THRESHOLD: tl.constexpr):
    """Which weights (T, S) dropout keeps."""
    number = program.to(tl.int32) * (BLOCK * BLOCK) + t * BLOCK + s
    return hashed(number, tl.load(seeds), tl.load(seeds + 1)) >= THRESHOLD


@triton.jit
def causal_softmax(q, k, t, s, scale):
    """softmax(q kᵀ · scale) over the keys s ≤ t: (T, S), in float32."""
    scores = tl.dot(q, tl.trans(k)) * (scale * 1.4426950408889634)  # for powers of two
    scores = tl.where(t >= s, scores, float("-inf"))
    weights = tl.exp2(scores - tl.max(scores, 1)[:, None])
    return weights / tl.sum(weights, 1)[:, None]


@triton.jit
def forward(
    packed,
    out,
    seeds,
    scale,
    keep,
    T,
    H: tl.constexpr,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    THRESHOLD: tl.constexpr,
):
    program = tl.program_id(0)
    row, head = (program // H).to(tl.int64), program % H
    t, s, d = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK)[None, :], tl.arange(0, WIDTH)[None, :]
    there = (t < T) & (d < K)
    source = packed + (row * T * 3 * H + head) * K + t * (3 * H * K) + d
    q = tl.load(source, there, 0.0)
    k = tl.load(source + H * K, there, 0.0)
    v = tl.load(source + 2 * H * K, there, 0.0)
    weights = causal_softmax(q, k, t, s, scale)
    if THRESHOLD > 0:
        weights = tl.where(kept(seeds, program, t, s, BLOCK, THRESHOLD), weights * (1.0 / keep), 0.0)
    mixed = tl.dot(weights.to(v.dtype), v)
    tl.store(out + (row * T * H + head) * K + t * (H * K) + d, mixed.to(v.dtype), there)


@triton.jit
def backward(
    packed,
    gradient,
    out,
    seeds,
    scale,
    keep,
    T,
    H: tl.constexpr,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    THRESHOLD: tl.constexpr,
):
    """With P = softmax(S), D dropout's factors and G the gradient of the output:

    ∂V = (P D)ᵀ G,   ∂P = D ∘ (G Vᵀ),   ∂S = P ∘ (∂P − rowsum(P ∘ ∂P)),   ∂Q = ∂S K · scale,   ∂K = ∂Sᵀ Q · scale
    """
    program = tl.program_id(0)
    row, head = (program // H).to(tl.int64), program % H
    t, s, d = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK)[None, :], tl.arange(0, WIDTH)[None, :]
    there = (t < T) & (d < K)
    place = (row * T * 3 * H + head) * K + t * (3 * H * K) + d
    q = tl.load(packed + place, there, 0.0)
    k = tl.load(packed + place + H * K, there, 0.0)
    g = tl.load(gradient + (row * T * H + head) * K + t * (H * K) + d, there, 0.0)
    weights = causal_softmax(q, k, t, s, scale)
    v = tl.load(packed + place + 2 * H * K, there, 0.0)
    towards = tl.dot(g, tl.trans(v))  # ∂P
    used = weights
    if THRESHOLD > 0:
        keeps = kept(seeds, program, t, s, BLOCK, THRESHOLD)
        used = tl.where(keeps, weights * (1.0 / keep), 0.0)
        towards = tl.where(keeps, towards * (1.0 / keep), 0.0)
    of_v = tl.dot(tl.trans(used.to(v.dtype)), g)
    tl.store(out + place + 2 * H * K, of_v.to(v.dtype), there)
    scores = weights * (towards - tl.sum(weights * towards, 1)[:, None]) * scale  # ∂S
    scores = scores.to(v.dtype)
    tl.store(out + place, tl.dot(scores, k).to(v.dtype), there)
    tl.store(out + place + H * K, tl.dot(tl.trans(scores), q).to(v.dtype), there)
