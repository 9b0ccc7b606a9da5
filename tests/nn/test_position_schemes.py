"""Position schemes against their equations, by themselves and inside attention."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fractions import Fraction

import pytest
import torch
from torch import Tensor, nn

from headway.nn import (
    Additive,
    ALiBi,
    Attention,
    InAttention,
    Learned,
    Relative,
    Rotary,
    SelfAttention,
    Sinusoidal,
    T5Bias,
    make_position,
)
from headway.nn.positions import NAMES
from headway.nn.synthesizer import DotProduct

WIDTH, HEADS, SIZE, LONG = 12, 3, 4, 9
BUCKETS, FURTHEST, REACH = 4, 6, 2
INSIDE: dict[str, Callable[[bool], InAttention | None]] = {
    "none": lambda causal: None,
    "rotary": lambda causal: Rotary(SIZE),
    "alibi": lambda causal: ALiBi(HEADS),
    "t5": lambda causal: T5Bias(HEADS, BUCKETS, FURTHEST, causal=causal),
    "relative": lambda causal: Relative(SIZE, REACH),
}


@contextmanager
def double() -> Iterator[None]:
    """Modules made in here compute their frequencies in float64."""
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def make(name: str, causal: bool = False, seed: int = 0) -> SelfAttention:
    torch.manual_seed(seed)
    with double():
        attention = SelfAttention(WIDTH, HEADS, causal=causal, position=INSIDE[name](causal))
    for parameter in attention.parameters():
        nn.init.normal_(parameter, std=0.6)
    return attention.eval()


def some(rows: int = 2, count: int = LONG, width: int = WIDTH, seed: int = 1) -> Tensor:
    return torch.randn(rows, count, width, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def rates(width: int) -> list[float]:
    return [10_000 ** (-2 * i / width) for i in range(width // 2)]


def rotation(t: float, width: int) -> Tensor:
    """The matrix with a 2 × 2 rotation by t·θ_i for each pair on its diagonal."""
    blocks = [[[math.cos(t * r), -math.sin(t * r)], [math.sin(t * r), math.cos(t * r)]] for r in rates(width)]
    return torch.block_diag(*(torch.tensor(block, dtype=torch.float64) for block in blocks))


# ---- sinusoids


def sinusoids(positions: Tensor, width: int = 16) -> Tensor:
    with double():
        return Sinusoidal(width).table(positions)


def test_sinusoids_are_the_formula_at_any_position() -> None:
    places = [0, 1, 17, 5_000, 1_000_000]
    for row, t in zip(sinusoids(torch.tensor(places)), places, strict=True):
        expected = [f(t * rate) for rate in rates(16) for f in (math.sin, math.cos)]
        torch.testing.assert_close(row, torch.tensor(expected, dtype=torch.float64), atol=1e-8, rtol=0)


def test_products_of_sinusoids_depend_on_the_distance_alone() -> None:
    for begin in (0, 700, 30_000):
        table = sinusoids(begin + torch.arange(50))
        expected = [[sum(math.cos((t - s) * rate) for rate in rates(16)) for s in range(50)] for t in range(50)]
        torch.testing.assert_close(table @ table.T, torch.tensor(expected, dtype=torch.float64), atol=1e-9, rtol=0)


def test_no_two_of_some_thousand_positions_look_alike() -> None:
    table = Sinusoidal(16).table(torch.arange(5000))  # in float32, as a model has it
    to_first = (table[1:] - table[0]).norm(dim=-1)  # all other distances are these, by the test above
    assert float(to_first.min()) > 0.1
    assert len(torch.unique((table * 100).round(), dim=0)) == 5000


def test_a_shift_of_a_sinusoid_is_one_linear_map_for_all_positions() -> None:
    table = sinusoids(torch.arange(300))
    for shift in (1, 7, 100):
        # each pair is (sin, cos): turning it forward is a rotation the other way round
        expected = table[: 300 - shift] @ rotation(-shift, 16).T
        torch.testing.assert_close(table[shift:], expected, atol=1e-10, rtol=0)


def test_sinusoids_are_added_row_by_row() -> None:
    scheme, x = Sinusoidal(WIDTH).double(), some()
    rows = torch.stack([torch.arange(LONG), torch.arange(LONG) + 40])
    out = scheme(x, rows)
    for row in range(2):
        torch.testing.assert_close(out[row], scheme(x[row : row + 1], rows[row])[0], atol=0, rtol=0)
        alone = scheme(torch.zeros_like(x), rows)[row]
        torch.testing.assert_close(out[row], x[row] + alone, atol=1e-12, rtol=0)


# ---- learned


def test_learned_positions_are_rows_of_a_table() -> None:
    scheme, x = Learned(12, WIDTH).double(), some()
    nn.init.normal_(scheme.table)
    rows = torch.stack([torch.arange(LONG), torch.arange(LONG) + 3])
    out = scheme(x, rows)
    for b in range(2):
        for t in range(LONG):
            assert torch.equal(out[b, t], x[b, t] + scheme.table[t + 3 * b])
    assert torch.equal(scheme(x, torch.arange(LONG))[0], out[0])


def test_learned_positions_end_with_their_table() -> None:
    scheme = Learned(8, WIDTH)
    assert scheme(torch.zeros(1, 8, WIDTH), torch.arange(8)).shape == (1, 8, WIDTH)
    with pytest.raises(ValueError, match="a row of 9 positions, and the learned table has 8"):
        scheme(torch.zeros(1, 9, WIDTH), torch.arange(9))
    with pytest.raises((ValueError, IndexError)):
        scheme(torch.zeros(2, 1, WIDTH), torch.tensor([[3], [8]]))


# ---- rotary


@pytest.mark.parametrize("width", [2, 8])
def test_rotary_is_the_rotation_matrix_and_the_complex_product(width: int) -> None:
    with double():
        scheme = Rotary(width)
    x, places = some(1, 4, width)[None], [0, 1, 13, 2_000]  # (B, H, T, K)
    turned = scheme.turn(x, torch.tensor(places))
    for at, t in enumerate(places):
        torch.testing.assert_close(turned[0, 0, at], rotation(t, width) @ x[0, 0, at], atol=1e-10, rtol=0)
        for i, rate in enumerate(rates(width)):
            unit = complex(math.cos(t * rate), math.sin(t * rate))
            number = complex(x[0, 0, at, 2 * i], x[0, 0, at, 2 * i + 1]) * unit
            assert abs(complex(turned[0, 0, at, 2 * i], turned[0, 0, at, 2 * i + 1]) - number) < 1e-10


def test_rotary_scores_depend_on_the_difference_alone_and_lengths_stay() -> None:
    with double():
        scheme = Rotary(8)
    q, k = some(1, 1, 8, seed=1)[None], some(1, 1, 8, seed=2)[None]
    for t, s in ((0, 0), (5, 2), (2, 5), (900, 7)):
        turned_q, turned_k = scheme.turn(q, torch.tensor([t])), scheme.turn(k, torch.tensor([s]))
        expected = q[0, 0, 0] @ rotation(s - t, 8) @ k[0, 0, 0]
        torch.testing.assert_close((turned_q * turned_k).sum(), expected, atol=1e-10, rtol=0)
        torch.testing.assert_close(turned_q.norm(), q.norm(), atol=1e-10, rtol=0)


# ---- ALiBi


def test_slopes_of_alibi() -> None:
    assert ALiBi(8).slopes.tolist() == [1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64, 1 / 128, 1 / 256]
    assert ALiBi(4).slopes.tolist() == [1 / 4, 1 / 16, 1 / 64, 1 / 256]
    assert ALiBi(2).slopes.tolist() == [1 / 16, 1 / 256]
    assert ALiBi(1).slopes.tolist() == [1 / 256]


@pytest.mark.parametrize("heads", [3, 5, 6, 7, 12, 20])
def test_slopes_for_other_numbers_of_heads(heads: int) -> None:
    """Those of the power of two below, then the first, third, fifth … of the power above."""
    below = max(power for power in (1, 2, 4, 8, 16) if power <= heads)
    first = [2 ** (-8 / below * (h + 1)) for h in range(below)]
    above = [2 ** (-8 / (2 * below) * (h + 1)) for h in range(2 * below)]
    expected = first + above[::2][: heads - below]
    torch.testing.assert_close(ALiBi(heads).slopes, torch.tensor(expected), atol=0, rtol=1e-6)
    assert len(set(ALiBi(heads).slopes.tolist())) == heads


def test_alibi_takes_the_slope_for_every_step_away() -> None:
    q = torch.zeros(2, 8, 3, 4)
    bias = ALiBi(8).bias(q, torch.tensor([0, 5, 6]), torch.arange(7))  # (H, T, S)
    rows = ALiBi(8).bias(q, torch.tensor([[[0, 5, 6]], [[1, 2, 3]]]), torch.arange(7))  # (B, H, T, S)
    for h in range(8):
        for s in range(7):
            assert bias[h, :, s].tolist() == [-abs(t - s) * 2.0 ** -(h + 1) for t in (0, 5, 6)]
            assert rows[1, h, :, s].tolist() == [-abs(t - s) * 2.0 ** -(h + 1) for t in (1, 2, 3)]
    assert torch.equal(rows[0], bias)


# ---- T5


def bucket(offset: int, buckets: int, furthest: int, causal: bool) -> int:
    """The bucket of s − t in exact fractions: singles first, then the greatest j with
    singles · (furthest / singles)^(j / rest) ≤ distance, both sides raised to the power `rest`.
    """
    count = buckets if causal else buckets // 2
    side = count if offset > 0 and not causal else 0
    far = max(0, -offset) if causal else abs(offset)
    singles = count // 2
    if far < singles:
        return side + far
    rest, j = count - singles, 0
    while j + 1 < rest and Fraction(furthest, singles) ** (j + 1) <= Fraction(far, singles) ** rest:
        j += 1
    return side + singles + j


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("buckets, furthest", [(32, 128), (4, 6), (8, 64), (6, 24), (64, 256)])
def test_buckets_of_t5(buckets: int, furthest: int, causal: bool) -> None:
    offsets = torch.arange(-2 * furthest, 2 * furthest + 1)
    found = T5Bias(2, buckets, furthest, causal=causal).bucket(offsets).tolist()
    assert found == [bucket(offset, buckets, furthest, causal) for offset in offsets.tolist()]
    assert set(found) == set(range(buckets)) - (set() if causal else {buckets // 2})  # s − t = 0 counts as the past


@pytest.mark.parametrize("causal", [False, True])
def test_buckets_grow_with_the_distance_up_to_the_furthest(causal: bool) -> None:
    scheme, count = T5Bias(2, causal=causal), 32 if causal else 16
    past = scheme.bucket(-torch.arange(400)).tolist()
    assert past == sorted(past)
    assert past[: count // 2] == list(range(count // 2))  # near distances have a bucket each
    assert past[128:] == [count - 1] * 272 and past[60] < count - 1
    future = scheme.bucket(torch.arange(1, 400)).tolist()
    assert future == ([0] * 399 if causal else [16 + number for number in past[1:]])


def test_t5_adds_a_number_for_each_head_and_bucket() -> None:
    scheme = T5Bias(3, BUCKETS, FURTHEST)
    nn.init.normal_(scheme.table)
    q, t, s = torch.zeros(2, 3, 4, 5), torch.tensor([0, 2, 3, 9]), torch.arange(10)
    whole, rows = scheme.bias(q, t, s), scheme.bias(q, torch.stack([t, t + 1])[:, None], s)
    for h in range(3):
        for at, place in enumerate(t.tolist()):
            for other in range(10):
                assert whole[h, at, other] == scheme.table[bucket(other - place, BUCKETS, FURTHEST, False), h]
                assert rows[1, h, at, other] == scheme.table[bucket(other - place - 1, BUCKETS, FURTHEST, False), h]
    assert torch.equal(rows[0], whole)


@pytest.mark.parametrize("buckets, furthest", [(2, 128), (7, 128), (32, 32)])
def test_t5_refuses_what_makes_no_buckets(buckets: int, furthest: int) -> None:
    with pytest.raises(ValueError, match=rf"\({buckets}\) and a furthest \({furthest}\)"):
        T5Bias(2, buckets, furthest)


# ---- inside attention


def reference(attention: SelfAttention, x: Tensor, places: list[list[int]], allowed: Tensor) -> Tensor:
    """Attention with the scheme's own equation, one pair at a time; `allowed` (B, T, T)."""
    scheme, mixed = attention.position, torch.zeros_like(x)
    for b in range(len(x)):
        for h in range(HEADS):
            part = slice(h * SIZE, (h + 1) * SIZE)
            q, k, v = (linear(x[b])[:, part] for linear in (attention.query, attention.key, attention.value))
            for t, place in enumerate(places[b]):
                seen = [s for s in range(x.shape[1]) if allowed[b, t, s]]
                scores, values = [], []
                for s in seen:
                    offset = places[b][s] - place
                    key, value, added = k[s], v[s], 0.0
                    if isinstance(scheme, Rotary):
                        key = rotation(offset, SIZE) @ key
                    elif isinstance(scheme, ALiBi):
                        added = -float(scheme.slopes[h]) * abs(offset)
                    elif isinstance(scheme, T5Bias):
                        added = float(scheme.table[bucket(offset, BUCKETS, FURTHEST, scheme.causal), h])
                    elif isinstance(scheme, Relative):
                        row = max(-REACH, min(REACH, offset)) + REACH
                        key, value = key + scheme.key_table[row], value + scheme.value_table[row]
                    scores.append(math.exp(float(q[t] @ key) / math.sqrt(SIZE) + added))
                    values.append(value)
                for score, value in zip(scores, values, strict=True):
                    mixed[b, t, part] += score / sum(scores) * value
    return attention.output(mixed) * allowed.any(-1, keepdim=True)  # who sees nobody gets zeros


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", INSIDE)
@torch.no_grad()
def test_attention_with_it_is_the_equation_written_out(name: str, causal: bool) -> None:
    attention, x = make(name, causal), some(count=6)
    mask = torch.ones(2, 6, dtype=torch.bool)
    mask[0, 0] = mask[1, 4:] = False  # when causal, the first token of row 0 sees nothing
    for positions in (torch.arange(6), torch.stack([torch.arange(6), torch.tensor([3, 4, 6, 7, 8, 15])])):
        for which in (None, mask):
            allowed = (torch.ones_like(mask) if which is None else mask)[:, None].expand(-1, 6, -1)
            allowed = allowed & torch.ones(6, 6, dtype=torch.bool).tril() if causal else allowed
            expected = reference(attention, x, positions.expand(2, 6).tolist(), allowed)
            torch.testing.assert_close(attention(x, positions, mask=which), expected, atol=1e-10, rtol=0)


