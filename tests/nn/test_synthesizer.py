"""Every synthesizer against its equation written out number by number, and what all of them promise."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from headway.models import GPT, GPTSettings
from headway.models.base import parameter_count
from headway.nn import ALiBi, InAttention, Relative, Rotary, SelfAttention, T5Bias
from headway.nn.attention import Attention
from headway.nn.synthesizer import (
    PARTS,
    DenseSynthesizer,
    DotProduct,
    FactorisedDense,
    FactorisedRandom,
    Mixture,
    RandomSynthesizer,
    Synthesizer,
    TokenMixer,
)

WIDTH, HEADS, SIZE, LENGTH = 12, 3, 4, 11
EVERY: dict[str, Callable[..., Synthesizer]] = {
    "dense": DenseSynthesizer,
    "dense shared": lambda *a, **k: DenseSynthesizer(*a, **k, shared=True),
    "random": RandomSynthesizer,
    "fixed": lambda *a, **k: RandomSynthesizer(*a, **k, trainable=False),
    "factorised dense": FactorisedDense,
    "factorised dense 2 x 7": lambda *a, **k: FactorisedDense(*a, **k, factors=(2, 7)),
    "factorised random": lambda *a, **k: FactorisedRandom(*a, **k, rank=2),
    "token mixer": TokenMixer,
    "mixture": Mixture,
    "mixture of all": lambda *a, **k: Mixture(*a, **k, parts=tuple(PARTS)),
    "mixture without keys": lambda *a, **k: Mixture(*a, **k, parts=("random", "factorised-dense")),
}


def make(kind: str, causal: bool = False, seed: int = 0, **options: object) -> Synthesizer:
    torch.manual_seed(seed)
    synthesizer = EVERY[kind](WIDTH, HEADS, causal=causal, length=LENGTH, **options)
    for parameter in synthesizer.parameters():
        torch.nn.init.normal_(parameter, std=0.6)
    return synthesizer.double().eval()


def some(rows: int = 2, count: int = 7, seed: int = 1) -> Tensor:
    return torch.randn(rows, count, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def score(part: torch.nn.Module, h: int, x_t: Tensor, x_s: Tensor, t: int, s: int) -> float:
    """How much head h at place t, with token x_t, looks at place s, where x_s is: one number, from the equation."""
    if isinstance(part, DenseSynthesizer):
        inner = [max(0.0, float(row @ x_t + bias)) for row, bias in zip(*head_of(part.inner, h), strict=True)]
        columns, offsets = (p if part.columns.dim() == 2 else p[h] for p in (part.columns, part.offsets))
        return sum(inner[i] * float(columns[i, s]) for i in range(SIZE)) + float(offsets[s])
    if isinstance(part, RandomSynthesizer):
        return float(part.table[h, t, s])
    if isinstance(part, FactorisedDense):
        m, n = part.factors
        a, b = part.first(x_t)[h * m : (h + 1) * m], part.second(x_t)[h * n : (h + 1) * n]
        blocks = torch.cat([number.repeat(n) for number in a])  # a₁ a₁ … a₂ a₂ …
        tiles = torch.cat([b] * m)  # b₁ b₂ … b₁ b₂ …
        return float(blocks[s] * tiles[s])
    if isinstance(part, FactorisedRandom):
        return sum(float(part.first[h, t, r] * part.second[h, s, r]) for r in range(part.first.shape[-1]))
    if isinstance(part, DotProduct):
        (wq, bq), (wk, bk) = head_of(part.query, h), head_of(part.key, h)
        return float((wq @ x_t + bq) @ (wk @ x_s + bk)) / math.sqrt(SIZE)
    assert isinstance(part, Mixture)
    shares = [math.exp(float(share)) for share in part.shares[:, h]]
    return sum(
        share / sum(shares) * score(inner, h, x_t, x_s, t, s)
        for share, inner in zip(shares, part.parts.values(), strict=True)
    )


def head_of(linear: torch.nn.Linear, h: int) -> tuple[Tensor, Tensor]:
    return linear.weight[h * SIZE : (h + 1) * SIZE], linear.bias[h * SIZE : (h + 1) * SIZE]


def reference(layer: Synthesizer, x: Tensor, places: list[list[int]], allowed: Tensor) -> tuple[Tensor, Tensor]:
    """Output (B, T, D) and weights (B, H, T, T), one number at a time; `allowed` (B, T, T)."""
    rows, count, _ = x.shape
    weights = torch.zeros(rows, HEADS, count, count, dtype=x.dtype)
    mixed = torch.zeros_like(x)
    for b in range(rows):
        for h in range(HEADS):
            weight, bias = head_of(layer.value, h)
            for t in range(count):
                seen = [s for s in range(count) if allowed[b, t, s]]
                found = [score(layer, h, x[b, t], x[b, s], places[b][t], places[b][s]) for s in seen]
                total = sum(math.exp(number) for number in found)
                for s, number in zip(seen, found, strict=True):
                    weights[b, h, t, s] = number if isinstance(layer, TokenMixer) else math.exp(number) / total
                    mixed[b, t, h * SIZE : (h + 1) * SIZE] += weights[b, h, t, s] * (weight @ x[b, s] + bias)
    seen = allowed.any(-1, keepdim=True)  # who sees nobody gets zeros
    return (mixed @ layer.output.weight.T + layer.output.bias) * seen, weights


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", EVERY)
@torch.no_grad()
def test_it_is_the_equation_written_out(kind: str, causal: bool) -> None:
    layer, x = make(kind, causal), some(count=4)
    mask = torch.tensor([[False, True, True, True], [True, True, True, False]])  # causal: row 0 begins with nothing
    allowed = mask[:, None].expand(-1, 4, -1)
    allowed = allowed & torch.ones(4, 4, dtype=torch.bool).tril() if causal else allowed
    for positions in (torch.arange(4), torch.tensor([2, 5, 6, 10]), torch.tensor([[0, 1, 2, 3], [7, 8, 9, 10]])):
        places = positions.expand(2, 4).tolist()
        expected, weights = reference(layer, x, places, allowed)
        torch.testing.assert_close(layer(x, positions, mask=mask), expected, atol=1e-10, rtol=0)
        torch.testing.assert_close(layer.weights(x, positions, mask), weights, atol=1e-10, rtol=0)


@pytest.mark.parametrize("kind", EVERY)
@torch.no_grad()
def test_cached_steps_equal_the_full_pass(kind: str) -> None:
    """Rows of 3 and 5 tokens, padded on the right, chosen and reordered, then continued at their own places."""
    layer, x = make(kind, causal=True), some(count=9)
    full = layer(x, torch.arange(9))
    cache = layer.empty_cache(2, 9)
    begin = layer(x[:, :5], torch.arange(5).expand(2, 5), cache)
    torch.testing.assert_close(begin[0, :3], full[0, :3], atol=1e-12, rtol=0)
    torch.testing.assert_close(begin[1], full[1, :5], atol=1e-12, rtol=0)
    order = torch.tensor([1, 0, 1])
    cache, x, full, lengths = cache.select(order), x[order], full[order], torch.tensor([5, 3, 5])
    for count in (1, 1, 2):
        places = lengths[:, None] + torch.arange(count)
        index = places[..., None].expand(-1, -1, WIDTH)
        torch.testing.assert_close(layer(x.gather(1, index), places, cache), full.gather(1, index), atol=1e-12, rtol=0)
        lengths = lengths + count


@pytest.mark.parametrize("kind", EVERY)
@torch.no_grad()
def test_padding_and_the_batch_change_nothing(kind: str) -> None:
    x = some()
    mask = torch.tensor([[True] * 4 + [False] * 3, [True] * 7])
    for causal in (False, True):
        layer = make(kind, causal)
        both = layer(x, torch.arange(7), mask=mask)
        torch.testing.assert_close(both[:1, :4], layer(x[:1, :4], torch.arange(4)), atol=1e-12, rtol=0)
        torch.testing.assert_close(both[1:], layer(x[1:], torch.arange(7)), atol=1e-12, rtol=0)


@pytest.mark.parametrize("kind", EVERY)
@torch.no_grad()
def test_the_future_changes_nothing(kind: str) -> None:
    layer, x = make(kind, causal=True), some()
    changed = torch.cat([x[:, :4], x[:, 4:] + 1.0], dim=1)
    before, after = layer(x, torch.arange(7)), layer(changed, torch.arange(7))
    assert torch.equal(before[:, :4], after[:, :4])
    assert not torch.allclose(before[:, 4:], after[:, 4:])


@pytest.mark.parametrize("kind", EVERY)
def test_a_row_with_nothing_to_see_gives_zeros_and_finite_gradients(kind: str) -> None:
    layer, x = make(kind), some().requires_grad_()
    mask = torch.tensor([[False] * 7, [True] * 7])
    out = layer(x, torch.arange(7), mask=mask)
    assert (out[0] == 0).all()
    out.square().sum().backward()
    assert torch.equal(x.grad[0], torch.zeros_like(x.grad[0]))
    for name, parameter in layer.named_parameters():
        assert torch.isfinite(parameter.grad).all(), name
        if not name.endswith("key.bias"):  # adds the same to all scores of a query, which no softmax sees
            assert (parameter.grad != 0).any(), name


@pytest.mark.parametrize("kind", EVERY)
def test_gradients_are_those_of_finite_differences(kind: str) -> None:
    layer, x = make(kind, causal=True), some(rows=1, count=3).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: layer(x, torch.tensor([1, 2, 3])), (x,))
    assert torch.autograd.gradcheck(lambda x: layer(x, torch.tensor([[4, 5, 6]])), (x,))


@torch.no_grad()
def test_the_dense_synthesizer_of_the_course_has_its_number_of_parameters() -> None:
    model = GPT(GPTSettings(width=256, layers=4, heads=8, block=128, positions="learned"), 256)
    for block in model.blocks:
        block.attention = DenseSynthesizer(256, 8, causal=True, length=127, shared=True)
    assert parameter_count(model) == 3_076_988
    assert {name for name, _ in block.attention.named_parameters()} == {
        "inner.weight",
        "inner.bias",
        "columns",
        "offsets",
        "value.weight",
        "value.bias",
        "output.weight",
        "output.bias",
    }
    assert float(block.attention.columns.abs().max()) <= 0.001 and not block.attention.offsets.any()


def test_parameters_beside_the_projections() -> None:
    """Three heads of width 4, length 11: what the docstrings promise."""
    projections = 2 * (12 * 12 + 12)
    counts = {kind: parameter_count(make(kind)) - projections for kind in EVERY}
    dot, dense, random = 2 * (144 + 12), 156 + 3 * (4 * 11 + 11), 3 * 121
    factorised_dense, factorised_random = 3 * (4 + 3) * (12 + 1), 3 * 2 * 11 * 8
    assert counts == {
        "dense": dense,
        "dense shared": 156 + 4 * 11 + 11,
        "random": random,
        "fixed": 0,
        "factorised dense": factorised_dense,
        "factorised dense 2 x 7": 3 * (2 + 7) * (12 + 1),
        "factorised random": 3 * 2 * 11 * 2,
        "token mixer": random,
        "mixture": dense + dot + 2 * 3,
        "mixture of all": dense + random + factorised_dense + factorised_random + dot + 5 * 3,
        "mixture without keys": random + factorised_dense + 2 * 3,
    }


@torch.no_grad()
def test_a_fixed_table_is_saved_and_not_learned() -> None:
    drawn, other = make("fixed", seed=0), make("fixed", seed=1)
    assert "table" in drawn.state_dict() and "table" not in dict(drawn.named_parameters())
    other.load_state_dict(drawn.state_dict())
    assert torch.equal(drawn(some(), torch.arange(7)), other(some(), torch.arange(7)))
    assert 0.9 < float(drawn.table.std()) < 1.1


@torch.no_grad()
def test_the_random_tables_begin_with_variance_one() -> None:
    torch.manual_seed(0)
    layer = FactorisedRandom(8, 2, length=100)
    table = layer.first @ layer.second.transpose(-2, -1)
    assert 0.9 < float(table.std()) < 1.1
    assert 0.98 < float(RandomSynthesizer(8, 2, length=100).table.std()) < 1.02
    assert 0.098 < float(TokenMixer(8, 2, length=100).table.std()) < 0.102


@pytest.mark.parametrize("length", [1, 2, 3, 9, 10, 127, 128])
def test_every_column_has_its_own_pair_of_factors(length: int) -> None:
    m, n = FactorisedDense(4, 1, length=length).factors
    assert m * n >= length and (m - 1) * n < length and abs(m - n) <= 1
    assert len({(s // n, s % n) for s in range(length)}) == length and (length - 1) // n < m


@torch.no_grad()
def test_a_token_mixer_is_a_linear_layer_across_the_row() -> None:
    torch.manual_seed(0)
    mixer = TokenMixer(WIDTH, 1, length=LENGTH).double()
    across = torch.nn.Linear(LENGTH, LENGTH, bias=False).double()
    across.weight.copy_(mixer.table[0])
    x = some(count=LENGTH)
    expected = mixer.output(across(mixer.value(x).transpose(1, 2)).transpose(1, 2))
    torch.testing.assert_close(mixer(x, torch.arange(LENGTH)), expected, atol=1e-12, rtol=0)


@torch.no_grad()
def test_where_a_random_synthesizer_looks_does_not_depend_on_the_tokens() -> None:
    t = torch.arange(7)
    for kind in ("random", "fixed", "factorised random", "token mixer"):
        layer = make(kind, causal=True)
        assert torch.equal(layer.weights(some(seed=1), t), layer.weights(some(seed=2), t))
    for kind in ("dense", "factorised dense", "mixture"):
        layer = make(kind, causal=True)
        assert not torch.allclose(layer.weights(some(seed=1), t), layer.weights(some(seed=2), t))


def schemes() -> list[InAttention | None]:
    return [None, Rotary(SIZE), ALiBi(HEADS), T5Bias(HEADS, buckets=4, furthest=6, causal=True), Relative(SIZE, 2)]


@pytest.mark.parametrize("position", schemes(), ids=lambda scheme: type(scheme).__name__)
@pytest.mark.parametrize("causal", [False, True])
@torch.no_grad()
def test_a_mixture_of_the_dot_product_alone_is_self_attention(position: InAttention | None, causal: bool) -> None:
    layer = Mixture(WIDTH, HEADS, causal=causal, length=LENGTH, position=position, parts=("dot-product",)).double()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.6)
    plain = SelfAttention(WIDTH, HEADS, causal=causal, position=position).double()
    for ours, its in ((plain, layer), (plain, layer.dot_product)):
        for name in ("query", "key") if its is layer.dot_product else ("value", "output"):
            getattr(ours, name).load_state_dict(getattr(its, name).state_dict())
    x, mask = some(), torch.tensor([[True] * 5 + [False] * 2, [True] * 7])
    for positions in (torch.arange(7), torch.stack([torch.arange(7), torch.arange(7) + 4])):
        expected = plain(x, positions, mask=mask)
        torch.testing.assert_close(layer(x, positions, mask=mask), expected, atol=1e-12, rtol=0)
        torch.testing.assert_close(layer.weights(x, positions), plain.weights(x, positions), atol=1e-12, rtol=0)
    if causal:
        places = torch.arange(7).expand(2, 7)
        cache, ours = plain.empty_cache(2, 7), layer.empty_cache(2, 7)
        for at in range(7):
            step = places[:, at : at + 1]
            expected = plain(x[:, at : at + 1], step, cache)
            torch.testing.assert_close(layer(x[:, at : at + 1], step, ours), expected, atol=1e-12, rtol=0)


@torch.no_grad()
def test_shares_of_a_mixture_begin_equal_and_may_choose_one_part() -> None:
    layer = Mixture(WIDTH, HEADS, length=LENGTH).double()
    assert torch.equal(layer.shares.softmax(0), torch.full((2, HEADS), 0.5, dtype=torch.float64))
    dense = DenseSynthesizer(WIDTH, HEADS, length=LENGTH).double()
    dense.load_state_dict(
        layer.parts["dense"].state_dict()
        | {name: tensor for name, tensor in layer.state_dict().items() if name.startswith(("value", "output"))}
    )
    layer.shares[0] += 100.0  # α = (1, 0)
    torch.testing.assert_close(layer(some(), torch.arange(7)), dense(some(), torch.arange(7)), atol=1e-12, rtol=0)


@pytest.mark.parametrize("kind", EVERY)
@torch.no_grad()
def test_dropout_is_for_training_and_differs_by_row(kind: str) -> None:
    layer = make(kind)
    layer.dropout = 0.5
    x = some(rows=1).expand(2, -1, -1)
    plain = layer(x, torch.arange(7))
    torch.testing.assert_close(plain[0], plain[1], atol=1e-12, rtol=0)
    dropped = layer.train()(x, torch.arange(7))
    assert not torch.allclose(dropped, plain) and not torch.allclose(dropped[0], dropped[1])


@pytest.mark.parametrize("kind", EVERY)
def test_rows_longer_than_the_length_are_refused(kind: str) -> None:
    layer = make(kind, causal=True)
    row = f"a row of 12 tokens, and this {type(layer).__name__} was built for length 11"
    place = f"position 11, and this {type(layer).__name__} was built for length 11"
    with pytest.raises(ValueError, match=row):
        layer(some(count=12), torch.arange(12))
    with pytest.raises(ValueError, match=row):
        layer.weights(some(count=12), torch.arange(12))
    with pytest.raises(ValueError, match=place):
        layer(some(count=2), torch.tensor([10, 11]))
    with pytest.raises(ValueError, match=place):
        layer(some(count=1), torch.tensor([[3], [11]]), layer.empty_cache(2, 20))
    assert layer(some(count=11), torch.arange(11)).shape == (2, 11, WIDTH)


@pytest.mark.parametrize("kind", EVERY)
def test_length_is_needed(kind: str) -> None:
    with pytest.raises(ValueError, match="give the longest row as length, not None"):
        EVERY[kind](WIDTH, HEADS)
    with pytest.raises(ValueError, match="not 0"):
        EVERY[kind](WIDTH, HEADS, length=0)
    with pytest.raises(ValueError, match=r"heads \(5\) must divide width \(12\)"):
        EVERY[kind](WIDTH, 5, length=LENGTH)


def test_positions_need_queries_and_keys() -> None:
    for kind, build in EVERY.items():
        if kind in ("mixture", "mixture of all"):
            assert isinstance(build(WIDTH, HEADS, length=LENGTH, position=Rotary(SIZE)), Attention)
        else:
            with pytest.raises(ValueError, match=r"no queries and keys for Rotary .* a Mixture with \"dot-product\""):
                build(WIDTH, HEADS, length=LENGTH, position=Rotary(SIZE))


def test_options_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match=r"factors \(2, 5\) make 10 columns, and length is 11"):
        FactorisedDense(WIDTH, HEADS, length=LENGTH, factors=(2, 5))
    with pytest.raises(ValueError, match=r"factors \(-3, -4\)"):
        FactorisedDense(WIDTH, HEADS, length=LENGTH, factors=(-3, -4))
    with pytest.raises(ValueError, match=r"rank \(0\) must be at least 1"):
        FactorisedRandom(WIDTH, HEADS, length=LENGTH, rank=0)
    with pytest.raises(ValueError, match="no part 'randon'; did you mean 'random'"):
        Mixture(WIDTH, HEADS, length=LENGTH, parts=("dense", "randon"))
    for parts in ((), ("dense", "dense")):
        with pytest.raises(ValueError, match="each part once and at least one of dense, random"):
            Mixture(WIDTH, HEADS, length=LENGTH, parts=parts)
