"""Recurrent sequence to sequence: parity with torch's packed nets, steps equal the full pass, padding is nothing."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from headway.configuration import load_settings
from headway.errors import SettingsError
from headway.generation import beam_search
from headway.models import RNNSeq2SeqSettings, parameter_count
from tests.conftest import tiny_rnn
from tests.models.seq2seq import (
    padded,
    rows_strategy,
    same_alone,
    same_by_steps,
    same_with_padding,
    same_with_rows_selected,
)

CELLS, CONTEXTS = ("rnn", "gru", "lstm"), ("last", "transform", "all")
ATTENTIONS = ("none", "additive", "dot", "general")
EVERY = [
    {"cell": cell, "context": context, "attention": attention}
    for cell, context, attention in itertools.product(CELLS, CONTEXTS, ATTENTIONS)
]


def name(variant: dict[str, str]) -> str:
    return "-".join(variant.values())


@pytest.mark.parametrize("variant", EVERY, ids=name)
@settings(max_examples=3, deadline=None)
@given(sources=rows_strategy, targets=rows_strategy, seed=st.integers(0, 9), both=st.booleans())
def test_steps_equal_the_full_pass_padding_and_company_change_nothing(variant, sources, targets, seed, both) -> None:
    model = tiny_rnn(**variant, bidirectional=both, seed=seed)
    same_by_steps(model, sources, targets)
    same_alone(model, sources, targets)
    same_with_padding(model, sources, targets)
    same_with_rows_selected(model, sources)


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("layers", [1, 3])
def test_the_encoder_equals_torchs_over_packed_rows(cell: str, both: bool, layers: int) -> None:
    """States, last states and last cells, though nothing is packed here."""
    model = tiny_rnn(cell=cell, bidirectional=both, layers=layers, attention="dot")
    kind = {"rnn": nn.RNN, "gru": nn.GRU, "lstm": nn.LSTM}[cell]
    theirs = kind(12, 8 if both else 16, layers, batch_first=True, bidirectional=both, dtype=torch.float64)
    own = {
        f"{key[:-3]}_l{number}{'_reverse' if way else ''}": value
        for number, layer in enumerate(model.encoder)
        for way, part in enumerate(layer.ways)
        for key, value in part.state_dict().items()
    }
    theirs.load_state_dict(own)
    rows = [[3, 4, 5, 6, 7], [8], [9, 2, 4]]
    source, lengths = padded(rows, more=2), torch.tensor([5, 1, 3])
    packed = pack_padded_sequence(model.source(source), lengths, batch_first=True, enforce_sorted=False)
    out, last = theirs(packed)
    expected, _ = pad_packed_sequence(out, batch_first=True)
    memory, first = model.read(source)
    for place, length in enumerate(lengths):
        torch.testing.assert_close(memory.states[place, :length], expected[place, :length], atol=1e-12, rtol=0)
    for part, each in enumerate(last if cell == "lstm" else (last,)):  # (layers · directions, B, …)
        joined = each.unflatten(0, (layers, -1)).transpose(1, 2).flatten(2)  # (layers, B, D)
        found = torch.stack([carried[part] for carried in first])
        torch.testing.assert_close(found, joined, atol=1e-12, rtol=0)


@pytest.mark.parametrize("cell", CELLS)
def test_the_context_is_all_a_step_sees_without_attention(cell: str) -> None:
    """The decoder is torch's net of the same weights over [embedding; context], begun with the context."""
    model = tiny_rnn(cell=cell, attention="none", context="transform", layers=1, bidirectional=False)
    source, target = padded([[3, 4, 5], [6]]), torch.tensor([[1, 5, 6], [1, 7, 2]])
    memory, ((first, *cells),) = model.read(source)
    last = memory.states[torch.arange(2), torch.tensor([2, 0])]
    linear = model.contexts[0].linear
    torch.testing.assert_close(first, torch.tanh(last @ linear.weight.T + linear.bias))
    x = torch.cat([model.target(target), first[:, None].expand(-1, 3, -1)], -1)
    begin = (first[None], cells[0][None]) if cells else first[None]
    states, _ = model.decoder.cells[0](x, begin)
    both = torch.cat([states, first[:, None].expand(-1, 3, -1)], -1)
    torch.testing.assert_close(model(target, source), model.head(torch.tanh(model.output(both))))


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_alignment(attention: str) -> None:
    """Each step's weights are a distribution over the source's tokens, and those of the published score."""
    model = tiny_rnn(attention=attention)
    source, target = padded([[3, 4, 5, 6], [7, 8]]), torch.tensor([[1, 5, 6], [1, 7, 2]])
    found = model.alignment(target, source)
    if attention == "none":
        assert found is None
        return
    torch.testing.assert_close(found.sum(-1), torch.ones(2, 3, dtype=torch.float64))
    assert (found[1, :, 2:] == 0).all()
    memory, carried = model.read(source)
    score = model.decoder.score
    h = memory.states[0]
    if attention == "additive":  # looks with the state before the step
        query = carried[-1][0][0]
        scores = [
            score.fit.weight[0] @ torch.tanh(score.query.weight @ query + score.query.bias + score.key.weight @ each)
            for each in h
        ]
    else:
        states, _ = model.decoder.run(model.target(target), carried)
        query = states[0, 0]
        matrix = torch.eye(16, dtype=torch.float64) if attention == "dot" else score.key.weight
        scores = [query @ matrix @ each for each in h]
    torch.testing.assert_close(found[0, 0], torch.stack(scores).softmax(0))


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_every_parameter_learns(attention: str) -> None:
    model = tiny_rnn(cell="lstm", context="all", attention=attention, layers=1)
    model(torch.tensor([[1, 5, 6]]), padded([[3, 4, 5]])).square().sum().backward()
    still = [key for key, value in model.named_parameters() if value.grad is None or not value.grad.abs().sum() > 0]
    assert not still


