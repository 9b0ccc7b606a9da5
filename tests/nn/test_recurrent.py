"""The recurrent networks against `torch.nn`, on both of their ways; rows of unequal length against rows alone."""

from __future__ import annotations

import copy
import inspect
import pickle
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, get_overloads

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from headway.nn import GRU, LSTM, RNN, GRUCell, LSTMCell, Recurrent, RNNCell, recurrent, run_padded, written_out
from headway.nn.cells import Equation, State, Weights

TORCH = {RNN: nn.RNN, GRU: nn.GRU, LSTM: nn.LSTM, RNNCell: nn.RNNCell, GRUCell: nn.GRUCell, LSTMCell: nn.LSTMCell}
LAYERS, CELLS = (RNN, GRU, LSTM), (RNNCell, GRUCell, LSTMCell)
WAYS: dict[str, Callable[[], AbstractContextManager[None]]] = {"fused": nullcontext, "written out": written_out}


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def parts(state: Any) -> list[Tensor]:
    return [state] if isinstance(state, Tensor) else list(state)


def flat(result: tuple[Any, Any]) -> list[Tensor]:
    """Output and state of a call as a list of tensors."""
    output, state = result
    return [output.data if isinstance(output, PackedSequence) else output, *parts(state)]


def gradients(found: list[Tensor], leaves: list[Tensor]) -> list[Tensor]:
    """Of a sum in which every element of every tensor has a weight of its own."""
    total = sum((x * torch.linspace(-1.0, 2.0, x.numel(), dtype=x.dtype).view(x.shape)).sum() for x in found)
    return list(torch.autograd.grad(total, leaves))


def assert_same(ours: list[Tensor], theirs: list[Tensor], tolerance: float = 1e-10) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.dtype == other.dtype
        scale = max(1.0, float(other.detach().abs().max())) if other.numel() else 1.0
        torch.testing.assert_close(mine / scale, other / scale, atol=tolerance, rtol=tolerance)


def strong(module: nn.Module) -> nn.Module:
    """With weights so large that gates open and close."""
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.7)
    return module


def refuse(*_: Any, **__: Any) -> Any:
    raise AssertionError("the written-out way was taken")


# --------------------------------------------------------------------------------------------------------- parity


@st.composite
def cases(draw: st.DrawFn) -> dict:
    kind = draw(st.sampled_from(LAYERS))
    options = {
        "num_layers": draw(st.integers(1, 3)),
        "bias": draw(st.booleans()),
        "batch_first": draw(st.booleans()),
        "bidirectional": draw(st.booleans()),
    }
    if kind is RNN:
        options["nonlinearity"] = draw(st.sampled_from(["tanh", "relu"]))
    if kind is LSTM:
        options["proj_size"] = draw(st.integers(0, 3))
    return {
        "kind": kind,
        "options": options,
        "input_size": draw(st.integers(1, 4)),
        "hidden_size": draw(st.integers(4, 5)),
        "lengths": draw(st.lists(st.integers(1, 6), min_size=1, max_size=4)),
        "form": draw(st.sampled_from(["batch", "alone", "packed"])),
        "state": draw(st.booleans()),
        "training": draw(st.booleans()),
        "seed": draw(st.integers(0, 2**20)),
    }


def build(case: dict, dtype: torch.dtype) -> tuple[Recurrent, nn.Module, list[Tensor], Callable[[nn.Module], Any]]:
    """Both networks with the same weights, the tensors that want gradients, and the call."""
    torch.manual_seed(case["seed"])
    size, options = (case["input_size"], case["hidden_size"]), case["options"]
    theirs = strong(TORCH[case["kind"]](*size, **options, dtype=dtype))
    ours = case["kind"](*size, **options, dtype=dtype)
    ours.load_state_dict(theirs.state_dict())
    ours.train(case["training"]), theirs.train(case["training"])

    rows, longest = len(case["lengths"]), max(case["lengths"])
    shape = (rows, longest) if options["batch_first"] else (longest, rows)
    shape = (longest,) if case["form"] == "alone" else shape
    x = torch.randn(*shape, case["input_size"], dtype=dtype).requires_grad_()
    alone = [] if case["form"] == "alone" else [rows]
    widths = [options.get("proj_size") or case["hidden_size"]] + [case["hidden_size"]] * (case["kind"] is LSTM)
    layers = options["num_layers"] * (1 + options["bidirectional"])
    state = [torch.randn(layers, *alone, width, dtype=dtype).requires_grad_() for width in widths]

    def call(module: nn.Module) -> Any:
        hx = (tuple(state) if case["kind"] is LSTM else state[0]) if case["state"] else None
        packed = x
        if case["form"] == "packed":
            packed = pack_padded_sequence(x, torch.tensor(case["lengths"]), options["batch_first"], False)
        return module(packed, hx)

    return ours, theirs, [x, *(state if case["state"] else [])], call


