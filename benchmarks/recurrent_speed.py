"""Headway's recurrent networks against torch's: the same weights, the same inputs, float32.

`RNN`, `GRU` and `LSTM`: 2 layers of 256, and a bidirectional layer; 32 rows of 64 tokens, width 128. Forward is without
gradients; a step is forward and backward. Also the cells, one step of 32 rows, whose equations are written out; padded
rows, half to fully used, packed by torch's functions or by `run_padded`; and, by itself, what the written-out way
costs. The results are compared before anything is timed. The two take turns, and the ratio is the median of the ratios
turn by turn, so that what else the machine does touches both: above 1 Headway is faster.

    python benchmarks/recurrent_speed.py [--repeat 30] [--threads 2] [--device cpu] [--quick]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from headway.nn import GRU, LSTM, RNN, GRUCell, LSTMCell, RNNCell, run_padded, written_out
from headway.training.device import describe_machine

Work = Callable[[], Tensor]
Kinds = tuple[type[nn.Module], type[nn.Module]]  # torch's and ours
LAYERS: tuple[Kinds, ...] = ((nn.RNN, RNN), (nn.GRU, GRU), (nn.LSTM, LSTM))
CELLS: tuple[Kinds, ...] = ((nn.RNNCell, RNNCell), (nn.GRUCell, GRUCell), (nn.LSTMCell, LSTMCell))


def first(result: Any) -> Tensor:
    """The output of a layer, or the h of a cell."""
    return result if isinstance(result, Tensor) else result[0]


def forward(module: nn.Module, x: Tensor) -> Work:
    @torch.no_grad()
    def work() -> Tensor:
        return first(module(x))

    return work


def step(module: nn.Module, x: Tensor) -> Work:
    def work() -> Tensor:
        module.zero_grad()
        out = first(module(x))
        out.square().mean().backward()
        return out.detach()

    return work


def packed_by_hand(module: nn.Module, x: Tensor, lengths: Tensor) -> Work:
    @torch.no_grad()
    def work() -> Tensor:
        output, _ = module(pack_padded_sequence(x, lengths, True, enforce_sorted=False))
        return pad_packed_sequence(output, True, total_length=x.shape[1])[0]

    return work


def padded(module: Any, x: Tensor, lengths: Tensor) -> Work:
    @torch.no_grad()
    def work() -> Tensor:
        return run_padded(module, x, lengths)[0]

    return work


def followed(work: Work) -> Work:
    def inside() -> Tensor:
        with written_out():
            return work()

    return inside


def compare(name: str, theirs: Work, ours: Work, repeat: int, each: int = 1) -> float:
    """Print a line and give the ratio; a turn is `each` calls."""
    torch.testing.assert_close(ours(), theirs(), atol=1e-4, rtol=1e-4)
    times: dict[Work, list[float]] = {theirs: [], ours: []}
    for turn in range(repeat + 1):
        for work in (theirs, ours) if turn % 2 else (ours, theirs):
            began = time.perf_counter()
            for _ in range(each):
                work()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            times[work].append((time.perf_counter() - began) / each)
    other, mine = times[theirs][1:], times[ours][1:]
    ratio = median(a / b for a, b in zip(other, mine, strict=True))
    print(f"{name:38}{1e3 * median(other):9.3f} ms{1e3 * median(mine):9.3f} ms{ratio:8.2f}", flush=True)
    return ratio


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=30, help="turns")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--quick", action="store_true", help="small networks and few turns, to see that it runs")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)

    rows, times, width, hidden, repeat = (4, 8, 8, 16, 3) if options.quick else (32, 64, 128, 256, options.repeat)
    torch.manual_seed(0)
    x = torch.randn(rows, times, width, device=options.device)
    lengths = torch.randint(times // 2, times, (rows,))

    def pair(kinds: Kinds, *sizes: int, **more: Any) -> tuple[nn.Module, nn.Module]:
        theirs, ours = (kind(*sizes, **more).to(options.device) for kind in kinds)
        ours.load_state_dict(theirs.state_dict())
        return theirs, ours

    print(describe_machine())
    print(f"{'':38}{'torch.nn':>12}{'Headway':>12}{'ratio':>8}")
    fused = []
    for kinds in LAYERS:
        name = kinds[1].__name__
        for shape, sizes, more in (
            ("2 layers", (width, hidden, 2), {}),
            ("both ways", (width, hidden), {"bidirectional": True}),
        ):
            theirs, ours = pair(kinds, *sizes, batch_first=True, **more)
            for what, work in (("forward", forward), ("step", step)):
                fused.append(compare(f"{name}, {shape}, {what}", work(theirs, x), work(ours, x), repeat))
    for kinds in LAYERS:
        theirs, ours = pair(kinds, width, hidden, batch_first=True)
        compare(
            f"{kinds[1].__name__}, padded rows", packed_by_hand(theirs, x, lengths), padded(ours, x, lengths), repeat
        )
    for kinds in CELLS:
        theirs, ours = pair(kinds, width, hidden)
        for what, work in (("forward", forward), ("step", step)):
            compare(f"{kinds[1].__name__}, {what}", work(theirs, x[:, 0]), work(ours, x[:, 0]), repeat, each=20)
    for kinds in LAYERS:
        theirs, ours = pair(kinds, width, hidden, batch_first=True)
        compare(f"{kinds[1].__name__} written out, step", step(theirs, x), followed(step(ours, x)), repeat)
    print(f"\nfused networks: {min(fused):.2f} to {max(fused):.2f}, median {median(fused):.2f}")


if __name__ == "__main__":
    main()