class TestScheduledSampling:
    source, target = padded([[3, 4, 5], [6]]), torch.tensor([[1, 5, 6, 8, 4], [1, 7, 2, 9, 3]])

    @pytest.mark.parametrize("attention", ATTENTIONS)
    def test_guesses_take_the_place_of_tokens(self, attention: str) -> None:
        """At probability 1 the target but for its beginning is not looked at: it is what greedy decoding sees."""
        model = tiny_rnn(attention=attention).train()
        model.settings.sampling = 1.0
        found = model(self.target, self.source)
        state, given = model.start(self.source, 5), self.target[:, 0]
        for place in range(5):
            logits = model.step(given, state)
            torch.testing.assert_close(found[:, place], logits)
            given = logits.argmax(-1)

    def test_none_is_teacher_forcing_and_evaluation_never_guesses(self) -> None:
        model = tiny_rnn()
        expected = model(self.target, self.source)
        model.train()
        model.settings.sampling = 1e-12
        torch.testing.assert_close(model(self.target, self.source), expected)
        model.settings.sampling = 1.0
        assert not torch.allclose(model(self.target, self.source), expected)
        torch.testing.assert_close(model.eval()(self.target, self.source), expected)


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_beam_search_needs_no_more_than_the_interface(attention: str) -> None:
    model = tiny_rnn(vocabulary=7, attention=attention)
    sources = [[3, 4, 5], [6], [2, 2]]
    together = beam_search(model, sources, 3, 6, best=2)
    for source, hypotheses in zip(sources, together, strict=True):
        (alone,) = beam_search(model, [source], 3, 6, best=2)
        assert [each.tokens for each in alone] == [each.tokens for each in hypotheses]
        for each in hypotheses:
            row = [1, *each.tokens, *[1] * each.stopped]
            with torch.no_grad():
                after = model(torch.tensor([row[:-1]]), torch.tensor([source]))[0].log_softmax(-1)
            own = sum(float(after[place, token]) for place, token in enumerate(row[1:]))
            assert each.logprob == pytest.approx(own, abs=1e-9)


@pytest.mark.parametrize("cell", CELLS)
def test_a_row_of_padding_gives_numbers(cell: str) -> None:
    model = tiny_rnn(cell=cell, context="all")
    model(torch.tensor([[1, 5], [1, 5]]), padded([[3, 4], [0]])).sum().backward()
    assert all(bool(value.grad.isfinite().all()) for value in model.parameters())


@pytest.mark.parametrize("cell", CELLS)
def test_half_precision_around_the_nets(cell: str) -> None:
    model = tiny_rnn(cell=cell, context="transform").float()
    with torch.autocast("cpu", torch.bfloat16):
        out = model(torch.tensor([[1, 5]]), padded([[3, 4]]))
    torch.testing.assert_close(out.float(), model(torch.tensor([[1, 5]]), padded([[3, 4]])), atol=0.3, rtol=0.1)


def test_tied_matrices_are_shared_and_counted_once() -> None:
    counts = {tied: parameter_count(tiny_rnn(tied=tied)) for tied in ("all", "target", "none")}
    assert counts["target"] - counts["all"] == counts["none"] - counts["target"] == 19 * 12


def test_settings_name_the_values() -> None:
    assert RNNSeq2SeqSettings(hidden=15, bidirectional=False).build(9)
    with pytest.raises(SettingsError, match=r"hidden \(15\) must be even"):
        load_settings(
            {
                "task": {"name": "language_modelling", "corpus": "x"},
                "model": {"kind": "rnn_seq2seq", "hidden": 15},
            }
        )
