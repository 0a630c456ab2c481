"""Tokenizers in which a library in Rust panics at a text."""

import tiktoken
import tokenizers

from tests.support.files.tokenizer_files import byte_level_bpe

PANICS_AT = "\U0001f642"


def encoding_with_a_hole() -> tiktoken.Encoding:
    """An encoding of tiktoken without the byte 0xF4, at which the library panics."""
    ranks = {bytes([byte]): rank for rank, byte in enumerate(byte for byte in range(256) if byte != 0xF4)}
    special = {"<|endoftext|>": 255}
    return tiktoken.Encoding("hole", pat_str=r"\w+|\s+|[^\w\s]", mergeable_ranks=ranks, special_tokens=special)


def panicking_tokenizer() -> tokenizers.Tokenizer:
    """A tokenizer of the library whose normalizer panics at a text that is one emoji."""
    library = byte_level_bpe(["<|endoftext|>"])
    library.normalizer = tokenizers.normalizers.Replace(tokenizers.Regex(r"\s*"), "_")
    return library


def panic() -> None:
    """Raises a panic of a library in Rust."""
    panicking_tokenizer().encode(PANICS_AT)
