"""What `headway.nn`'s Transformer classes have beyond torch's: rows that see nothing, shared layers, recorded weights,
positions, other mechanisms of attention, inference without padding, and errors that say what to do.
"""

from __future__ import annotations

import copy
import io
import pickle
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from headway.nn import ALiBi, BigBird, InAttention, Learned, Local, Relative, Rotary, SelfAttention, Sinusoidal, T5Bias
from headway.nn.dropout import Dropout
from headway.nn.layers import TransformerDecoderLayer, TransformerEncoderLayer
from headway.nn.multihead import MultiheadAttention
from headway.nn.recording import record_attention
from headway.nn.transformer import Transformer, TransformerDecoder, TransformerEncoder

HIDDEN = float("-inf")
SCHEMES = {"rotary": Rotary(4), "relative": Relative(4, reach=2), "alibi": ALiBi(2), "t5": T5Bias(2, 4, 8)}


def roughen(module: nn.Module) -> nn.Module:
    """Weights that are neither zero nor alike, in float64."""
    for parameter in module.parameters():
        nn.init.normal_(parameter, mean=0.5 if parameter.dim() == 1 else 0.0, std=0.4)
    return module.double()


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def close(mine: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(mine, other, atol=1e-10, rtol=1e-10)


def small(**options: object) -> Transformer:
    settings: dict = {"dim_feedforward": 12, "dropout": 0.0, "batch_first": True} | options
    return roughen(Transformer(8, 2, 2, 2, **settings))


# ------------------------------------------------------------------------------------------------ nothing to attend to


def masks_that_hide_all(kind: str) -> dict[str, Tensor]:
    """Masks for 2 rows of 3 queries and 4 keys after which query 1 sees nothing, and in row 1 no query does."""
    hidden, padded = torch.zeros(3, 4, dtype=torch.bool), torch.zeros(2, 4, dtype=torch.bool)
    hidden[1], padded[1] = True, True
    if kind == "together":  # neither hides everything by itself
        hidden[1, 3], padded[0, 3] = False, True
    if kind == "byte":
        return {"attn_mask": hidden.byte() * 2, "key_padding_mask": padded.byte()}
    if kind == "float":
        zeros = torch.zeros((), dtype=torch.float64)
        return {"attn_mask": zeros.masked_fill(hidden, HIDDEN), "key_padding_mask": zeros.masked_fill(padded, HIDDEN)}
    return {"attn_mask": hidden, "key_padding_mask": padded}


@pytest.mark.parametrize("kind", ["bool", "byte", "float", "together"])
@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_a_query_with_nothing_to_see_gives_zeros_and_finite_gradients(
    kind: str, need_weights: bool, dropout: float
) -> None:
    attention = roughen(MultiheadAttention(8, 2, dropout, batch_first=True))
    query, memory = numbers(2, 3, 8).requires_grad_(), numbers(2, 4, 8).requires_grad_()
    out, weights = attention(query, memory, memory, need_weights=need_weights, **masks_that_hide_all(kind))
    empty = torch.tensor([[False, True, False], [True, True, True]])
    assert (out[empty] == 0).all() and (out[~empty] != 0).all()
    if weights is not None:
        assert (weights[empty] == 0).all()
    out.square().sum().backward()
    for tensor in (query, memory, *attention.parameters()):
        assert tensor.grad is not None and torch.isfinite(tensor.grad).all()
    assert (query.grad[empty] == 0).all() and (memory.grad[1] == 0).all()


@pytest.mark.parametrize("training", [True, False])
def test_a_model_survives_rows_of_padding(training: bool) -> None:
    model = small(dropout=0.3).train(training)
    src, tgt = numbers(2, 4, 8).requires_grad_(), numbers(2, 3, 8).requires_grad_()
    all_padding = torch.tensor([[False] * 4, [True] * 4])
    out = model(src, tgt, src_key_padding_mask=all_padding, memory_key_padding_mask=all_padding)
    out.sum().backward()
    gradients = [src.grad, tgt.grad, *(p.grad for p in model.parameters())]
    assert torch.isfinite(out).all() and all(torch.isfinite(g).all() for g in gradients if g is not None)
    with torch.inference_mode():
        assert torch.isfinite(model(src, tgt, None, None, None, all_padding, None, all_padding)).all()


def test_padding_changes_nothing_for_the_tokens_that_count() -> None:
    model = small().eval()
    src, tgt = numbers(2, 5, 8), numbers(2, 4, 8)
    padded = torch.tensor([[False, False, False, True, True], [False] * 5])
    out = model(src, tgt, src_key_padding_mask=padded, memory_key_padding_mask=padded)
    close(out[:1], model(src[:1, :3], tgt[:1]))
    close(out[1:], model(src[1:], tgt[1:]))


# ---------------------------------------------------------------------------------------------------- causal attention


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("extra", [True, False])
def test_causal_without_a_mask_makes_it_causal(need_weights: bool, padded: bool, extra: bool) -> None:
    attention = roughen(MultiheadAttention(8, 2, add_bias_kv=extra, add_zero_attn=extra, batch_first=True))
    x = numbers(2, 5, 8)
    options = {"need_weights": need_weights}
    if padded:
        options["key_padding_mask"] = torch.tensor([[False] * 5, [False, True, False, False, True]])
    later = torch.ones(5, 5, dtype=torch.bool).triu(1)
    close(attention(x, x, x, is_causal=True, **options)[0], attention(x, x, x, attn_mask=later, **options)[0])


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.float64])
def test_a_causal_mask_is_found_and_no_other(batch_first: bool, dtype: torch.dtype) -> None:
    decoder = TransformerDecoder(TransformerDecoderLayer(8, 2, 12, batch_first=batch_first), 1)
    told = []
    decoder.layers[0].register_forward_pre_hook(
        lambda module, args, kwargs: told.append(kwargs["tgt_is_causal"]), with_kwargs=True
    )
    x = torch.randn(4, 4, 8)
    later = torch.ones(4, 4, dtype=torch.bool).triu(1)
    mask = later.to(dtype) if dtype != torch.float64 else torch.zeros(4, 4).masked_fill(later, HIDDEN)
    other = mask.clone()
    other[0, 0] = 1
    for given in (mask, other, None):
        decoder(x, x, tgt_mask=given)
    decoder(x, x, tgt_mask=other, tgt_is_causal=True)
    assert told == [True, False, False, True]


