"""Each experiment against its closed form, or against a slow computation that is obviously right."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from headway.inspection.experiments import (
    EXPERIMENTS,
    averaging,
    complexity,
    copying,
    layer_norm,
    masks,
    multi_head_robustness,
    permutation,
    rotary,
    scaling,
    single_head_noise,
    sinusoids,
    subspaces,
    synthesizer_limit,
    untied_qkv,
)
from headway.inspection.experiments.base import Table, generator, look_up, normal, off_diagonals, slope
from headway.nn import ATTENTIONS, DenseSynthesizer, Perceiver, SelfAttention

SMALL: dict[str, dict[str, Any]] = {
    "copying": {},
    "averaging": {},
    "subspaces": {"draws": 20},
    "single-head-noise": {"samples": 500},
    "multi-head-robustness": {"samples": 500},
    "scaling": {"widths": (4, 16), "sets": 4, "queries": 8},
    "untied-qkv": {"steps": 20, "width": 16},
    "permutation": {"permutations": 3},
    "sinusoids": {"length": 32, "width": 16},
    "rotary": {"length": 16, "draws": 20, "distances": 32},
    "synthesizer-limit": {"steps": 20},
    "masks": {"draws": 50},
    "layer-norm": {"layers": 4, "width": 16},
    "complexity": {"attentions": {"dot-product": SelfAttention}, "width": 16, "heads": 2, "shorter": 16, "repeats": 1},
}


# ---- what holds for every experiment


def test_every_experiment_is_known_here() -> None:
    assert list(SMALL) == list(EXPERIMENTS)


@pytest.mark.parametrize("name", SMALL)
def test_an_experiment_is_a_pure_function_of_its_seed(name: str) -> None:
    experiment = EXPERIMENTS[name]
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    first, again, other = (experiment.run(seed=seed, **SMALL[name]) for seed in (3, 3, 4))
    assert torch.equal(torch.get_rng_state(), state) and torch.get_num_threads() == threads
    if name != "complexity":  # which measures the clock
        assert experiment.table(first).rows == experiment.table(again).rows
        assert experiment.finding(first) == experiment.finding(again)
    if name not in ("complexity", "sinusoids"):  # of which the second has nothing random
        assert repr(first) != repr(other)


@pytest.mark.parametrize("name", SMALL)
def test_an_experiment_can_be_shown(name: str) -> None:
    experiment = EXPERIMENTS[name]
    result = experiment.run(**SMALL[name])
    table = experiment.table(result)
    assert table.rows and all(len(row) == len(table.header) for row in table.rows)
    assert not any(word in " ".join(cell for row in table.rows for cell in row) for word in ("nan", "inf"))
    assert experiment.finding(result).endswith(".")
    figure = Figure(layout="constrained")
    experiment.draw(result, figure)
    figure.canvas.draw()
    axes = [axes for axes in figure.axes if axes.get_label() != "<colorbar>"]
    assert axes and all(axes.get_title() and axes.get_xlabel() for axes in axes)
    assert all(axes.get_ylabel() for axes in axes) or name == "masks"  # whose bars are named one by one


def test_a_table_is_set_in_columns() -> None:
    assert Table(("a", "long"), [("name", "1"), ("b", "22")]).text() == (
        "a     long\n----  ----\nname     1\nb       22"
    )


def test_the_slope_of_a_line() -> None:
    assert slope([1, 2, 4], [5, 3, -1]) == pytest.approx(-2)


def test_the_spread_along_diagonals() -> None:
    size = 5
    toeplitz = torch.tensor([[float(t - s) ** 3 for s in range(size)] for t in range(size)])
    assert off_diagonals(toeplitz) == 0
    toeplitz[3, 1] += 0.25
    assert off_diagonals(toeplitz) == 0.25


def test_looking_up_equals_the_loop() -> None:
    source = generator(0)
    q, k, v = normal(4, source=source), normal(3, 5, 4, source=source), normal(3, 5, 4, source=source)
    weights, z = look_up(q, k, v)
    for n in range(3):
        scores = [math.exp(float(q @ k[n, s])) for s in range(5)]
        expected = sum((score / sum(scores)) * v[n, s] for s, score in enumerate(scores))
        torch.testing.assert_close(z[n], expected)
        assert float(weights[n, 2]) == pytest.approx(scores[2] / sum(scores))


# ---- copying, averaging, subspaces


def test_copying_follows_the_formula_and_ends_in_the_value() -> None:
    result = copying.run(betas=(0, 3, 10, 40), keys=5, width=8)
    expected = [math.exp(beta) / (math.exp(beta) + 4) for beta in (0, 3, 10, 40)]
    assert result.weights == pytest.approx(expected, abs=1e-12) and result.formula == pytest.approx(expected)
    assert result.errors == sorted(result.errors, reverse=True) and result.errors[-1] < 1e-12
    assert result.errors[0] > 0.5  # β = 0: the mean of all values


def test_copying_with_random_keys_in_a_wide_space_is_nearly_the_same() -> None:
    result = copying.run(betas=(1, 4, 12), keys=8, width=4096)
    assert result.random_weights == pytest.approx(result.formula, abs=0.02)
    assert result.random_errors[-1] < 1e-3


def test_averaging_falls_exponentially() -> None:
    result = averaging.run(betas=(0, 5, 10, 15, 20))
    assert result.errors == pytest.approx(result.formula, rel=1e-6)
    assert result.rate == pytest.approx(1, abs=0.01)
    n = result.keys
    assert result.weights == pytest.approx([math.exp(b) / (2 * math.exp(b) + n - 2) for b in result.betas])


def test_averaging_over_keys_of_unequal_length_gets_worse_again() -> None:
    result = averaging.run(betas=(0, 4, 200), length=0.9)
    assert result.uneven[1] < result.uneven[0] and result.uneven[1] < result.uneven[2]
    same = averaging.run(betas=(0, 4, 20), length=1.0)
    assert same.uneven == pytest.approx(same.errors)


def test_each_map_recovers_its_own_case() -> None:
    """Row by row, the first map that works; the ones after it work too, the ones before do not."""
    errors = subspaces.run(draws=50).errors
    for first, basis in enumerate(subspaces.BASES):
        for index, form in enumerate(subspaces.MAPS):
            assert (errors[basis][form] < 1e-12) if index >= first else (errors[basis][form] > 0.1), (basis, form)


def test_the_oblique_map_solves_for_both_parts() -> None:
    source = generator(1)
    a, b = normal(9, 3, source=source), normal(9, 4, source=source)
    v_a, v_b = a @ normal(3, source=source), b @ normal(4, source=source)
    coefficients = torch.linalg.lstsq(torch.cat([a, b], 1), (v_a + v_b)[:, None]).solution[:3, 0]
    torch.testing.assert_close(subspaces.oblique(a, b) @ (v_a + v_b), a @ coefficients)
    torch.testing.assert_close(a @ coefficients, v_a)


# ---- one head and two


def test_the_single_head_swings_as_much_as_it_should() -> None:
    result = single_head_noise.run(betas=(5, 20, 100))
    assert result.deviations == pytest.approx([0.38, 0.47, 0.49], abs=0.02)
    assert result.deviations == pytest.approx(result.formula, abs=0.01)
    assert result.weights.mean(-1).tolist() == pytest.approx([0.5] * 3, abs=0.02)


@pytest.mark.parametrize("beta", [1.0, 3.0, 5.0])
def test_the_formula_of_the_swing_against_another_integral(beta: float) -> None:
    """Two keys: w = σ(β(ξ − 1)); its moments by Gauss–Hermite."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(150)
    sigmoid = 1 / (1 + np.exp(-beta * math.sqrt(0.5) * nodes))
    variance = (weights * (sigmoid - 0.5) ** 2).sum() / weights.sum()
    assert single_head_noise.expected(beta, 2) == pytest.approx(math.sqrt(variance), abs=1e-3)


