"""Decoding: the cache equals the full pass, a batch equals one at a time, sampling is reproducible."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.errors import TextError, UserError
from headway.generation import Sampling, best_alternatives, generate, stream
from headway.generation.decode import common_start, context_start
from headway.generation.sampling import keep_top
from headway.models.attentions import KINDS, DenseSynthesizerSettings
from headway.models.rnn_seq2seq import CELLS
from headway.nn.positions import NAMES as POSITIONS
from tests.conftest import tiny_gpt, tiny_recurrent

prompts_strategy = st.lists(st.lists(st.integers(1, 18), min_size=1, max_size=12), min_size=1, max_size=5)
long_prompts = st.lists(st.lists(st.integers(1, 18), min_size=1, max_size=17), min_size=1, max_size=10)


def full_pass(model, prompt, limit, stop=()):
    """Greedy decoding with a whole forward pass for every token: slow and obviously right."""
    tokens, out, logprobs = list(prompt), [], []
    for _ in range(limit):
        context = tokens[context_start(len(tokens), model.context) :]
        logits = model(torch.tensor([context]))[0, -1]
        every = logits.log_softmax(-1)
        logits[0] = float("-inf")
        token = int(logits.argmax())
        logprobs.append(float(every[token]))
        tokens.append(token)
        if token in stop:
            break
        out.append(token)
    return out, logprobs


MODELS = {
    **{positions: {"positions": positions} for positions in POSITIONS},
    **{name: {"attention": name, "positions": "learned"} for name in KINDS if name not in ("dot-product", "linformer")},
    "short-synthesizer": {"attention": DenseSynthesizerSettings(length=17), "positions": "learned"},
    "segments": {"positions": "learned", "layers": 3, "bottleneck": 5, "reading": "segments"},
    "first": {"positions": "sinusoidal", "layers": 3, "bottleneck": 5, "reading": "first"},
    **{cell: {"cell": cell} for cell in CELLS},
}


@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=6, deadline=None)
@given(prompts=long_prompts, limit=st.integers(1, 40), seed=st.integers(0, 20))
def test_cached_batch_equals_full_pass_one_at_a_time(name, prompts, limit, seed) -> None:
    """Prompts of unequal length, past the end of the context too (block 24)."""
    model = (tiny_recurrent if name in CELLS else tiny_gpt)(**MODELS[name], seed=seed)
    with torch.no_grad():
        expected = [full_pass(model, prompt, limit, stop=[2, 5, 9]) for prompt in prompts]
    found = generate(model, prompts, limit, stop=[2, 5, 9], rows=8)
    for result, (tokens, logprobs) in zip(found, expected, strict=True):
        assert result.tokens == tokens
        assert result.logprobs == pytest.approx(logprobs, abs=1e-5)
        assert result.stopped == (len(result.logprobs) > len(tokens))


@settings(max_examples=15, deadline=None)
@given(prompts=prompts_strategy, seed=st.integers(0, 20))
def test_sampling_in_a_batch_equals_one_at_a_time(prompts, seed) -> None:
    model = tiny_gpt("rotary")
    batch = generate(model, prompts, 10, [2], Sampling(temperature=1.3, top_k=9, top_p=0.9, seed=seed), rows=2)
    for row, prompt in enumerate(prompts):
        alone = generate(model, [prompt], 10, [2], Sampling(temperature=1.3, top_k=9, top_p=0.9, seed=seed + row))[0]
        assert alone.tokens == batch[row].tokens


@settings(max_examples=30)
@given(prompts=prompts_strategy, shared=st.lists(st.integers(1, 18), max_size=6))
def test_a_common_beginning_is_found(prompts, shared) -> None:
    contexts = [[*shared, *prompt] for prompt in prompts]
    count = common_start(contexts)
    assert count >= len(shared)
    assert count < min(map(len, contexts))
    assert len({tuple(context[:count]) for context in contexts}) == 1
    assert count == min(map(len, contexts)) - 1 or len({context[count] for context in contexts}) > 1


def test_the_context_is_never_longer_than_the_block_nor_shorter_than_half() -> None:
    for block in (2, 3, 7, 24):
        for length in range(1, 200):
            context = length - context_start(length, block)
            assert context <= block
            assert context >= min(length, (block + 1) // 2)


def test_same_seed_same_text_other_seed_other_text() -> None:
    model = tiny_gpt()
    first, again, other = (generate(model, [[3, 4]], 20, (), Sampling(1.5, seed=seed))[0].tokens for seed in (1, 1, 2))
    assert first == again != other


def test_sampling_follows_the_distribution() -> None:
    logits = torch.tensor([0.1, 0.2, 0.7]).log().expand(6000, 3)
    sampling = Sampling(temperature=1.0)
    shares = sampling.choose(logits, sampling.generators(range(6000))).bincount() / 6000
    torch.testing.assert_close(shares, torch.tensor([0.1, 0.2, 0.7]), atol=0.025, rtol=0)


def test_top_k_and_top_p_keep_what_they_say() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    assert torch.isfinite(keep_top(logits, 2, 1.0)).tolist() == [[True, True, False, False]]
    assert torch.isfinite(keep_top(logits, 0, 0.6)).tolist() == [[True, True, False, False]]
    assert torch.isfinite(keep_top(logits, 0, 1e-9)).tolist() == [[True, False, False, False]]


def test_streaming_gives_the_same_tokens_as_they_come() -> None:
    model = tiny_gpt()
    prompts = [[3, 4, 5], [6]]
    steps = list(stream(model, prompts, 8))
    assert [step.row for step in steps] == [0, 1] * 8
    for row, result in enumerate(generate(model, prompts, 8)):
        assert [step.token for step in steps if step.row == row] == result.tokens
    assert not model.training


def test_alternatives_are_whole_continuations_in_order() -> None:
    model = tiny_gpt()
    prompts = [[3, 4, 5], [6, 7]]
    found = best_alternatives(model, prompts, 4, 6, stop=[2])
    for prompt, candidates in zip(prompts, found, strict=True):
        values = [candidate.logprob for candidate in candidates]
        assert values == sorted(values, reverse=True)
        for candidate in candidates:
            with torch.no_grad():
                row = torch.tensor([[*prompt, *candidate.tokens]])
                logits = model(row[:, :-1])[0, len(prompt) - 1 :]
                scores = logits.log_softmax(-1)
            total = sum(float(scores[place, token]) for place, token in enumerate(candidate.tokens))
            assert sum(candidate.logprobs[: len(candidate.tokens)]) == pytest.approx(total, abs=1e-5)


@settings(max_examples=15, deadline=None)
@given(prompt=st.lists(st.integers(1, 18), min_size=1, max_size=24), limit=st.integers(1, 8), seed=st.integers(0, 9))
def test_the_alternative_that_begins_like_the_greedy_answer_is_the_greedy_answer(prompt, limit, seed) -> None:
    """Up to the very end of the context (block 24)."""
    model = tiny_gpt(seed=seed)
    greedy = generate(model, [prompt], limit, [2])[0]
    candidates = best_alternatives(model, [prompt], 4, limit, [2])[0]
    same = [candidate for candidate in candidates if candidate.tokens[:1] == greedy.tokens[:1]]
    assert not greedy.tokens or [candidate.tokens for candidate in same] == [greedy.tokens]
    assert all(len(candidate.tokens) <= limit for candidate in candidates)


def test_a_long_prompt_that_stops_early_does_not_outgrow_the_context() -> None:
    """A row that has stopped stays in the batch until enough others have; its neighbours go on past the block."""
    for seed in range(10):
        model = tiny_gpt(**MODELS["short-synthesizer"], seed=seed)  # which has no place behind its context
        generator = torch.Generator().manual_seed(seed)
        prompts = [torch.randint(1, 19, (n,), generator=generator).tolist() for n in (16, 2, 2, 2, 2, 2, 2, 2)]
        assert len(generate(model, prompts, 60, [2, 3])) == 8


def test_bad_requests_are_named() -> None:
    model = tiny_gpt(block=24)
    with pytest.raises(TextError, match="prompt 2 has 25 tokens, and the model's context is 24"):
        generate(model, [[1], [1] * 25], 3)
    with pytest.raises(TextError, match="the prompt is empty"):
        generate(model, [[]], 3)
    with pytest.raises(UserError, match=r"\(0\) must be at least 1"):
        generate(model, [[1]], 0)
    for wrong in (
        {"temperature": -1},
        {"temperature": math.nan},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.5},
    ):
        with pytest.raises(UserError, match=next(iter(wrong))):
            Sampling(**wrong)
    assert generate(model, [], 3) == []