@pytest.mark.parametrize("name", INSIDE)
@torch.no_grad()
def test_cached_steps_equal_the_full_pass(name: str) -> None:
    """Rows of 3 and 5 tokens, padded on the right, then continued at their own places."""
    attention, x = make(name, causal=True), some()
    full = attention(x, torch.arange(LONG))
    cache = attention.empty_cache(2, LONG)
    begin = attention(x[:, :5], torch.arange(5).expand(2, 5), cache)
    torch.testing.assert_close(begin[0, :3], full[0, :3], atol=1e-12, rtol=0)
    torch.testing.assert_close(begin[1], full[1, :5], atol=1e-12, rtol=0)
    lengths = torch.tensor([3, 5])
    for count in (1, 1, 2):
        places = lengths[:, None] + torch.arange(count)
        index = places[..., None].expand(-1, -1, WIDTH)
        out = attention(x.gather(1, index), places, cache)
        torch.testing.assert_close(out, full.gather(1, index), atol=1e-12, rtol=0)
        lengths += count


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", INSIDE)
@torch.no_grad()
def test_padding_and_the_batch_change_nothing(name: str, causal: bool) -> None:
    attention, x = make(name, causal), some()
    positions = torch.stack([torch.arange(LONG), torch.arange(LONG) + 5])
    mask = torch.tensor([[True] * 4 + [False] * 5, [True] * LONG])
    both = attention(x, positions, mask=mask)
    torch.testing.assert_close(both[:1, :4], attention(x[:1, :4], positions[0, :4]), atol=1e-12, rtol=0)
    torch.testing.assert_close(both[1:], attention(x[1:], positions[1]), atol=1e-12, rtol=0)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", INSIDE)
