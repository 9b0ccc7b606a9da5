"""The layers of `torch.nn`'s Transformer, with the same constructors, calls and weights.

    encoder layer   x ← Norm(x + Attention(x));  x ← Norm(x + FeedForward(x))
    decoder layer   x ← Norm(x + Attention(x));  x ← Norm(x + Attention(x, memory));  x ← Norm(x + FeedForward(x))

and with `norm_first` x ← x + Attention(Norm(x)) and so on. "Attention is all you need" (Vaswani et al. 2017), section
3.1; the norm in front: "On layer normalization in the Transformer architecture" (Xiong et al. 2020), figure 1. A layer
takes time O(T²·D + T·D·F), F being the width of the feed-forward net; attending to a memory adds O(T·S·D + S·D²).

What torch does not have comes as keywords after torch's arguments:
  `position`    where tokens stand: a scheme of `positions.py` that acts in the self-attention
  `attention`   another mechanism of self-attention: a name of `headway.nn.ATTENTIONS`, or what builds one

A query with nothing to attend to gets zeros, never NaN.

Shapes: B batch, T target length, S source length, D width. Inputs are (B, T, D) with `batch_first`, (T, B, D) without
it, and (T, D) for a sequence by itself. Masks are torch's: bool and uint8 with nonzero = hidden, or floats to be added.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headway.errors import nearest
from headway.nn import kernels
from headway.nn.attention import Attention, causal_mask
from headway.nn.dropout import Dropout
from headway.nn.multihead import MultiheadAttention, Packing, in_attention, read_mask
from headway.nn.positions import InAttention

Function = Callable[[Tensor], Tensor]
Mechanism = str | Callable[..., Attention]
Device = torch.device | str | None

ACTIVATIONS: dict[str, Function] = {"relu": F.relu, "gelu": F.gelu}


class TransformerEncoderLayer(nn.Module):
    """Self-attention and a feed-forward net, as `torch.nn.TransformerEncoderLayer`.

    `position` acts in the self-attention. `attention` builds another mechanism in its place, as in
    `attention(d_model, nhead, dropout, causal=False, position=…)`: it has its own pattern, takes a key padding mask and
    refuses a `src_mask`.
    """

    def __init__(
        self,
        d_model: int,
        nhead: int,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: str | Function = F.relu,
        layer_norm_eps: float = 1e-5,
        batch_first: bool = False,
        norm_first: bool = False,
        bias: bool = True,
        device: Device = None,
        dtype: torch.dtype | None = None,
        *,
        position: InAttention | str | None = None,
        attention: Mechanism | None = None,
    ) -> None:
        super().__init__()
        self.d_model, self.nhead = d_model, nhead
        self.batch_first, self.norm_first = batch_first, norm_first
        self.self_attn = self_attention(
            attention, d_model, nhead, dropout, bias, batch_first, position, causal=False, device=device, dtype=dtype
        )
        self.linear1 = nn.Linear(d_model, dim_feedforward, bias=bias, device=device, dtype=dtype)
        self.dropout = Dropout(dropout)
        self.linear2 = nn.Linear(dim_feedforward, d_model, bias=bias, device=device, dtype=dtype)
        self.norm1 = nn.LayerNorm(d_model, eps=layer_norm_eps, bias=bias, device=device, dtype=dtype)
        self.norm2 = nn.LayerNorm(d_model, eps=layer_norm_eps, bias=bias, device=device, dtype=dtype)
        self.dropout1 = Dropout(dropout)
        self.dropout2 = Dropout(dropout)
        self.activation = activation_named(activation)

    def forward(
        self,
        src: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """src (B, S, D) → (B, S, D), with `src_mask` (S, S) or (B·H, S, S) and `src_key_padding_mask` (B, S)."""

        def attend(x: Tensor) -> Tensor:
            return attend_to_self(self.self_attn, x, src_mask, src_key_padding_mask, is_causal, self.batch_first)

        return self.sublayers(src, attend)

    def packed(self, rows: Tensor, packing: Packing) -> Tensor:
        """The same for the tokens that count and nothing else: (N, D) → (N, D)."""
        attention = cast(MultiheadAttention, self.self_attn)
        return self.sublayers(rows, lambda x: attention.packed(x, packing))

    def sublayers(self, x: Tensor, attend: Function) -> Tensor:
        add, feed_forward = in_memory_at_hand(self)
        if self.norm_first:
            x = add(x, self.dropout1(attend(self.norm1(x))))
            return add(x, self.dropout2(feed_forward(self.norm2(x))))
        x = self.norm1(add(x, self.dropout1(attend(x))))
        return self.norm2(add(x, self.dropout2(feed_forward(x))))


class TransformerDecoderLayer(nn.Module):
    """Self-attention, attention to a memory and a feed-forward net, as `torch.nn.TransformerDecoderLayer`.

    `position` and `attention` act in the self-attention, as in the encoder's layer. The mechanism is built causal, so a
    causal `tgt_mask` says nothing new to it and any other is refused. The memory is attended to as ever.
    """

    def __init__(
        self,
        d_model: int,
        nhead: int,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: str | Function = F.relu,
        layer_norm_eps: float = 1e-5,
        batch_first: bool = False,
        norm_first: bool = False,
        bias: bool = True,
        device: Device = None,
        dtype: torch.dtype | None = None,
        *,
        position: InAttention | str | None = None,
        attention: Mechanism | None = None,
    ) -> None:
        super().__init__()
        self.d_model, self.nhead = d_model, nhead
        self.batch_first, self.norm_first = batch_first, norm_first
        self.self_attn = self_attention(
            attention, d_model, nhead, dropout, bias, batch_first, position, causal=True, device=device, dtype=dtype
        )
        self.multihead_attn = MultiheadAttention(
            d_model, nhead, dropout, bias, batch_first=batch_first, device=device, dtype=dtype
        )
        self.linear1 = nn.Linear(d_model, dim_feedforward, bias=bias, device=device, dtype=dtype)
        self.dropout = Dropout(dropout)
        self.linear2 = nn.Linear(dim_feedforward, d_model, bias=bias, device=device, dtype=dtype)
        self.norm1 = nn.LayerNorm(d_model, eps=layer_norm_eps, bias=bias, device=device, dtype=dtype)
        self.norm2 = nn.LayerNorm(d_model, eps=layer_norm_eps, bias=bias, device=device, dtype=dtype)
        self.norm3 = nn.LayerNorm(d_model, eps=layer_norm_eps, bias=bias, device=device, dtype=dtype)
        self.dropout1 = Dropout(dropout)
        self.dropout2 = Dropout(dropout)
        self.dropout3 = Dropout(dropout)
        self.activation = activation_named(activation)

    def forward(
        self,
        tgt: Tensor,
        memory: Tensor,
        tgt_mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
        tgt_key_padding_mask: Tensor | None = None,
        memory_key_padding_mask: Tensor | None = None,
        tgt_is_causal: bool = False,
        memory_is_causal: bool = False,
    ) -> Tensor:
        """tgt (B, T, D), memory (B, S, D) → (B, T, D), with `tgt_mask` (T, T) and `memory_mask` (T, S)."""

        def attend(x: Tensor) -> Tensor:
            return attend_to_self(self.self_attn, x, tgt_mask, tgt_key_padding_mask, tgt_is_causal, self.batch_first)

        def recall(x: Tensor) -> Tensor:
            return self.multihead_attn(
                x,
                memory,
                memory,
                key_padding_mask=memory_key_padding_mask,
                need_weights=False,
                attn_mask=memory_mask,
                is_causal=memory_is_causal,
            )[0]

        add, feed_forward = in_memory_at_hand(self)
        x = tgt
        if self.norm_first:
            x = add(x, self.dropout1(attend(self.norm1(x))))
            x = add(x, self.dropout2(recall(self.norm2(x))))
            return add(x, self.dropout3(feed_forward(self.norm3(x))))
        x = self.norm1(add(x, self.dropout1(attend(x))))
        x = self.norm2(add(x, self.dropout2(recall(x))))
        return self.norm3(add(x, self.dropout3(feed_forward(x))))


GLOBAL_HOOKS = (  # torch's hooks on every module, kept in dicts that stay the same objects
    torch.nn.modules.module._global_forward_hooks,
    torch.nn.modules.module._global_forward_pre_hooks,
    torch.nn.modules.module._global_backward_hooks,
    torch.nn.modules.module._global_backward_pre_hooks,
)
PARTS = (TransformerEncoderLayer, TransformerDecoderLayer, MultiheadAttention, nn.Linear, nn.LayerNorm, Dropout)


def self_attention(
    attention: Mechanism | None,
    width: int,
    heads: int,
    dropout: float,
    bias: bool,
    batch_first: bool,
    position: InAttention | str | None,
    causal: bool,
    device: Device,
    dtype: torch.dtype | None,
) -> MultiheadAttention | Attention:
    """torch's attention, or the mechanism that was asked for."""
    if attention is not None:
        return build_mechanism(attention, width, heads, dropout, position, causal, device, dtype)
    scheme = in_attention(position, width, heads, causal, device, dtype)
    return MultiheadAttention(
        width, heads, dropout, bias, batch_first=batch_first, device=device, dtype=dtype, position=scheme
    )


