"""Text in, tokens out: readers for a user's files and the tokenizers that cut them into pieces."""

from headway.text.plain import Notes
from headway.text.readers import Pair, read_documents, read_lines, read_pairs, read_parallel, read_text
from headway.text.tokenizers import BPE, KINDS, Bytes, Characters, StreamDecoder, Tokenizer, Words
from headway.text.tokenizers import load as load_tokenizer

__all__ = [
    "BPE",
    "KINDS",
    "Bytes",
    "Characters",
    "Notes",
    "Pair",
    "StreamDecoder",
    "Tokenizer",
    "Words",
    "load_tokenizer",
    "read_documents",
    "read_lines",
    "read_pairs",
    "read_parallel",
    "read_text",
]
