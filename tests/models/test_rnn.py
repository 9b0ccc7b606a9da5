"""The recurrent language model: parity with torch's nets, no look ahead, the carried state equals the full pass."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import headway
from headway.configuration import load_settings
from headway.errors import Interrupted, SettingsError
from headway.generation import Sampling, beam_continue, generate
from headway.models import RNNLanguageModelSettings, parameter_count
from headway.nn import written_out
from headway.training.engines import choose
from headway.training.stage import TrainingSettings
from tests.conftest import tiny_recurrent
from tests.training.test_resume import StopAt, final_weights, same

CELLS = ("rnn", "gru", "lstm")
rows_strategy = st.lists(st.lists(st.integers(1, 18), min_size=1, max_size=12), min_size=1, max_size=5)


def rows_of(lists: list[list[int]], more: int = 0) -> torch.Tensor:
    longest = max(map(len, lists)) + more
    return torch.tensor([[*row, *[0] * (longest - len(row))] for row in lists])


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("layers", [1, 3])
def test_logits_equal_torchs_net_and_a_linear_layer(cell: str, layers: int) -> None:
    model = tiny_recurrent(cell=cell, layers=layers)
    kind = {"rnn": nn.RNN, "gru": nn.GRU, "lstm": nn.LSTM}[cell]
    net = kind(12, 16, layers, batch_first=True, dtype=torch.float64)
    weights = [(f"{key[:-1]}{n}", w) for n, layer in enumerate(model.blocks) for key, w in layer.state_dict().items()]
    net.load_state_dict(dict(weights))
    head = nn.Linear(16, 19, bias=False, dtype=torch.float64)
    head.load_state_dict(model.head.state_dict())
    tokens = torch.randint(19, (3, 11))
    expected = head(net(nn.functional.embedding(tokens, model.embedding.weight))[0])
    torch.testing.assert_close(model(tokens), expected, atol=1e-12, rtol=0)
    with written_out():
        torch.testing.assert_close(model(tokens), expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("cell", CELLS)
def test_a_token_depends_on_those_before_it_and_on_no_other(cell: str) -> None:
    """Nor on another row: each begins with zeros."""
    model = tiny_recurrent(cell=cell)
    x = model.embedding(torch.randint(19, (2, 9))).detach().requires_grad_()
    model.embedding.forward = lambda tokens: x
    model(torch.zeros(2, 9, dtype=torch.long))[0, 4].square().sum().backward()
    reached = x.grad.abs().sum(-1) > 0
    assert reached[0].tolist() == [True] * 5 + [False] * 4 and not reached[1].any()


@pytest.mark.parametrize("cell", CELLS)
@settings(max_examples=10, deadline=None)
@given(lists=rows_strategy, more=st.integers(0, 4), seed=st.integers(0, 9))
def test_padding_and_company_change_nothing(cell, lists, more, seed) -> None:
    model = tiny_recurrent(cell=cell, seed=seed)
    together = model(rows_of(lists, more))
    for row, found in zip(lists, together, strict=True):
        torch.testing.assert_close(found[: len(row)], model(torch.tensor([row]))[0], atol=1e-12, rtol=0)


@pytest.mark.parametrize("cell", CELLS)
@settings(max_examples=10, deadline=None)
@given(first=rows_strategy, more=st.integers(0, 3), seed=st.integers(0, 9), data=st.data())
def test_a_pass_that_goes_on_equals_one_over_the_whole(cell, first, more, seed, data) -> None:
    """From padded rows of unequal length, by several tokens at once, and with the rows in another order."""
    model = tiny_recurrent(cell=cell, seed=seed)
    cache = model.empty_cache(len(first), 30)
    begun = model(rows_of(first, more), cache)
    cache.lengths += torch.tensor([len(row) for row in first])
    order = data.draw(st.lists(st.integers(0, len(first) - 1), min_size=1, max_size=6))
    cache = cache.select(torch.tensor(order))
    rest = [data.draw(st.lists(st.integers(1, 18), min_size=4, max_size=4)) for _ in order]
    found = model(rows_of(rest)[:, :3], cache)
    cache.lengths += 3
    last = model(rows_of(rest)[:, 3:], cache)
    for place, number in enumerate(order):
        row = first[number]
        whole = model(torch.tensor([row + rest[place]]))[0]
        parts = torch.cat([begun[number, : len(row)], found[place], last[place]])
        torch.testing.assert_close(parts, whole, atol=1e-12, rtol=0)


@pytest.mark.parametrize("cell", CELLS)
@settings(max_examples=5, deadline=None)
@given(prompts=rows_strategy, seed=st.integers(0, 20))
def test_sampling_and_beams_in_a_batch_equal_one_at_a_time(cell, prompts, seed) -> None:
    model = tiny_recurrent(cell=cell)
    batch = generate(model, prompts, 10, [2], Sampling(temperature=1.3, top_k=9, seed=seed), rows=2)
    beams = beam_continue(model, prompts, 3, 6)
    for row, prompt in enumerate(prompts):
        alone = generate(model, [prompt], 10, [2], Sampling(temperature=1.3, top_k=9, seed=seed + row))[0]
        assert alone.tokens == batch[row].tokens
        assert beam_continue(model, [prompt], 3, 6)[0][0].tokens == beams[row][0].tokens


def test_what_a_row_keeps_does_not_grow() -> None:
    model = tiny_recurrent()
    cache = model.empty_cache(2, 24)
    for _ in range(9):
        model(torch.ones(2, 1, dtype=torch.long), cache)
        cache.lengths += 1
    assert all(part.shape == (2, 2, 16) for layer in cache.layers for part in layer.parts)  # before and after a token


@pytest.mark.parametrize("cell", CELLS)
def test_every_parameter_learns_and_dropout_acts_in_training_alone(cell: str) -> None:
    model = tiny_recurrent(cell=cell, dropout=0.5)
    tokens = torch.randint(19, (2, 9))
    torch.testing.assert_close(model(tokens), model(tokens))
    model.train()
    assert not torch.allclose(model(tokens), model(tokens))
    model(tokens).square().sum().backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in model.parameters())


@pytest.mark.parametrize("cell", CELLS)
def test_half_precision_around_the_layers(cell: str) -> None:
    model = tiny_recurrent(cell=cell).float()
    tokens = torch.randint(19, (2, 9))
    with torch.autocast("cpu", torch.bfloat16):
        found = model(tokens)
    torch.testing.assert_close(found.float(), model(tokens), atol=0.3, rtol=0.1)


def test_sizes() -> None:
    """V·E and V·D outside, in a layer 4·D·(inputs + D) and two biases of 4·D; a tied output is counted once."""
    untied, tied = (RNNLanguageModelSettings(width=8, layers=2, tied=tied).build(50) for tied in (False, True))
    assert parameter_count(untied) == 2 * 50 * 8 + 2 * (4 * 8 * 16 + 2 * 4 * 8)
    assert parameter_count(untied) - parameter_count(tied) == 50 * 8
    assert tied.head.weight is tied.embedding.weight
    assert parameter_count(RNNLanguageModelSettings(width=8, hidden=6, layers=1).build(50)) == 50 * 14 + 24 * 14 + 48


def test_muon_steps_the_layers_and_nothing_else() -> None:
    model = tiny_recurrent(layers=2)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found = {names[id(matrix)] for matrix in model.hidden_matrices()}
    assert found == {f"blocks.{layer}.weight_{kind}_l0" for layer in (0, 1) for kind in ("ih", "hh")}


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (
            {"tied": True, "width": 8, "hidden": 6},
            r"model.hidden: with tied = true .* hidden \(6\) must be width \(8\)",
        ),
        ({"cell": "lstn"}, "model.cell = 'lstn': must be one of rnn, gru, lstm; did you mean 'lstm'"),
        ({"layers": 0}, "model.layers = 0: must be at least 1"),
        ({"hidden": -1}, "model.hidden = -1: must be at least 0"),
        ({"dropout": 1.0}, "model.dropout = 1.0: must be below 1"),
        ({"heads": 4}, "model.heads: unknown key"),
    ],
)
def test_bad_settings_are_named(table: dict, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        load_settings({"task": {"name": "language_modelling", "corpus": "x"}, "model": {"kind": "rnn", **table}})


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_stopping_and_resuming_gives_the_same_weights(people: Path, optimizer: str) -> None:
    """Through both stages of a run that pretrains by span corruption and learns questions; the run can then be used."""
    training = {"steps": 3, "batch_size": 4, "log_every": 1, "accumulate": 2, "optimizer": optimizer}
    tables = {
        "model": {"kind": "rnn", "width": 8, "hidden": 12, "block": 48},
        "pretraining": {"task": {"name": "span_corruption", "corpus": f"{people}/wiki.txt"}, "training": training},
        "task": {"name": "question_answering", "questions": f"{people}/train.tsv", "dev": f"{people}/dev.tsv"},
        "training": {**training, "evaluate_every": 2},
    }
    expected = final_weights(headway.train(tables, people / "whole").path)
    for stop in (2, 5):
        with pytest.raises(Interrupted):
            headway.train(tables, people / f"{stop}", watch=StopAt(stop))
        run = headway.train(tables, people / f"{stop}", resume=True)
        assert same(final_weights(run.path), expected)
    assert run.evaluation["questions"] == 4 and run.answer("Where was Ada Lund born?")[0].alternatives


def test_it_learns_what_repeats_itself(tmp_path: Path) -> None:
    """A row says what comes next in it: the perplexity falls to that of the first tokens of a row."""
    (tmp_path / "abc.txt").write_text("abcdefgh" * 200)
    tables = {
        "model": {"kind": "rnn", "cell": "gru", "width": 16, "layers": 1, "block": 16, "dropout": 0.0},
        "task": {"name": "language_modelling", "corpus": f"{tmp_path}/abc.txt", "documents": "file"},
        "training": {"steps": 60, "batch_size": 8, "learning_rate": 0.03},
    }
    run = headway.train(tables, tmp_path / "run")
    assert run.evaluation["perplexity"] < 1.1 and run.evaluation["bits_per_byte"] < 0.2
    assert "".join(run.task.stream(run.model, "cde", 30, Sampling(0.0))) == ("fghabcde" * 4)[:30]


def test_a_gpu_captures_its_steps_and_does_not_compile_them() -> None:
    """Compiling would write out every step of a row."""
    assert choose(TrainingSettings(steps=100_000), torch.device("cuda"), tiny_recurrent(), capturable=True)[0] == 1