# ----------------------------------------------------------------------------------------------------------- recording


def pass_through(model: nn.Module) -> Tensor:
    torch.manual_seed(3)
    causal = Transformer.generate_square_subsequent_mask(3)
    padded = torch.tensor([[False, False, False, True], [False] * 4])
    return model(numbers(2, 4, 8), numbers(2, 3, 8), tgt_mask=causal, src_key_padding_mask=padded)


def contents(model: nn.Module) -> list:
    """All that hangs on the modules, hooks among it."""
    return [{name: str(value) for name, value in vars(module).items()} for module in model.modules()]


def test_recorded_weights_are_those_the_layers_use() -> None:
    model = small().eval()
    with record_attention(model) as seen:
        out = pass_through(model)
    close(out, pass_through(model))
    names = [name for name, module in model.named_modules() if isinstance(module, MultiheadAttention)]
    assert list(seen) == names and len(names) == 6
    shapes = {"encoder": (2, 2, 4, 4), "self_attn": (2, 2, 3, 3), "multihead_attn": (2, 2, 3, 4)}
    for name, calls in seen.items():
        (weights,) = calls
        kind = "encoder" if name.startswith("encoder") else name.rsplit(".", 1)[1]
        assert weights.shape == shapes[kind] and not weights.requires_grad
        close(weights.sum(-1), torch.ones_like(weights[..., 0]))
    assert (seen["encoder.layers.1.self_attn"][0][0, ..., 3] == 0).all()
    assert (seen["decoder.layers.0.self_attn"][0].triu(1) == 0).all()


def test_recorded_weights_equal_a_loop_over_heads() -> None:
    attention = roughen(MultiheadAttention(6, 2, 0.5))
    query, memory = numbers(3, 2, 6), numbers(4, 2, 6)
    with record_attention(attention) as seen:
        attention(query, memory, memory, need_weights=False)
    for row in range(2):
        q = query[:, row] @ attention.in_proj_weight[:6].T + attention.in_proj_bias[:6]
        k = memory[:, row] @ attention.in_proj_weight[6:12].T + attention.in_proj_bias[6:12]
        for head, part in enumerate((slice(0, 3), slice(3, 6))):
            close(seen[""][0][row, head], (q[:, part] @ k[:, part].T / 3**0.5).softmax(-1))


def test_a_recorded_model_is_left_as_it_was() -> None:
    model = small()
    before = contents(model)
    with record_attention(model) as seen:
        pass_through(model)
        assert contents(model) != before
    assert contents(model) == before
    with pytest.raises(ValueError, match="rows of source"), record_attention(model):
        model(numbers(2, 4, 8), numbers(3, 4, 8))
    assert contents(model) == before
    pass_through(model)
    assert all(len(calls) == 1 for calls in seen.values())


def test_recording_draws_no_random_numbers() -> None:
    model = small(dropout=0.5)
    with record_attention(model):
        out = pass_through(model)
    close(out, pass_through(model))


