"""Tokenizers: text to token ids and back.

Every token is a string of bytes; decoding joins the pieces and reads the bytes as UTF-8. Two special tokens
come first in every vocabulary: padding (id 0, shown as □) and the mask (id 1, shown as ⁇). No text encodes to
them, so a model's markers cannot be forged by its input.

    characters   a token a character of the training text; anything else is refused
    bytes        a token a byte; spells any text
    words        words with the space in front; rare ones are spelled by their characters
    bpe          byte pairs merged by frequency; spells any text
"""

from __future__ import annotations

import codecs
import hashlib
import json
import operator
import re
import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from headway.errors import DataError, TextError, UserError, nearest
from headway.files import write_text
from headway.text.checks import named, never_seen, refuse_size, refuse_small, some_text, utf8
from headway.text.cutting import parts, without_endless_words
from headway.text.lookup import Lookup, byte_alphabet
from headway.text.plain import read_text

PAD = "□"
MASK = "⁇"
SPECIALS = (PAD, MASK)
FORMAT = "headway-tokenizer"
VERSION = 1
LEAVES = 2.0  # seconds in which a thread that nobody waits for any more should have ended

# Scripts without spaces between words in which a character is a syllable or a word: Han and kana, as they stand between
# the brackets of a regular expression. Thai, Lao, Khmer and Burmese have no spaces either, but their characters are
# letters and vowel signs, which mean little apart: they stay together, and merging finds the frequent syllables. Hangul
# has spaces.
UNSPACED = (
    "\u2e80-\u2fd5\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003fffd"  # Han: radicals and characters
    "\u3005-\u3007\u3021-\u3029\u3038-\u303b\U00016fe2-\U00016fe3\U00016ff0-\U00016ff6"  # its marks and numerals
    "\u3041-\u30ff\u31f0-\u31ff\u32d0-\u32fe\u3300-\u3357\uff65-\uff9f\U0001aff0-\U0001b16f\U0001f200"  # kana
)

# How the library describes that a character of these scripts is a word by itself.
APART = {"type": "Split", "pattern": {"Regex": f"[{UNSPACED}]"}, "behavior": "Isolated", "invert": False}


class Tokenizer(ABC):
    """What all kinds share: the pieces, decoding, and a JSON form that travels with a model's weights."""

    kind: ClassVar[str]
    pad: int = 0
    mask: int = 1
    specials: tuple[str, ...] = SPECIALS
    lead: str = ""
    """Goes in front of a text that stands alone, so that its first word is cut like any other."""

    def __init__(self, pieces: Iterable[bytes]) -> None:
        """`pieces` without the special ones, in the order of their ids."""
        self.pieces: list[bytes] = [special.encode() for special in self.specials] + list(pieces)

    def __len__(self) -> int:
        return len(self.pieces)

    def __repr__(self) -> str:
        return f"<{self.kind} tokenizer, {len(self):,} tokens>"

    @classmethod
    @abstractmethod
    def train(cls, texts: Iterable[str], size: int | None = None) -> Tokenizer:
        """Learn a vocabulary from texts, of at most `size` tokens for the kinds that leave that open."""

    def encode_alone(self, text: str) -> list[int]:
        """The tokens of a text that stands alone, with `lead`; what it is refused for is placed in the text itself."""
        try:
            return self.encode(self.lead + text)
        except TextError:
            self.encode(text)  # is refused as well, without the lead to count
            raise

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """The ids of a text, never special ones. Raises TextError for characters it cannot spell."""

    def encode_array(self, text: str) -> np.ndarray:
        """The same ids as an int32 array, without the list in between where a kind can do that."""
        return np.asarray(self.encode(text), dtype=np.int32)

    def decode(self, ids: Iterable[int], specials: bool = False) -> str:
        """The text of ids, with special tokens left out or, with specials=True, shown as □ and ⁇.

        Bytes that are not UTF-8, such as a character cut in two, become U+FFFD.
        """
        # numpy and torch: plain numbers at once, rather than a scalar object for each
        numbers = ids.tolist() if hasattr(ids, "tolist") else ids
        return b"".join(self.piece(number, specials) for number in numbers).decode("utf-8", errors="replace")

    def piece(self, token: int, specials: bool = False) -> bytes:
        """The bytes that one id stands for; none for a special token unless specials=True."""
        index = operator.index(token)
        if not 0 <= index < len(self.pieces):
            raise TextError(f"token id {index} is out of range; this vocabulary has ids 0 to {len(self) - 1}")
        return self.pieces[index] if specials or index >= len(self.specials) else b""

    def stream(self, specials: bool = False) -> StreamDecoder:
        """A decoder for tokens that arrive one at a time."""
        return StreamDecoder(self, specials)

    def byte_lengths(self) -> np.ndarray:
        """How many bytes of text each id stands for, (V,) int32; 0 for special tokens."""
        return np.array([len(self.piece(token)) for token in range(len(self))], dtype=np.int32)

    def to_json(self) -> dict[str, Any]:
        """Everything about this tokenizer, as an object that `json` can write."""
        return {"format": FORMAT, "version": VERSION, "kind": self.kind, **self._state()}

    @staticmethod
    def from_json(data: object, source: str = "tokenizer") -> Tokenizer:
        """The tokenizer, of whichever kind, that `to_json` described. `source` names the file in errors."""
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise DataError(f'{source}: not a Headway tokenizer (no "format": "{FORMAT}" in it)')
        if data.get("version") != VERSION:
            found = repr(data.get("version"))
            raise DataError(f"{source}: tokenizer format version {found}; this Headway reads {VERSION}")
        kind = data.get("kind")
        if not isinstance(kind, str) or kind not in KINDS:
            raise DataError(f"{source}: no tokenizer is of kind {kind!r}{nearest(str(kind), KINDS)}")
        try:
            return KINDS[kind]._from_state(data)
        except UserError as error:
            raise DataError(f"{source}: damaged tokenizer ({error})") from None
        except Exception as error:  # the tokenizers library raises bare Exception
            raise DataError(f"{source}: damaged tokenizer ({type(error).__name__}: {error})") from error

    @abstractmethod
    def _state(self) -> dict[str, Any]:
        """What `to_json` has to add for this kind."""

    @classmethod
    @abstractmethod
    def _from_state(cls, state: dict[str, Any]) -> Tokenizer:
        """The inverse of `_state`. May raise anything on a damaged state."""

    def fingerprint(self) -> str:
        """16 hex digits, the same in every process, by which a run knows the tokenizer of its weights."""
        canonical = json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()[:16]

    def save(self, path: str | Path) -> None:
        """Write the JSON form. A reader sees the old file or the whole new one, never a part."""
        write_text(Path(path), json.dumps(self.to_json(), ensure_ascii=False) + "\n")


