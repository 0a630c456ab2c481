"""Opening tokenizers by name."""

import logging
from typing import Final

from trackbed.datasets.adapters import ByteTokenizer, HuggingFaceTokenizer
from trackbed.datasets.fast_tokenizer import FastTokenizer, UnsuitableError
from trackbed.datasets.sentencepiece_adapter import SentencePieceTokenizer
from trackbed.datasets.tiktoken_adapter import TiktokenTokenizer
from trackbed.errors import ArgumentError

__all__ = ["BYTES", "TIKTOKEN", "AnyTokenizer", "open_fastest_tokenizer", "open_tokenizer"]

BYTES: Final = "bytes"
"""Name of the tokenizer whose ids are the UTF-8 bytes of a text."""

TIKTOKEN: Final = "tiktoken:"
"""Prefix of the name of a tiktoken encoding."""

_SENTENCEPIECE: Final = ".model"

AnyTokenizer = ByteTokenizer | HuggingFaceTokenizer | SentencePieceTokenizer | TiktokenTokenizer

logger = logging.getLogger(__name__)


def open_tokenizer(name: str, *, eod_token: str | None = None, special_tokens: bool = False) -> AnyTokenizer:
    """Opens the tokenizer with a given name.

    Args:
        name: path of a Hugging Face `tokenizers` file, or of a SentencePiece model, which ends in `.model`; or
            `tiktoken:` followed by the name of an encoding; or `bytes`.
        eod_token: end-of-document token; by default the first one found of several common names.
        special_tokens: if True, special tokens written out in a text become their ids.

    Raises:
        ArgumentError: the file is no tokenizer, or lacks the end-of-document token; the library is not installed;
            or the options name tokens that the tokenizer does not have or does not recognise.
    """
    if name == BYTES:
        if eod_token is not None or special_tokens:
            chosen = "special_tokens" if eod_token is None else f"eod_token {eod_token!r}"
            msg = f"the tokenizer {BYTES!r} must be used without options, as it has no such tokens, found {chosen}"
            raise ArgumentError(msg)
        return ByteTokenizer()
    if name.startswith(TIKTOKEN):
        encoding = name.removeprefix(TIKTOKEN)
        return TiktokenTokenizer(encoding, eod_token=eod_token, special_tokens=special_tokens)
    if name.endswith(_SENTENCEPIECE):
        if special_tokens:
            msg = f"{name}: a SentencePiece model must be used without special_tokens, as it recognises none in a text"
            raise ArgumentError(msg)
        return SentencePieceTokenizer(name, eod_token=eod_token)
    return HuggingFaceTokenizer(name, eod_token=eod_token, special_tokens=special_tokens)


def open_fastest_tokenizer(name: str, *, eod_token: str | None = None, special_tokens: bool = False) -> AnyTokenizer:
    """Opens a tokenizer with the fastest library that produces the same ids as that of `open_tokenizer`.

    For files of Hugging Face `tokenizers`, uses fastokens if it is installed, can read the file, and produces the same
    ids as `tokenizers` on texts of many kinds; this check takes a second. Otherwise logs a warning with the reason.

    Args:
        name: as for `open_tokenizer`.
        eod_token: as for `open_tokenizer`.
        special_tokens: as for `open_tokenizer`.

    Raises:
        ArgumentError: as `open_tokenizer`.
    """
    if name == BYTES or name.startswith(TIKTOKEN) or name.endswith(_SENTENCEPIECE):
        return open_tokenizer(name, eod_token=eod_token, special_tokens=special_tokens)
    try:
        return FastTokenizer(name, eod_token=eod_token, special_tokens=special_tokens)
    except UnsuitableError as error:
        logger.warning("%s: using tokenizers instead of the much faster fastokens: %s", name, error)
    return open_tokenizer(name, eod_token=eod_token, special_tokens=special_tokens)
