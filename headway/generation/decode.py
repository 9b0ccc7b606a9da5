"""Continuing a batch of prompts, token by token, with a key-value cache.

A prompt of n tokens and its continuation see each other as long as they fit the model's context (`block`). Past that
the oldest half block is let go, and again every half block: the context of token n is a function of n alone
(`context_start`), so that the cached result equals a full pass and a batch equals one row at a time.

Shapes: B rows, T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from headway.errors import TextError, UserError
from headway.generation.sampling import GREEDY, Sampling
from headway.memory import Progress, Room, untold
from headway.models import CausalModel
from headway.nn import Cache

PAD = 0


class Step(NamedTuple):
    """One new token of one row, with its log-probability under the model (before temperature and filters)."""

    row: int
    token: int
    logprob: float


@dataclass
class Continuation:
    """What was generated for one prompt. A stop token ends it and is not part of `tokens`."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    stopped: bool = False

    @property
    def logprob(self) -> float:
        """Of the whole continuation, the stop token included."""
        return sum(self.logprobs)


def generate(
    model: CausalModel,
    prompts: Sequence[Sequence[int]],
    limit: int,
    stop: Sequence[int] = (),
    sampling: Sampling = GREEDY,
    rows: int | None = None,
    progress: Progress = untold,
) -> list[Continuation]:
    """At most `limit` tokens for each prompt, in the order of the prompts.

    Prompts of like length are decoded together, `rows` at a time (chosen by the device where it is not given), or
    fewer where memory runs out; `progress` is told how many prompts are done.
    """
    check_prompts(prompts, model.context)

    def continued(group: list[int]) -> list[Continuation]:
        made = [Continuation() for _ in group]
        for step in stream(model, [prompts[number] for number in group], limit, stop, sampling, group):
            result = made[step.row]
            result.logprobs.append(step.logprob)
            if step.token in stop:
                result.stopped = True
            else:
                result.tokens.append(step.token)
        return made

    by_length = sorted(range(len(prompts)), key=lambda number: len(prompts[number]))
    room = Room(rows or (64 if next(model.parameters()).device.type == "cpu" else 1024), progress)
    found = [each for part in room.each(continued, by_length) for each in part]
    return [each for _, each in sorted(zip(by_length, found, strict=True), key=lambda pair: pair[0])]


@torch.inference_mode()
def stream(
    model: CausalModel,
    prompts: Sequence[Sequence[int]],
    limit: int,
    stop: Sequence[int] = (),
    sampling: Sampling = GREEDY,
    numbers: Sequence[int] | None = None,
) -> Iterator[Step]:
    """The tokens of all prompts, one at a time, as they are made; the rows of the batch take turns.

    `numbers` are the places of these prompts in a larger list, by which sampling tells them apart.
    """
    block = model.context
    check_prompts(prompts, block)
    if limit < 1:
        raise UserError(f"the number of tokens to generate ({limit}) must be at least 1")
    if not prompts:
        return
    training = model.training
    model.eval()
    sequences = [list(prompt) for prompt in prompts]
    generators = sampling.generators(range(len(prompts)) if numbers is None else numbers)
    rows = list(range(len(prompts)))  # which prompt stands in each row of the cache
    going = set(rows)  # the prompts that have not stopped
    try:
        logits, cache = prefill(model, sequences, limit)
        for made in range(1, limit + 1):
            every = logits.log_softmax(-1)
            logits[:, PAD] = float("-inf")
            tokens = sampling.choose(logits, [generators[row] for row in rows])
            logprobs = every.gather(-1, tokens[:, None])[:, 0].tolist()
            for row, token, logprob in zip(rows, tokens.tolist(), logprobs, strict=True):
                if row in going:
                    sequences[row].append(token)
                    yield Step(row, token, logprob)
                    if token in stop:
                        going.remove(row)
            if not going or made == limit:
                return
            lengths = [len(sequences[row]) for row in going]
            slides = any(context_start(length, block) > context_start(length - 1, block) for length in lengths)
            if slides or len(going) <= 0.75 * len(rows):  # copying the cache pays when enough rows can go
                kept = [place for place, row in enumerate(rows) if row in going]
                rows = [rows[place] for place in kept]
                cache, tokens = cache.select(torch.tensor(kept, device=tokens.device)), tokens[kept]
            if slides:
                logits, cache = prefill(model, [sequences[row] for row in rows], limit - made)
            else:
                still = torch.tensor([row in going for row in rows], device=tokens.device)
                cache.lengths *= still  # a row that has stopped keeps its place in the batch and goes nowhere
                logits = model(tokens[:, None], cache)[:, -1].float()
                cache.lengths += still
    finally:
        model.train(training)