def test_recording_every_kind_of_attention() -> None:
    model = small(attention=partial(Local, reach=1), share_layers=True)
    with record_attention(model) as seen:
        for _ in range(2):
            model(numbers(2, 4, 8), numbers(2, 3, 8), None, None)
    assert {name: len(calls) for name, calls in seen.items()} == {
        "encoder.layers.0.self_attn": 4,
        "decoder.layers.0.self_attn": 4,
        "decoder.layers.0.multihead_attn": 4,
    }
    near = torch.ones(4, 4, dtype=torch.bool).tril(1).triu(-1)
    weights = seen["encoder.layers.0.self_attn"][3]
    assert weights.shape == (2, 2, 4, 4) and torch.equal(weights > 0, near.expand(2, 2, 4, 4))


# ------------------------------------------------------------------------------------------------------- shared layers


def test_shared_layers_are_one_layer_applied_again() -> None:
    model = small(share_layers=True).eval()
    single = small(share_layers=False)
    assert [name for name in model.state_dict() if "layers.1" in name] == []
    of_layers = sum(p.numel() for p in single.encoder.layers.parameters())
    assert sum(p.numel() for p in model.encoder.layers.parameters()) * 2 == of_layers
    src, tgt = numbers(2, 4, 8), numbers(2, 3, 8)
    layer, last = model.encoder.layers[0], model.decoder.layers[0]
    memory = model.encoder.norm(layer(layer(src)))
    close(model.encoder(src), memory)
    close(model(src, tgt), model.decoder.norm(last(last(tgt, memory), memory)))


def test_the_gradient_of_a_shared_layer_is_the_sum_over_its_uses() -> None:
    shared = roughen(TransformerEncoder(TransformerEncoderLayer(8, 2, 12, 0.0), 3, share_layers=True))
    apart = TransformerEncoder(shared.layers[0], 3)
    x = numbers(4, 2, 8)
    for model in (shared, apart):
        model(x).square().sum().backward()
    for name, parameter in shared.layers[0].named_parameters():
        close(parameter.grad, sum(layer.get_parameter(name).grad for layer in apart.layers))


# ----------------------------------------------------------------------------------------------------------- positions


def slow_attention(attention: MultiheadAttention, x: Tensor, scheme: InAttention, hidden: Tensor) -> Tensor:
    """Self-attention of x (T, D) with the scheme's own terms, one pair of tokens at a time, by `SelfAttention`."""
    width = attention.embed_dim
    plain = SelfAttention(width, attention.num_heads, position=scheme).double()
    with torch.no_grad():
        for place, linear in enumerate((plain.query, plain.key, plain.value)):
            linear.weight.copy_(attention.in_proj_weight[place * width : (place + 1) * width])
            linear.bias.copy_(attention.in_proj_bias[place * width : (place + 1) * width])
    q, k, v = plain.project(x[None], torch.arange(len(x)))
    mixed = torch.zeros_like(q)
    for t in range(len(x)):
        seen = [s for s in range(len(x)) if not hidden[t, s]]
        at, to = torch.tensor([t]), torch.tensor(seen)
        weights = plain.scores(q[:, :, [t]], k[:, :, seen], at, to).softmax(-1)  # (1, H, 1, len(seen))
        mixed[:, :, [t]] = weights @ v[:, :, seen] + scheme.values(weights, at, to)
    return attention.out_proj(mixed.transpose(1, 2).flatten(2)[0])


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("masked", [True, False])
def test_positions_act_in_self_attention(name: str, need_weights: bool, masked: bool) -> None:
    scheme = copy.deepcopy(SCHEMES[name])
    attention = roughen(MultiheadAttention(8, 2, position=scheme))
    x = numbers(5, 8)
    hidden = torch.zeros(5, 5, dtype=torch.bool)
    hidden[0, 3] = hidden[2, :2] = hidden[4, 4] = masked
    out, weights = attention(x, x, x, attn_mask=hidden if masked else None, need_weights=need_weights)
    close(out, slow_attention(attention, x, scheme, hidden))
    assert (weights is None) == (not need_weights)
    plain = MultiheadAttention(8, 2).double()
    plain.load_state_dict(attention.state_dict(), strict=False)
    assert not torch.allclose(out, plain(x, x, x, attn_mask=hidden)[0])


@pytest.mark.parametrize("name", SCHEMES)
def test_keys_that_stand_nowhere_have_no_position(name: str) -> None:
    """The zero key has the score 0 whatever the scheme, so the weights of the others keep their proportions."""
    x = numbers(2, 4, 8)
    attention = roughen(MultiheadAttention(8, 2, position=copy.deepcopy(SCHEMES[name]), batch_first=True))
    more = MultiheadAttention(8, 2, position=copy.deepcopy(attention.position), batch_first=True, add_zero_attn=True)
    more.double().load_state_dict(attention.state_dict())
    with record_attention(nn.ModuleList([attention, more])) as seen:
        attention(x, x, x)
        more(x, x, x)
    plain, longer = seen["0"][0], seen["1"][0]
    close(longer[..., :4] / longer[..., :4].sum(-1, keepdim=True), plain)