class StreamDecoder:
    """Decodes one token after another. What `feed` and a last `flush` return joins to what `decode` gives."""

    def __init__(self, tokenizer: Tokenizer, specials: bool = False) -> None:
        self._tokenizer = tokenizer
        self._specials = specials
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, token: int) -> str:
        """The characters that this token completes; a character's first bytes wait for the rest of it."""
        return self._decoder.decode(self._tokenizer.piece(token, self._specials))

    def flush(self) -> str:
        """What still waits, as U+FFFD if it is no whole character. The decoder is as new afterwards."""
        return self._decoder.decode(b"", final=True)


class Characters(Tokenizer):
    """A token a character. The special characters □ and ⁇ are reserved, as in the course's vocabulary."""

    kind = "characters"

    def __init__(self, characters: Iterable[str]) -> None:
        self.characters = "".join(characters)
        if len(set(self.characters)) != len(self.characters):
            raise TextError("a character stands twice in the vocabulary")
        _refuse_specials(self.characters)
        super().__init__(utf8(character) for character in self.characters)
        # The id of every code point up to the greatest known one; 0, which encodes nothing, means never seen.
        # One slot more stands for all that lie beyond.
        codes = _code_points(self.characters)
        self._table = np.zeros(int(codes.max(initial=0)) + 2, dtype=np.int32)
        self._table[codes] = np.arange(len(self.specials), len(self), dtype=np.int32)

    @classmethod
    def train(cls, texts: Iterable[str], size: int | None = None) -> Characters:
        """The distinct characters of the texts, sorted; always with the line end, which readers take off."""
        refuse_size(cls.kind, size)
        seen = {"\n"}
        for text in some_text(texts):
            _refuse_specials(text)
            seen.update(text)
        return cls(sorted(seen))

    def encode(self, text: str) -> list[int]:
        return self.encode_array(text).tolist()

    def encode_array(self, text: str) -> np.ndarray:
        ids = self._table[np.minimum(_code_points(text), len(self._table) - 1)]
        if not ids.all():
            raise never_seen(text, self.characters)
        return ids

    def _state(self) -> dict[str, Any]:
        return {"characters": self.characters}

    @classmethod
    def _from_state(cls, state: dict[str, Any]) -> Characters:
        return cls(state["characters"])


