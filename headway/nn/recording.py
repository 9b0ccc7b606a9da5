"""Where a model looked: the attention weights of every layer, on request.

    with record_attention(model) as seen:
        model(src, tgt)
    seen["encoder.layers.0.self_attn"]      # a list, one (B, H, T, S) tensor for each call

Outside the block a model computes no weights it does not need. Inside it every attention computes them a second time
beside its output, in memory O(T·S·H) for each layer and call; the output itself is what it would have been.

Shapes: B batch, T queries, S keys, H heads.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from headway.nn.attention import Attention
from headway.nn.multihead import MultiheadAttention


@contextmanager
def record_attention(model: nn.Module) -> Iterator[OrderedDict[str, list[Tensor]]]:
    """The weights of every `MultiheadAttention` and `Attention` inside `model`, by its name in `named_modules()`.

    They are those before dropout, each head by itself, without gradients, on the model's device. A layer that is
    applied several times has an entry for each. After the block, also after an error, the model is as it was.
    """
    seen: OrderedDict[str, list[Tensor]] = OrderedDict()
    with ExitStack() as hooks:
        for name, module in model.named_modules():
            inside = any(name.startswith(f"{outer}.") for outer in seen)  # a part of one that is recorded as a whole
            if isinstance(module, MultiheadAttention | Attention) and not inside:
                seen[name] = []
                hooks.enter_context(module.register_forward_hook(recorder(seen[name], name), with_kwargs=True))
        if not seen:
            raise ValueError(
                f"{type(model).__name__} has no attention of headway.nn to record; torch's weights load into the "
                "headway.nn class of the same name"
            )
        yield seen


def recorder(calls: list[Tensor], name: str) -> Any:
    """A hook that adds the weights of each call to `calls`."""

    def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        given = inspect.signature(module.forward).bind(*args, **kwargs).arguments
        if given.pop("cache", None) is not None:
            raise ValueError(f"{name} continues a cache, whose weights are not kept: record a pass over the whole row")
        given.pop("average_attn_weights", None)
        with torch.no_grad():
            calls.append(module.weights(**given))  # type: ignore[operator]

    return record