@pytest.mark.parametrize("name", SCHEMES)
def test_a_name_gives_every_layer_its_own_scheme(name: str) -> None:
    model = small(positions=name)
    layers = [*model.encoder.layers, *model.decoder.layers]
    schemes = [layer.self_attn.position for layer in layers]
    assert all(type(scheme) is type(SCHEMES[name]) for scheme in schemes)
    assert len({id(scheme) for scheme in schemes}) == 4
    assert all(layer.multihead_attn.position is None for layer in model.decoder.layers)
    if name == "t5":
        assert [scheme.causal for scheme in schemes] == [False, False, True, True]
    src, tgt = numbers(2, 4, 8), numbers(2, 3, 8)
    swapped = [1, 0, 2, 3]
    assert not torch.allclose(model.encoder(src[:, swapped])[:, swapped], model.encoder(src))
    memory = model.encoder(src)[:, swapped]  # the memory is a set: its order says nothing
    close(model.decoder(tgt, memory), model(src, tgt))


def test_a_module_is_shared_by_all_layers() -> None:
    scheme = T5Bias(2, 4, 8)
    model = Transformer(8, 2, 2, 2, 12, positions=scheme)
    assert all(layer.self_attn.position is scheme for layer in [*model.encoder.layers, *model.decoder.layers])
    assert (scheme.table == 0).all()  # Xavier's values are not for schemes
    again = copy.deepcopy(model)
    assert again.encoder.layers[0].self_attn.position is again.decoder.layers[1].self_attn.position


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("given", ["sinusoidal", "learned"])
def test_positions_on_the_embeddings_are_added_to_the_input(batch_first: bool, given: str) -> None:
    scheme = Sinusoidal(8) if given == "sinusoidal" else Learned(6, 8)
    model = small(positions="sinusoidal" if given == "sinusoidal" else scheme, batch_first=batch_first)
    bare = Transformer(8, 2, 2, 2, 12, 0.0, batch_first=batch_first).double()
    bare.load_state_dict({name: value for name, value in model.state_dict().items() if "positions" not in name})
    src, tgt = numbers(2, 4, 8), numbers(2, 3, 8)
    placed = [scheme.double()(x, torch.arange(x.shape[1])) for x in (src, tgt)]
    if not batch_first:
        src, tgt, *placed = (x.transpose(0, 1) for x in (src, tgt, *placed))
    torch.testing.assert_close(model(src, tgt), bare(*placed), atol=1e-6, rtol=1e-6)
    row = 0 if batch_first else 1
    close(model(src.select(row, 1), tgt.select(row, 1)), model(src, tgt).select(row, 1))


def test_positions_that_cannot_be() -> None:
    with pytest.raises(ValueError, match=r"positions=Learned\(512, 8\)"):
        Transformer(8, 2, positions="learned")
    with pytest.raises(ValueError, match="did you mean 'rotary'"):
        Transformer(8, 2, positions="rotari")
    with pytest.raises(ValueError, match="did you mean 'alibi'"):
        MultiheadAttention(8, 2, position="alibbi")
    with pytest.raises(ValueError, match="sinusoidal positions act on the embeddings"):
        TransformerEncoderLayer(8, 2, position="sinusoidal")
    with pytest.raises(TypeError, match="positions are 3"):
        TransformerEncoder(TransformerEncoderLayer(8, 2), 2, positions=3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="position is a Sinusoidal; give an InAttention"):
        MultiheadAttention(8, 2, position=Sinusoidal(8))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="ALiBi positions already"):
        TransformerEncoder(TransformerEncoderLayer(8, 2, position="alibi"), 2, positions="rotary")
    with pytest.raises(ValueError, match="Identity does not tell"):
        TransformerEncoder(nn.Identity(), 2, positions="rotary")
    attention = MultiheadAttention(8, 2, position="rotary")
    with pytest.raises(ValueError, match="3 queries and 4 keys: build a cross-attention without position"):
        attention(torch.zeros(3, 8), torch.zeros(4, 8), torch.zeros(4, 8))
    assert Transformer(8, 2, 1, 1, 12, positions="none").encoder.positions is None


# ----------------------------------------------------------------------------------------------------- other mechanisms