@torch.no_grad()
def test_only_distances_matter_inside_attention(name: str, causal: bool) -> None:
    attention, x = make(name, causal), some()
    torch.testing.assert_close(
        attention(x, torch.arange(LONG)), attention(x, torch.arange(LONG) + 50), atol=1e-10, rtol=0
    )


@torch.no_grad()
def with_embeddings(scheme: nn.Module | None) -> Callable[[Tensor, Tensor], Tensor]:
    """Attention without positions of its own, on embeddings that have them."""
    attention = make("none")
    return lambda x, positions: attention(x if scheme is None else scheme(x, positions), positions)


@torch.no_grad()
def test_without_positions_the_order_is_nothing_and_with_each_scheme_it_is_something() -> None:
    x, positions = some(), torch.arange(LONG)
    order = torch.tensor([4, 0, 7, 1, 8, 3, 2, 6, 5])
    learned = Learned(LONG, WIDTH).double()
    nn.init.normal_(learned.table)
    kinds: dict[str, Callable[[Tensor, Tensor], Tensor]] = {name: make(name) for name in INSIDE}
    kinds["learned"], kinds["sinusoidal"] = with_embeddings(learned), with_embeddings(Sinusoidal(WIDTH).double())
    assert set(kinds) == set(NAMES)
    for name, model in kinds.items():
        out = model(x, positions)
        together = model(x[:, order], positions[order])  # tokens take their positions with them
        torch.testing.assert_close(together, out[:, order], atol=1e-10, rtol=0)
        alike = torch.allclose(model(x[:, order], positions), out[:, order], atol=1e-10)
        assert alike == (name == "none"), name


