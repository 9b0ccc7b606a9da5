"""GPT: sizes the course names, parity with an independent implementation, causality."""

from __future__ import annotations

import pytest
import torch

from headway.configuration import load_settings
from headway.errors import SettingsError
from headway.models import GPT, GPTSettings, parameter_count
from headway.models.attentions import KINDS
from headway.nn.positions import NAMES as POSITIONS
from headway.settings import to_table
from tests.conftest import tiny_gpt


@pytest.mark.parametrize(
    ("variant", "count"),
    [("vanilla", 3_323_392), ("rope", 3_290_624), ("synthesizer", 3_076_988), ("perceiver", 3_339_776)],
)
def test_parameter_counts_of_the_course(variant: str, count: int) -> None:
    settings = load_settings(f"birthplaces/course-{variant}")
    assert parameter_count(settings.model.build(256)) == count


TASK = {"task": {"name": "language_modelling", "corpus": "x"}}


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "linformer"])
def test_every_attention_is_built_by_its_name_and_survives_the_run_file(kind: str) -> None:
    settings = load_settings(TASK | {"model": {"attention": kind, "positions": "learned", "width": 16, "heads": 2}})
    again = load_settings(settings.tables())
    assert again.model == settings.model and again.model.attention.kind == kind
    model = settings.model.build(11)
    assert model(torch.randint(11, (2, 40))).shape == (2, 40, 11)
    assert to_table(settings.model)["attention"]


def test_an_attention_takes_its_own_settings_and_no_others() -> None:
    settings = load_settings(TASK, ["model.attention=local", "model.attention.reach=5"])
    assert settings.model.build(11).blocks[0].attention.reach == 5
    for tables, message in (
        ({"attention": {"kind": "local", "window": 3}}, "model.attention.window: unknown key"),
        ({"attention": "lokal"}, "model.attention.kind = 'lokal': unknown; did you mean 'local'"),
        ({"attention": 3}, r"\[model.attention\] must be a table, not 3"),
        ({"attention": {"kind": "bigbird", "window": 4}}, "so 4 must be odd"),
        ({"attention": "linformer"}, "mixes the whole row"),
        ({"attention": "synthesizer-dense"}, "no queries and keys for rotary positions"),
        ({"attention": {"kind": "synthesizer-mixture", "parts": ["dens"]}}, r"\['dens'\]: a mixture is made of"),
        ({"kind": "perceiver", "layers": 1}, "1 is too few"),
    ):
        with pytest.raises(SettingsError, match=message):
            load_settings(TASK | {"model": tables})


def test_tied_output_is_counted_once_and_shared() -> None:
    untied, tied = (GPT(GPTSettings(width=16, heads=2, layers=1, tied=tied), 50) for tied in (False, True))
    assert parameter_count(untied) - parameter_count(tied) == 50 * 16
    assert tied.head.weight is tied.embedding.weight


def test_initialisation() -> None:
    torch.manual_seed(0)
    model = GPT(GPTSettings(width=256, layers=4, heads=8, positions="learned"), 256)
    assert abs(float(model.blocks[0].attention.query.weight.detach().std()) - 0.02) < 1e-3
    assert abs(float(model.blocks[0].feed_forward.output.weight.detach().std()) - 0.02 / 8**0.5) < 1e-3
    assert (model.positions.table == 0).all()
    assert all((parameter == 0).all() for name, parameter in model.named_parameters() if name.endswith("bias"))


def test_logits_equal_an_independent_gpt() -> None:
    """torch.nn's own pre-norm encoder under a causal mask is a GPT body."""
    from torch import nn

    model = tiny_gpt("learned")
    layer = nn.TransformerEncoderLayer(16, 2, 64, 0.0, "gelu", batch_first=True, norm_first=True)
    body = nn.TransformerEncoder(layer, 2, nn.LayerNorm(16), enable_nested_tensor=False).double().eval()
    with torch.no_grad():
        for ours, theirs in zip(model.blocks, body.layers, strict=True):
            attention = ours.attention
            parts = (attention.query, attention.key, attention.value)
            theirs.self_attn.in_proj_weight.copy_(torch.cat([part.weight for part in parts]))
            theirs.self_attn.in_proj_bias.copy_(torch.cat([part.bias for part in parts]))
            theirs.self_attn.out_proj.load_state_dict(attention.output.state_dict())
            theirs.norm1.load_state_dict(ours.attention_norm.state_dict())
            theirs.norm2.load_state_dict(ours.feed_forward_norm.state_dict())
            theirs.linear1.load_state_dict(ours.feed_forward.inner.state_dict())
            theirs.linear2.load_state_dict(ours.feed_forward.output.state_dict())
        body.norm.load_state_dict(model.norm.state_dict())
    tokens = torch.randint(19, (3, 11))
    x = model.embedding(tokens) + model.positions.table[:11]
    mask = nn.Transformer.generate_square_subsequent_mask(11, dtype=torch.float64)
    expected = model.head(body(x, mask=mask, is_causal=True))
    torch.testing.assert_close(model(tokens), expected, atol=1e-10, rtol=0)


@pytest.mark.parametrize("positions", POSITIONS)
def test_padding_on_the_right_changes_nothing(positions: str) -> None:
    model = tiny_gpt(positions)
    tokens = torch.randint(1, 19, (2, 9))
    padded = torch.cat([tokens, torch.zeros(2, 6, dtype=torch.long)], 1)
    torch.testing.assert_close(model(padded)[:, :9], model(tokens), atol=1e-12, rtol=0)


def test_positions_are_what_makes_a_set_a_sequence() -> None:
    """Behind one layer without positions, the last token sees the others as a set; with positions it does not."""
    tokens, swapped = torch.tensor([[3, 5, 7, 9]]), torch.tensor([[5, 3, 7, 9]])
    for positions, same in (("none", True), ("rotary", False), ("sinusoidal", False), ("learned", False)):
        model = tiny_gpt(positions, layers=1)
        assert torch.allclose(model(tokens)[:, -1], model(swapped)[:, -1]) == same


def test_settings_name_the_values() -> None:
    with pytest.raises(SettingsError, match=r"heads \(6\) must divide width \(256\)"):
        load_settings(
            {"task": {"name": "language_modelling", "corpus": "x"}, "model": {"width": 256, "heads": 6}},
        )