def test_a_mechanism_takes_the_place_of_self_attention() -> None:
    """`SelfAttention` as the mechanism computes what `MultiheadAttention` does with the same weights."""
    torch.manual_seed(0)
    model, other = small(attention=SelfAttention, batch_first=False), small(batch_first=False)
    state = {}
    for name, value in model.state_dict().items():
        for mine, torchs in (("output", "out_proj"), ("query", "in_proj_"), ("key", ""), ("value", "")):
            if f"self_attn.{mine}." in name:
                parts = [name.replace(f".{mine}.", f".{each}.") for each in ("query", "key", "value")]
                if mine == "query":
                    state[name.replace(".query.", ".in_proj_")] = torch.cat([model.state_dict()[p] for p in parts])
                elif mine == "output":
                    state[name.replace("output", torchs)] = value
                break
        else:
            state[name] = value
    other.load_state_dict(state)
    src, tgt = numbers(4, 2, 8), numbers(3, 2, 8)
    later = torch.ones(3, 3, dtype=torch.bool).triu(1)
    padded = torch.tensor([[False] * 4, [False, True, False, True]])
    expected = other(src, tgt, tgt_mask=later, src_key_padding_mask=padded, memory_key_padding_mask=padded)
    floats = torch.zeros(2, 4).masked_fill(padded, HIDDEN)
    for padding in (padded, padded.byte(), floats):
        for causal in ({"tgt_mask": later}, {"tgt_mask": later, "tgt_is_causal": False}, {}):
            close(model(src, tgt, src_key_padding_mask=padding, memory_key_padding_mask=padding, **causal), expected)
    one = other(src[:, 1], tgt[:, 1], tgt_mask=later, src_key_padding_mask=padded[1])
    close(model(src[:, 1], tgt[:, 1], src_key_padding_mask=padded[1]), one)


def test_mechanisms_by_name_or_builder_are_causal_in_the_decoder_only() -> None:
    for kind, given in ((Local, "local"), (Local, Local), (BigBird, partial(BigBird, length=8, block=2, window=1))):
        model = Transformer(8, 2, 2, 2, 12, attention=given, positions="rotary")
        layers = [*model.encoder.layers, *model.decoder.layers]
        assert all(type(layer.self_attn) is kind for layer in layers)
        assert [layer.self_attn.causal for layer in layers] == [False, False, True, True]
        assert all(isinstance(layer.self_attn.position, Rotary) for layer in layers)
        assert all(type(layer.multihead_attn) is MultiheadAttention for layer in model.decoder.layers)


def test_mechanisms_begin_apart_and_with_their_own_values() -> None:
    torch.manual_seed(0)
    model = Transformer(8, 2, 2, 2, 12, attention=SelfAttention, dtype=torch.float64)
    first, second = (layer.self_attn.query.weight for layer in model.encoder.layers)
    assert first.dtype == torch.float64 and not torch.equal(first, second)
    assert first.abs().max() <= 1 / 8**0.5  # nn.Linear's range, narrower than Xavier's


def test_mechanisms_refuse_other_masks() -> None:
    encoder, decoder = (
        kind(8, 2, 12, attention=partial(Local, reach=1), batch_first=True)
        for kind in (TransformerEncoderLayer, TransformerDecoderLayer)
    )
    x = torch.randn(2, 4, 8)
    mask = torch.zeros(4, 4, dtype=torch.bool)
    later = torch.ones(4, 4, dtype=torch.bool).triu(1)
    for options in ({"src_mask": mask}, {"src_mask": later}, {"is_causal": True}):
        with pytest.raises(ValueError, match="Local has its own pattern, which is not causal"):
            encoder(x, **options)
    with pytest.raises(ValueError, match="Local has its own pattern, which is causal"):
        decoder(x, x, tgt_mask=mask)
    torch.testing.assert_close(decoder.eval()(x, x, tgt_mask=later), decoder(x, x))
    with pytest.raises(ValueError, match="may hold 0 and -inf only"):
        encoder(x, src_key_padding_mask=torch.full((2, 4), -1.0))
    with pytest.raises(ValueError, match=r"\(2, 3\); \(2, 4\) is wanted"):
        encoder(x, src_key_padding_mask=mask[:2, :3])


def test_mechanisms_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="did you mean 'bigbird'"):
        Transformer(8, 2, attention="bigbrid")
    with pytest.raises(ValueError, match="longest length") as found:
        Transformer(8, 2, attention="bigbird")
    assert found.value.__notes__ == [
        "options go in with functools.partial, as in attention=partial(BigBird, length=512)"
    ]
    with pytest.raises(TypeError, match="attention built a Linear"):
        TransformerEncoderLayer(8, 2, attention=lambda *args, **options: nn.Linear(8, 8))  # type: ignore[arg-type]
    for option in ({"attention": "local"}, {"positions": "rotary"}, {"share_layers": True}):
        with pytest.raises(ValueError, match="do not reach into a custom_encoder"):
            Transformer(8, 2, custom_encoder=nn.Identity(), **option)
    layer = TransformerEncoderLayer(8, 2, attention=partial(Local, reach=1))
    stack = TransformerEncoder(layer, 2, positions="rotary")
    assert all(isinstance(each.self_attn.position, Rotary) for each in stack.layers)