@pytest.mark.parametrize("name", ["t5", "relative"])
@pytest.mark.parametrize("causal", [False, True])
def test_learned_schemes_get_finite_gradients_through_masked_rows(name: str, causal: bool) -> None:
    attention, x = make(name, causal), some().requires_grad_()
    mask = torch.tensor([[False] * LONG, [True] * LONG])
    out = attention(x, torch.arange(LONG), mask=mask)
    assert (out[0] == 0).all()
    out.square().sum().backward()
    assert torch.equal(x.grad[0], torch.zeros_like(x.grad[0]))
    never = {  # distances that do not occur: the future, and a future of 0 tokens
        ("t5", False): {BUCKETS // 2},
        ("t5", True): set(),
        ("relative", False): set(),
        ("relative", True): {REACH + 1, REACH + 2},
    }[name, causal]
    for table, parameter in attention.position.named_parameters():
        assert torch.isfinite(parameter.grad).all(), table
        assert {row for row, grad in enumerate(parameter.grad) if not grad.any()} == never, table


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [SelfAttention, Additive, DotProduct])
def test_a_scheme_that_says_nothing_changes_nothing(kind: type[Attention], dtype: torch.dtype) -> None:
    torch.manual_seed(4)
    without = kind(WIDTH, HEADS, length=LONG).to(dtype)
    within = kind(WIDTH, HEADS, length=LONG, position=InAttention()).to(dtype)
    within.load_state_dict(without.state_dict())
    x, positions = torch.randn(2, LONG, WIDTH, dtype=dtype), torch.arange(LONG)
    torch.testing.assert_close(within(x, positions), without(x, positions), atol=0, rtol=0)


def test_relative_needs_a_reach() -> None:
    with pytest.raises(ValueError, match="at least 1 token, not 0"):
        Relative(4, 0)


def test_schemes_by_name() -> None:
    kinds = {name: type(make_position(name, WIDTH, HEADS, LONG)) for name in NAMES}
    assert kinds == {
        "learned": Learned,
        "sinusoidal": Sinusoidal,
        "relative": Relative,
        "rotary": Rotary,
        "alibi": ALiBi,
        "t5": T5Bias,
        "none": type(None),
    }
    with pytest.raises(ValueError, match="'rotery' are unknown; did you mean 'rotary'"):
        make_position("rotery", WIDTH, HEADS)
    with pytest.raises(ValueError, match="give the longest length"):
        make_position("learned", WIDTH, HEADS)
