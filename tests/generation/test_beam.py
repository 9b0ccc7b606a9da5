"""Beam search: it equals a plain one, an exhaustive one where that is possible, and greedy decoding for 1."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.errors import TextError, UserError
from headway.generation import beam_continue, beam_search, generate
from headway.generation.beam import STRONGEST, Beam
from tests.conftest import tiny_encoder_decoder, tiny_gpt

MARK = 1
sources_strategy = st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=9), min_size=1, max_size=4)
penalties = st.sampled_from([-3.0, -0.7, 0.0, 0.6, 3.0])


def next_logprobs(model, source, tokens, begin=MARK):
    return model(torch.tensor([[begin, *tokens]]), torch.tensor([source]))[0].log_softmax(-1)


def score(logprob, length, penalty):
    return logprob / ((5 + length) / 6) ** penalty


@torch.no_grad()
def plain_beam(model, source, beam, limit, penalty, end=MARK, begin=MARK):
    """One sentence, a full pass for every hypothesis, always to the limit: (tokens, logprob, score), the best first."""
    live, finished = [([], 0.0)], []
    for length in range(1, limit + 1):
        grown = []
        for tokens, logprob in live:
            after = next_logprobs(model, source, tokens, begin)[-1].tolist()
            grown += [
                ([*tokens, token], logprob + value)
                for token, value in enumerate(after)
                if token == end or token not in (0, begin)
            ]
        grown = sorted(grown, key=lambda each: -each[1])[: beam - len(finished)]
        live = [each for each in grown if each[0][-1] != end]
        finished += [(t[:-1], p, score(p, length, penalty)) for t, p in grown if t[-1] == end]
    finished += [(tokens, p, score(p, limit, penalty)) for tokens, p in live]
    return sorted(finished, key=lambda each: -each[2])


@settings(max_examples=60, deadline=None)
@given(
    sources=sources_strategy,
    beam=st.integers(1, 9),
    limit=st.integers(1, 7),
    penalty=penalties,
    best=st.integers(1, 9),
    seed=st.integers(0, 20),
    begin=st.sampled_from([1, 2]),
)
def test_a_cached_batch_that_stops_early_equals_a_plain_search(sources, beam, limit, penalty, best, seed, begin):
    model = tiny_encoder_decoder(vocabulary=7, seed=seed)
    best = min(best, beam)
    found = beam_search(model, sources, beam, limit, penalty, best, rows=2 * beam, begin=begin)
    assert len(found) == len(sources)
    for source, hypotheses in zip(sources, found, strict=True):
        expected = plain_beam(model, source, beam, limit, penalty, begin=begin)[:best]
        assert [each.tokens for each in hypotheses] == [tokens for tokens, _, _ in expected]
        assert [each.logprob for each in hypotheses] == pytest.approx([each[1] for each in expected], abs=1e-9)
        assert [each.score for each in hypotheses] == pytest.approx([each[2] for each in expected], abs=1e-9)


@settings(max_examples=15, deadline=None)
@given(source=st.lists(st.integers(1, 4), min_size=1, max_size=6), penalty=penalties, seed=st.integers(0, 50))
def test_a_beam_as_wide_as_the_space_finds_the_best_of_all_targets(source, penalty, seed) -> None:
    model, limit = tiny_encoder_decoder(vocabulary=5, seed=seed), 3
    every = {}
    with torch.no_grad():
        for tokens in itertools.product((2, 3, 4), repeat=limit):
            after = next_logprobs(model, source, tokens)
            sums = [0.0, *itertools.accumulate(float(after[place, token]) for place, token in enumerate(tokens))]
            every[tokens] = score(sums[limit], limit, penalty)
            for length in range(limit):  # ended earlier
                logprob = sums[length] + float(after[length, MARK])
                every[tokens[:length]] = score(logprob, length + 1, penalty)
    (found,) = beam_search(model, [source], 5**limit, limit, penalty, best=5)
    expected = sorted(every.items(), key=lambda each: -each[1])[:5]
    assert [tuple(each.tokens) for each in found] == [tokens for tokens, _ in expected]
    assert [each.score for each in found] == pytest.approx([value for _, value in expected], abs=1e-9)


@settings(max_examples=20, deadline=None)
@given(sources=sources_strategy, limit=st.integers(1, 12), penalty=penalties, seed=st.integers(0, 20))
@torch.no_grad()
def test_a_beam_of_one_is_greedy_and_says_the_models_own_probability(sources, limit, penalty, seed) -> None:
    model = tiny_encoder_decoder(vocabulary=7, seed=seed)
    for source, (found,) in zip(sources, beam_search(model, sources, 1, limit, penalty), strict=True):
        tokens: list[int] = []
        while len(tokens) < limit and (not tokens or tokens[-1] != MARK):
            tokens.append(int(next_logprobs(model, source, tokens)[-1, 1:].argmax()) + 1)
        stopped = tokens[-1] == MARK
        assert (found.tokens, found.stopped) == (tokens[:-1] if stopped else tokens, stopped)
        own = next_logprobs(model, source, tokens[:-1]).gather(1, torch.tensor(tokens)[:, None]).sum()
        assert found.logprob == pytest.approx(float(own), abs=1e-9)


def test_a_beam_of_one_is_greedy_where_tokens_are_equally_likely() -> None:
    model = tiny_encoder_decoder(vocabulary=7)
    torch.nn.init.zeros_(model.head.weight)
    ((found,),) = beam_search(model, [[3, 4]], 1, 5, begin=MARK)
    assert (found.tokens, found.stopped) == ([], True)  # the end mark has the lowest number


@settings(max_examples=20, deadline=None)
@given(
    prompts=st.lists(st.lists(st.integers(1, 18), min_size=1, max_size=10), min_size=1, max_size=5),
    limit=st.integers(1, 14),
    seed=st.integers(0, 20),
)
def test_a_causal_models_beam_of_one_is_what_generate_writes(prompts, limit, seed) -> None:
    model = tiny_gpt(seed=seed)
    for (found,), greedy in zip(
        beam_continue(model, prompts, 1, limit, end=2), generate(model, prompts, limit, [2]), strict=True
    ):
        assert (found.tokens, found.stopped) == (greedy.tokens, greedy.stopped)


@settings(max_examples=10, deadline=None)
@given(prompt=st.lists(st.integers(1, 5), min_size=1, max_size=6), seed=st.integers(0, 20))
@torch.no_grad()
def test_a_causal_models_wide_beam_finds_the_likeliest_continuation(prompt, seed) -> None:
    model = tiny_gpt(vocabulary=6, seed=seed)
    best = (-float("inf"), ())
    for tokens in itertools.product((1, 2, 3, 4, 5), repeat=3):
        held = tokens[: tokens.index(2) + 1] if 2 in tokens else tokens
        after = model(torch.tensor([[*prompt, *held]]))[0, len(prompt) - 1 :].log_softmax(-1)
        best = max(best, (sum(float(after[place, token]) for place, token in enumerate(held)), held))
    ((found,),) = beam_continue(model, [prompt], 6**3, 3, length_penalty=0.0, end=2)
    assert found.logprob == pytest.approx(best[0], abs=1e-5)
    assert found.tokens == [token for token in best[1] if token != 2]


def test_a_finished_sentence_leaves_the_batch_and_stops_cost() -> None:
    """The model is asked about live hypotheses only: fewer rows than sentences × beam × limit."""
    model = tiny_encoder_decoder(vocabulary=7, seed=3)
    rows = []
    step = model.step
    model.step = lambda tokens, state: rows.append(len(tokens)) or step(tokens, state)
    found = beam_search(model, [[3, 4], [5], [6, 2, 3]], 3, 20)
    longest = max(len(each.tokens) + each.stopped for (each,) in found)
    assert rows[0] == 3 and max(rows) <= 9
    assert rows == sorted(rows[:2]) + sorted(rows[2:], reverse=True)
    assert len(rows) >= longest


def test_less_memory_the_same_result() -> None:
    model = tiny_encoder_decoder(vocabulary=7)
    sources = [[3, 4], [5], [6, 2, 3], [2, 2], [4]]
    expected = beam_search(model, sources, 3, 6)
    start = model.start

    def small(source, room):
        if len(source) > 2:
            raise RuntimeError("CUDA out of memory")
        return start(source, room)

    model.start = small
    assert [[each.tokens for each in one] for one in beam_search(model, sources, 3, 6)] == [
        [each.tokens for each in one] for one in expected
    ]


def test_the_model_trains_on_where_it_was_training() -> None:
    model = tiny_encoder_decoder(dropout=0.5).train()
    first, second = (beam_search(model, [[3, 4, 5]], 2, 6) for _ in range(2))
    assert first == second and model.training


def test_bad_requests_are_named() -> None:
    model = tiny_encoder_decoder()
    for arguments, message in (
        (([[3]], 0, 5), r"the beam \(0\) must hold at least 1"),
        (([[3]], -2, 5), r"the beam \(-2\)"),
        (([[3]], 2, 0), r"tokens to generate \(0\) must be at least 1"),
        (([[3]], 2, 25), r"generate \(25\) is more than the model writes at most, 24"),
        (([[3]], 2, 5, 0.6, 3), r"best \(3\) hypotheses of a beam of 2"),
        (([[3]], 2, 24, 1000.0), r"the length penalty \(1000.0\) must be between -10 and 10"),
        (([[3]], 2, 24, float("nan")), r"the length penalty \(nan\)"),
        (([[3], [4] * 25], 2, 5), "source 2 has 25 tokens, and the model reads at most 24"),
        (([[3], []], 2, 5), "source 2 is empty"),
    ):
        with pytest.raises(UserError, match=message):
            beam_search(model, *arguments)
    with pytest.raises(TextError, match="prompt 1 has 20 tokens, and 6 more do not fit the model's context of 24"):
        beam_continue(tiny_gpt(), [[3] * 20], 2, 6)
    assert beam_search(model, [], 2, 5) == []


def test_logits_that_are_no_numbers_are_named() -> None:
    model = tiny_encoder_decoder()
    torch.nn.init.constant_(model.head.weight, float("nan"))
    with pytest.raises(ValueError, match="not numbers"):
        beam_search(model, [[3]], 2, 5)


@given(logprob=st.floats(-50, 0), length=st.integers(1, 9), more=st.integers(1, 9), penalty=st.floats(-3, 3))
def test_the_reach_of_a_live_hypothesis_is_the_best_it_can_end_with(logprob, length, more, penalty) -> None:
    options = Beam(1, length + more, penalty)
    ends = [score(logprob, each, penalty) for each in range(length + 1, length + more + 1)]
    assert options.reach(logprob, length) == pytest.approx(max(ends), rel=1e-12)


@pytest.mark.parametrize("shortest", [0, 1, 3])
def test_no_target_ends_before_it_may(shortest: int) -> None:
    """A model to which all tokens are alike ends as soon as it may: the end mark has the lowest number."""
    model = tiny_encoder_decoder(vocabulary=7)
    torch.nn.init.zeros_(model.head.weight)
    ((found,),) = beam_search(model, [[3, 4]], 1, 6, begin=MARK, shortest=shortest)
    assert len(found.tokens) == shortest and found.stopped


@pytest.mark.parametrize("penalty", [-STRONGEST, STRONGEST])
def test_the_strongest_penalties_give_scores_that_are_numbers(penalty: float) -> None:
    options = Beam(1, 1_000_000, penalty)
    scores = [options.score(-500.0, length) for length in (1, 1_000, 1_000_000)]
    assert all(map(math.isfinite, scores)) and sorted(scores, reverse=penalty < 0) == scores


def test_scores_of_half_precision_are_summed_in_float32() -> None:
    model = tiny_encoder_decoder(vocabulary=7).to(torch.bfloat16)
    ((found,),) = beam_search(model, [[3, 4]], 1, 20, begin=MARK, shortest=20)
    with torch.no_grad():
        row = torch.tensor([[MARK, *found.tokens[:-1]]])
        after = model(row, torch.tensor([[3, 4]]))[0].float().log_softmax(-1)
    own = float(after.gather(1, torch.tensor(found.tokens)[:, None]).sum())
    assert len(found.tokens) == 20 and found.logprob == pytest.approx(own, rel=2e-2)
    assert torch.tensor(found.logprob).bfloat16().item() != found.logprob