# ----------------------------------------------------------------------------------------- inference, copies, compilers


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("position", [None, "rotary", "relative"])
def test_inference_without_padding_equals_inference_with_it(
    batch_first: bool, norm_first: bool, position: str | None
) -> None:
    layer = TransformerEncoderLayer(8, 2, 12, batch_first=batch_first, norm_first=norm_first, position=position)
    encoder = roughen(TransformerEncoder(layer, 2)).eval()
    x = numbers(3, 5, 8) if batch_first else numbers(5, 3, 8)
    padded = torch.tensor([[False] * 5, [True, False, True, False, True], [True] * 5])
    counts = ~padded if batch_first else ~padded.T
    rows_computed = []
    encoder.layers[0].linear1.forward = _counting(encoder.layers[0].linear1.forward, rows_computed)
    full = encoder(x, src_key_padding_mask=padded)
    with torch.inference_mode():
        for mask in (padded, padded.byte()):
            packed = encoder(x, src_key_padding_mask=mask)
            close(packed[counts], full[counts])
            assert (packed[~counts] == 0).all()
        encoder.enable_nested_tensor = False
        close(encoder(x, src_key_padding_mask=padded), full)
    assert rows_computed == [15, 7, 7, 15]


def _counting(forward, rows: list[int]):  # type: ignore[no-untyped-def]
    def counted(x: Tensor) -> Tensor:
        rows.append(x[..., 0].numel())
        return forward(x)

    return counted


def test_hooks_see_whole_sequences() -> None:
    encoder = TransformerEncoder(TransformerEncoderLayer(8, 2, 12, batch_first=True), 1).eval()
    shapes = []
    encoder.layers[0].linear1.register_forward_hook(lambda module, args, out: shapes.append(tuple(out.shape)))
    with torch.inference_mode():
        encoder(torch.randn(2, 3, 8), src_key_padding_mask=torch.tensor([[False, False, True]] * 2))
    assert shapes == [(2, 3, 12)]


@pytest.mark.parametrize("part", ["self_attn", "self_attn.out_proj", "linear1", "linear2", "dropout2", "norm1"])
def test_what_a_hook_has_seen_is_not_written_over(part: str) -> None:
    layer = roughen(TransformerEncoderLayer(8, 2, 12, batch_first=True)).eval()
    kept: list[tuple[Tensor, Tensor]] = []

    def keep(module: nn.Module, args: object, out: Tensor | tuple[Tensor, None]) -> None:
        out = out[0] if isinstance(out, tuple) else out
        kept.append((out, out.clone()))

    layer.get_submodule(part).register_forward_hook(keep)
    with torch.no_grad():
        layer(numbers(2, 3, 8))
    assert len(kept) == 1 and all(torch.equal(now, then) for now, then in kept)


class Echo(nn.Module):
    """An attention that gives its queries back."""

    def forward(self, query: Tensor, *others: Tensor, **options: object) -> tuple[Tensor, None]:
        return query, None


@pytest.mark.parametrize("attention", [None, Echo()])
def test_inputs_are_not_written_over(attention: nn.Module | None) -> None:
    layer = TransformerEncoderLayer(8, 2, 12, batch_first=True).eval()
    if attention is not None:
        layer.self_attn = attention  # type: ignore[assignment]
    x = torch.randn(2, 3, 8)
    before = x.clone()
    with torch.no_grad():
        layer(x)
    assert torch.equal(x, before)


def test_it_compiles_in_one_piece() -> None:
    layer = TransformerEncoderLayer(8, 2, 12, batch_first=True)
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    x, padded = torch.randn(2, 3, 8), torch.tensor([[False, False, True], [True] * 3])
    compiled(x, src_key_padding_mask=padded).sum().backward()  # dropout and all
    layer.eval()
    torch.testing.assert_close(compiled(x, src_key_padding_mask=padded), layer(x, src_key_padding_mask=padded))


