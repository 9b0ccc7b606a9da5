"""The encoder-decoder Transformer: parity with torch's, steps equal the full pass, padding changes nothing."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from headway.configuration import load_settings
from headway.errors import SettingsError
from headway.models import EncoderDecoder, EncoderDecoderSettings, parameter_count
from headway.nn import Dropout
from tests.conftest import tiny_encoder_decoder
from tests.models.seq2seq import (
    padded,
    rows_strategy,
    same_alone,
    same_by_steps,
    same_with_padding,
    same_with_rows_selected,
)

VARIANTS = [
    {"norm": norm, "positions": positions}
    for norm in ("post", "pre")
    for positions in ("sinusoidal", "learned", "rotary", "none")
]


def torch_layer(ours: nn.Module, theirs: nn.Module) -> None:
    """Give a layer of torch's the weights of one of ours."""
    attentions = [(ours.attention, theirs.self_attn)]
    norms = [(ours.around_attention, theirs.norm1), (ours.around_feed_forward, theirs.norm2)]
    if hasattr(ours, "cross_attention"):
        attentions.append((ours.cross_attention, theirs.multihead_attn))
        norms = [norms[0], (ours.around_cross, theirs.norm2), (ours.around_feed_forward, theirs.norm3)]
    for mine, other in attentions:
        parts = (mine.query, mine.key, mine.value)
        other.in_proj_weight.copy_(torch.cat([part.weight for part in parts]))
        other.in_proj_bias.copy_(torch.cat([part.bias for part in parts]))
        other.out_proj.load_state_dict(mine.output.state_dict())
    for mine, other in norms:
        other.load_state_dict(mine.norm.state_dict())
    theirs.linear1.load_state_dict(ours.feed_forward.inner.state_dict())
    theirs.linear2.load_state_dict(ours.feed_forward.output.state_dict())


def torch_body(model: EncoderDecoder) -> nn.Transformer:
    s = model.settings
    body = nn.Transformer(
        s.width, s.heads, s.layers, s.decoder_layers or s.layers, 4 * s.width, 0.0, s.activation,
        batch_first=True, norm_first=s.norm == "pre", dtype=torch.float64,
    )  # fmt: skip
    if s.norm == "post":  # torch adds a norm behind the last layer's, which the paper does not have
        body.encoder.norm = body.decoder.norm = None
    with torch.no_grad():
        for stack, layers in ((model.encoder, body.encoder.layers), (model.decoder, body.decoder.layers)):
            for ours, theirs in zip(stack, layers, strict=True):
                torch_layer(ours, theirs)
        if s.norm == "pre":
            body.encoder.norm.load_state_dict(model.encoder_norm.state_dict())
            body.decoder.norm.load_state_dict(model.decoder_norm.state_dict())
    return body.train()  # eval would take torch's fast path, which leaves gradients out


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@pytest.mark.parametrize("norm", ["post", "pre"])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_outputs_and_gradients_equal_torch(norm: str, activation: str) -> None:
    model = tiny_encoder_decoder(norm=norm, activation=activation, layers=2, decoder_layers=3, positions="none")
    body = torch_body(model)
    source, target = padded([[3, 4, 5, 6, 7], [8, 9], [4]]), padded([[1, 5, 6], [1, 7, 8], [1, 2, 3]])
    hidden = source == 0
    order = nn.Transformer.generate_square_subsequent_mask(3, dtype=torch.float64)

    def theirs() -> torch.Tensor:
        x, y = (each.table(tokens) * 4 for each, tokens in ((model.source, source), (model.target, target)))
        out = body(
            x, y, tgt_mask=order, src_key_padding_mask=hidden, memory_key_padding_mask=hidden, tgt_is_causal=True
        )
        return model.head(out)

    expected, found = theirs(), model(target, source)
    torch.testing.assert_close(found, expected, atol=1e-10, rtol=1e-10)
    weight = torch.randn_like(found)
    (found * weight).sum().backward()
    of_embeddings, model.target.table.weight.grad = model.target.table.weight.grad, None  # shared by all three
    (expected * weight).sum().backward()
    torch.testing.assert_close(of_embeddings, model.target.table.weight.grad, atol=1e-10, rtol=1e-10)
    for stack, layers in ((model.encoder, body.encoder.layers), (model.decoder, body.decoder.layers)):
        for ours, other in zip(stack, layers, strict=True):
            mine = torch.cat([part.weight.grad for part in (ours.attention.query, ours.attention.key)])
            torch.testing.assert_close(mine, other.self_attn.in_proj_weight.grad[:32], atol=1e-10, rtol=1e-10)
            torch.testing.assert_close(
                ours.feed_forward.inner.weight.grad, other.linear1.weight.grad, atol=1e-10, rtol=1e-10
            )
            if hasattr(ours, "cross_attention"):
                torch.testing.assert_close(
                    ours.cross_attention.value.weight.grad,
                    other.multihead_attn.in_proj_weight.grad[32:],
                    atol=1e-10,
                    rtol=1e-10,
                )


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: "-".join(variant.values()))
@settings(max_examples=6, deadline=None)
@given(sources=rows_strategy, targets=rows_strategy, seed=st.integers(0, 9))
def test_steps_equal_the_full_pass_padding_and_company_change_nothing(variant, sources, targets, seed) -> None:
    model = tiny_encoder_decoder(**variant, seed=seed)
    same_by_steps(model, sources, targets)
    same_alone(model, sources, targets)
    same_with_padding(model, sources, targets)
    same_with_rows_selected(model, sources)


