"""The tokenizer that a user names: a file of Hugging Face `tokenizers`, or bytes."""

from typing import Final

from trackbed.datasets.adapters import ByteTokenizer, HuggingFaceTokenizer
from trackbed.errors import ArgumentError

__all__ = ["BYTES", "open_tokenizer"]

BYTES: Final = "bytes"
"""Names the tokenizer whose ids are the bytes of a text."""


def open_tokenizer(
    name: str, *, eod_token: str | None = None, special_tokens: bool = False
) -> ByteTokenizer | HuggingFaceTokenizer:
    """The tokenizer in the JSON file `name`, or the one whose ids are bytes.

    Args:
        name: path of a file of Hugging Face `tokenizers`, or `bytes`.
        eod_token: token that ends a document; by default the first of the usual ones that the tokenizer has.
        special_tokens: whether special tokens written out in a text become their ids.

    Raises:
        ArgumentError: the file is no tokenizer, or lacks the end-of-document token; or the byte tokenizer is
            told about tokens, of which it has none.
    """
    if name != BYTES:
        return HuggingFaceTokenizer(name, eod_token=eod_token, special_tokens=special_tokens)
    if eod_token is not None or special_tokens:
        chosen = "special_tokens" if eod_token is None else f"eod_token {eod_token!r}"
        msg = f"the tokenizer {BYTES!r} must be used without options, as it has no such tokens, found {chosen}"
        raise ArgumentError(msg)
    return ByteTokenizer()
