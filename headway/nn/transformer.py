"""`torch.nn`'s Transformer and its stacks, with the same constructors, calls and weights.

    encoder       layer after layer over the source, then a norm
    decoder       layer after layer over the target, each attending to the encoder's result, then a norm
    transformer   decoder(target, encoder(source))

"Attention is all you need" (Vaswani et al. 2017), section 3.1; the layers are those of `layers.py`, and time is theirs
times their number.

What torch does not have comes as keywords after torch's arguments:
  `positions`      where tokens stand: a scheme of `positions.py` for a whole stack
  `attention`      another mechanism of self-attention: a name of `headway.nn.ATTENTIONS`, or what builds one
  `share_layers`   one layer, applied again and again

A query with nothing to attend to gets zeros, never NaN. `recording.record_attention` shows every layer's weights.

Shapes: B batch, T target length, S source length, D width. Inputs are (B, T, D) with `batch_first`, (T, B, D) without
it, and (T, D) for a sequence by itself. Masks are torch's: bool and uint8 with nonzero = hidden, or floats to be added.
"""

from __future__ import annotations

import copy
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headway.errors import nearest
from headway.nn.attention import Attention, causal_mask
from headway.nn.layers import (
    Device,
    Function,
    Mechanism,
    TransformerDecoderLayer,
    TransformerEncoderLayer,
    as_built,
    build_mechanism,
    from_rows,
    is_causal_mask,
    length_of,
    own_parts,
    places,
    to_rows,
)
from headway.nn.multihead import HIDDEN, Packing, placed, read_mask
from headway.nn.positions import IN_ATTENTION, NAMES, InAttention, Learned, make_position


class Stack(nn.Module):
    """`num_layers` layers one after another: copies of one layer, or with `share_layers` that layer again and again.

    `positions` is a name of `positions.NAMES` or a module. What acts on embeddings is added to the input. What acts in
    attention goes into the self-attention of every layer: by name a new one for each, as a module the same one for all.
    """

    causal = False  # are the positions of its layers counted from later tokens to earlier ones only?

    def __init__(
        self,
        layer: nn.Module,
        num_layers: int,
        norm: nn.Module | None,
        share_layers: bool,
        positions: nn.Module | str | None,
    ) -> None:
        super().__init__()
        copies = min(num_layers, 1) if share_layers else num_layers
        self.layers = nn.ModuleList(copy.deepcopy(layer) for _ in range(copies))
        self.num_layers = num_layers
        self.repeats = num_layers if share_layers else 1
        self.norm = norm
        inner = getattr(layer, "self_attn", None)
        self.batch_first = bool(getattr(layer, "batch_first", getattr(inner, "batch_first", False)))
        self.positions = self.take(positions, layer)

    def take(self, positions: nn.Module | str | None, layer: nn.Module) -> nn.Module | None:
        """Give every layer its scheme, or return the scheme that acts on the embeddings."""
        if not isinstance(positions, nn.Module | str | None):
            raise TypeError(f"positions are {positions!r}; give a built module or one of {', '.join(NAMES)}")
        schemes = [scheme_for(positions, layer, self.causal) for _ in range(max(len(self.layers), 1))]
        if isinstance(schemes[0], Learned):
            width, wanted = schemes[0].table.shape[1], getattr(layer, "d_model", None)
            if wanted not in (None, width):
                raise ValueError(
                    f"learned positions of width {width} for layers of {wanted}: Learned(length, {wanted})"
                )
        if not isinstance(schemes[0], InAttention):
            return schemes[0]
        for each, scheme in zip(self.layers, schemes, strict=False):
            attention: Any = getattr(each, "self_attn", None)
            if not hasattr(attention, "take_position"):
                raise ValueError(f"{type(attention).__name__} takes no {type(scheme).__name__} positions")
            attention.take_position(scheme)
        return None

    def embed(self, x: Tensor) -> Tensor:
        """The input with its positions, where they act on it."""
        if self.positions is None:
            return x
        rows = to_rows(x, self.batch_first)
        return from_rows(self.positions(rows, places(rows)), x, self.batch_first)

    def sequence(self) -> list[nn.Module]:
        """The layers in the order of their work."""
        return list(self.layers) * self.repeats


