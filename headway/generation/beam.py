"""Beam search: the `beam` likeliest beginnings of a target go on side by side.

    score(y) = log P(y) / ((5 + |y|) / 6)^α

"Google's neural machine translation system" (Wu et al. 2016), section 7; |y| counts the end mark. α = 0 is the plain
log-probability, a larger α favours longer targets.

At each step every live hypothesis is continued by every token, and the likeliest continuations stay. One that ends
leaves the beam, and its place with it: a beam of 1 is greedy decoding. The search for a sentence is over when nothing
is live, or nothing live can still beat the hypotheses that are to be returned, however it goes on: what is returned is
what the search would return if it went on to the limit. At the limit what is live is closed as it stands.

Shapes: N sentences, k beam, R live hypotheses of all sentences (the rows of the model's batch), V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from headway.errors import TextError, UserError
from headway.generation.decode import PAD, check_prompts, prefill
from headway.memory import Progress, Room, untold
from headway.models import CausalModel, DecoderState, Seq2SeqModel
from headway.nn import Cache

MARK = 1
STRONGEST = 10.0  # length penalty, in either direction: far beyond use, and no score leaves the range of numbers
State = TypeVar("State", bound=DecoderState)


@dataclass
class Hypothesis:
    """A target that was found. The end mark is not part of `tokens`.

    `logprob` is the model's own log-probability of the tokens, and of the end mark where the model chose it
    (`stopped`). One that was closed at the limit has no end mark, in `logprob` and in the length.
    """

    tokens: list[int]
    logprob: float
    score: float
    stopped: bool = True


@dataclass(frozen=True)
class Beam:
    """What is searched for: `best` hypotheses of at most `limit` tokens, the end mark counted."""

    beam: int
    limit: int
    length_penalty: float = 0.6
    best: int = 1
    end: int = MARK
    never: tuple[int, ...] = (PAD,)  # tokens that are not written
    shortest: int = 0  # tokens before a target may end

    def __post_init__(self) -> None:
        if self.beam < 1:
            raise UserError(f"the beam ({self.beam}) must hold at least 1 hypothesis; 1 is greedy decoding")
        if self.limit < 1:
            raise UserError(f"the number of tokens to generate ({self.limit}) must be at least 1")
        if not -STRONGEST <= self.length_penalty <= STRONGEST:
            raise UserError(
                f"the length penalty ({self.length_penalty}) must be between {-STRONGEST:g} and {STRONGEST:g}; "
                "0 is none, 0.6 usual"
            )
        if not 1 <= self.best <= self.beam:
            raise UserError(
                f"best ({self.best}) hypotheses of a beam of {self.beam}: ask for 1 to {self.beam}, or widen the beam"
            )

    def score(self, logprob: float, length: int) -> float:
        return logprob / float(((5 + length) / 6) ** self.length_penalty)

    def reach(self, logprob: float, length: int) -> float:
        """The best score that a live hypothesis of this length may end with.

        It loses no log-probability at best, and the penalty changes in one direction as it grows: either the next
        token or the one at the limit is the best place to end.
        """
        return max(self.score(logprob, length + 1), self.score(logprob, self.limit))


def beam_search(
    model: Seq2SeqModel,
    sources: Sequence[Sequence[int]],
    beam: int,
    limit: int,
    length_penalty: float = 0.6,
    best: int = 1,
    rows: int | None = None,
    *,
    begin: int = MARK,
    end: int = MARK,
    shortest: int = 0,
    progress: Progress = untold,
) -> list[list[Hypothesis]]:
    """For each source its `best` targets of at least `shortest` tokens, the best first.

    A target begins after the token `begin` and ends with `end`. Sources of like length are searched together, `rows`
    hypotheses at a time (chosen by the device where it is not given), or fewer where memory runs out; `progress` is
    told how many sources are done.
    """
    options = Beam(beam, limit, length_penalty, best, end, tuple({PAD, begin} - {end}), shortest)
    check_sources(sources, limit, int(model.settings.block))
    device = next(model.parameters()).device

    def searched(some: Sequence[Sequence[int]]) -> list[list[Hypothesis]]:
        longest = max(len(source) for source in some)
        padded = torch.tensor([[*source, *[PAD] * (longest - len(source))] for source in some], device=device)
        state = model.start(padded, limit)
        return search(model.step(torch.full((len(some),), begin, device=device), state), state, model.step, options)

    return by_length(model, searched, sources, beam, rows, progress)


def beam_continue(
    model: CausalModel,
    prompts: Sequence[Sequence[int]],
    beam: int,
    limit: int,
    length_penalty: float = 0.6,
    best: int = 1,
    rows: int | None = None,
    *,
    end: int = MARK,
) -> list[list[Hypothesis]]:
    """For each prompt its `best` continuations, the best first. Both together must fit the model's context."""
    options = Beam(beam, limit, length_penalty, best, end, tuple({PAD} - {end}))
    check_prompts(prompts, model.context)
    for number, prompt in enumerate(prompts, 1):
        if len(prompt) + limit - 1 > model.context:
            raise TextError(
                f"prompt {number} has {len(prompt)} tokens, and {limit} more do not fit the model's context of "
                f"{model.context} (model.block); shorten the prompt or generate fewer"
            )

    def step(tokens: Tensor, cache: Cache) -> Tensor:
        logits = model(tokens[:, None], cache)[:, -1]
        cache.lengths += 1
        return logits

    def searched(some: Sequence[Sequence[int]]) -> list[list[Hypothesis]]:
        return search(*prefill(model, some, limit), step, options)

    return by_length(model, searched, prompts, beam, rows)