class Bytes(Tokenizer):
    """A token a byte of UTF-8: nothing to learn, and any text can be spelled."""

    kind = "bytes"

    def __init__(self) -> None:
        super().__init__(bytes([value]) for value in range(256))

    @classmethod
    def train(cls, texts: Iterable[str], size: int | None = None) -> Bytes:
        """The same tokenizer for all texts; they are only checked."""
        refuse_size(cls.kind, size)
        for _ in some_text(texts):
            pass
        return cls()

    def encode(self, text: str) -> list[int]:
        return self.encode_array(text).tolist()

    def encode_array(self, text: str) -> np.ndarray:
        return np.frombuffer(utf8(text), dtype=np.uint8).astype(np.int32) + len(self.specials)

    def _state(self) -> dict[str, Any]:
        return {}

    @classmethod
    def _from_state(cls, state: dict[str, Any]) -> Bytes:
        return cls()


class Words(Tokenizer):
    """Words and punctuation, each with the space in front of it. A rare word is spelled by its characters."""

    kind = "words"
    lead = " "
    longest = 64  # characters of a word that gets a token: what is longer is no word
    # A word (with inner apostrophes and hyphens), a sign, or one whitespace character: no text leaves a gap.
    pattern = re.compile(r" ?\w+(?:['’-]\w+)*| ?[^\w\s]|\s")

    def __init__(self, words: Iterable[str]) -> None:
        self.words = list(words)
        super().__init__(utf8(word) for word in self.words)
        self._ids = {word: token for token, word in enumerate(self.words, start=len(self.specials))}
        if len(self._ids) != len(self.words) or "" in self._ids:
            raise TextError("a piece of the vocabulary is empty or stands there twice")

    @classmethod
    def train(cls, texts: Iterable[str], size: int | None = None) -> Words:
        """Every character seen, sorted, then the longer pieces, the most frequent first.

        `size` is the greatest length of the whole vocabulary, special tokens and characters included.
        """
        counts: Counter[str] = Counter()
        characters = {"\n", " "}
        for text in some_text(texts):
            for part in parts(cls.lead + text):
                counts.update(cls.pattern.findall(part))
            characters.update(text)
        words = [word for word in counts if 1 < len(word) <= cls.longest]
        words.sort(key=lambda word: (-counts[word], word))
        if size is not None:
            least = len(SPECIALS) + len(characters)
            refuse_small(size, least, f"special tokens and {len(characters)} characters")
            words = words[: size - least]
        return cls(sorted(characters) + words)

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for word in (word for part in parts(text) for word in self.pattern.findall(part)):
            if word in self._ids:
                ids.append(self._ids[word])
            else:
                try:
                    ids.extend(self._ids[character] for character in word)
                except KeyError:
                    raise never_seen(text, (known for known in self.words if len(known) == 1)) from None
        return ids

    def unspaced(self) -> int:
        """How many words hold several characters of an UNSPACED script: they are parts of sentences, or whole ones."""
        several = re.compile(f"[{UNSPACED}].*[{UNSPACED}]")
        return sum(several.search(word) is not None for word in self.words)

    def _state(self) -> dict[str, Any]:
        return {"words": self.words}

    @classmethod
    def _from_state(cls, state: dict[str, Any]) -> Words:
        return cls(state["words"])