class TransformerEncoder(Stack):
    """A stack of encoder layers and a norm, as `torch.nn.TransformerEncoder`.

    In inference (`eval()` and no gradients) with a bool or uint8 `src_key_padding_mask` and no `mask`, padding is not
    computed, and the padded positions of the last layer are zeros. `enable_nested_tensor=False` turns that off;
    `mask_check` is accepted and not needed, since padding may stand anywhere.
    """

    def __init__(
        self,
        encoder_layer: nn.Module,
        num_layers: int,
        norm: nn.Module | None = None,
        enable_nested_tensor: bool = True,
        mask_check: bool = True,
        *,
        share_layers: bool = False,
        positions: nn.Module | str | None = None,
    ) -> None:
        super().__init__(encoder_layer, num_layers, norm, share_layers, positions)
        self.enable_nested_tensor = enable_nested_tensor
        self.mask_check = mask_check

    def forward(
        self,
        src: Tensor,
        mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool | None = None,
    ) -> Tensor:
        """src (B, S, D) → (B, S, D). With `is_causal` None it is found out whether `mask` is the causal one."""
        causal = is_causal_mask(mask, length_of(src, self.batch_first)) if is_causal is None else is_causal
        x = self.embed(src)
        packing = None if causal or mask is not None else self.packing(src, src_key_padding_mask)
        if packing is not None and all(as_built(layer) for layer in self.layers):
            rows = packing.pack(to_rows(x, self.batch_first))  # (N, D)
            for layer in self.sequence():
                rows = cast(TransformerEncoderLayer, layer).packed(rows, packing)
            x = from_rows(packing.unpack(rows), src, self.batch_first)
        else:
            for layer in self.sequence():
                x = layer(x, src_mask=mask, is_causal=causal, src_key_padding_mask=src_key_padding_mask)
            if packing is not None:  # somebody watches the layers: computed in full, the result is the same
                x = from_rows(
                    to_rows(x, self.batch_first).masked_fill(~packing.keep[..., None], 0.0), src, self.batch_first
                )
        return x if self.norm is None else self.norm(x)

    def packing(self, src: Tensor, key_padding_mask: Tensor | None) -> Packing | None:
        """The tokens that count, where it is possible to compute nothing else."""
        if not self.enable_nested_tensor or torch.is_grad_enabled() or torch.compiler.is_compiling():
            return None
        if src.dim() != 3 or key_padding_mask is None or key_padding_mask.is_floating_point():
            return None
        if key_padding_mask.shape != to_rows(src, self.batch_first).shape[:2]:
            return None  # attention will say what is wrong with it
        if any(module.training for module in self.layers.modules()):
            return None
        if not all(type(layer) is TransformerEncoderLayer and own_parts(layer) for layer in self.layers):
            return None
        return Packing(read_mask(key_padding_mask, "src_key_padding_mask")[0])


class TransformerDecoder(Stack):
    """A stack of decoder layers and a norm, as `torch.nn.TransformerDecoder`."""

    causal = True

    def __init__(
        self,
        decoder_layer: nn.Module,
        num_layers: int,
        norm: nn.Module | None = None,
        *,
        share_layers: bool = False,
        positions: nn.Module | str | None = None,
    ) -> None:
        super().__init__(decoder_layer, num_layers, norm, share_layers, positions)

    def forward(
        self,
        tgt: Tensor,
        memory: Tensor,
        tgt_mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
        tgt_key_padding_mask: Tensor | None = None,
        memory_key_padding_mask: Tensor | None = None,
        tgt_is_causal: bool | None = None,
        memory_is_causal: bool = False,
    ) -> Tensor:
        """tgt (B, T, D), memory (B, S, D) → (B, T, D). With `tgt_is_causal` None it is found out from `tgt_mask`."""
        length = length_of(tgt, self.batch_first)
        causal = is_causal_mask(tgt_mask, length) if tgt_is_causal is None else tgt_is_causal
        x = self.embed(tgt)
        for layer in self.sequence():
            x = layer(
                x,
                memory,
                tgt_mask=tgt_mask,
                memory_mask=memory_mask,
                tgt_key_padding_mask=tgt_key_padding_mask,
                memory_key_padding_mask=memory_key_padding_mask,
                tgt_is_causal=causal,
                memory_is_causal=memory_is_causal,
            )
        return x if self.norm is None else self.norm(x)