def by_length(
    model: torch.nn.Module,
    searched: Callable[[Sequence[Sequence[int]]], list[list[Hypothesis]]],
    sources: Sequence[Sequence[int]],
    beam: int,
    rows: int | None,
    progress: Progress = untold,
) -> list[list[Hypothesis]]:
    """What is found for the sources, in their order, those of like length together."""
    order = sorted(range(len(sources)), key=lambda number: len(sources[number]))
    together = rows or (320 if next(model.parameters()).device.type == "cpu" else 5120)
    room = Room(max(1, together // beam), progress)
    training = model.training
    model.eval()
    try:
        with torch.inference_mode():
            found = [each for part in room.each(searched, [sources[number] for number in order]) for each in part]
    finally:
        model.train(training)
    return [each for _, each in sorted(zip(order, found, strict=True), key=lambda pair: pair[0])]


def search(
    logits: Tensor, state: State, step: Callable[[Tensor, State], Tensor], options: Beam
) -> list[list[Hypothesis]]:
    """The best hypotheses of each sentence, from the logits (N, V) of its first token and the state behind them."""
    count, beam, device = len(logits), options.beam, logits.device
    found: list[list[Hypothesis]] = [[] for _ in range(count)]
    sentences = list(range(count))  # those still searched
    live = torch.full((count, beam), float("-inf"), device=device, dtype=precise(logits))  # log-probabilities
    live[:, 0] = 0.0
    written = torch.empty(count, beam, 0, dtype=torch.long, device=device)
    rank = torch.arange(beam, device=device)
    places = torch.full((count,), beam, device=device)  # in each sentence's beam
    for length in range(1, options.limit + 1):
        alive = live.isfinite()  # (N, k), R of them, in the order of the state's rows
        too_early = (options.end,) if length <= options.shortest else ()
        parents, tokens, live = likeliest(live, alive, logits, (*options.never, *too_early))
        live = live.masked_fill(rank >= places[:, None], float("-inf"))
        written = torch.cat([written.gather(1, parents[..., None].expand(-1, -1, length - 1)), tokens[..., None]], -1)

        ended = live.isfinite() & (tokens == options.end)
        closed = ended if length < options.limit else live.isfinite()
        lists = (each.tolist() for each in (closed.nonzero()[:, 0], written[closed], live[closed], ended[closed]))
        for place, hypothesis, logprob, stopped in zip(*lists, strict=True):
            made = Hypothesis(hypothesis[: length - stopped], logprob, options.score(logprob, length), stopped)
            found[sentences[place]].append(made)
        live = live.masked_fill(closed, float("-inf"))
        places = places - closed.sum(1)

        going = [
            place
            for place, logprob in enumerate(live.amax(1).tolist())
            if logprob > float("-inf") and options.reach(logprob, length) > bar(found[sentences[place]], options.best)
        ]
        if not going:
            break
        before = (alive.flatten().cumsum(0) - 1).view_as(alive).gather(1, parents)  # rows of the state
        if len(going) < len(sentences):
            sentences = [sentences[place] for place in going]
            kept = torch.tensor(going, device=device)
            live, written, tokens, before, places = (each[kept] for each in (live, written, tokens, before, places))
        onward = live.isfinite()
        state = state.select(before[onward])
        logits = step(tokens[onward], state)
    if not all(found):
        raise ValueError("a sentence has no hypothesis: the model's logits are not numbers, or rule every token out")
    return [best_of(each, options.best) for each in found]


def likeliest(live: Tensor, alive: Tensor, logits: Tensor, never: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """The k likeliest continuations of each sentence: whose they are, by which token, log-probabilities; (N, k) each.

    The k likeliest of a sentence are among the k likeliest of each of its hypotheses.
    """
    count, beam = live.shape
    logprobs = logits.to(live.dtype).log_softmax(-1)  # (R, V)
    logprobs[:, list(never)] = float("-inf")
    few, which = logprobs.topk(min(beam, logprobs.shape[-1]))  # (R, m)
    if beam == 1:  # of equals, the one that greedy decoding takes
        which = logits.masked_fill(logprobs == float("-inf"), float("-inf")).argmax(-1, keepdim=True)
        few = logprobs.gather(-1, which)
    grid = live.new_full((count, beam, few.shape[-1]), float("-inf"))  # (N, k, m)
    grid[alive] = few + live[alive][:, None]
    tokens = torch.zeros_like(grid, dtype=torch.long)
    tokens[alive] = which
    values, places = grid.flatten(1).topk(beam)
    return places // grid.shape[-1], tokens.flatten(1).gather(1, places), values


def precise(logits: Tensor) -> torch.dtype:
    """What log-probabilities are summed in: float32 or better."""
    return torch.promote_types(logits.dtype, torch.float32)


def bar(found: Sequence[Hypothesis], best: int) -> float:
    """The score that a hypothesis must beat to be among the `best`."""
    return best_of(found, best)[-1].score if len(found) >= best else float("-inf")


def best_of(found: Sequence[Hypothesis], best: int) -> list[Hypothesis]:
    return sorted(found, key=lambda hypothesis: -hypothesis.score)[:best]


def check_sources(sources: Sequence[Sequence[int]], limit: int, block: int) -> None:
    for number, source in enumerate(sources, 1):
        if not source:
            raise TextError(f"source {number} is empty; give the model at least one token to read")
        if len(source) > block:
            raise TextError(
                f"source {number} has {len(source)} tokens, and the model reads at most {block} (model.block); "
                "shorten it"
            )
    if limit > block:
        raise UserError(
            f"the number of tokens to generate ({limit}) is more than the model writes at most, {block} (model.block)"
        )