def test_layers_of_torch_and_of_headway_fit_each_others_stacks() -> None:
    torch.manual_seed(0)
    theirs = nn.TransformerEncoderLayer(8, 2, 12, 0.0, batch_first=True)
    ours = TransformerEncoderLayer(8, 2, 12, 0.0, batch_first=True)
    ours.load_state_dict(theirs.state_dict())
    x, padded = torch.randn(2, 3, 8), torch.tensor([[False, False, True]] * 2)
    expected = nn.TransformerEncoder(theirs, 2)(x, src_key_padding_mask=padded)
    with pytest.warns(UserWarning, match="enable_nested_tensor"):
        mixed = nn.TransformerEncoder(ours, 2)
    torch.testing.assert_close(mixed(x, src_key_padding_mask=padded), expected)
    torch.testing.assert_close(TransformerEncoder(theirs, 2)(x, src_key_padding_mask=padded), expected)


def test_models_can_be_copied_pickled_and_saved() -> None:
    for model in (small(), small(positions="t5", share_layers=True), small(attention=Local, activation="gelu")):
        model.eval()
        expected = model(src := numbers(2, 4, 8), tgt := numbers(2, 3, 8))
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        for again in (
            copy.deepcopy(model),
            pickle.loads(pickle.dumps(model)),
            torch.load(file, weights_only=False),
        ):
            close(again(src, tgt), expected)


def test_dropout_acts_everywhere_in_training_and_nowhere_after() -> None:
    model = small(dropout=0.5)
    assert sum(isinstance(module, Dropout) for module in model.modules()) == 2 * 3 + 2 * 4
    src, tgt = numbers(2, 4, 8), numbers(2, 3, 8)

    def out(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return model(src, tgt)

    close(out(1), out(1))
    assert not torch.allclose(out(1), out(2))
    model.eval()
    close(out(1), out(2))
    torch.manual_seed(0)
    attention = roughen(MultiheadAttention(8, 2, 0.5, batch_first=True))
    weights = attention(src, src, src, average_attn_weights=False)[1]
    full = attention.weights(src, src, src)
    assert (weights == 0).any()
    close(weights[weights != 0], 2 * full[weights != 0])


def test_it_runs_in_bfloat16_and_under_autocast() -> None:
    src, tgt = torch.randn(2, 4, 8), torch.randn(2, 3, 8)
    causal = Transformer.generate_square_subsequent_mask(3)
    model = Transformer(8, 2, 1, 1, 12, batch_first=True, positions="relative", dtype=torch.bfloat16)
    assert model(src.bfloat16(), tgt.bfloat16(), tgt_mask=causal).dtype == torch.bfloat16
    model = Transformer(8, 2, 1, 1, 12, batch_first=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = model(src, tgt, tgt_mask=causal)
    out.float().sum().backward()
    assert torch.isfinite(out).all()


# -------------------------------------------------------------------------------------------------------------- errors


def test_errors_of_attention_name_the_values() -> None:
    with pytest.raises(ValueError, match=r"num_heads \(3\) must divide embed_dim \(8\)"):
        MultiheadAttention(8, 3)
    with pytest.raises(ValueError, match=r"num_heads \(0\)"):
        TransformerEncoderLayer(8, 0)
    attention = MultiheadAttention(8, 2, kdim=6, vdim=4, batch_first=True)
    query, key, value = torch.zeros(2, 3, 8), torch.zeros(2, 5, 6), torch.zeros(2, 5, 4)

    def refuses(message: str, *inputs: Tensor, **options: Tensor) -> None:
        with pytest.raises(ValueError, match=message):
            attention(*inputs, **options)

    refuses("query has 6 features and this attention takes 8", key, key, value)
    refuses("value has 6 features and this attention takes 4", query, key, key)
    refuses(r"all three must have 3 axes, or 2", query, key[0], value)
    refuses("all three must have 3 axes, or 2", query[None], key[None], value[None])
    refuses("each key needs its value", query, key, value[:, :4])
    refuses("query has 1 rows and key 2", query[:1], key, value)
    refuses(
        r"\(5, 3\); \(T, S\) = \(3, 5\) or \(B·H, T, S\) = \(4, 3, 5\)", query, key, value, attn_mask=torch.zeros(5, 3)
    )
    refuses(
        r"\(2, 3, 5\); \(T, S\) = \(3, 5\) or \(B·H, T, S\) = \(4, 3, 5\)",
        query,
        key,
        value,
        attn_mask=torch.zeros(2, 3, 5),
    )
    refuses(r"\(5, 2\); \(2, 5\) is wanted", query, key, value, key_padding_mask=torch.zeros(5, 2))
    for name, shape in (("attn_mask", (3, 5)), ("key_padding_mask", (2, 5))):
        with pytest.raises(TypeError, match=f"{name} is torch.int64"):
            attention(query, key, value, **{name: torch.zeros(shape, dtype=torch.int64)})
    nested = torch.nested.nested_tensor([torch.zeros(3, 8)], layout=torch.jagged)
    with pytest.raises(TypeError, match="pad them and give a key_padding_mask"):
        attention(nested, nested, nested)


def test_errors_of_the_model_name_the_values() -> None:
    model = Transformer(8, 2, 1, 1, 12)
    for src, tgt, message in (
        ((4, 2, 8), (3, 3, 8), "2 rows of source and 3 of target"),
        ((4, 2, 6), (3, 2, 8), r"src \(4, 2, 6\), tgt \(3, 2, 8\): both must have d_model \(8\)"),
        ((4, 2, 8), (3, 8), "both must have 3 axes, or 2"),
    ):
        with pytest.raises(ValueError, match=message):
            model(torch.zeros(src), torch.zeros(tgt))
    with pytest.raises(ValueError, match="'gelo' is unknown; did you mean 'gelu'"):
        Transformer(8, 2, activation="gelo")


def test_layers_taken_away_or_added_are_applied_once_each() -> None:
    encoder = TransformerEncoder(TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True), 6).double()
    x, calls = torch.randn(2, 5, 16, dtype=torch.float64), []
    encoder.layers = encoder.layers[:5]
    for layer in encoder.layers:
        layer.register_forward_hook(lambda *_: calls.append(1))
    encoder(x)
    assert len(calls) == 5


@pytest.mark.parametrize("part", ["linear1", "linear2", "self_attn", "dropout1", "norm1"])
def test_backward_hooks_work_on_every_part(part: str) -> None:
    layer, seen = TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True), []
    getattr(layer, part).register_full_backward_hook(lambda *_: seen.append(part))
    layer(torch.randn(2, 5, 16, requires_grad=True)).sum().backward()
    assert seen == [part]