def test_the_swing_goes_to_that_of_a_coin() -> None:
    assert single_head_noise.expected(1e4, 8) == pytest.approx(0.5, abs=1e-3)


def test_noisy_keys_have_the_covariance_they_should() -> None:
    """α I for every key, and ½ μμᵀ more for the first."""
    means = torch.eye(3, dtype=torch.float64)
    k = single_head_noise.noisy_keys(means, 0.04, 200_000, generator(0))
    torch.testing.assert_close(k.mean(0), means, atol=0.01, rtol=0)
    for s, extra in ((0, 0.5), (1, 0.0)):
        expected = 0.04 * torch.eye(3, dtype=torch.float64) + extra * torch.outer(means[s], means[s])
        torch.testing.assert_close(k[:, s].T.cov(), expected, atol=0.01, rtol=0)


def test_two_heads_swing_less() -> None:
    result = multi_head_robustness.run(betas=(5, 100))
    found = 0.5 * (1 + math.erf(1.0))  # P(N(1, ½) > 0)
    assert result.limit == pytest.approx(0.5 * math.sqrt(found * (1 - found)))
    assert result.two_deviations[-1] == pytest.approx(result.limit, abs=0.01)
    assert result.one_deviations == pytest.approx([0.386, 0.494], abs=0.01)
    assert all(two < one / 2 for one, two in zip(result.one_deviations, result.two_deviations, strict=True))
    assert all(two < one / 2 for one, two in zip(result.one_errors, result.two_errors, strict=True))


