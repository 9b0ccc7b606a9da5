"""The kernels of `headway.nn.short`, in Triton: attention over short rows. One program takes one head of one row.

Queries and keys come in two halves. The earlier queries see no later key, so three of the four products are needed, and
two programs fit a processor: one computes while the other loads. E is the exponential of a score less its row's
largest. A row's divisor, 1 ÷ sum(E) ÷ the share that dropout keeps, is put into its output or the gradient of that,
which are smaller than its E.

Triton reads the annotations of a kernel's arguments, so they have none but its own.

Shapes: T tokens, in two halves that are padded to a power of two; H heads; K head width, padded to a power of two.
Packed rows are (T, 3, H, K).
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
def drop(values, rows, columns, THRESHOLD: tl.constexpr):
    """The values of pairs that dropout keeps, 0 for the others. A pair's bits are the product of its row's and its
    column's, of which the upper ones depend on all of both."""
    if THRESHOLD == 0:
        return values
    return tl.where(rows * columns >= THRESHOLD, values, 0.0)


@triton.jit
def product(a, b):
    """a bᵀ."""
    return tl.dot(a, tl.trans(b))


@triton.jit
def short_attention_forward(
    packed,
    out,
    seeds,
    scale,
    keep,
    T,
    H: tl.constexpr,
    K: tl.constexpr,
    HALF: tl.constexpr,
    WIDTH: tl.constexpr,
    THRESHOLD: tl.constexpr,
):
    program = tl.program_id(0)
    row, head = (program // H).to(tl.int64), program % H
    t, s, d = tl.arange(0, HALF)[:, None], tl.arange(0, HALF)[None, :], tl.arange(0, WIDTH)[None, :]
    here, later = (t < T) & (d < K), (t + HALF < T) & (d < K)
    first, second = tl.load(seeds), tl.load(seeds + 1)
    rows_0 = hashed(program * (2 * HALF) + t, first, second)
    rows_1 = hashed(program * (2 * HALF) + HALF + t, first, second)
    columns_0 = hashed(s, second, first) | 1  # odd, so that a product with it keeps all bits
    columns_1 = columns_0 * 0x9E3779B1
    source = packed + (row * T * 3 * H + head) * K + t * (3 * H * K) + d
    target = out + (row * T * H + head) * K + t * (H * K) + d
    power = scale * 1.4426950408889634  # e to a score is 2 to this much of it

    k_0 = tl.load(source + H * K, here, 0.0)
    v_0 = tl.load(source + 2 * H * K, here, 0.0)
    q = tl.load(source, here, 0.0)
    e = tl.where(t >= s, product(q, k_0), float("-inf"))
    e = tl.exp2((e - tl.max(e, 1)[:, None]) * power)
    share = 1.0 / tl.sum(e, 1)[:, None]
    mixed = tl.dot(drop(e, rows_0, columns_0, THRESHOLD).to(v_0.dtype), v_0)
    tl.store(target, (mixed * (share / keep)).to(v_0.dtype), here)

    step = HALF * 3 * H * K
    k_1 = tl.load(source + step + H * K, later, 0.0)
    v_1 = tl.load(source + step + 2 * H * K, later, 0.0)
    q = tl.load(source + step, later, 0.0)
    e_0, e_1 = product(q, k_0), tl.where(t >= s, product(q, k_1), float("-inf"))
    most = tl.maximum(tl.max(e_0, 1), tl.max(e_1, 1))[:, None]
    e_0, e_1 = tl.exp2((e_0 - most) * power), tl.exp2((e_1 - most) * power)
    share = 1.0 / (tl.sum(e_0, 1) + tl.sum(e_1, 1))[:, None]
    mixed = tl.dot(drop(e_0, rows_1, columns_0, THRESHOLD).to(v_0.dtype), v_0)
    mixed = tl.dot(drop(e_1, rows_1, columns_1, THRESHOLD).to(v_1.dtype), v_1, mixed)
    tl.store(target + HALF * H * K, (mixed * (share / keep)).to(v_0.dtype), later)


@triton.jit
def short_attention_backward(  # noqa: PLR0915 - one pass from top to bottom
    packed,
    gradient,
    out,
    seeds,
    scale,
    keep,
    T,
    H: tl.constexpr,
    K: tl.constexpr,
    HALF: tl.constexpr,
    WIDTH: tl.constexpr,
    THRESHOLD: tl.constexpr,
):
    """With P = E ÷ sum(E) the weights, S the scores, D what dropout multiplies by, G the gradient of the output:

        ∂V = (P ∘ D)ᵀ G    ∂P = D ∘ (G Vᵀ)    ∂S = P ∘ (∂P − sum(P ∘ ∂P))    ∂Q = ∂S K · scale    ∂K = ∂Sᵀ Q · scale

    and with N, the rows of G times their divisors, so that E stands for P:

        ∂V = drop(E)ᵀ N    R = drop(E) ∘ (N Vᵀ)    ∂S = R − E · (sum(R) ÷ sum(E))
    """
    program = tl.program_id(0)
    row, head = (program // H).to(tl.int64), program % H
    t, s, d = tl.arange(0, HALF)[:, None], tl.arange(0, HALF)[None, :], tl.arange(0, WIDTH)[None, :]
    here, later = (t < T) & (d < K), (t + HALF < T) & (d < K)
    first, second = tl.load(seeds), tl.load(seeds + 1)
    rows_0 = hashed(program * (2 * HALF) + t, first, second)
    rows_1 = hashed(program * (2 * HALF) + HALF + t, first, second)
    columns_0 = hashed(s, second, first) | 1  # odd, so that a product with it keeps all bits
    columns_1 = columns_0 * 0x9E3779B1
    place = (row * T * 3 * H + head) * K + t * (3 * H * K) + d
    source, target = packed + place, out + place
    arriving = gradient + (row * T * H + head) * K + t * (H * K) + d
    power = scale * 1.4426950408889634
    step = HALF * 3 * H * K

    # The later queries, with both halves of the keys.
    k_0 = tl.load(source + H * K, here, 0.0)
    k_1 = tl.load(source + step + H * K, later, 0.0)
    q = tl.load(source + step, later, 0.0)
    g = tl.load(arriving + HALF * H * K, later, 0.0)
    v_0 = tl.load(source + 2 * H * K, here, 0.0)
    v_1 = tl.load(source + step + 2 * H * K, later, 0.0)
    e_0, e_1 = product(q, k_0), tl.where(t >= s, product(q, k_1), float("-inf"))
    most = tl.maximum(tl.max(e_0, 1), tl.max(e_1, 1))[:, None]
    e_0, e_1 = tl.exp2((e_0 - most) * power), tl.exp2((e_1 - most) * power)
    share = 1.0 / (tl.sum(e_0, 1) + tl.sum(e_1, 1))[:, None]
    n = (g * (share / keep)).to(q.dtype)
    d_1 = drop(e_1, rows_1, columns_1, THRESHOLD)
    of_v = tl.dot(tl.trans(d_1.to(q.dtype)), n)
    tl.store(target + step + 2 * H * K, of_v.to(q.dtype), later)
    r_1 = d_1 * product(n, v_1)
    d_0 = drop(e_0, rows_1, columns_0, THRESHOLD)
    of_v = tl.dot(tl.trans(d_0.to(q.dtype)), n)
    r_0 = d_0 * product(n, v_0)
    mean = (tl.sum(r_0, 1) + tl.sum(r_1, 1))[:, None] * share
    of_s = (r_1 - e_1 * mean).to(q.dtype)
    of_k = tl.dot(tl.trans(of_s), q)
    tl.store(target + step + H * K, (of_k * scale).to(q.dtype), later)
    of_q = tl.dot(of_s, k_1)
    of_s = (r_0 - e_0 * mean).to(q.dtype)
    of_q = tl.dot(of_s, k_0, of_q)
    tl.store(target + step, (of_q * scale).to(q.dtype), later)
    of_k = tl.dot(tl.trans(of_s), q)

    # The earlier queries, with the earlier keys; these have gradients from above.
    q = tl.load(source, here, 0.0)
    g = tl.load(arriving, here, 0.0)
    e_0 = tl.where(t >= s, product(q, k_0), float("-inf"))
    e_0 = tl.exp2((e_0 - tl.max(e_0, 1)[:, None]) * power)
    share = 1.0 / tl.sum(e_0, 1)[:, None]
    n = (g * (share / keep)).to(q.dtype)
    d_0 = drop(e_0, rows_0, columns_0, THRESHOLD)
    of_v = tl.dot(tl.trans(d_0.to(q.dtype)), n, of_v)
    tl.store(target + 2 * H * K, of_v.to(q.dtype), here)
    r_0 = d_0 * product(n, v_0)
    of_s = (r_0 - e_0 * (tl.sum(r_0, 1)[:, None] * share)).to(q.dtype)
    tl.store(target, (tl.dot(of_s, k_0) * scale).to(q.dtype), here)
    of_k = tl.dot(tl.trans(of_s), q, of_k)
    tl.store(target + H * K, (of_k * scale).to(q.dtype), here)
