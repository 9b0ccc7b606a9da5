"""How much faster a batched, cached beam search is than a plain one, on a CPU.

The plain one takes one sentence at a time and runs the whole model, encoder and decoder, over every live hypothesis
again for each token. Headway searches many sentences at once, reads each source once and keeps the keys and values of
what is written. Both follow the same rules (which hypotheses stay, when to stop) with the same weights in float32; the
hypotheses must be the same. Prints both times and their ratio, and fails where they differ.

    python benchmarks/beam_speed.py [--sentences 1000] [--beam 5] [--seed 0]      (--sentences 40: a quick try)

The model is an encoder-decoder Transformer of width 256 with 3 layers and 2,000 words. Its weights are random, its
logits scaled so that it prefers some words to others as a trained one does, and the end mark likely enough that targets
are of all lengths up to the limit. Sources are 4 to 24 random words.
"""

from __future__ import annotations

import argparse
import time

import torch

from headway.generation import Hypothesis, beam_search
from headway.models import EncoderDecoderSettings, Seq2SeqModel
from headway.training.device import describe_machine

MARK = 1
PENALTY = 0.6
SHARPNESS = 8.0  # standard deviation of the logits
END_LOGIT = 10.0  # mean logit of the end mark


def random_model(words: int) -> Seq2SeqModel:
    """A model with preferences: its logits differ by several units, and the end mark's stand above the mean."""
    settings = EncoderDecoderSettings(width=256, layers=3, dropout=0.0, norm="pre", block=64, tied="none")
    model = settings.build(words).eval()
    weights = dict(model.named_parameters())
    towards_end = torch.randn(256) / 16  # of length 1
    with torch.no_grad():
        weights["head.weight"].mul_(SHARPNESS)
        weights["head.weight"][MARK] = END_LOGIT * towards_end
        weights["decoder_norm.bias"].copy_(towards_end)
    return model


def random_sources(count: int, words: int) -> list[list[int]]:
    """Sentences of 4 to 24 words."""
    lengths = torch.randint(4, 25, (count,)).tolist()
    return [torch.randint(2, words, (length,)).tolist() for length in lengths]


def score(logprob: float, length: int) -> float:
    return logprob / ((5 + length) / 6) ** PENALTY


@torch.inference_mode()
def plain_beam(model: Seq2SeqModel, source: list[int], beam: int, limit: int) -> Hypothesis:
    """The best target of one sentence, with a full forward pass for each token."""
    live: list[tuple[list[int], float]] = [([MARK], 0.0)]
    finished: list[Hypothesis] = []
    for length in range(1, limit + 1):
        tokens = torch.tensor([row for row, _ in live])
        logprobs = model(tokens, torch.tensor([source] * len(live)))[:, -1].log_softmax(-1)
        logprobs[:, 0] = float("-inf")
        totals = logprobs + torch.tensor([logprob for _, logprob in live])[:, None]
        best = totals.flatten().topk(beam - len(finished))
        grown = [
            ([*live[place // totals.shape[1]][0], place % totals.shape[1]], value)
            for place, value in zip(best.indices.tolist(), best.values.tolist(), strict=True)
        ]
        live = [(row, logprob) for row, logprob in grown if row[-1] != MARK]
        finished += [
            Hypothesis(row[1:-1], logprob, score(logprob, length)) for row, logprob in grown if row[-1] == MARK
        ]
        bar = max((each.score for each in finished), default=float("-inf"))
        if not live or score(live[0][1], limit) <= bar:
            break
    else:
        finished += [Hypothesis(row[1:], logprob, score(logprob, limit), False) for row, logprob in live]
    return max(finished, key=lambda each: each.score)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sentences", type=int, default=1000)
    parser.add_argument("--beam", type=int, default=5)
    parser.add_argument("--limit", type=int, default=40, help="longest target")
    parser.add_argument("--words", type=int, default=2000, help="size of the vocabulary")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rows", type=int, default=None, help="hypotheses in a batch (chosen where not given)")
    options = parser.parse_args()

    torch.manual_seed(options.seed)
    model = random_model(options.words)
    sources = random_sources(options.sentences, options.words)

    beam_search(model, sources[:8], options.beam, options.limit)
    began = time.perf_counter()
    ours = [best for (best,) in beam_search(model, sources, options.beam, options.limit, PENALTY, rows=options.rows)]
    fast = time.perf_counter() - began
    began = time.perf_counter()
    theirs = [plain_beam(model, source, options.beam, options.limit) for source in sources]
    slow = time.perf_counter() - began

    tokens, ended = sum(len(each.tokens) for each in ours), sum(each.stopped for each in ours)
    equal = sum(mine.tokens == other.tokens for mine, other in zip(ours, theirs, strict=True))
    apart = max(abs(mine.score - other.score) for mine, other in zip(ours, theirs, strict=True))
    print(f"{describe_machine()}, {len(sources)} sentences, beam {options.beam}, seed {options.seed}")
    print(f"{tokens / len(sources):.1f} tokens a target, {ended} targets ended before the limit")
    print(f"plain               {slow:8.2f} s")
    print(f"Headway             {fast:8.2f} s")
    print(f"ratio               {slow / fast:8.1f} ×")
    print(f"same hypotheses     {equal} of {len(sources)}, scores at most {apart:.1e} apart")
    if equal < len(sources) and apart > 1e-4:  # else another one was as good, but for rounding
        raise SystemExit("hypotheses differ")


if __name__ == "__main__":
    main()
