"""What tokenizers refuse, each with the value, the place and the way out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from headway.errors import DataError, SettingsError, TextError

SHOWN_CHARACTERS = 5


def utf8(text: str) -> bytes:
    """The text in UTF-8. Python's strings may hold half a surrogate pair, which has no place there."""
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise TextError(
            f"half a surrogate pair, {named(text[error.start])}, at character {error.start + 1}; "
            "it stands for no character and cannot be written as UTF-8: leave it out"
        ) from None


def some_text(texts: Iterable[str]) -> Iterator[str]:
    """The texts one by one, each fit for UTF-8; an error at the end if there was nothing in them."""
    if isinstance(texts, str):
        raise TypeError("train takes many texts, not one; put it in a list")
    empty = True
    for text in texts:
        utf8(text)
        empty = empty and not text
        yield text
    if empty:
        raise DataError("no text to train a tokenizer on; check the corpus path")


def refuse_size(kind: str, size: int | None) -> None:
    """For kinds whose vocabulary is what it is: a size that would be ignored is an error."""
    if size is not None:
        raise SettingsError([f'tokenizer.size ({size}) has no meaning for tokenizer.kind = "{kind}"; leave it out'])


def refuse_small(size: int, least: int, what: str) -> None:
    """`size` must leave room for the `least` tokens that no vocabulary of this kind can do without."""
    if size < least:
        raise SettingsError([f"tokenizer.size ({size}) must be at least {least}, to hold the {what}"])


def never_seen(text: str, known: Iterable[str]) -> TextError:
    """An error that names the characters of `text` which are not among the `known` ones."""
    seen = set(known)
    strangers = list(dict.fromkeys(character for character in text if character not in seen))
    names = ", ".join(named(character) for character in strangers[:SHOWN_CHARACTERS])
    if rest := strangers[SHOWN_CHARACTERS:]:
        names += f" and {len(rest):,} more"
    return TextError(
        f"never seen in training: {names}, first at character {text.index(strangers[0]) + 1}; "
        'leave them out, or train with tokenizer.kind = "bytes" or "bpe", which can spell any text'
    )


def named(character: str) -> str:
    """A character as it may stand in a message: 'ß' (U+00DF). `repr` spells out what does not print."""
    return f"{character!r} (U+{ord(character):04X})"
