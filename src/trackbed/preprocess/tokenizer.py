"""The tokenizer that a user names."""

import logging
from typing import Final

from trackbed.datasets.adapters import ByteTokenizer, HuggingFaceTokenizer
from trackbed.datasets.fast_tokenizer import FastTokenizer, UnsuitableError
from trackbed.datasets.sentencepiece_adapter import SentencePieceTokenizer
from trackbed.datasets.tiktoken_adapter import TiktokenTokenizer
from trackbed.errors import ArgumentError

__all__ = ["BYTES", "TIKTOKEN", "AnyTokenizer", "open_fastest_tokenizer", "open_tokenizer"]

BYTES: Final = "bytes"
"""Names the tokenizer whose ids are the bytes of a text."""

TIKTOKEN: Final = "tiktoken:"
"""Begins the name of an encoding of tiktoken's."""

_SENTENCEPIECE: Final = ".model"

AnyTokenizer = ByteTokenizer | HuggingFaceTokenizer | SentencePieceTokenizer | TiktokenTokenizer

logger = logging.getLogger(__name__)


def open_tokenizer(name: str, *, eod_token: str | None = None, special_tokens: bool = False) -> AnyTokenizer:
    """The tokenizer that a name stands for.

    Args:
        name: path of a file of Hugging Face `tokenizers`, or of a model of SentencePiece, which ends in `.model`; or
            `tiktoken:` and the name of an encoding; or `bytes`.
        eod_token: token that ends a document; by default the usual one, or the first of several usual ones.
        special_tokens: whether special tokens written out in a text become their ids.

    Raises:
        ArgumentError: the file is no tokenizer, or lacks the end-of-document token; the library is not installed;
            or the tokenizer is told about tokens that it does not have or does not look for.
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
            msg = f"{name}: a model of SentencePiece must be used without special_tokens, as it finds none in a text"
            raise ArgumentError(msg)
        return SentencePieceTokenizer(name, eod_token=eod_token)
    return HuggingFaceTokenizer(name, eod_token=eod_token, special_tokens=special_tokens)


def open_fastest_tokenizer(name: str, *, eod_token: str | None = None, special_tokens: bool = False) -> AnyTokenizer:
    """As `open_tokenizer`, for tokenising much: a library that gives the same ids faster, where there is one.

    Files of Hugging Face `tokenizers` go to fastokens if that is installed, can read them, and finds the ids that
    `tokenizers` finds in texts of many kinds, which takes a second. If not, a warning in the log says why.

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
        logger.warning("%s: tokenizers does the work, at a small part of the speed: %s", name, error)
    return open_tokenizer(name, eod_token=eod_token, special_tokens=special_tokens)
