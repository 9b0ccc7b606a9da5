"""`MultiheadAttention` in the place of `torch.nn.MultiheadAttention`: its constructor, its call and its weights.

    MultiHead(Q, K, V) = [head_1; …; head_H] W_O,   head_i = softmax((Q Wq_i)(K Wk_i)ᵀ / √K_width + mask) (V Wv_i)

"Attention is all you need" (Vaswani et al. 2017), section 3.2.2. Time O(T·S·D + (T + S)·D²); memory O(T·S·H) where the
weights are asked for or dropped out, O((T + S)·D) with the fused kernels.

torch's masks say True = hidden. They are read at the door and turned round: inside, True = may attend. A query with
nothing to attend to gets zeros and passes finite gradients on, where torch gives NaN.

Shapes: B batch, T queries, S keys, D width, H heads, K head width. Inputs are (B, T, D) with `batch_first`, (T, B, D)
without it, and (T, D) for a sequence by itself.
"""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headway.errors import nearest
from headway.nn.attention import causal_mask
from headway.nn.dropout import dropout as drop
from headway.nn.dropout import has_values
from headway.nn.positions import IN_ATTENTION, InAttention, make_position

HIDDEN = float("-inf")


class MultiheadAttention(nn.Module):
    """Scaled dot-product attention with several heads, as torch has it.

    Arguments, defaults, state dict and initial values are those of `torch.nn.MultiheadAttention`. Beyond torch,
    `position` is a scheme for self-attention (an `InAttention` or a name: rotary, relative, alibi, t5): queries and
    keys then stand at 0 … T − 1 of the same sequence, and keys of another length are refused. Keys that `add_bias_kv`
    and `add_zero_attn` append stand nowhere and are seen by all (by torch's fused causal path
    they are not).
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        position: InAttention | str | None = None,
    ) -> None:
        super().__init__()
        if embed_dim < 1 or num_heads < 1 or embed_dim % num_heads:
            raise ValueError(f"num_heads ({num_heads}) must divide embed_dim ({embed_dim})")
        self.embed_dim = embed_dim
        self.kdim = embed_dim if kdim is None else kdim
        self.vdim = embed_dim if vdim is None else vdim
        self.num_heads = num_heads
        self.head_dim = embed_dim // num_heads
        self.dropout = dropout
        self.batch_first = batch_first
        self.add_zero_attn = add_zero_attn

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, device=device, dtype=dtype))

        packed = self.kdim == self.vdim == embed_dim
        self.in_proj_weight = parameter(3 * embed_dim, embed_dim) if packed else None
        self.q_proj_weight = None if packed else parameter(embed_dim, embed_dim)
        self.k_proj_weight = None if packed else parameter(embed_dim, self.kdim)
        self.v_proj_weight = None if packed else parameter(embed_dim, self.vdim)
        self.in_proj_bias = parameter(3 * embed_dim) if bias else None
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias, device=device, dtype=dtype)
        self.bias_k = parameter(1, 1, embed_dim) if add_bias_kv else None
        self.bias_v = parameter(1, 1, embed_dim) if add_bias_kv else None
        self.reset_parameters()
        self.position = in_attention(position, embed_dim, num_heads, device=device, dtype=dtype)

    def reset_parameters(self) -> None:
        """Xavier matrices and zero biases, drawn in torch's order."""
        for weight in (self.in_proj_weight, self.q_proj_weight, self.k_proj_weight, self.v_proj_weight):
            if weight is not None:
                nn.init.xavier_uniform_(weight)
        if self.in_proj_bias is not None:
            nn.init.zeros_(self.in_proj_bias)
            nn.init.zeros_(self.out_proj.bias)
        for extra in (self.bias_k, self.bias_v):
            if extra is not None:
                nn.init.xavier_normal_(extra)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """query (B, T, D), key (B, S, kdim), value (B, S, vdim) → (B, T, D), and the weights or None.

        `key_padding_mask` is (B, S), `attn_mask` (T, S) or (B·H, T, S). In a bool or uint8 mask nonzero = hidden, a
        float mask is added to the scores. `is_causal` says that `attn_mask` is the causal one and is taken at its word;
        without an `attn_mask` it makes the attention causal. The weights are (B, T, S), the mean of the heads, or
        (B, H, T, S) without `average_attn_weights`; in training they are those after dropout, as in torch.
        """
        self.check(query, key, value)
        attn_mask = self.in_force(attn_mask, key_padding_mask, is_causal, need_weights)
        q, k, v = (self.split(x) for x in self.project(query, key, value))
        allowed, bias = self.read_masks(q, k, key_padding_mask, attn_mask)
        causal = is_causal and attn_mask is None
        p = self.dropout if self.training else 0.0
        mixed, weights, nothing = self.mix(q, k, v, allowed, bias, causal, p, need_weights)
        batched = query.dim() == 3
        out = self.out_proj(self.join(mixed, batched))
        if nothing is not None:  # to no head: zeros, without the bias of the output
            out = out.masked_fill(self.join(nothing.expand(*q.shape[:3], 1), batched).all(-1, keepdim=True), 0.0)
        if weights is None:
            return out, None
        weights = weights.mean(1) if average_attn_weights else weights
        return out, weights if batched else weights[0]

    def weights(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        need_weights: bool = True,
    ) -> Tensor:
        """How much of each key every query takes, before dropout: (B, H, T, S). For looking at, not for training.

        With `need_weights=False` they are those of a forward pass that does not return them.
        """
        self.check(query, key, value)
        attn_mask = self.in_force(attn_mask, key_padding_mask, is_causal, need_weights)
        q, k, v = (self.split(x) for x in self.project(query, key, value))
        allowed, bias = self.read_masks(q, k, key_padding_mask, attn_mask)
        _, weights, _ = self.mix(q, k, v, allowed, bias, is_causal and attn_mask is None, 0.0, need_weights=True)
        return cast(Tensor, weights)

    def in_force(
        self, attn_mask: Tensor | None, key_padding_mask: Tensor | None, is_causal: bool, need_weights: bool
    ) -> Tensor | None:
        """The mask that counts: where `is_causal` alone says it all, torch does not look at `attn_mask`, nor do we."""
        return None if is_causal and key_padding_mask is None and not need_weights else attn_mask

    def take_position(self, scheme: InAttention) -> None:
        """Let a scheme act in this attention, which must not have one yet."""
        if self.position is not None:
            raise ValueError(
                f"the layer has {type(self.position).__name__} positions already: leave out position of the layer or "
                "positions of the stack"
            )
        self.position = scheme

    def packed(self, rows: Tensor, packing: Packing) -> Tensor:
        """Self-attention of the tokens that count and nothing else: (N, D) → (N, D)."""
        assert self.in_proj_weight is not None
        projected = packing.unpack(F.linear(rows, self.in_proj_weight, self.in_proj_bias))  # (B, T, 3·D)
        q, k, v = projected.unflatten(-1, (3, self.num_heads, self.head_dim)).permute(2, 0, 3, 1, 4)
        mixed, _, _ = self.mix(q, k, v, packing.keep[:, None, None, :], None, False, 0.0, need_weights=False)
        return self.out_proj(packing.pack(mixed.transpose(1, 2).flatten(2)))

    def mix(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        allowed: Tensor | None,
        bias: Tensor | None,
        causal: bool,
        p: float,
        need_weights: bool,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """The values, weighed: q (B, H, T, K), k and v (B, H, S, K) → (B, H, T, K), the weights if needed, and which
        queries attend to nothing, if any do.

        `allowed` and `bias` broadcast to (B, H, T, S). The weights are written out where they are needed, where a
        position acts on the values, and where they are dropped out on a CPU, which the fused kernel does slower.
        """
        t, s = q.shape[-2], k.shape[-2]
        on_values = self.position is not None and self.position.on_values
        if self.position is not None:
            places = torch.arange(t, device=q.device)
            q, k = self.position.turn(q, places), self.position.turn(k, places)
            bias = total(bias, self.position.bias(q * self.head_dim**-0.5, places, places))
        explicit = need_weights or on_values or (p > 0.0 and q.device.type == "cpu")
        fused_causal = causal and allowed is None and bias is None and not (explicit or self.extra_keys)
        if causal and not fused_causal:
            order = causal_mask(t, s, q.device)
            allowed = order if allowed is None else allowed & order
        if self.extra_keys:
            k, v = self.with_extra_keys(k, self.bias_k), self.with_extra_keys(v, self.bias_v)
            more = (0, self.extra_keys)
            allowed = None if allowed is None else F.pad(allowed, more, value=True)
            bias = None if bias is None else F.pad(bias, more)
        added, nothing = additive(allowed, bias, q.dtype)

        if not explicit:
            mixed = F.scaled_dot_product_attention(q, k, v, added, p, fused_causal)
            return (mixed if nothing is None else mixed.masked_fill(nothing, 0.0)), None, nothing
        scores = q * self.head_dim**-0.5 @ k.transpose(-2, -1)  # (B, H, T, S)
        if added is not None:
            scores += added
        weights = scores.softmax(-1)
        weights = drop(weights if nothing is None else weights.masked_fill(nothing, 0.0), p)
        mixed = weights @ v
        if self.position is not None:
            mixed = mixed + self.position.values(weights[..., :s], places, places)
        return mixed, weights if need_weights else None, nothing

    @property
    def extra_keys(self) -> int:
        return (self.bias_k is not None) + self.add_zero_attn

    def with_extra_keys(self, x: Tensor, learned: Tensor | None) -> Tensor:
        """Keys or values (B, H, S, K), with the `learned` one and the zero one behind them."""
        parts = [x]
        if learned is not None:
            parts.append(learned.view(1, self.num_heads, 1, self.head_dim).to(x.dtype).expand(len(x), -1, -1, -1))
        if self.add_zero_attn:
            parts.append(x.new_zeros(*x.shape[:2], 1, self.head_dim))
        return torch.cat(parts, -2)

    def project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        """Queries, keys and values, (…, D) each; what is the same tensor goes through one matrix product."""
        width = self.embed_dim
        if self.in_proj_weight is not None and key is value:
            if query is key:
                return F.linear(query, self.in_proj_weight, self.in_proj_bias).chunk(3, -1)
            to_q, to_kv = self.in_proj_weight.split([width, 2 * width])
            bias_q, bias_kv = (None, None) if self.in_proj_bias is None else self.in_proj_bias.split([width, 2 * width])
            return F.linear(query, to_q, bias_q), *F.linear(key, to_kv, bias_kv).chunk(2, -1)
        if self.in_proj_weight is not None:
            to_each = self.in_proj_weight.chunk(3)
        else:
            to_each = cast(tuple[Tensor, ...], (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight))
        biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        return tuple(F.linear(x, w, b) for x, w, b in zip((query, key, value), to_each, biases, strict=True))

    def split(self, x: Tensor) -> Tensor:
        """(B, T, D), (T, B, D) or (T, D), as the inputs come, → (B, H, T, K)."""
        heads = x.unflatten(-1, (self.num_heads, self.head_dim))
        if heads.dim() == 3:
            return heads.transpose(0, 1)[None]
        return heads.transpose(1, 2) if self.batch_first else heads.permute(1, 2, 0, 3)

    def join(self, heads: Tensor, batched: bool) -> Tensor:
        """(B, H, T, K) → (B, T, D), (T, B, D) or (T, D), as the inputs came."""
        if not batched:
            return heads[0].transpose(0, 1).flatten(1)
        return (heads.transpose(1, 2) if self.batch_first else heads.permute(2, 0, 1, 3)).flatten(2)

    def read_masks(
        self, q: Tensor, k: Tensor, key_padding_mask: Tensor | None, attn_mask: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Which keys each query may attend to, and what is added to its scores; both broadcast to (B, H, T, S)."""
        rows, heads, t, s = *q.shape[:3], k.shape[2]
        allowed, bias = None, None
        if attn_mask is not None:
            expected = [(t, s), (rows * heads, t, s)]
            if tuple(attn_mask.shape) not in expected:
                raise ValueError(
                    f"the attention mask has the shape {tuple(attn_mask.shape)}; (T, S) = {expected[0]} or "
                    f"(B·H, T, S) = {expected[1]} is wanted"
                )
            allowed, bias = read_mask(attn_mask, "attn_mask", q.dtype)
            if attn_mask.dim() == 3:
                allowed = allowed.view(rows, heads, t, s)
                bias = None if bias is None else bias.view(rows, heads, t, s)
        if key_padding_mask is not None:
            expected = [(rows, s), (s,)] if rows == 1 else [(rows, s)]
            if tuple(key_padding_mask.shape) not in expected:
                raise ValueError(
                    f"key_padding_mask has the shape {tuple(key_padding_mask.shape)}; {either(expected)} is wanted"
                )
            keys, more = read_mask(key_padding_mask.view(rows, 1, 1, s), "key_padding_mask", q.dtype)
            allowed = keys if allowed is None else allowed & keys
            bias = total(bias, more)
        return allowed, bias

    def check(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        if query.is_nested or key.is_nested or value.is_nested:
            raise TypeError("nested tensors are not taken: pad them and give a key_padding_mask")
        shapes = f"query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}"
        if query.dim() not in (2, 3) or not query.dim() == key.dim() == value.dim():
            raise ValueError(f"{shapes}: all three must have 3 axes, or 2 for a sequence by itself")
        for name, x, width in (("query", query, self.embed_dim), ("key", key, self.kdim), ("value", value, self.vdim)):
            if x.shape[-1] != width:
                raise ValueError(f"{name} has {x.shape[-1]} features and this attention takes {width} ({shapes})")
        if key.shape[:-1] != value.shape[:-1]:
            raise ValueError(f"each key needs its value ({shapes})")
        batch = 0 if self.batch_first else 1
        if query.dim() == 3 and query.shape[batch] != key.shape[batch]:
            raise ValueError(f"query has {query.shape[batch]} rows and key {key.shape[batch]} ({shapes})")
        length = 0 if query.dim() == 2 else 1 - batch
        if self.position is not None and query.shape[length] != key.shape[length]:
            raise ValueError(
                f"{type(self.position).__name__} positions are for self-attention, and there are {query.shape[length]} "
                f"queries and {key.shape[length]} keys: build a cross-attention without position"
            )

    def extra_repr(self) -> str:
        return f"{self.embed_dim}, num_heads={self.num_heads}, dropout={self.dropout}, batch_first={self.batch_first}"


class Packing:
    """The tokens that count, without the padding between them: (B, T, D) ↔ (N, D). For inference."""

    def __init__(self, keep: Tensor) -> None:
        self.keep = keep  # (B, T), True = counts
        self.index = keep.flatten().nonzero().squeeze(1)  # (N,)

    def pack(self, x: Tensor) -> Tensor:
        return x.flatten(0, 1).index_select(0, self.index)

    def unpack(self, rows: Tensor) -> Tensor:
        """The rows in their places, zeros between them."""
        rows_and_padding = rows.new_zeros(self.keep.numel(), rows.shape[-1])
        return rows_and_padding.index_copy_(0, self.index, rows).view(*self.keep.shape, -1)


def read_mask(mask: Tensor, name: str, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor | None]:
    """A mask of torch as (who may be attended to, what is added to scores of `dtype`)."""
    if mask.dtype == torch.bool:
        return ~mask, None
    if mask.dtype == torch.uint8:
        return mask == 0, None
    if mask.is_floating_point():
        mask = mask.to(dtype or mask.dtype)  # first: what overflows to −inf there hides too
        hidden = mask == HIDDEN
        return ~hidden, mask.masked_fill(hidden, 0.0)
    raise TypeError(f"{name} is {mask.dtype}; give torch.bool or torch.uint8 (nonzero = hidden) or floats (added)")


def additive(allowed: Tensor | None, bias: Tensor | None, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
    """What is added to the scores, −inf where not `allowed`, and which queries may attend to nothing, (…, T, 1).

    Those see everything instead, so that their softmax is finite, and are cleared afterwards.
    """
    bias = None if bias is None else bias.to(dtype)
    if allowed is None:
        return bias, None
    nothing: Tensor | None = ~allowed.any(-1, keepdim=True)
    if allowed.device.type == "cpu" and has_values(allowed) and not cast(Tensor, nothing).any():
        nothing = None  # asking costs nothing here, clearing would
    seen = allowed if nothing is None else allowed | nothing
    base = torch.zeros((), dtype=dtype, device=allowed.device) if bias is None else bias
    return base.masked_fill(~seen, HIDDEN), nothing


def total(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """a + b, where either may be missing."""
    if a is None or b is None:
        return b if a is None else a
    return a + b


def either(shapes: list[tuple[int, ...]]) -> str:
    return " or ".join(str(shape) for shape in shapes)


def in_attention(
    position: InAttention | str | None,
    width: int,
    heads: int,
    causal: bool = False,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> InAttention | None:
    """The scheme that acts inside attention: as given, or made by its name."""
    if position is None or isinstance(position, InAttention):
        return position
    known = ", ".join(IN_ATTENTION)
    if not isinstance(position, str):
        raise TypeError(f"position is a {type(position).__name__}; give an InAttention or a name: {known}")
    if position in ("learned", "sinusoidal"):
        raise ValueError(
            f"{position} positions act on the embeddings, not in attention: give them as positions= to the "
            f"encoder, the decoder or the Transformer; position is one of {known}"
        )
    if position not in (*IN_ATTENTION, "none"):
        raise ValueError(f"position {position!r} is unknown{nearest(position, IN_ATTENTION)}")
    scheme = make_position(position, width, heads, causal=causal)
    return None if scheme is None else cast(InAttention, placed(scheme, device, dtype))


def placed(scheme: nn.Module, device: torch.device | str | None, dtype: torch.dtype | None) -> nn.Module:
    """The scheme on its device; what it learns in `dtype`, but no frequencies or slopes rounded to it."""
    learns = any(True for _ in scheme.parameters())
    return scheme.to(device=device, dtype=dtype if learns else None)