def build_mechanism(
    attention: Mechanism,
    width: int,
    heads: int,
    dropout: float,
    position: InAttention | str | None,
    causal: bool,
    device: Device,
    dtype: torch.dtype | None,
) -> Attention:
    if isinstance(attention, str):
        from headway.nn import ATTENTIONS  # here, since the package imports this module

        if attention not in ATTENTIONS:
            raise ValueError(f"attention {attention!r} is unknown{nearest(attention, ATTENTIONS)}")
        attention = cast(Callable[..., Attention], ATTENTIONS[attention])
    if isinstance(attention, nn.Module):
        raise TypeError(
            f"attention is a {type(attention).__name__} that is built already; give the class, or "
            f"functools.partial({type(attention).__name__}, …), so that every layer gets its own"
        )
    scheme = in_attention(position, width, heads, causal, device, dtype)
    try:
        mechanism = attention(width, heads, dropout, causal=causal, position=scheme)
    except ValueError as error:
        name = getattr(getattr(attention, "func", attention), "__name__", "…")
        if not causal or "causal" not in str(error):
            error.add_note(f"options go in with functools.partial, as in attention=partial({name}, length=512)")
        raise
    if not isinstance(mechanism, Attention):
        raise TypeError(
            f"attention built a {type(mechanism).__name__}; give what builds a headway.nn.Attention, "
            "as in functools.partial(BigBird, window=3), or the name of one"
        )
    return mechanism.to(device=device, dtype=dtype)