def prefill(model: CausalModel, sequences: Sequence[Sequence[int]], room: int) -> tuple[Tensor, Cache]:
    """Run every context at once: the logits of the next token (B, V), and a cache with `room` to go on.

    What all contexts begin with is computed once.
    """
    block = model.context
    device = next(model.parameters()).device
    contexts = [list(sequence[context_start(len(sequence), block) :]) for sequence in sequences]
    longest = max(len(context) for context in contexts)
    shared = common_start(contexts)
    cache = model.empty_cache(1, min(block, longest + room))
    if shared:
        model.hidden(torch.tensor([contexts[0][:shared]], device=device), cache)
        cache.lengths += shared
    cache = cache.select(torch.zeros(len(contexts), dtype=torch.long, device=device))
    lengths = torch.tensor([len(context) - shared for context in contexts])
    padded = torch.full((len(contexts), longest - shared), PAD)
    padded[torch.arange(longest - shared) < lengths[:, None]] = torch.tensor(
        [token for context in contexts for token in context[shared:]]
    )
    hidden = model.hidden(padded.to(device), cache)  # (B, T, D)
    lengths = lengths.to(device)
    cache.lengths += lengths
    return model.head(hidden[torch.arange(len(contexts), device=device), lengths - 1]).float(), cache


def common_start(contexts: Sequence[list[int]]) -> int:
    """How many tokens all contexts begin with, at least one of each left over."""
    shortest = min(len(context) for context in contexts) - 1
    first, last = min(contexts), max(contexts)  # in lexical order; what these two share, all share
    return next((place for place in range(shortest) if first[place] != last[place]), shortest)


def context_start(length: int, block: int) -> int:
    """Where the context of the token after `length` tokens begins: 0 until the block is full, then by half blocks."""
    half = max(1, block // 2)
    return max(0, -((block - length) // half) * half) if length > block else 0


def check_prompts(prompts: Sequence[Sequence[int]], block: int) -> None:
    for number, prompt in enumerate(prompts, 1):
        which = f"prompt {number}" if len(prompts) > 1 else "the prompt"
        if not prompt:
            raise TextError(f"{which} is empty; give the model at least one token to continue")
        if len(prompt) > block:
            raise TextError(
                f"{which} has {len(prompt)} tokens, and the model's context is {block} (model.block); shorten it"
            )


@torch.inference_mode()
def best_alternatives(
    model: CausalModel, prompts: Sequence[Sequence[int]], count: int, limit: int, stop: Sequence[int]
) -> list[list[Continuation]]:
    """For each prompt the `count` likeliest first tokens, each continued greedily; the likeliest whole first."""
    if not prompts:
        return []
    block = model.context
    check_prompts(prompts, block)
    training = model.training
    model.eval()
    logits = torch.cat(list(Room(64).each(lambda some: prefill(model, some, 0)[0], prompts)))
    model.train(training)
    logprobs = logits.log_softmax(-1)
    logprobs[:, [PAD, *stop]] = float("-inf")  # an empty continuation is no alternative
    first = logprobs.topk(min(count, logits.shape[-1] - 1 - len(stop)))
    branches = [
        (row, token, logprob)
        for row in range(len(prompts))
        for token, logprob in zip(first.indices[row].tolist(), first.values[row].tolist(), strict=True)
    ]
    if limit == 1:
        grown = [Continuation() for _ in branches]
    else:
        longer = [[*prompts[row], token] for row, token, _ in branches]
        grown = generate(model, [row[context_start(len(row), block) :] for row in longer], limit - 1, stop)
    found: list[list[Continuation]] = [[] for _ in prompts]
    for (row, token, logprob), rest in zip(branches, grown, strict=True):
        found[row].append(Continuation([token, *rest.tokens], [logprob, *rest.logprobs], rest.stopped))
    return [sorted(candidates, key=lambda candidate: -candidate.logprob) for candidates in found]