# ---- scaling


def test_the_size_of_the_softmax_gradient_equals_that_of_autograd() -> None:
    scores = 3 * normal(4, 6, source=generator(0))
    norms = scaling.jacobian_norm(scores.softmax(-1))
    for row, norm in zip(scores, norms, strict=True):
        jacobian = torch.autograd.functional.jacobian(lambda x: x.softmax(-1), row)
        torch.testing.assert_close(norm, jacobian.norm())


def test_dividing_by_the_root_makes_the_width_not_matter() -> None:
    result = scaling.run(widths=(16, 256, 4096), sets=8)
    for values in (result.scaled.largest, result.scaled.entropy, result.scaled.gradient):
        assert max(values) / min(values) < 1.2
    assert result.unscaled.largest == sorted(result.unscaled.largest) and result.unscaled.largest[-1] > 0.95
    assert result.unscaled.entropy[-1] < 0.15 < result.unscaled.entropy[0]
    assert result.unscaled.median[-1] < 1e-4 and result.scaled.median[-1] > 0.1


# ---- what one layer can learn


def test_pointers_form_one_cycle_and_lead_to_their_values() -> None:
    tokens, values = 5, 7
    x, target = untied_qkv.pointers(20, tokens, values, generator(0))
    for row, answers in zip(x, target, strict=True):
        name, pointer, value = (part.argmax(-1).tolist() for part in row.split([tokens, tokens, values], -1))
        assert name == list(range(tokens))
        assert answers.tolist() == [value[pointer[t]] for t in range(tokens)]
        place, seen = 0, set()
        while place not in seen:
            seen.add(place)
            place = pointer[place]
        assert len(seen) == tokens


def test_only_untied_projections_follow_pointers() -> None:
    result = untied_qkv.run(steps=200, width=32)
    assert result.accuracies["Q, K, V"] > 0.98
    assert all(result.chance < result.accuracies[name] < 0.5 for name in ("Q = K, V", "Q = K = V"))
    assert result.asymmetry["Q, K, V"] > 0.3
    assert result.asymmetry["Q = K, V"] < 1e-5 and result.asymmetry["Q = K = V"] < 1e-5