def test_a_watched_encoder_gives_what_an_unwatched_one_gives() -> None:
    encoder = TransformerEncoder(TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True), 2).eval()
    x, padding = torch.randn(2, 5, 16), torch.tensor([[False] * 5, [False, False, True, True, True]])
    with torch.no_grad():
        before = encoder(x, src_key_padding_mask=padding)
        with record_attention(encoder):
            inside = encoder(x, src_key_padding_mask=padding)
    torch.testing.assert_close(inside, before)
    assert (before[1, 2:] == 0).all()


@pytest.mark.parametrize("name", ["dot-product", "local", "additive"])
def test_compiled_decoders_take_their_causal_mask(name: str) -> None:
    model = Transformer(16, 2, 1, 1, 32, 0.0, batch_first=True, attention=name).eval()
    src, tgt = torch.randn(2, 5, 16), torch.randn(2, 4, 16)
    mask = Transformer.generate_square_subsequent_mask(4)
    expected = model(src, tgt, tgt_mask=mask)
    torch.testing.assert_close(torch.compile(model, backend="eager")(src, tgt, tgt_mask=mask), expected)
    torch.testing.assert_close(model(src, tgt, tgt_mask=mask.expand(4, 4, 4)), expected)


def test_gradients_of_each_example_by_torch_func() -> None:
    from torch.func import functional_call, grad, vmap

    layer = TransformerEncoderLayer(16, 2, 32, 0.5, batch_first=True)
    parameters = dict(layer.named_parameters())
    x, padding = torch.randn(3, 70, 16), torch.rand(3, 70) > 0.7

    def loss(parameters, row, hidden):
        return functional_call(layer, parameters, (row[None],), {"src_key_padding_mask": hidden[None]}).sum()

    found = vmap(grad(loss), (None, 0, 0), randomness="different")(parameters, x, padding)
    assert found["linear1.weight"].shape == (3, 32, 16) and found["linear1.weight"].isfinite().all()


def test_positions_of_a_stack_are_checked_as_those_of_a_layer() -> None:
    from functools import partial

    from headway.nn import Linformer, Mixture

    linformer = TransformerEncoderLayer(16, 2, 32, attention=partial(Linformer, length=8))
    with pytest.raises(ValueError, match="no scores of pairs for ALiBi"):
        TransformerEncoder(linformer, 2, positions="alibi")
    mixture = TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True, attention=partial(Mixture, length=8))
    x, turned = torch.randn(1, 6, 16), TransformerEncoder(mixture, 1, positions="rotary")
    assert not torch.allclose(turned(x), TransformerEncoder(mixture, 1)(x))


def test_a_row_hidden_by_a_large_number_is_hidden_in_half_precision() -> None:
    attention = MultiheadAttention(16, 2, batch_first=True).half()
    x, mask = torch.randn(1, 4, 16).half(), torch.zeros(4, 4)
    mask[1] = -1e9
    out, weights = attention(x, x, x, attn_mask=mask)
    assert out.isfinite().all() and (weights[0, 1] == 0).all()
