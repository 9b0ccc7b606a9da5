"""The attention mechanisms of `headway.nn` by the names and settings a run file gives them.

[model]                      [model.attention]
attention = "local"          kind = "local"
                             reach = 16
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, cast

from headway.nn import ATTENTIONS, Attention, InAttention
from headway.nn.synthesizer import PARTS as MIXTURE_PARTS
from headway.settings import setting

PARTS = tuple(MIXTURE_PARTS)


@dataclass
class AttentionSettings:
    """A mechanism without settings of its own; the others add theirs, named as its constructor names them."""

    kind: str = setting("dot-product", "which attention")

    @property
    def has_keys(self) -> bool:
        """Whether there are queries and keys for a position scheme to act on."""
        return self.kind in ("dot-product", "unscaled", "additive", "local", "bigbird")

    def problems(self) -> Iterator[tuple[str, str]]:
        if self.kind == "linformer":
            yield (
                "kind",
                "a projected key mixes the whole row, what comes later too, so a model that continues text cannot use "
                "linformer; choose local or bigbird",
            )

    def build(self, width: int, heads: int, dropout: float, length: int, position: InAttention | None) -> Attention:
        """The mechanism, causal, for rows of at most `length`."""
        own = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "kind"}
        own["length"] = own.get("length") or length
        make = cast(Any, ATTENTIONS[self.kind])
        return cast(Attention, make(width, heads, dropout, causal=True, position=position, **own))


@dataclass
class LocalSettings(AttentionSettings):
    kind: str = setting("local", "which attention")
    reach: int = setting(32, "how many earlier positions each one looks at", least=0)


@dataclass
class BigBirdSettings(AttentionSettings):
    kind: str = setting("bigbird", "which attention")
    block: int = setting(64, "positions in a block", least=1)
    window: int = setting(3, "blocks in the window, the own one in the middle; odd", least=1)
    globals: int = setting(1, "blocks at the beginning that everybody looks at", least=0)
    randoms: int = setting(2, "blocks chosen by chance, once", least=0)

    def problems(self) -> Iterator[tuple[str, str]]:
        if self.window % 2 == 0:
            yield "window", f"the own block stands in the middle of the window, so {self.window} must be odd"


@dataclass
class PerceiverSettings(AttentionSettings):
    kind: str = setting("perceiver", "which attention")
    bottleneck: int = setting(32, "latents through which a row is read", least=1)


@dataclass
class DenseSynthesizerSettings(AttentionSettings):
    kind: str = setting("synthesizer-dense", "which attention")
    shared: bool = setting(False, "one second matrix for all heads")
    length: int = setting(0, "columns of the second matrix; 0: model.block", least=0)


@dataclass
class FactorisedRandomSettings(AttentionSettings):
    kind: str = setting("synthesizer-factorised-random", "which attention")
    rank: int = setting(8, "columns of the two factors", least=1)


@dataclass
class MixtureSettings(AttentionSettings):
    kind: str = setting("synthesizer-mixture", "which attention")
    parts: list[str] = setting(("dense", "dot-product"), "what is mixed: " + ", ".join(PARTS))

    def __post_init__(self) -> None:
        self.parts = list(self.parts)

    @property
    def has_keys(self) -> bool:
        return "dot-product" in self.parts

    def problems(self) -> Iterator[tuple[str, str]]:
        unknown = [part for part in self.parts if part not in PARTS]
        if unknown or not self.parts:
            yield "parts", f"{unknown or 'an empty list'}: a mixture is made of {', '.join(PARTS)}"
        elif len(set(self.parts)) < len(self.parts):
            yield "parts", f"{self.parts}: each part once"


OWN_SETTINGS: dict[str, type[AttentionSettings]] = {
    "local": LocalSettings,
    "bigbird": BigBirdSettings,
    "perceiver": PerceiverSettings,
    "perceiver-first": PerceiverSettings,
    "synthesizer-dense": DenseSynthesizerSettings,
    "synthesizer-factorised-random": FactorisedRandomSettings,
    "synthesizer-mixture": MixtureSettings,
}
KINDS: dict[str, type[AttentionSettings]] = {name: OWN_SETTINGS.get(name, AttentionSettings) for name in ATTENTIONS}