def test_tied_scores_have_their_largest_on_the_diagonal() -> None:
    both = nn.Linear(6, 4)
    scores = untied_qkv.OneLayer(both, both, both, 3).scores(normal(30, 5, 6, source=generator(0)).float())
    diagonal = scores.diagonal(dim1=-2, dim2=-1)
    torch.testing.assert_close(diagonal.amax(-1), scores.amax((-2, -1)))


def test_questions_ask_for_the_value_beside_their_key() -> None:
    pairs, values = 4, 9
    x, answers = synthesizer_limit.questions(50, pairs, values, generator(0))
    for row, answer in zip(x, answers.tolist(), strict=True):
        keys, held, mark = row.split([pairs, values, 1], -1)
        assert mark[:, 0].tolist() == [0.0] * pairs + [1.0] and held[-1].sum() == 0
        table = {int(keys[s].argmax()): int(held[s].argmax()) for s in range(pairs)}
        assert len(table) == pairs == len(set(table.values()))
        assert table[int(keys[-1].argmax())] == answer


def test_the_synthesizer_cannot_look_up_and_dot_products_can() -> None:
    result = synthesizer_limit.run(
        steps=250, attentions={"dot-product": SelfAttention, "dense synthesizer": DenseSynthesizer}
    )
    assert result.accuracies["dot-product"] > 0.98
    assert result.accuracies["dense synthesizer"] < result.guess + 0.05
    assert min(result.losses["dense synthesizer"]) > math.log(result.pairs) - 0.25  # a batch may be easier than most
    assert result.guess == pytest.approx(1 / 6) and result.chance == pytest.approx(1 / 12)


# ---- positions


def test_only_attention_without_positions_commutes_with_permutations() -> None:
    deviations = permutation.run(tokens=12, permutations=5).deviations
    assert deviations.pop("none") < 1e-14
    assert set(deviations) == {"none, causal", "learned", "sinusoidal", "relative", "rotary", "alibi", "t5"}
    assert min(deviations.values()) > 0.05