def test_steps_equal_the_full_pass_of_a_long_target() -> None:
    """Longer than the slots that a cache has at first."""
    targets = torch.randint(1, 19, (3, 22), generator=torch.Generator().manual_seed(0)).tolist()
    same_by_steps(tiny_encoder_decoder(positions="learned"), [[3, 4, 5], [6], [7, 8]], targets)


def test_the_source_is_read_once() -> None:
    model = tiny_encoder_decoder()
    state = model.start(padded([[3, 4, 5]]), 8)
    calls = []
    for layer in model.decoder:
        layer.cross_attention.key.register_forward_hook(lambda *_: calls.append("key"))
        layer.cross_attention.value.register_forward_hook(lambda *_: calls.append("value"))
    for token in (1, 4, 2):
        model.step(torch.tensor([token]), state)
    assert not calls


def test_later_tokens_and_padding_of_the_source_get_no_gradient() -> None:
    model = tiny_encoder_decoder(tied="none")
    source, target = padded([[3, 4, 5], [6]]), torch.tensor([[1, 7, 8], [1, 9, 2]])
    model(target, source)[1, 1].sum().backward()
    reached = model.source.table.weight.grad.abs().sum(1).nonzero().flatten().tolist()
    assert reached == [6]
    assert model.target.table.weight.grad.abs().sum(1).nonzero().flatten().tolist() == [1, 9]


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_alignment_is_what_the_last_layer_looks_at(norm: str) -> None:
    model = tiny_encoder_decoder(norm=norm)
    sources, target = [[3, 4, 5, 6], [7, 8]], torch.tensor([[1, 5, 6], [1, 7, 0]])
    source = padded(sources)
    found = model.alignment(target, source)
    torch.testing.assert_close(found.sum(-1), torch.ones(2, 3, dtype=torch.float64))
    assert (found[1, :, 2:] == 0).all()
    seen = []
    cross = model.decoder[-1].cross_attention
    cross.query.register_forward_hook(lambda _, args, out: seen.append(out))
    model(target, source)
    q, k = (each.unflatten(-1, (2, 8)).transpose(1, 2) for each in (seen[0], cross.key(model.encode(source))))
    scores = (q @ k.transpose(-1, -2) / 8**0.5).masked_fill(source[:, None, None] == 0, float("-inf"))
    torch.testing.assert_close(found, scores.softmax(-1).mean(1), atol=1e-12, rtol=0)


def test_tied_matrices_are_shared_and_counted_once() -> None:
    counts = {tied: parameter_count(tiny_encoder_decoder(tied=tied)) for tied in ("all", "target", "none")}
    assert counts["target"] - counts["all"] == counts["none"] - counts["target"] == 19 * 16


def test_initialisation() -> None:
    torch.manual_seed(0)
    model = EncoderDecoderSettings(width=128, layers=1).build(1000)
    model.eval().requires_grad_(False)
    embedded, _ = model.target(torch.randint(1000, (50, 20)))
    without = embedded - model.target.positions(torch.zeros(50, 20, 128), torch.arange(20))
    assert abs(float(without.std()) - 1) < 0.02  # √D · N(0, 1/D)
    bound = (6 / (128 + 128)) ** 0.5
    query = model.decoder[0].attention.query.weight
    assert 0.98 * bound < float(query.abs().max()) <= bound
    assert all((value == 0).all() for name, value in model.named_parameters() if name.endswith("bias"))


def test_dropout_acts_in_training_alone() -> None:
    model = tiny_encoder_decoder(dropout=0.3, inner_dropout=0.3)
    source, target = padded([[3, 4, 5]]), torch.tensor([[1, 5, 6]])
    assert torch.equal(model(target, source), model(target, source))
    model.train()
    assert not torch.equal(model(target, source), model(target, source))


def test_settings_name_the_values() -> None:
    task = {"task": {"name": "language_modelling", "corpus": "x"}}
    for wrong, message in (
        ({"width": 30, "heads": 4}, r"heads \(4\) must divide width \(30\)"),
        ({"width": 12, "heads": 4, "positions": "rotary"}, r"width / heads \(3\) must be even"),
        ({"width": 15, "heads": 5}, r"width \(15\) must be even"),
        ({"norm": "both"}, "must be one of post, pre"),
        ({"tied": "some"}, "must be one of all, target, none"),
    ):
        with pytest.raises(SettingsError, match=message):
            load_settings(task | {"model": {"kind": "encoder_decoder"} | wrong})


@pytest.mark.parametrize("norm", ["post", "pre"])
@pytest.mark.parametrize("layers", [1, 2])
def test_residual_dropout_is_where_the_paper_has_it(norm: str, layers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On both sums of embedding and position, and on what each part adds before the norm: nowhere else."""
    model = tiny_encoder_decoder(norm=norm, layers=layers, dropout=0.3, inner_dropout=0.0).train()
    seen: list[tuple[int, ...]] = []

    def forward(self: Dropout, x: torch.Tensor) -> torch.Tensor:
        if self.p > 0:
            seen.append(tuple(x.shape))
        return torch.zeros_like(x) if self.p > 0 else x

    monkeypatch.setattr(Dropout, "forward", forward)
    target, source = torch.randint(1, 19, (2, 5)), torch.randint(1, 19, (2, 7))
    logits = model(target, source)
    width = model.settings.width
    assert seen.count((2, 7, width)) == 1 + 2 * layers and seen.count((2, 5, width)) == 1 + 3 * layers
    torch.testing.assert_close(logits, logits[:1, :1].expand_as(logits))  # all that is known of a token was dropped