class Transformer(nn.Module):
    """Encoder and decoder, as `torch.nn.Transformer`: after the same `torch.manual_seed` it has the same weights.

    `positions`, `attention` and `share_layers` act in both; the decoder's mechanisms are causal. Position schemes and
    mechanisms begin with values of their own, everything else of more than one axis with Xavier's.
    """

    def __init__(
        self,
        d_model: int = 512,
        nhead: int = 8,
        num_encoder_layers: int = 6,
        num_decoder_layers: int = 6,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: str | Function = F.relu,
        custom_encoder: nn.Module | None = None,
        custom_decoder: nn.Module | None = None,
        layer_norm_eps: float = 1e-5,
        batch_first: bool = False,
        norm_first: bool = False,
        bias: bool = True,
        device: Device = None,
        dtype: torch.dtype | None = None,
        *,
        positions: nn.Module | str | None = None,
        attention: Mechanism | None = None,
        share_layers: bool = False,
    ) -> None:
        super().__init__()
        beyond_torch = positions is not None or attention is not None or share_layers
        if beyond_torch and (custom_encoder is not None or custom_decoder is not None):
            raise ValueError(
                "positions, attention and share_layers do not reach into a custom_encoder or custom_decoder: give them "
                "to TransformerEncoder, TransformerDecoder and their layers, and leave them out here"
            )
        self.d_model, self.nhead = d_model, nhead
        self.batch_first = batch_first
        shape = (d_model, nhead, dim_feedforward, dropout, activation, layer_norm_eps, batch_first, norm_first, bias)
        inside = attention is not None and (isinstance(positions, InAttention) or positions in IN_ATTENTION)
        stack: dict[str, Any] = {"share_layers": share_layers, "positions": None if inside else positions}

        def norm() -> nn.LayerNorm:
            return nn.LayerNorm(d_model, eps=layer_norm_eps, bias=bias, device=device, dtype=dtype)

        if custom_encoder is None:
            encoder_layer = TransformerEncoderLayer(*shape, device=device, dtype=dtype)
            custom_encoder = TransformerEncoder(encoder_layer, num_encoder_layers, norm(), **stack)
        if custom_decoder is None:
            decoder_layer = TransformerDecoderLayer(*shape, device=device, dtype=dtype)
            custom_decoder = TransformerDecoder(decoder_layer, num_decoder_layers, norm(), **stack)
        self.encoder, self.decoder = custom_encoder, custom_decoder
        for part in (self.encoder, self.decoder) if attention is not None else ():
            for layer in cast(Stack, part).layers:  # each is built by itself: copies would all begin alike
                layer.self_attn = build_mechanism(
                    cast(Mechanism, attention),
                    d_model,
                    nhead,
                    dropout,
                    cast(InAttention | str | None, positions if inside else None),
                    causal=cast(Stack, part).causal,
                    device=device,
                    dtype=dtype,
                )
        self.reset_parameters()

    def forward(
        self,
        src: Tensor,
        tgt: Tensor,
        src_mask: Tensor | None = None,
        tgt_mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        tgt_key_padding_mask: Tensor | None = None,
        memory_key_padding_mask: Tensor | None = None,
        src_is_causal: bool | None = None,
        tgt_is_causal: bool | None = None,
        memory_is_causal: bool = False,
    ) -> Tensor:
        """src (B, S, D), tgt (B, T, D) → (B, T, D). Masks (S, S), (T, T), (T, S); padding (B, S), (B, T), (B, S)."""
        self.check(src, tgt)
        memory = self.encoder(src, mask=src_mask, src_key_padding_mask=src_key_padding_mask, is_causal=src_is_causal)
        return self.decoder(
            tgt,
            memory,
            tgt_mask=tgt_mask,
            memory_mask=memory_mask,
            tgt_key_padding_mask=tgt_key_padding_mask,
            memory_key_padding_mask=memory_key_padding_mask,
            tgt_is_causal=tgt_is_causal,
            memory_is_causal=memory_is_causal,
        )

    def check(self, src: Tensor, tgt: Tensor) -> None:
        shapes = f"src {tuple(src.shape)}, tgt {tuple(tgt.shape)}"
        if src.dim() not in (2, 3) or src.dim() != tgt.dim():
            raise ValueError(f"{shapes}: both must have 3 axes, or 2 for a sequence by itself")
        if src.shape[-1] != self.d_model or tgt.shape[-1] != self.d_model:
            raise ValueError(f"{shapes}: both must have d_model ({self.d_model}) features")
        batch = 0 if self.batch_first else 1
        if src.dim() == 3 and src.shape[batch] != tgt.shape[batch]:
            hint = "" if self.batch_first else "; batch_first is False, so the second axis is the batch"
            raise ValueError(f"{shapes}: {src.shape[batch]} rows of source and {tgt.shape[batch]} of target{hint}")

    def reset_parameters(self) -> None:
        """Xavier for the matrices, in torch's order; position schemes and mechanisms are left as they are."""
        others: list[nn.Module] = [m for m in self.modules() if isinstance(m, Attention | InAttention)]
        others += [m.positions for m in self.modules() if isinstance(m, Stack) and m.positions is not None]
        left = {id(parameter) for module in others for parameter in module.parameters()}
        for parameter in self.parameters():
            if parameter.dim() > 1 and id(parameter) not in left:
                nn.init.xavier_uniform_(parameter)

    @staticmethod
    def generate_square_subsequent_mask(
        sz: int, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        """The causal mask as torch writes it, (sz, sz): −inf above the diagonal, 0 elsewhere."""
        return torch.zeros(sz, sz, device=device, dtype=dtype).masked_fill(~causal_mask(sz, sz, device), HIDDEN)


def scheme_for(positions: nn.Module | str | None, layer: nn.Module, causal: bool) -> nn.Module | None:
    """The scheme for a stack of such layers: as given, or a new one of this name."""
    if not isinstance(positions, str):
        return positions
    if positions not in NAMES:
        raise ValueError(f"positions {positions!r} are unknown{nearest(positions, NAMES)}")
    inner = getattr(layer, "self_attn", None)
    width = getattr(layer, "d_model", getattr(inner, "embed_dim", None))
    heads = getattr(layer, "nhead", getattr(inner, "num_heads", None))
    if width is None or heads is None:
        raise ValueError(f"{type(layer).__name__} does not tell its width and heads: give positions as a module")
    if positions == "learned":
        raise ValueError(
            "learned positions are a table of a fixed length: give the table itself, "
            f"as in positions=Learned(512, {width}) for 512 tokens"
        )
    scheme = make_position(positions, width, heads, causal=causal)
    like = next(layer.parameters())
    return None if scheme is None else placed(scheme, like.device, like.dtype)