def test_sinusoids_know_the_distance_and_two_sines_do_not() -> None:
    length, width = 40, 32
    result = sinusoids.run(length, width)
    theta = [10_000 ** (-2 * i / width) for i in range(width // 2)]

    def mean(angles: list[float]) -> float:
        return sum(map(math.cos, angles)) / len(angles)

    for t, s in ((0, 0), (3, 10), (39, 1)):
        right = mean([(t - s) * x for x in theta])
        wrong = right - mean([(t + s) * x for x in theta])
        assert float(result.products[t, s]) == pytest.approx(right, abs=1e-6)
        assert float(result.misprinted[t, s]) == pytest.approx(wrong, abs=1e-6)
    assert result.spread < 1e-5 and result.misprinted_spread > 0.3
    assert result.neighbours == 1.0 and result.misprinted_neighbours < 0.9
    assert result.by_distance[0] == pytest.approx(1, abs=1e-6)
    assert result.by_distance[0] > result.by_distance[1] > result.by_distance[2] > result.by_distance[20]


def test_rotary_scores_depend_on_the_distance_alone() -> None:
    result = rotary.run(length=24, head_width=16, draws=400, distances=40)
    assert result.spreads["float64", 0] < 1e-5 and result.spreads["float32", 0] < 1e-5
    assert result.spreads["float32", 100_000] > 10 * result.spreads["float32", 0]
    source = generator(0)
    q, k = normal(16, source=source), normal(16, source=source)
    for t, s in ((0, 0), (2, 7), (20, 5)):  # the pair i of q and k, as complex numbers: Re(q̄ k e^{i(s−t)θ})
        expected = sum(
            (complex(q[i], -q[i + 1]) * complex(k[i], k[i + 1]) * np.exp(1j * (s - t) * 10_000 ** (-i / 16))).real
            for i in range(0, 16, 2)
        )
        assert float(result.scores[t, s]) == pytest.approx(expected / 4, abs=1e-5)


def test_rotary_scores_fall_with_distance_for_equal_vectors_only() -> None:
    result = rotary.run(length=8, draws=400, distances=200)
    assert result.formula[0] == pytest.approx(8)
    assert max(abs(a - b) for a, b in zip(result.same_mean, result.formula, strict=True)) < 0.4
    assert np.mean(result.same_mean[:10]) > 1.3 * np.mean(result.same_mean[90:110])
    assert max(map(abs, result.other_mean)) < 5 / math.sqrt(400)  # their standard deviation is 1
    assert result.other_deviation == pytest.approx([1.0] * 200, abs=0.2)


# ---- masks


def test_masks_show_who_may_see_whom() -> None:
    allowed = masks.run(tokens=4, real=3, draws=2).allowed
    for t in range(4):
        for s in range(4):
            assert bool(allowed["padding"][t, s]) == (s < 3)
            assert bool(allowed["causal"][t, s]) == (s <= t)
            assert bool(allowed["both"][t, s]) == (s < 3 and s <= t)


def test_each_way_of_masking_equals_the_loop() -> None:
    scores, allowed = normal(4, 5, source=generator(0)), torch.rand(4, 5, generator=generator(1)) > 0.4
    for t in range(4):
        powers = [math.exp(score) for score in scores[t].tolist()]
        kept = [power if ok else 0.0 for power, ok in zip(powers, allowed[t].tolist(), strict=True)]
        zeroed = [power if ok else 1.0 for power, ok in zip(powers, allowed[t].tolist(), strict=True)]
        expected = {
            masks.WAYS[0]: [power / sum(kept) for power in kept],
            masks.WAYS[1]: [power / sum(powers) for power in kept],
            masks.WAYS[2]: [power / sum(zeroed) for power in zeroed],
            masks.WAYS[3]: [power / sum(kept) for power in kept],
        }
        for way in masks.WAYS:
            assert masks.mask_by(way, scores, allowed)[t].tolist() == pytest.approx(expected[way]), way


def test_what_leaks_and_what_is_lost() -> None:
    result = masks.run(tokens=8, real=5)
    right, after, before, added = masks.WAYS
    assert result.leaked[right] == 0 and result.total[right] == pytest.approx(1) and result.empty[right] == 0
    share = (1 + 2 + 3 + 4 + 5 + 5 + 5 + 5) / 64  # of allowed pairs: all scores have one distribution
    assert result.total[after] == pytest.approx(share, abs=0.01) and result.leaked[after] == 0
    assert 0.3 < result.leaked[before] == pytest.approx(1 - result.total[before])
    assert result.leaked[added] == 0 and result.empty[added] == pytest.approx(1) == result.empty[before]


# ---- depth


def test_what_each_design_does_to_depth() -> None:
    designs = layer_norm.run(layers=16, width=32, tokens=8, batch=4).designs
    assert designs["nothing"].signal[-1] < 1e-3 and designs["nothing"].gradient[0] < 1e-3
    assert designs["residual"].signal[-1] > 1e2 and designs["residual"].gradient[0] > 1e2
    assert designs["post-norm"].signal[1:] == pytest.approx([1.0] * 16, abs=1e-3)
    assert designs["batch norm"].signal[1:] == pytest.approx([1.0] * 16, abs=1e-3)
    assert 2 < designs["pre-norm"].signal[-1] < 10
    assert min(designs["post-norm"].gradient) < 0.6 and min(designs["pre-norm"].gradient) > 0.9
    assert designs["batch norm"].coupling > 0.1
    assert all(depth.coupling < 1e-12 for name, depth in designs.items() if name != "batch norm")


@pytest.mark.parametrize("name", layer_norm.DESIGNS)
def test_the_gradient_through_the_stack_equals_finite_differences(name: str) -> None:
    source = generator(0)
    x, direction = normal(2, 2, 4, source=source), normal(2, 2, 4, source=source)
    matrices = [normal(4, 4, source=source) / 2 for _ in range(4)]

    class Linear(nn.Module):
        def __init__(self, matrix: Tensor) -> None:
            super().__init__()
            self.matrix = matrix

        def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
            return x @ self.matrix

    sublayers, wrap = [Linear(matrix) for matrix in matrices], layer_norm.DESIGNS[name]
    depth = layer_norm.measure(wrap, sublayers, x, x, direction)

    def loss(x: Tensor) -> float:
        return float((layer_norm.stack(wrap, sublayers, x)[-1].detach() * direction).sum())

    slopes = []
    for index in range(x.numel()):
        step = torch.zeros(x.numel(), dtype=torch.float64)
        step[index] = 1e-5
        slopes.append((loss(x + step.view_as(x)) - loss(x - step.view_as(x))) / 2e-5)
    expected = np.sqrt(np.mean(np.square(slopes))) / float(direction.square().mean().sqrt())
    assert depth.gradient[0] == pytest.approx(expected, rel=1e-4)


# ---- complexity


class Square(nn.Module):
    """Holds two T×T tables at a time, and returns a number: memory 8T² bytes and a few."""

    def __init__(self, width: int, heads: int, dropout: float, causal: bool, length: int) -> None:
        super().__init__()

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        table = torch.empty(x.shape[1], x.shape[1])
        other = torch.empty(x.shape[1], x.shape[1])
        del table
        return torch.empty(1) + other[0, 0]


def test_memory_is_the_peak_of_what_is_held(capfd: pytest.CaptureFixture[str]) -> None:
    for length in (64, 200):
        module: Any = Square(8, 1, 0.0, False, length)
        assert 0 <= complexity.peak_memory(module, torch.zeros(1, length, 8)) - 8 * length**2 <= 256
    assert capfd.readouterr().err == ""


def test_exponents_are_those_of_powers() -> None:
    lengths = [64, 128, 512]
    assert complexity.exponent(lengths, [3e-4 * length**1.7 for length in lengths]) == pytest.approx(1.7)
    assert math.isnan(complexity.exponent([64], [1.0]))


def test_complexity_tells_linear_memory_from_quadratic() -> None:
    attentions: Any = {"dot-product": SelfAttention, "square": Square}
    result = complexity.run(32, 2, attentions=attentions, shorter=4, repeats=1)
    assert result.growths["dot-product"].lengths == [128, 256, 512, 1024]
    assert result.growths["dot-product"].memory_exponent == pytest.approx(1, abs=0.3)  # buffers count at first
    assert result.growths["square"].memory_exponent == pytest.approx(2, abs=0.05)
    assert result.growths["square"].cost.time == "not listed"
    assert all(seconds > 0 for growth in result.growths.values() for seconds in growth.seconds)


def test_a_slow_attention_is_not_asked_for_longer_rows() -> None:
    attentions: Any = {"dot-product": SelfAttention}
    result = complexity.run(16, 2, attentions=attentions, shorter=16, repeats=1, patience=0.0)
    assert result.growths["dot-product"].lengths == [32]


@pytest.mark.parametrize("name", complexity.MEASURED)
def test_every_attention_has_its_cost_written_down_and_can_be_measured(name: str) -> None:
    assert name in complexity.COSTS
    result = complexity.run(16, 2, attentions={name: complexity.MEASURED[name]}, shorter=16, repeats=1)
    growth = result.growths[name]
    assert growth.lengths == [length // 16 for length in complexity.COSTS[name].lengths]
    assert min(growth.memory) > 0


def test_no_attention_is_left_out_and_the_causal_perceiver_is_causal() -> None:
    assert complexity.MEASURED.keys() >= ATTENTIONS.keys()
    built = []

    def build(*arguments: Any, **options: Any) -> Any:
        built.append(options["causal"])
        return Perceiver(*arguments, **options)

    names = ("perceiver", "causal perceiver")
    result = complexity.run(16, 2, attentions=dict.fromkeys(names, build), shorter=64, repeats=1, patience=0.0)
    assert built == [False, True]
    assert re.search(r"a linear formula .*; the causal perceiver, which is both, as T", complexity.finding(result))
