"""`headway.nn`'s Transformer classes against `torch.nn`: random configurations, outputs, weights and every gradient.

Where torch gives NaN, to a query with nothing to attend to, zeros are expected.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from headway.nn.layers import TransformerDecoderLayer, TransformerEncoderLayer
from headway.nn.multihead import MultiheadAttention
from headway.nn.transformer import Transformer, TransformerDecoder, TransformerEncoder

CLOSE = {"atol": 1e-10, "rtol": 1e-10}
HIDDEN = float("-inf")
KINDS = ("none", "bool", "byte", "float")
Mask = tuple[Tensor | None, Tensor | None]  # for us, for torch


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, about mixed masks and its fast path
        yield
    torch.set_default_dtype(torch.float32)


def twins(ours: nn.Module, theirs: nn.Module) -> tuple[nn.Module, nn.Module]:
    """Both with the same weights, none of them zero or alike, loaded from the one into the other."""
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, mean=0.5 if parameter.dim() == 1 else 0.0, std=0.4)
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


def mask_of(kind: str, hidden: Tensor, draw: torch.Generator) -> Mask:
    """A mask that hides what `hidden` says, for us and for torch, which has no byte masks."""
    if kind == "none":
        return None, None
    if kind == "bool":
        return hidden, hidden
    if kind == "byte":
        return hidden.to(torch.uint8) * 3, hidden
    values = torch.randn(hidden.shape, generator=draw).masked_fill(hidden, HIDDEN)
    return values, values


def plain(mask: Mask) -> Mask:
    """The mask, a float one with zeros wherever it hides nothing."""
    theirs = mask[1]
    if theirs is None or theirs.dtype == torch.bool:
        return mask
    zeros = torch.zeros_like(theirs).masked_fill(theirs == HIDDEN, HIDDEN)
    return zeros, zeros


def gradients(out: Tensor, inputs: list[Tensor], module: nn.Module) -> list[Tensor]:
    weights = torch.linspace(-1.0, 2.0, out.numel()).view(out.shape)
    found = torch.autograd.grad((out * weights).sum(), [*inputs, *module.parameters()], allow_unused=True)
    return [torch.zeros(()) if gradient is None else gradient for gradient in found]


def assert_all_close(ours: list[Tensor], theirs: list[Tensor]) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        scale = max(1.0, float(other.abs().max())) if other.numel() else 1.0
        torch.testing.assert_close(mine / scale, other / scale, **CLOSE)


# ---------------------------------------------------------------------------------------------- MultiheadAttention


@st.composite
def attention_cases(draw: st.DrawFn) -> dict:
    case = {
        "heads": draw(st.sampled_from([1, 2, 3])),
        "head_dim": draw(st.integers(1, 4)),
        "rows": draw(st.integers(1, 3)),
        "t": draw(st.integers(1, 5)),
        "s": draw(st.integers(1, 5)),
        "batched": draw(st.booleans()),
        "same": draw(st.sampled_from(["all", "memory", "none"])),
        "widths": draw(st.sampled_from([(None, None), (5, None), (None, 3), (5, 3)])),
        "padding": draw(st.sampled_from(KINDS)),
        "attn": draw(st.sampled_from(KINDS)),
        "axes": draw(st.sampled_from([2, 3])),
        "causal": draw(st.booleans()),
        "empty": draw(st.booleans()),
        "need_weights": draw(st.booleans()),
        "average": draw(st.booleans()),
        "training": draw(st.booleans()),
        "seed": draw(st.integers(0, 2**20)),
    }
    flags = ("bias", "add_bias_kv", "add_zero_attn", "batch_first")
    return case | {"flags": {flag: draw(st.booleans()) for flag in flags}}


@settings(max_examples=300, deadline=None)
@given(case=attention_cases())
def test_multihead_attention(case: dict) -> None:
    draw = torch.Generator().manual_seed(case["seed"])
    width, heads, rows = case["heads"] * case["head_dim"], case["heads"], case["rows"] if case["batched"] else 1
    kdim, vdim = case["widths"] if case["same"] == "none" else (None, None)
    t, s = case["t"], case["t"] if case["same"] == "all" else case["s"]
    flags = dict(case["flags"])
    options = {"kdim": kdim, "vdim": vdim, **flags}
    torch.manual_seed(case["seed"])
    ours, theirs = twins(MultiheadAttention(width, heads, **options), nn.MultiheadAttention(width, heads, **options))
    ours.train(case["training"]), theirs.train(case["training"])

    def sequence(length: int, features: int) -> Tensor:
        shape = (rows, length, features) if flags["batch_first"] else (length, rows, features)
        x = torch.randn(shape, generator=draw)
        return (x if case["batched"] else x.squeeze(0 if flags["batch_first"] else 1)).requires_grad_()

    query = sequence(t, width)
    key = query if case["same"] == "all" else sequence(s, kdim or width)
    value = sequence(s, vdim or width) if case["same"] == "none" else key
    inputs = list({id(x): x for x in (query, key, value)}.values())

    causal = (
        case["causal"] and case["attn"] != "none" and t == s and not (flags["add_bias_kv"] or flags["add_zero_attn"])
    )
    for_all = case["axes"] == 2 or causal  # one mask, or one for every row and head
    hidden = torch.rand((t, s) if for_all else (rows * heads, t, s), generator=draw) < 0.4
    if causal:
        hidden = torch.ones(t, s, dtype=torch.bool).triu(1)
    padded = torch.rand(rows, s, generator=draw) < 0.4
    if not case["empty"]:  # every query sees its first key
        hidden[..., 0], padded[:, 0] = False, False
    attn = mask_of("bool" if causal and case["attn"] == "float" else case["attn"], hidden, draw)
    padding = mask_of(case["padding"], padded if case["batched"] else padded[0], draw)

    def call(module: nn.Module, which: int) -> tuple[Tensor, Tensor | None]:
        return module(
            query,
            key,
            value,
            padding[which],
            case["need_weights"],
            attn[which],
            average_attn_weights=case["average"],
            is_causal=causal,
        )

    blind = torch.zeros(rows, heads, t, s, dtype=torch.bool)  # which pairs are hidden
    if case["attn"] != "none":
        blind |= hidden if for_all else hidden.view(rows, heads, t, s)
    if case["padding"] != "none":
        blind |= padded[:, None, None, :]
    extra = flags["add_bias_kv"] or flags["add_zero_attn"]
    nothing = torch.zeros(rows, heads, t, dtype=torch.bool) if extra else blind.all(-1)  # (B, H, T)
    compare_attention(call(ours, 0), call(theirs, 1), nothing, case)
    found = gradients(call(ours, 0)[0], inputs, ours)
    assert all(torch.isfinite(gradient).all() for gradient in found)
    if not nothing.any():
        assert_all_close(found, gradients(call(theirs, 1)[0], inputs, theirs))


def compare_attention(
    ours: tuple[Tensor, Tensor | None], theirs: tuple[Tensor, Tensor | None], nothing: Tensor, case: dict
) -> None:
    (out, weights), (expected, expected_weights) = ours, theirs
    spoiled, dead = nothing.any(1), nothing.all(1)  # (B, T): NaN in torch; and zeros here
    if not case["batched"]:
        spoiled, dead = spoiled[0], dead[0]
    elif not case["flags"]["batch_first"]:
        spoiled, dead = spoiled.T, dead.T
    assert torch.isfinite(out).all()
    assert (out[dead] == 0).all()
    torch.testing.assert_close(out[~spoiled], expected[~spoiled], **CLOSE)
    if not case["need_weights"]:
        assert weights is None and expected_weights is None
    else:
        assert weights.shape == expected_weights.shape
        of_head = nothing if not case["average"] else nothing.any(1)
        of_head = of_head if case["batched"] else of_head[0]
        torch.testing.assert_close(weights[~of_head], expected_weights[~of_head], **CLOSE)
        if not case["average"]:
            assert (weights[of_head] == 0).all()


# ------------------------------------------------------------------------------------------------ layers and stacks


def cubed(x: Tensor) -> Tensor:
    return x**3 / 10


@st.composite
def model_cases(draw: st.DrawFn) -> dict:
    return {
        "heads": draw(st.sampled_from([1, 2, 3])),
        "head_dim": draw(st.sampled_from([3, 4])),
        "rows": draw(st.integers(1, 3)),
        "t": draw(st.integers(1, 5)),
        "s": draw(st.integers(1, 5)),
        "layers": draw(st.sampled_from([1, 2])),
        "batched": draw(st.booleans()),
        "training": draw(st.booleans()),
        "norm": draw(st.booleans()),
        "masks": {name: draw(st.sampled_from(KINDS)) for name in ("src", "tgt", "memory")},
        "padding": {name: draw(st.sampled_from(KINDS)) for name in ("src", "tgt", "memory")},
        "causal": draw(st.booleans()),
        "hint": draw(st.booleans()),
        "axes": draw(st.sampled_from([2, 3])),
        "seed": draw(st.integers(0, 2**20)),
        "options": {
            "dropout": 0.0,
            "dim_feedforward": draw(st.sampled_from([4, 7])),
            "activation": draw(st.sampled_from(["relu", "gelu", F.relu, F.gelu, cubed])),
            "layer_norm_eps": draw(st.sampled_from([1e-5, 1e-2])),
            "batch_first": draw(st.booleans()),
            "norm_first": draw(st.booleans()),
            "bias": draw(st.booleans()),
        },
    }


class Setting:
    """The tensors of a case."""

    def __init__(self, case: dict) -> None:
        self.case = case
        self.draw = torch.Generator().manual_seed(case["seed"])
        self.width = case["heads"] * case["head_dim"]
        self.rows = case["rows"] if case["batched"] else 1
        self.batch_first = case["options"]["batch_first"]
        self.lengths = {"src": case["s"], "tgt": case["t"], "memory": case["s"]}
        torch.manual_seed(case["seed"])

    def sequence(self, name: str) -> Tensor:
        shape = [self.rows, self.lengths[name], self.width]
        if not self.case["batched"]:
            shape = shape[1:]
        elif not self.batch_first:
            shape = [shape[1], shape[0], shape[2]]
        return torch.randn(shape, generator=self.draw).requires_grad_()

    def mask(self, name: str) -> Mask:
        t, s = (self.lengths["tgt"] if name == "memory" else self.lengths[name]), self.lengths[name]
        each = self.rows * self.case["heads"] if self.case["axes"] == 3 else 1
        hidden = torch.rand(each, t, s, generator=self.draw) < 0.4
        hidden[..., 0] = False
        hidden = hidden if self.case["axes"] == 3 else hidden[0]
        if name == "tgt" and self.case["causal"]:
            hidden = torch.ones(t, t, dtype=torch.bool).triu(1)
            if self.case["masks"][name] == "float":
                causal = nn.Transformer.generate_square_subsequent_mask(t)
                return causal, causal
        return mask_of(self.case["masks"][name], hidden, self.draw)

    def padding(self, name: str) -> Mask:
        padded = torch.rand(self.rows, self.lengths[name], generator=self.draw) < 0.4
        padded[:, 0] = False
        return mask_of(self.case["padding"][name], padded if self.case["batched"] else padded[0], self.draw)

    @property
    def is_causal(self) -> bool:
        return self.case["causal"] and self.case["masks"]["tgt"] != "none"


def compare(
    ours: nn.Module, theirs: nn.Module, inputs: list[Tensor], masks: dict[str, Mask], case: dict, **hints: object
) -> None:
    twins(ours, theirs)
    ours.train(case["training"]), theirs.train(case["training"])
    out = ours(*inputs, **{name: mask[0] for name, mask in masks.items()}, **hints)
    expected = theirs(*inputs, **{name: mask[1] for name, mask in masks.items()}, **hints)
    torch.testing.assert_close(out, expected, **CLOSE)
    assert_all_close(gradients(out, inputs, ours), gradients(expected, inputs, theirs))


@settings(max_examples=100, deadline=None)
@given(case=model_cases())
def test_encoder(case: dict) -> None:
    setting = Setting(case)
    shape, options = (setting.width, case["heads"]), case["options"]
    ours, theirs = TransformerEncoderLayer(*shape, **options), nn.TransformerEncoderLayer(*shape, **options)
    masks = {"src_mask": setting.mask("src"), "src_key_padding_mask": setting.padding("src")}
    compare(ours, theirs, [setting.sequence("src")], masks, case)

    norms = [nn.LayerNorm(setting.width) if case["norm"] else None for _ in range(2)]
    ours = TransformerEncoder(ours, case["layers"], norms[0])
    theirs = nn.TransformerEncoder(theirs, case["layers"], norms[1])
    masks["mask"] = masks.pop("src_mask")
    compare(ours, theirs, [setting.sequence("src")], masks, case)


@settings(max_examples=100, deadline=None)
@given(case=model_cases())
def test_decoder(case: dict) -> None:
    setting = Setting(case)
    shape, options = (setting.width, case["heads"]), case["options"]
    ours, theirs = TransformerDecoderLayer(*shape, **options), nn.TransformerDecoderLayer(*shape, **options)
    masks = {f"{name}_mask": setting.mask(name) for name in ("tgt", "memory")}
    masks |= {f"{name}_key_padding_mask": setting.padding(name) for name in ("tgt", "memory")}
    inputs = [setting.sequence("tgt"), setting.sequence("memory")]
    hints = {"tgt_is_causal": True} if case["hint"] and setting.is_causal else {}
    compare(ours, theirs, inputs, masks, case, **hints)

    norms = [nn.LayerNorm(setting.width) if case["norm"] else None for _ in range(2)]
    ours = TransformerDecoder(ours, case["layers"], norms[0])
    theirs = nn.TransformerDecoder(theirs, case["layers"], norms[1])
    compare(ours, theirs, inputs, masks, case, **hints)


@settings(max_examples=60, deadline=None)
@given(case=model_cases())
def test_transformer(case: dict) -> None:
    setting = Setting(case)
    shape = (setting.width, case["heads"], case["layers"], 3 - case["layers"])
    ours, theirs = Transformer(*shape, **case["options"]), nn.Transformer(*shape, **case["options"])
    masks = {f"{name}_mask": setting.mask(name) for name in ("src", "tgt", "memory")}
    masks |= {f"{name}_key_padding_mask": setting.padding(name) for name in ("src", "tgt", "memory")}
    hints = {"tgt_is_causal": True} if case["hint"] and setting.is_causal else {}
    compare(ours, theirs, [setting.sequence("src"), setting.sequence("tgt")], masks, case, **hints)


def test_an_activation_that_is_a_module() -> None:
    """By itself: a decoder of torch forgets such an activation when it copies its layers, and takes ReLU."""
    options = {"dim_feedforward": 7, "dropout": 0.0, "activation": nn.Tanh()}
    ours, theirs = twins(TransformerDecoderLayer(8, 2, **options), nn.TransformerDecoderLayer(8, 2, **options))
    tgt, memory = torch.randn(4, 2, 8), torch.randn(3, 2, 8)
    torch.testing.assert_close(ours(tgt, memory), theirs(tgt, memory), **CLOSE)
    stack = TransformerDecoder(ours, 2)
    torch.testing.assert_close(stack(tgt, memory), ours(ours(tgt, memory), memory), **CLOSE)


@settings(max_examples=60, deadline=None)
@given(case=model_cases())
def test_inference_of_an_encoder(case: dict) -> None:
    """Without gradients torch has ways of its own, and so have we: the positions that count must agree.

    Float masks are 0 and -inf here: torch's own way takes any other number for hidden.
    """
    setting = Setting(case)
    shape, options = (setting.width, case["heads"]), case["options"]
    norms = [nn.LayerNorm(setting.width) if case["norm"] else None for _ in range(2)]
    ours, theirs = twins(
        TransformerEncoder(TransformerEncoderLayer(*shape, **options), case["layers"], norms[0]),
        nn.TransformerEncoder(nn.TransformerEncoderLayer(*shape, **options), case["layers"], norms[1]),
    )
    src, mask, padding = setting.sequence("src"), (None, None), setting.padding("src")
    if case["padding"]["src"] == "none" or not case["hint"]:
        mask = setting.mask("src")
    mask, padding = plain(mask), plain(padding)
    with torch.no_grad():
        out = ours.eval()(src, mask[0], padding[0])
        expected = theirs.eval()(src, mask[1], padding[1])
    counts = torch.ones(out.shape[:-1], dtype=torch.bool)
    if padding[1] is not None:  # torch leaves zeros for what a float mask hides too, where it takes its own way
        counts = ~padding[1] if padding[1].dtype == torch.bool else padding[1] != HIDDEN
        counts = counts.T if case["batched"] and not setting.batch_first else counts
    torch.testing.assert_close(out[counts], expected[counts], **CLOSE)


# -------------------------------------------------------------------------------------------------------- beginnings

BUILDS: list[tuple[str, Callable[[], nn.Module], Callable[[], nn.Module]]] = [
    ("attention", lambda: MultiheadAttention(12, 3), lambda: nn.MultiheadAttention(12, 3)),
    (
        "attention, all options",
        lambda: MultiheadAttention(12, 3, 0.1, False, True, True, 5, 7, True),
        lambda: nn.MultiheadAttention(12, 3, 0.1, False, True, True, 5, 7, True),
    ),
    (
        "encoder layer",
        lambda: TransformerEncoderLayer(12, 3, 20, 0.2, "gelu", 1e-4, True, True, False),
        lambda: nn.TransformerEncoderLayer(12, 3, 20, 0.2, "gelu", 1e-4, True, True, False),
    ),
    (
        "decoder layer",
        lambda: TransformerDecoderLayer(12, 3, 20, 0.2, "gelu", 1e-4, True, True, True),
        lambda: nn.TransformerDecoderLayer(12, 3, 20, 0.2, "gelu", 1e-4, True, True, True),
    ),
    (
        "encoder",
        lambda: TransformerEncoder(TransformerEncoderLayer(12, 3), 2, nn.LayerNorm(12), False, False),
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(12, 3), 2, nn.LayerNorm(12), False, False),
    ),
    (
        "decoder",
        lambda: TransformerDecoder(TransformerDecoderLayer(12, 3), 2, nn.LayerNorm(12)),
        lambda: nn.TransformerDecoder(nn.TransformerDecoderLayer(12, 3), 2, nn.LayerNorm(12)),
    ),
    (
        "transformer",
        lambda: Transformer(12, 3, 2, 1, 20, 0.2, "gelu", None, None, 1e-4, True, True, False),
        lambda: nn.Transformer(12, 3, 2, 1, 20, 0.2, "gelu", None, None, 1e-4, True, True, False),
    ),
    (
        "transformer, custom encoder",
        lambda: Transformer(12, 3, 2, 1, 20, custom_encoder=nn.Linear(3, 4)),
        lambda: nn.Transformer(12, 3, 2, 1, 20, custom_encoder=nn.Linear(3, 4)),
    ),
]


@pytest.mark.parametrize(("ours", "theirs"), [pytest.param(*pair, id=name) for name, *pair in BUILDS])
def test_the_same_seed_gives_the_same_weights(ours: Callable[[], nn.Module], theirs: Callable[[], nn.Module]) -> None:
    torch.manual_seed(5)
    mine, state = ours().state_dict(), torch.get_rng_state()
    torch.manual_seed(5)
    other = theirs().state_dict()
    assert list(mine) == list(other)  # in this order, so an optimizer's state fits too
    assert all(torch.equal(mine[name], other[name]) for name in mine)
    assert torch.equal(state, torch.get_rng_state())
    ours().load_state_dict(other)
    theirs().load_state_dict(mine)
    assert [name for name, _ in ours().named_parameters()] == [name for name, _ in theirs().named_parameters()]


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (MultiheadAttention, nn.MultiheadAttention),
        (TransformerEncoderLayer, nn.TransformerEncoderLayer),
        (TransformerDecoderLayer, nn.TransformerDecoderLayer),
        (TransformerEncoder, nn.TransformerEncoder),
        (TransformerDecoder, nn.TransformerDecoder),
        (Transformer, nn.Transformer),
    ],
)
def test_the_same_arguments_in_the_same_places(ours: type[nn.Module], theirs: type[nn.Module]) -> None:
    import inspect

    for method in ("__init__", "forward"):
        mine = inspect.signature(getattr(ours, method)).parameters.values()
        other = inspect.signature(getattr(theirs, method)).parameters.values()
        positional = [(p.name, p.default) for p in mine if p.kind is not p.KEYWORD_ONLY]
        assert positional == [(p.name, p.default) for p in other]
        assert all(p.default is not p.empty for p in mine if p.kind is p.KEYWORD_ONLY)


@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bool])
def test_the_causal_mask_is_torchs(dtype: torch.dtype | None) -> None:
    for size in (0, 1, 5):
        mine = Transformer.generate_square_subsequent_mask(size, dtype=dtype)
        other = nn.Transformer.generate_square_subsequent_mask(size, dtype=dtype)
        assert mine.dtype == other.dtype and torch.equal(mine, other)
