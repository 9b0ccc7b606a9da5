"""Headway's Transformer against `torch.nn.Transformer` on a CPU: the same weights, the same inputs, float32.

Width 512, 8 heads, 2 + 2 layers, feed-forward 2048; 16 rows of 96 source and 80 target tokens, of which padding takes
up to half where there is any. The outputs are compared before anything is timed. The two take turns. The times are
medians; the ratio is the median of the ratios turn by turn, so that what else the machine does touches both: above 1
Headway is faster. The ratio of the two shortest times stands beside it.

    python benchmarks/transformer_parity.py [--repeat 15] [--threads 2] [--sequence-first] [--quick]
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from headway.nn.transformer import Transformer
from headway.training.device import describe_machine

Work = Callable[[nn.Module], Any]


def padding(rows: int, length: int) -> Tensor:
    """A key padding mask (B, T) of rows that are between half and fully used."""
    return torch.arange(length) >= torch.randint(length // 2, length + 1, (rows, 1))


def pair(shape: dict[str, Any], dropout: float, batch_first: bool) -> tuple[nn.Module, nn.Module]:
    """torch's model and ours, with the same weights."""
    torch.manual_seed(0)
    theirs = nn.Transformer(**shape, dropout=dropout, batch_first=batch_first)
    ours = Transformer(**shape, dropout=dropout, batch_first=batch_first)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def turns(theirs: nn.Module, ours: nn.Module, work: Work, repeat: int) -> tuple[list[float], list[float]]:
    """Seconds of each turn, the two alternating in who begins, after one turn to warm up."""
    times: dict[nn.Module, list[float]] = {theirs: [], ours: []}
    for turn in range(repeat + 1):
        for model in (theirs, ours) if turn % 2 else (ours, theirs):
            began = time.perf_counter()
            work(model)
            times[model].append(time.perf_counter() - began)
    return times[theirs][1:], times[ours][1:]


def agree(theirs: nn.Module, ours: nn.Module, work: Work, counts: Tensor | None) -> None:
    """The outputs are the same, where tokens count."""
    expected, out = work(theirs), work(ours)
    if counts is not None:
        expected, out = expected[counts], out[counts]
    torch.testing.assert_close(out, expected, atol=1e-4, rtol=1e-4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--repeat", type=int, default=15, help="turns of a training step; evaluation has three times as many"
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--sequence-first", action="store_true", help="inputs (T, B, D) in place of (B, T, D)")
    parser.add_argument("--quick", action="store_true", help="a small model and few turns, to see that it runs")
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # torch's, about its nested tensors
    torch.set_num_threads(options.threads)

    shape: dict[str, Any] = {"d_model": 512, "nhead": 8, "dim_feedforward": 2048}
    rows, source, target, repeat = 16, 96, 80, options.repeat
    if options.quick:
        shape, (rows, source, target), repeat = {"d_model": 64, "nhead": 4, "dim_feedforward": 128}, (4, 24, 20), 3
    shape |= {"num_encoder_layers": 2, "num_decoder_layers": 2}
    batch_first = not options.sequence_first
    torch.manual_seed(1)
    src, tgt = torch.randn(rows, source, shape["d_model"]), torch.randn(rows, target, shape["d_model"])
    if not batch_first:
        src, tgt = src.transpose(0, 1).contiguous(), tgt.transpose(0, 1).contiguous()
    causal = nn.Transformer.generate_square_subsequent_mask(target)
    of_source, of_target = padding(rows, source), padding(rows, target)
    padded = {
        "src_key_padding_mask": of_source,
        "tgt_key_padding_mask": of_target,
        "memory_key_padding_mask": of_source,
    }
    counts = {name: ~mask if batch_first else ~mask.T for name, mask in (("src", of_source), ("tgt", of_target))}

    def step(model: nn.Module) -> Tensor:
        model.zero_grad()
        out = model(src, tgt, tgt_mask=causal, **padded)
        out.square().mean().backward()
        return out.detach()

    @torch.inference_mode()
    def evaluate(model: nn.Module) -> Tensor:
        return model(src, tgt, tgt_mask=causal)

    @torch.inference_mode()
    def evaluate_padded(model: nn.Module) -> Tensor:
        return model(src, tgt, tgt_mask=causal, **padded)

    @torch.inference_mode()
    def encode(model: Any) -> Tensor:
        return model.encoder(src)

    @torch.inference_mode()
    def encode_padded(model: Any) -> Tensor:
        return model.encoder(src, src_key_padding_mask=of_source)

    still = pair(shape, 0.0, batch_first)
    dropping = pair(shape, 0.1, batch_first)
    agree(*still, step, counts["tgt"])
    share = 1 - float(torch.cat([of_source, of_target], 1).float().mean())
    print(describe_machine())
    print(f"{rows} rows of {source} and {target} tokens, {share:.0%} of them count where rows are padded\n")
    print(f"{'':32}{'torch.nn':>10}{'Headway':>10}{'ratio':>8}{'of shortest':>13}")
    for name, models, training, work, seen in (
        ("training, dropout 0.1", dropping, True, step, None),
        ("training, dropout 0", still, True, step, counts["tgt"]),
        ("evaluation", dropping, False, evaluate, None),
        ("evaluation, padded rows", dropping, False, evaluate_padded, counts["tgt"]),
        ("encoder, evaluation", dropping, False, encode, None),
        ("encoder, evaluation, padded", dropping, False, encode_padded, counts["src"]),
    ):
        for model in models:
            model.train(training)
        if not training:
            agree(*models, work, seen)
        theirs, ours = turns(*models, work, repeat if training else 3 * repeat)
        ratio = median(a / b for a, b in zip(theirs, ours, strict=True))
        print(
            f"{name:32}{1e3 * median(theirs):7.1f} ms{1e3 * median(ours):7.1f} ms"
            f"{ratio:8.2f}{min(theirs) / min(ours):13.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