def attend_to_self(
    attention: nn.Module,
    x: Tensor,
    mask: Tensor | None,
    key_padding_mask: Tensor | None,
    is_causal: bool,
    batch_first: bool,
) -> Tensor:
    """What x takes from itself, by torch's attention or by another mechanism: the shape of x."""
    if not isinstance(attention, Attention):
        return attention(
            x, x, x, key_padding_mask=key_padding_mask, need_weights=False, attn_mask=mask, is_causal=is_causal
        )[0]
    name = type(attention).__name__
    if attention.causal:
        if not (mask is None or is_causal or torch.compiler.is_compiling() or hides_the_future(mask, x, batch_first)):
            raise ValueError(f"{name} has its own pattern, which is causal: give it no other mask")
    elif mask is not None or is_causal:
        raise ValueError(f"{name} has its own pattern, which is not causal: give it key padding, no mask")
    rows = to_rows(x, batch_first)  # (B, T, D)
    keep = None if key_padding_mask is None else tokens_that_count(key_padding_mask, rows, name)
    return from_rows(attention(rows, positions=places(rows), mask=keep), x, batch_first)


def own_parts(layer: nn.Module) -> bool:
    """Is the layer made of this module's own parts, none exchanged?"""
    return all(type(module) in PARTS or isinstance(module, InAttention) for module in layer.modules())


