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
) -> list[Continuation]:
    """At most `limit` tokens for each prompt, in the order of the prompts."""
    results = [Continuation() for _ in prompts]
    for step in stream(model, prompts, limit, stop, sampling):
        result = results[step.row]
        result.logprobs.append(step.logprob)
        if step.token in stop:
            result.stopped = True
        else:
            result.tokens.append(step.token)
    return results


@torch.inference_mode()
def stream(
    model: CausalModel,
    prompts: Sequence[Sequence[int]],
    limit: int,
    stop: Sequence[int] = (),
    sampling: Sampling = GREEDY,
) -> Iterator[Step]:
    """The same tokens one at a time, as they are made; the rows of a batch take turns."""
    block = model.settings.block
    check_prompts(prompts, block)
    if limit < 1:
        raise UserError(f"the number of tokens to generate ({limit}) must be at least 1")
    if not prompts:
        return
    training = model.training
    model.eval()
    device = next(model.parameters()).device
    sequences = [list(prompt) for prompt in prompts]  # of the rows still going, by row number
    generators = sampling.generators(len(prompts))
    alive = list(range(len(prompts)))
    try:
        logits, cache = prefill(model, [sequences[row] for row in alive], limit, block, device)
        for made in range(1, limit + 1):
            logits[:, PAD] = float("-inf")
            tokens = sampling.choose(logits, [generators[row] for row in alive])
            logprobs = logits.log_softmax(-1).gather(-1, tokens[:, None])[:, 0].tolist()
            chosen = tokens.tolist()
            for row, token, logprob in zip(alive, chosen, logprobs, strict=True):
                sequences[row].append(token)
                yield Step(row, token, logprob)
            going = [place for place, token in enumerate(chosen) if token not in stop]
            if not going or made == limit:
                return
            if len(going) < len(alive):
                kept = torch.tensor(going, device=device)
                cache, tokens, alive = cache.select(kept), tokens[kept], [alive[place] for place in going]
            lengths = [len(sequences[row]) for row in alive]
            if any(context_start(length, block) > context_start(length - 1, block) for length in lengths):
                logits, cache = prefill(model, [sequences[row] for row in alive], limit - made, block, device)
            else:
                logits = model(tokens[:, None], cache)[:, -1].float()
                cache.lengths += 1
    finally:
        model.train(training)


def prefill(
    model: CausalModel, sequences: Sequence[Sequence[int]], room: int, block: int, device: torch.device
) -> tuple[Tensor, Cache]:
    """Run every context at once: the logits of the next token (B, V), and a cache with `room` to go on."""
    contexts = [sequence[context_start(len(sequence), block) :] for sequence in sequences]
    lengths = torch.tensor([len(context) for context in contexts], device=device)
    longest = int(lengths.max())
    padded = torch.full((len(contexts), longest), PAD, dtype=torch.long)
    for row, context in enumerate(contexts):
        padded[row, : len(context)] = torch.as_tensor(context)
    cache = model.empty_cache(len(contexts), min(block, longest + room))
    hidden = model.hidden(padded.to(device), cache)  # (B, T, D)
    last = hidden[torch.arange(len(contexts), device=device), lengths - 1]
    cache.lengths += lengths
    return model.head(last).float(), cache


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
    block = model.settings.block
    check_prompts(prompts, block)
    training = model.training
    model.eval()
    logits, _ = prefill(model, prompts, 0, block, next(model.parameters()).device)
    model.train(training)
    logits[:, PAD] = float("-inf")
    logprobs = logits.log_softmax(-1)
    logprobs[:, [PAD, *stop]] = float("-inf")  # an empty continuation is no alternative
    first = logprobs.topk(min(count, logits.shape[-1] - 1 - len(stop)))
    branches = [
        (row, token, logprob)
        for row in range(len(prompts))
        for token, logprob in zip(first.indices[row].tolist(), first.values[row].tolist(), strict=True)
    ]
    grown = generate(model, [[*prompts[row], token][-block:] for row, token, _ in branches], max(1, limit - 1), stop)
    found: list[list[Continuation]] = [[] for _ in prompts]
    for (row, token, logprob), rest in zip(branches, grown, strict=True):
        found[row].append(Continuation([token, *rest.tokens], [logprob, *rest.logprobs], rest.stopped))
    return [sorted(candidates, key=lambda candidate: -candidate.logprob) for candidates in found]