@settings(max_examples=200, deadline=None)
@given(case=cases(), way=st.sampled_from(list(WAYS)))
def test_it_is_torchs(case: dict, way: str) -> None:
    ours, theirs, leaves, call = build(case, torch.float64)
    with WAYS[way]():
        result = call(ours)
    expected = call(theirs)
    assert_same(flat(result), flat(expected))
    assert type(result[0]) is type(expected[0]) and type(result[1]) is type(expected[1])
    if isinstance(result[0], PackedSequence):
        for mine, other in zip(result[0][1:], expected[0][1:], strict=True):
            assert torch.equal(mine, other)
    found = gradients(flat(result), [*leaves, *ours.parameters()])
    assert_same(found, gradients(flat(expected), [*leaves, *theirs.parameters()]))


@settings(max_examples=60, deadline=None)
@given(case=cases())
def test_the_two_ways_agree_in_float32(case: dict) -> None:
    """Where the fused kernels are others than in float64."""
    ours, _, leaves, call = build(case, torch.float32)
    leaves += ours.parameters()
    fused = flat(call(ours))
    with written_out():
        followed = flat(call(ours))
    assert_same(fused, followed, 1e-5)
    assert_same(gradients(fused, leaves), gradients(followed, leaves), 2e-5)


@settings(max_examples=80, deadline=None)
@given(
    kind=st.sampled_from(CELLS),
    rows=st.sampled_from([None, 1, 3]),
    bias=st.booleans(),
    given_state=st.booleans(),
    relu=st.booleans(),
    seed=st.integers(0, 2**20),
)
def test_a_cell_is_torchs(
    kind: type[nn.Module], rows: int | None, bias: bool, given_state: bool, relu: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    options = {"nonlinearity": "relu"} if relu and kind is RNNCell else {}
    theirs = strong(TORCH[kind](3, 5, bias, **options))
    ours = kind(3, 5, bias, **options)
    ours.load_state_dict(theirs.state_dict())
    batch = [] if rows is None else [rows]
    x = torch.randn(*batch, 3).requires_grad_()
    state = [torch.randn(*batch, 5).requires_grad_() for _ in range(1 + (kind is LSTMCell))]
    hx = (tuple(state) if kind is LSTMCell else state[0]) if given_state else None
    mine, other = parts(ours(x, hx)), parts(theirs(x, hx))
    assert_same(mine, other)
    leaves = [x, *(state if given_state else [])]
    assert_same(
        gradients(mine, [*leaves, *used(ours, given_state)]), gradients(other, [*leaves, *used(theirs, given_state)])
    )


def used(cell: nn.Module, given_state: bool) -> list[Tensor]:
    return [weight for name, weight in cell.named_parameters() if given_state or name != "weight_hh"]


@pytest.mark.parametrize("kind", LAYERS)
def test_a_layer_is_its_cell_step_after_step(kind: type[Recurrent]) -> None:
    torch.manual_seed(0)
    layer, cell = strong(kind(3, 5)), {RNN: RNNCell, GRU: GRUCell, LSTM: LSTMCell}[kind](3, 5)
    cell.load_state_dict({name.removesuffix("_l0"): weight for name, weight in layer.state_dict().items()})
    x, state, outputs = torch.randn(6, 2, 3), None, []
    for at in x:
        state = cell(at, state)
        outputs.append(parts(state)[0])
    assert_same(flat(layer(x)), [torch.stack(outputs), *(part[None] for part in parts(state))])


@pytest.mark.parametrize("way", WAYS)
def test_dropout_falls_between_the_layers_and_nowhere_else(way: str) -> None:
    """With all of it dropped the last layer sees zeros; of the outputs themselves nothing is dropped."""
    torch.manual_seed(0)
    ours = strong(GRU(3, 5, 2, dropout=1.0, bidirectional=True))
    above = GRU(10, 5, bidirectional=True)
    above.load_state_dict({n.replace("l1", "l0"): w for n, w in ours.state_dict().items() if "l1" in n})
    x = torch.randn(4, 2, 3)
    with WAYS[way]():
        output, state = ours(x)
        assert_same([output], [above(torch.zeros(4, 2, 10))[0]])
        assert_same([state[:2]], [first_layer(ours)(x)[1]])
        still = GRU(3, 5, 2, bidirectional=True)
        still.load_state_dict(ours.state_dict())
        assert_same(flat(ours.eval()(x)), flat(still(x)))


def first_layer(stack: Recurrent) -> GRU:
    first = GRU(3, 5, bidirectional=True)
    first.load_state_dict({name: weight for name, weight in stack.state_dict().items() if "l0" in name})
    return first


def test_dropout_has_torchs_distribution() -> None:
    """A stack that shows what passes between its layers: how much is dropped, and the scale of the rest."""
    seen = {}
    for name, kind, way in (("torch", nn.RNN, nullcontext), ("fused", RNN, nullcontext), ("written", RNN, written_out)):
        torch.manual_seed(1)
        stack = kind(1, 1, 2, nonlinearity="relu", bias=False, dropout=0.3)
        for parameter, value in zip(stack.parameters(), (1.0, 0.0, 1.0, 0.0), strict=True):
            nn.init.constant_(parameter, value)
        with way():
            seen[name] = stack(torch.ones(100, 200, 1))[0].flatten()
    for values in seen.values():
        assert abs(float((values == 0).double().mean()) - 0.3) < 0.02  # six standard deviations
        torch.testing.assert_close(values[values > 0], torch.full_like(values[values > 0], 1 / 0.7), atol=1e-4, rtol=0)


# ----------------------------------------------------------------------------------------------------- beginnings

BUILDS: list[tuple[type[nn.Module], tuple, dict]] = [
    (RNN, (3, 4), {}),
    (RNN, (3, 4, 2, "relu", False, True, 0.1, True), {}),
    (GRU, (3, 4), {}),
    (GRU, (3, 4, 2, True, True, 0.1, True), {}),
    (LSTM, (3, 4), {}),
    (LSTM, (3, 4, 2, False, True, 0.1, True, 2), {}),
    (LSTM, (3, 4), {"num_layers": 3, "proj_size": 2, "bidirectional": True, "dtype": torch.float32, "device": "cpu"}),
    (RNNCell, (3, 4, True, "relu"), {}),
    (GRUCell, (3, 4, False), {}),
    (LSTMCell, (3, 4), {"dtype": torch.float32}),
]


@pytest.mark.parametrize(("kind", "args", "options"), BUILDS)
def test_the_same_seed_gives_the_same_weights(kind: type[nn.Module], args: tuple, options: dict) -> None:
    torch.manual_seed(5)
    ours, state = kind(*args, **options), torch.get_rng_state()
    torch.manual_seed(5)
    theirs = TORCH[kind](*args, **options)
    assert torch.equal(state, torch.get_rng_state())
    mine, other = ours.state_dict(), theirs.state_dict()
    assert list(mine) == list(other)
    assert [name for name, _ in ours.named_parameters()] == [name for name, _ in theirs.named_parameters()]
    assert all(torch.equal(mine[name], other[name]) and mine[name].dtype == other[name].dtype for name in mine)
    theirs.load_state_dict(mine)
    ours.load_state_dict(other)
    assert str(ours) == str(theirs)
    if isinstance(ours, Recurrent):
        assert ours.mode == theirs.mode
        assert [[w.shape for w in group] for group in ours.all_weights] == [
            [w.shape for w in group] for group in theirs.all_weights
        ]


@pytest.mark.parametrize("kind", TORCH)
def test_the_same_arguments_in_the_same_places(kind: type[nn.Module]) -> None:
    constructors = get_overloads(TORCH[kind].__init__)
    theirs = inspect.signature(constructors[0] if constructors else TORCH[kind].__init__)
    ours = inspect.signature(kind.__init__)
    assert [(p.name, p.default) for p in ours.parameters.values()] == [
        (p.name, p.default) for p in theirs.parameters.values()
    ]
    mine, other = (inspect.signature(c.forward).parameters.values() for c in (kind, TORCH[kind]))
    assert [(p.name, p.default) for p in mine] == [(p.name, p.default) for p in other]


# ---------------------------------------------------------------------------------------------- which way is taken


def stack(kind: type[Recurrent] = LSTM, **options: Any) -> tuple[Recurrent, Tensor]:
    torch.manual_seed(0)
    return strong(kind(3, 5, 2, **options)), torch.randn(4, 2, 3)


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("form", ["batch", "alone", "packed"])
def test_an_ordinary_call_is_fused(kind: type[Recurrent], form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rnn, x = stack(kind, bidirectional=True)
    x = {"batch": x, "alone": x[:, 0], "packed": pack_padded_sequence(x, torch.tensor([2, 4]), False, False)}[form]
    monkeypatch.setattr(recurrent, "scan", refuse)
    rnn(x)
    for copied in (copy.deepcopy(rnn), pickle.loads(pickle.dumps(rnn))):
        assert_same(flat(copied(x)), flat(rnn(x)))
    with written_out(), pytest.raises(AssertionError):
        rnn(x)
    rnn(x)  # after the block again


def test_written_out_ends_with_an_error_too_and_may_stand_in_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    rnn, x = stack()
    monkeypatch.setattr(recurrent, "scan", refuse)
    with pytest.raises(KeyError), written_out():
        with written_out():
            pass
        with pytest.raises(AssertionError):
            rnn(x)
        raise KeyError
    rnn(x)


def test_another_equation_is_followed_in_every_form() -> None:
    """Input and forget gate coupled, as in Greff et al. 2017: an LSTM that forgets as much as it takes in."""

    def coupled(x: Tensor, state: State, weights: Weights) -> State:
        h, c = state
        forget, candidate, output = (x + weights.from_state(h)).chunk(3, -1)
        c = torch.lerp(candidate.tanh(), c, forget.sigmoid())
        return output.sigmoid() * c.tanh(), c

    torch.manual_seed(0)
    rnn = strong(Recurrent(Equation("coupled", 3, 2, coupled), 3, 4, 2, bidirectional=True))
    lstm = LSTM(3, 4, 2, bidirectional=True)
    wide = {}  # the same as an LSTM: σ(−a) = 1 − σ(a), so the input gate is the forget gate's row with its sign turned
    for name, weight in rnn.state_dict().items():
        forget, candidate, output = weight.chunk(3)
        wide[name] = torch.cat([-forget, forget, candidate, output])
    lstm.load_state_dict(wide)
    x = torch.randn(5, 3, 3)
    assert_same(flat(rnn(x)), flat(lstm(x)))
    assert_same(flat(run_padded(rnn, x, [2, 5, 1])), flat(run_padded(lstm, x, [2, 5, 1])))


@pytest.mark.parametrize("kind", LAYERS)
def test_torch_func_and_forward_mode(kind: type[Recurrent]) -> None:
    """For which there are no kernels: each against the same thing by other means."""
    rnn, x = stack(kind, bidirectional=True)
    many = torch.randn(3, *x.shape)
    assert_same([torch.func.vmap(lambda y: rnn(y)[0])(many)], [torch.stack([rnn(y)[0] for y in many])])

    def loss(weights: dict[str, Tensor], y: Tensor) -> Tensor:
        return torch.func.functional_call(rnn, weights, (y,))[0].square().sum()

    weights = dict(rnn.named_parameters())
    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(weights, many)
    for row, y in enumerate(many):
        expected = torch.autograd.grad(loss(weights, y), list(weights.values()))
        assert_same([each[name][row] for name in weights], list(expected))

    direction = torch.randn_like(x)
    jacobian = torch.autograd.functional.jacobian(lambda y: rnn(y)[0], x)
    expected = torch.einsum("abcxyz,xyz->abc", jacobian, direction)
    assert_same([torch.func.jvp(lambda y: rnn(y)[0], (x,), (direction,))[1]], [expected])
    with forward_ad.dual_level():
        dual = rnn(forward_ad.make_dual(x, direction))[0]
        assert_same([forward_ad.unpack_dual(dual).tangent], [expected])
    single, one, along = copy.deepcopy(rnn).float(), x.float(), direction.float()
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(single(forward_ad.make_dual(one, along))[0]).tangent
    assert_same([tangent], [expected.float()], 1e-4)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", LAYERS)
def test_second_derivatives(kind: type[Recurrent], way: str) -> None:
    rnn, x = stack(kind)
    with WAYS[way]():
        assert torch.autograd.gradgradcheck(lambda y: rnn(y)[0], (x[:2, :1].clone().requires_grad_(),))


def test_other_weights_are_seen_at_once() -> None:
    """Assigned, tied or parametrized: nothing remembers the old ones."""
    rnn, x = stack()
    other, _ = stack()
    strong(other)
    for name, weight in other.named_parameters():
        setattr(rnn, name, nn.Parameter(weight.detach().clone()))
    assert_same(flat(rnn(x)), flat(other(x)))
    nn.utils.parametrizations.weight_norm(rnn, "weight_hh_l0")
    assert_same(flat(rnn(x)), flat(other(x)))
    rnn.parametrizations.weight_hh_l0.original0.data.mul_(2.0)
    other.weight_hh_l0.data.mul_(2.0)
    assert_same(flat(rnn(x)), flat(other(x)))


@pytest.mark.parametrize("kind", LAYERS)
def test_it_compiles_as_one_graph(kind: type[Recurrent]) -> None:
    rnn, x = stack(kind)
    torch._dynamo.reset()
    assert_same(flat(torch.compile(rnn, backend="eager", fullgraph=True)(x)), flat(rnn(x)))


def test_autocast_has_torchs_dtypes() -> None:
    for kind in LAYERS:
        ours, theirs = kind(3, 5, dtype=torch.float32), TORCH[kind](3, 5, dtype=torch.float32)
        ours.load_state_dict(theirs.state_dict())
        x = torch.randn(4, 2, 3, dtype=torch.float32)
        with torch.autocast("cpu", torch.bfloat16):
            if kind is not LSTM or torch.bfloat16 not in recurrent.LACKING:  # else torch itself fails
                assert_same(flat(ours(x)), flat(theirs(x)), 0.0)
            ours(x.bfloat16())
            assert_same([run_padded(ours, x, [0, 4])[0][:, 1]], [ours(x[:, 1])[0]], 1e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_where_the_cpu_has_no_kernel_for_it(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recurrent, "LACKING", {dtype})
    rnn, x = LSTM(3, 5, 2, dtype=torch.float32), torch.randn(4, 2, 3, dtype=torch.float32)
    expected = flat(rnn(x))
    with torch.autocast("cpu", dtype):
        found = flat(rnn(x))
        found[0].float().sum().backward()
        torch._dynamo.reset()
        compiled = torch.compile(rnn, backend="eager", fullgraph=True)(x)
    assert_same(flat(compiled), found)
    assert_same([part.float() for part in found], expected, 2e-2)
    assert all(parameter.grad is not None for parameter in rnn.parameters())


# ---------------------------------------------------------------------------------------------------- padded rows


@settings(max_examples=100, deadline=None)
@given(case=cases(), more=st.integers(0, 2), empty=st.booleans(), way=st.sampled_from(list(WAYS)))
def test_padding_changes_nothing(case: dict, more: int, empty: bool, way: str) -> None:
    """Whatever it holds: outputs, states and gradients are those of each row by itself."""
    case |= {"form": "batch"}
    ours, _, leaves, _ = build(case, torch.float64)
    lengths = [0, *case["lengths"], 0] if empty else case["lengths"]
    torch.manual_seed(case["seed"])
    rows = [torch.randn(length, case["input_size"]).requires_grad_() for length in lengths]
    padded = torch.stack(
        [
            torch.cat([row, torch.full((max(lengths) + more - len(row), case["input_size"]), float("nan"))])
            for row in rows
        ],
        0 if case["options"]["batch_first"] else 1,
    )
    states = [torch.randn(part.shape[0], len(rows), part.shape[2]).requires_grad_() for part in zero(ours)]
    hx = ours.equation.show(tuple(states)) if case["state"] else None
    with WAYS[way]():
        outputs, state = run_padded(ours, padded, torch.tensor(lengths), hx)
        outputs = outputs if case["options"]["batch_first"] else outputs.transpose(0, 1)
        expected, finals = [], []
        for number, row in enumerate(rows):
            before = [part[:, number] for part in states] if case["state"] else [part[:, 0] for part in zero(ours)]
            alone = (row.new_zeros(0, outputs.shape[-1]), ours.equation.show(tuple(before)))
            alone = ours(row, alone[1]) if len(row) else alone
            expected.append(alone[0])
            finals.append(parts(alone[1]))
    finals = [torch.stack(part, 1) for part in zip(*finals, strict=True)]
    for output, mine in zip(expected, outputs, strict=True):
        assert_same([mine[: len(output)]], [output], 1e-12)
        assert (mine[len(output) :] == 0).all()
    assert_same(parts(state), finals, 1e-12)
    real = torch.cat([output[: len(row)] for output, row in zip(outputs, rows, strict=True)])
    leaves = [*ours.parameters(), *(row for row in rows if len(row)), *(states if case["state"] else [])]
    found = gradients([real, *parts(state)], leaves)
    assert_same(found, gradients([torch.cat(expected), *finals], leaves), 1e-11)


def zero(rnn: Recurrent) -> State:
    return rnn.zero_state(rnn.weight_ih_l0, 1)


def test_rows_that_are_all_empty() -> None:
    rnn = LSTM(3, 4, 2, batch_first=True, bidirectional=True)
    hx = (torch.randn(4, 2, 4), torch.randn(4, 2, 4))
    for times in (0, 5):
        outputs, state = run_padded(rnn, torch.randn(2, times, 3), [0, 0], hx)
        assert outputs.shape == (2, times, 8) and not outputs.any()
        assert_same(list(state), list(hx), 0.0)


# --------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (LSTM, {"hidden_size": 0}, "hidden_size must be 1 or more, not 0"),
        (LSTM, {"input_size": -2}, "input_size must be 1 or more, not -2"),
        (LSTM, {"num_layers": 0}, "num_layers must be 1 or more, not 0"),
        (LSTM, {"hidden_size": 2.5}, "hidden_size is a whole number, not 2.5"),
        (LSTM, {"proj_size": 4}, r"proj_size \(4\) must be smaller than hidden_size \(4\)"),
        (LSTM, {"proj_size": -1}, r"proj_size \(-1\)"),
        (GRU, {"dropout": 1.5}, "between 0 and 1, not 1.5"),
        (GRU, {"dropout": True}, "between 0 and 1, not True"),
        (GRU, {"bias": 1}, "bias is True or False, not 1"),
        (GRU, {"batch_first": None}, "batch_first is True or False, not None"),
        (RNN, {"nonlinearity": "tahn"}, "'tahn' is unknown; did you mean 'tanh'"),
    ],
)
def test_what_cannot_be_built_is_refused_as_in_torch(kind: type[Recurrent], options: dict, message: str) -> None:
    options = {"input_size": 3, "hidden_size": 4} | options
    with pytest.raises((ValueError, TypeError)) as theirs:
        TORCH[kind](**options)
    with pytest.raises(theirs.type, match=message):
        kind(**options)


def test_dropout_with_one_layer_warns() -> None:
    for kind in (LSTM, nn.LSTM):
        with pytest.warns(UserWarning, match="num_layers=1") as seen:
            kind(3, 4, dropout=0.5)
        assert seen[0].filename == __file__ or kind is nn.LSTM
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        LSTM(3, 4, 2, dropout=0.5)


BAD_CALLS: list[tuple[type[nn.Module], Callable[[], tuple], str]] = [
    (LSTM, lambda: (torch.randn(5, 2, 4),), r"4 features and input_size is 3 \(input \(5, 2, 4\)\)"),
    (LSTM, lambda: (torch.randn(5),), r"shape \(5,\); 3 axes"),
    (LSTM, lambda: (torch.randn(1, 5, 2, 3),), r"shape \(1, 5, 2, 3\); 3 axes"),
    (GRU, lambda: (torch.randn(0, 2, 3),), r"shape \(0, 2, 3\), a time of 0 steps"),
    (GRU, lambda: (torch.randn(5, 2, 3).float(),), r"torch.float32 and the weights are torch.float64"),
    (GRU, lambda: (torch.randn(5, 2, 3), torch.randn(2, 4)), r"hx has the shape \(2, 4\).*= \(1, 2, 4\)"),
    (GRU, lambda: (torch.randn(5, 3), torch.randn(1, 2, 4)), r"hx has the shape \(1, 2, 4\).*= \(1, 4\)"),
    (GRU, lambda: (torch.randn(5, 2, 3), torch.randn(1, 3, 4)), r"hx has the shape \(1, 3, 4\)"),
    (
        LSTM,
        lambda: (torch.randn(5, 2, 3), (torch.randn(1, 2, 4), torch.randn(1, 2, 5))),
        r"hx\[1\] has the shape \(1, 2, 5\).*= \(1, 2, 4\)",
    ),
    (
        LSTM,
        lambda: (pack_padded_sequence(torch.randn(5, 2, 3), [5, 2]), (torch.randn(1, 3, 4), torch.randn(1, 3, 4))),
        r"hx\[0\] has the shape \(1, 3, 4\)",
    ),
    (LSTMCell, lambda: (torch.randn(2, 5),), r"shape \(2, 5\); \(B, 3\)"),
    (LSTMCell, lambda: (torch.randn(1, 2, 3),), r"shape \(1, 2, 3\)"),
    (GRUCell, lambda: (torch.randn(2, 3), torch.randn(3, 4)), r"state has the shape \(3, 4\); \(2, 4\) is wanted"),
    (RNNCell, lambda: (torch.randn(2, 3), torch.randn(1, 2, 4)), r"state has the shape \(1, 2, 4\)"),
]


@pytest.mark.parametrize(("kind", "arguments", "message"), BAD_CALLS)
def test_a_call_torch_refuses_is_refused_by_name(
    kind: type[nn.Module], arguments: Callable[[], tuple], message: str
) -> None:
    with pytest.raises((ValueError, RuntimeError)) as theirs:
        TORCH[kind](3, 4)(*arguments())
    for way in WAYS.values():
        with way(), pytest.raises(theirs.type, match=message):
            kind(3, 4)(*arguments())


@pytest.mark.parametrize(
    ("kind", "hx", "message"),
    [
        (LSTM, torch.zeros(1, 2, 4), "the state of LSTM is a tuple of 2 tensors, and hx is a Tensor"),
        (LSTM, (torch.zeros(1, 2, 4),), "hx is a tuple of 1"),
        (GRU, (torch.zeros(1, 2, 4), torch.zeros(1, 2, 4)), "the state of GRU is one tensor, and hx is a tuple of 2"),
    ],
)
def test_a_state_of_the_wrong_kind(kind: type[Recurrent], hx: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        kind(3, 4)(torch.randn(5, 2, 3), hx)


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ([5, 6], r"lengths\[1\] is 6, and rows have 0 to 5"),
        ([-1, 5], r"lengths\[0\] is -1"),
        ([5], r"shape \(1,\).*each of the 2 rows"),
        ([5.0, 2.0], "holds torch.float"),
        (torch.ones(2, 5, dtype=torch.bool), r"shape \(2, 5\) and holds torch.bool"),
    ],
)
def test_lengths_that_cannot_be(lengths: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run_padded(GRU(3, 4), torch.randn(5, 2, 3), lengths)


def test_padded_rows_are_zeros_where_torch_pads() -> None:
    """The same numbers as packing and unpacking by hand with torch's own class."""
    torch.manual_seed(0)
    theirs = nn.LSTM(3, 4, 2, batch_first=True, bidirectional=True)
    ours = LSTM(3, 4, 2, batch_first=True, bidirectional=True)
    ours.load_state_dict(theirs.state_dict())
    x, lengths = torch.randn(3, 6, 3), [2, 5, 1]
    output, state = theirs(pack_padded_sequence(x, lengths, True, False))
    assert_same(flat(run_padded(ours, x, lengths)), [pad_packed_sequence(output, True, total_length=6)[0], *state])