def as_built(layer: nn.Module) -> bool:
    """Is it made of its own parts, and nobody watches what passes between them? Then it may be computed otherwise."""
    return own_parts(layer) and not (any(GLOBAL_HOOKS) or any(kernels.watched(module) for module in layer.modules()))


def in_memory_at_hand(layer: TransformerEncoderLayer | TransformerDecoderLayer) -> tuple[Callable, Function]:
    """x + y and the feed-forward net, written over y and over the net's inside where nobody looks at these again.

    New memory costs as much as the sums and the activation do.
    """
    own = not torch.compiler.is_compiling() and as_built(layer)
    activation = torch.relu_ if own and layer.activation is F.relu else layer.activation

    def add(x: Tensor, y: Tensor) -> Tensor:
        return y.add_(x) if own and x.dtype == y.dtype else x + y

    def feed_forward(x: Tensor) -> Tensor:
        return layer.linear2(layer.dropout(activation(layer.linear1(x))))

    return add, feed_forward


def tokens_that_count(key_padding_mask: Tensor, rows: Tensor, name: str) -> Tensor:
    """(B, T), True = counts, from torch's key padding mask."""
    if key_padding_mask.shape not in (rows.shape[:2], rows.shape[1:2] if len(rows) == 1 else None):
        raise ValueError(
            f"the key padding mask has the shape {tuple(key_padding_mask.shape)}; {tuple(rows.shape[:2])} is wanted"
        )
    keep, bias = read_mask(key_padding_mask, "the key padding mask")
    if bias is not None and bias.any():
        raise ValueError(f"{name} takes tokens or leaves them: its float key padding mask may hold 0 and -inf only")
    return keep.view(rows.shape[:2])


def is_causal_mask(mask: Tensor | None, length: int) -> bool:
    """Does this mask of torch hide the later tokens and nothing else?"""
    if mask is None or mask.shape != (length, length) or mask.requires_grad or torch.compiler.is_compiling():
        return False
    allowed, bias = read_mask(mask, "the attention mask")
    return torch.equal(allowed, causal_mask(length, length, mask.device)) and (bias is None or not bias.any())


def hides_the_future(mask: Tensor, x: Tensor, batch_first: bool) -> bool:
    """Is this the causal mask, (T, T), or the same once for every head of every row, (B·H, T, T)?"""
    masks = mask if mask.dim() == 3 else mask[None]
    return all(is_causal_mask(each, length_of(x, batch_first)) for each in masks)


def to_rows(x: Tensor, batch_first: bool) -> Tensor:
    """(B, T, D), (T, B, D) or (T, D), as torch's inputs come, → (B, T, D)."""
    if x.dim() == 2:
        return x[None]
    return x if batch_first else x.transpose(0, 1)


def from_rows(rows: Tensor, like: Tensor, batch_first: bool) -> Tensor:
    """(B, T, D) → the axes of `like`."""
    if like.dim() == 2:
        return rows[0]
    return rows if batch_first else rows.transpose(0, 1)


def length_of(x: Tensor, batch_first: bool) -> int:
    return to_rows(x, batch_first).shape[1]


def places(rows: Tensor) -> Tensor:
    """0 … T − 1 for rows (B, T, D)."""
    return torch.arange(rows.shape[1], device=rows.device)


def activation_named(activation: str | Function) -> Function:
    if not isinstance(activation, str):
        return activation
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation {activation!r} is unknown{nearest(activation, ACTIVATIONS)}; or give a function")
    return ACTIVATIONS[activation]