class BPE(Tokenizer):
    """Byte pairs merged by frequency, by the `tokenizers` library, from all 256 bytes up; spells any text.

    Pairs are merged within words. A word is a run of letters, digits or signs with the space in front of it; a
    character of an UNSPACED script is a word by itself, so that no token holds parts of two of them: a frequent one
    becomes a token, and a rare one is spelled by its bytes.

    The library knows nothing of special tokens. Its ids are moved up to make room for them, so that no text,
    not even one that looks like a special token, gets their ids.
    """

    kind = "bpe"
    lead = " "
    default_size = 4096

    def __init__(self, library_json: dict[str, Any]) -> None:
        """`library_json` is the `tokenizers` library's own description of a byte-level BPE tokenizer."""
        from tokenizers import Tokenizer as LibraryTokenizer

        self._library_json = library_json
        self._library = LibraryTokenizer.from_str(json.dumps(library_json))
        names = {token: name for name, token in self._library.get_vocab().items()}
        byte_of = byte_alphabet()
        super().__init__(bytes(byte_of[sign] for sign in names[token]) for token in range(len(names)))
        sample = "".join(map(chr, range(0x200)))
        if not set(byte_of) <= set(names.values()) or self.decode(self.encode_whole(sample)) != sample:
            raise TextError("not a byte-level BPE that can spell any text")

    @classmethod
    def train(cls, texts: Iterable[str], size: int | None = None) -> BPE:
        """Merge pairs seen at least twice until there are `size` tokens (4096 if None), specials included."""
        from tokenizers import Regex, decoders, models, pre_tokenizers, trainers
        from tokenizers import Tokenizer as LibraryTokenizer

        size = cls.default_size if size is None else size
        refuse_small(size, len(SPECIALS) + 256, "special tokens and 256 bytes")
        library = LibraryTokenizer(models.BPE())
        words = pre_tokenizers.ByteLevel(add_prefix_space=False)
        apart = pre_tokenizers.Split(Regex(f"[{UNSPACED}]"), behavior="isolated")
        library.pre_tokenizer = pre_tokenizers.Sequence([apart, words])
        library.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=size - len(SPECIALS),
            min_frequency=2,
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        unspaced = re.compile(f"[{UNSPACED}]")
        seen = False

        def read() -> Iterator[str]:
            nonlocal seen
            for text in some_text(texts):
                seen = seen or unspaced.search(text) is not None
                for part in parts(cls.lead + text):
                    yield from without_endless_words(part)

        heard_meanwhile(lambda texts: library.train_from_iterator(texts, trainer=trainer), read())
        if not seen:
            library.pre_tokenizer = words  # the rule that parted nothing is left out
        return cls(json.loads(library.to_str()))

    @cached_property
    def by_words(self) -> bool:
        """Whether it cuts words as GPT-2 does, with or without unspaced scripts, and changes nothing else."""
        cut = self._library_json.get("pre_tokenizer") or {}
        if cut.get("type") == "Sequence" and cut["pretokenizers"][:-1] == [APART]:
            cut = cut["pretokenizers"][-1]
        plain = cut.get("type") == "ByteLevel" and cut.get("use_regex", True) and not cut.get("add_prefix_space", True)
        changes = [self._library_json.get(key) for key in ("normalizer", "added_tokens", "truncation", "padding")]
        return plain and not any(changes) and not self._library_json["model"].get("dropout")

    def lookup(self, dtype: np.dtype) -> Lookup:
        """What finds the ids of words, as numbers of this type."""
        return Lookup(self._library, len(self.specials), dtype)

    @cached_property
    def _words(self) -> Lookup:
        return self.lookup(np.dtype(np.int32))

    def encode(self, text: str) -> list[int]:
        return self.encode_array(text).tolist()

    def encode_array(self, text: str) -> np.ndarray:
        if not self.by_words:
            return self.encode_whole(text)
        return np.frombuffer(self._words.encode(text), np.int32).copy()  # which may be written to, as those of others

    def encode_whole(self, text: str) -> np.ndarray:
        """The ids as the library finds them, in a text that it is given whole."""
        utf8(text)  # the library's own complaint about half a surrogate pair helps nobody
        return np.array(self._library.encode(text, add_special_tokens=False).ids, dtype=np.int32) + len(self.specials)

    def _state(self) -> dict[str, Any]:
        return {"tokenizers": self._library_json}

    @classmethod
    def _from_state(cls, state: dict[str, Any]) -> BPE:
        return cls(state["tokenizers"])


KINDS: dict[str, type[Tokenizer]] = {kind.kind: kind for kind in (Characters, Bytes, Words, BPE)}


def load(path: str | Path) -> Tokenizer:
    """The tokenizer in a file that `save` wrote. Raises DataError for a missing, damaged or foreign file."""
    try:
        data = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: not a Headway tokenizer: not JSON ({error})") from None
    return Tokenizer.from_json(data, source=str(path))


def heard_meanwhile(work: Callable[[Iterator[str]], object], texts: Iterable[str]) -> None:
    """Do something long with texts that is not Python's; what a signal raises meanwhile is heard, and ends the wait."""
    left, ended = threading.Event(), threading.Event()
    errors: list[BaseException] = []

    def read() -> Iterator[str]:
        for text in texts:
            if left.is_set():
                raise InterruptedError("nobody waits for it any more")
            yield text

    def run() -> None:
        try:
            work(read())
        except BaseException as error:
            errors.append(error)
        finally:
            ended.set()

    threading.Thread(target=run, daemon=True).start()
    try:
        while not ended.wait(0.1):
            pass
    finally:
        left.set()
        ended.wait(LEAVES)
    if errors:
        raise errors[0]


def _code_points(text: str) -> np.ndarray:
    """The code points of a text, (characters,) uint32. Half a surrogate pair is let through as one."""
    return np.frombuffer(text.encode("utf-32-le", errors="surrogatepass"), dtype="<u4")


def _refuse_specials(text: str) -> None:
    """For a vocabulary of characters, in which the signs of the special tokens are taken."""
    for special, use in ((PAD, "padding"), (MASK, "the mask")):
        if (place := text.find(special)) >= 0:
            raise TextError(
                f"{named(special)} at character {place + 1} is reserved for {use}; "
                'leave it out, or train with tokenizer.kind = "bytes", "words" or "bpe"'
            )
