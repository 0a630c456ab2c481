"""Opening tokenizers by name."""

import os
import re
from pathlib import Path
from typing import Any, Final

from trackbed.datasets.tokenizers.base import MegatronIdentity, OpenedAs
from trackbed.datasets.tokenizers.bytes_and_numbers import ByteTokenizer, NullTokenizer
from trackbed.datasets.tokenizers.huggingface import HuggingFaceTokenizer
from trackbed.datasets.tokenizers.huggingface_folder import OnlyTransformersError
from trackbed.datasets.tokenizers.sentencepiece import SentencePieceTokenizer
from trackbed.datasets.tokenizers.tiktoken import TiktokenTokenizer
from trackbed.datasets.tokenizers.transformers import TransformersTokenizer
from trackbed.datasets.tokenizers.wordpiece import WordPieceTokenizer
from trackbed.errors import ArgumentError

BYTES: Final = "bytes"
"""Name of the tokenizer whose ids are the UTF-8 bytes of a text."""

_TIKTOKEN: Final = "tiktoken:"
_NULL: Final = "null:"
_SENTENCEPIECE: Final = ".model"
_WORDPIECE: Final = ".txt"

AnyTokenizer = (
    ByteTokenizer
    | HuggingFaceTokenizer
    | NullTokenizer
    | SentencePieceTokenizer
    | TiktokenTokenizer
    | TransformersTokenizer
    | WordPieceTokenizer
)


def is_path(name: str) -> bool:
    """True if the name of a tokenizer is the path of a file or folder.

    >>> [is_path(name) for name in ("a/vocab.txt", "bytes", "null:7", "tiktoken:gpt2")]
    [True, False, False, False]
    """
    return name != BYTES and not name.startswith((_TIKTOKEN, _NULL))


def is_wordpiece(name: str) -> bool:
    """True if a tokenizer's name is of a WordPiece vocabulary, which `lower_case` is for."""
    return is_path(name) and name.endswith(_WORDPIECE) and not Path(name).is_dir()


def maps_special_tokens(name: str) -> bool:
    """True if a tokenizer's name is of a kind that can map special tokens written out in a text to their ids.

    >>> [maps_special_tokens(name) for name in ("tokenizer.json", "bytes", "llama.model")]
    [True, False, False]
    """
    is_model = name.endswith(_SENTENCEPIECE) and not Path(name).is_dir()
    return name != BYTES and not name.startswith(_NULL) and not is_model


def open_tokenizer(
    name: str | os.PathLike[str],
    *,
    megatron_identity: MegatronIdentity | None = None,
    lower_case: bool = False,
    eod_token: str | None = None,
    pad_token: str | None = None,
    special_tokens: bool = False,
) -> AnyTokenizer:
    """Opens the tokenizer with a given name.

    Args:
        name: path of a file of Hugging Face `tokenizers` (`tokenizer.json`), of a folder of Hugging Face files, of a
            WordPiece vocabulary, which ends in `.txt`, or of a SentencePiece model, which ends in `.model`; or
            `tiktoken:` and the name of an encoding; or `bytes`; or `null:` and the `vocab_size` of a `NullTokenizer`.
        megatron_identity: identity of the tokenizer in a Megatron job that shares the cache.
        lower_case: True for a WordPiece vocabulary of lower-case text.
        eod_token: token that ends a document; by default the first one found of several common names, or the one that
            the file states.
        pad_token: token that pads short samples; by default the one that the file states.
        special_tokens: if True, special tokens written out in a text become their ids.

    Raises:
        ArgumentError: the file is no tokenizer, or lacks a token that was named; the library is not installed; or the
            options name tokens that the tokenizer does not have or does not recognise.
    """
    opened = _open(
        _checked(name),
        megatron_identity=megatron_identity,
        lower_case=lower_case,
        eod_token=eod_token,
        pad_token=pad_token,
        special_tokens=special_tokens,
    )
    opened.opened_as = OpenedAs(
        name=os.fspath(name), lower_case=lower_case, eod_token=eod_token, special_tokens=special_tokens
    )
    return opened


def _open(
    name: str,
    *,
    megatron_identity: MegatronIdentity | None,
    lower_case: bool,
    eod_token: str | None,
    pad_token: str | None,
    special_tokens: bool,
) -> AnyTokenizer:
    """Opens the tokenizer of the kind that its name states."""
    if lower_case and not is_wordpiece(name):
        raise ArgumentError(
            f"{name}: must be a WordPiece vocabulary ({_WORDPIECE}) with lower_case, found another kind of tokenizer"
        )
    if name == BYTES or name.startswith(_NULL):
        _refuse_tokens(name, eod_token, pad_token, special_tokens=special_tokens)
        if name == BYTES:
            return ByteTokenizer(megatron_identity=megatron_identity)
        return NullTokenizer(_vocab_size(name), megatron_identity=megatron_identity)
    named: dict[str, Any] = {"eod_token": eod_token, "pad_token": pad_token, "megatron_identity": megatron_identity}
    if name.endswith(_SENTENCEPIECE) and not Path(name).is_dir():
        if special_tokens:
            raise ArgumentError(
                f"{name}: a SentencePiece model must be used without special_tokens, as it recognises none in a text"
            )
        return SentencePieceTokenizer(name, **named)
    named["special_tokens"] = special_tokens
    if name.startswith(_TIKTOKEN):
        return TiktokenTokenizer(name.removeprefix(_TIKTOKEN), **named)
    if is_wordpiece(name):
        return WordPieceTokenizer(name, lower_case=lower_case, **named)
    try:
        return HuggingFaceTokenizer(name, **named)
    except OnlyTransformersError:
        return TransformersTokenizer(name, **named)


def _checked(name: object) -> str:
    """Returns a name as text, if it can be one."""
    text = os.fspath(name) if isinstance(name, os.PathLike) else name
    if not isinstance(text, str) or not text or "\0" in text:
        raise ArgumentError(f"the name of a tokenizer must be a path, or text such as 'bytes', found {name!r}")
    try:
        if is_path(text):
            Path(text).stat()
    except FileNotFoundError:
        pass  # each kind says what it looked for
    except OSError as error:
        raise ArgumentError(
            f"{text[:200]}: must be a file or folder that can be looked up, found: {error.strerror}"
        ) from error
    return text


def _refuse_tokens(name: str, eod_token: str | None, pad_token: str | None, *, special_tokens: bool) -> None:
    """Refuses options that a tokenizer without a vocabulary of tokens would ignore."""
    given = [f"eod_token {eod_token!r}"] if eod_token is not None else []
    given += [f"pad_token {pad_token!r}"] if pad_token is not None else []
    given += ["special_tokens"] if special_tokens else []
    if given:
        raise ArgumentError(
            f"the tokenizer {name!r} must be used without options, as it has no such tokens, found {given[0]}"
        )


def _vocab_size(name: str) -> int:
    """Returns N of `null:N`."""
    digits = name.removeprefix(_NULL)
    if not re.fullmatch(r"[0-9]{1,10}", digits):
        raise ArgumentError(f"the tokenizer {_NULL}N must have a decimal number N of ids, found {digits[:40]!r}")
    return int(digits)
