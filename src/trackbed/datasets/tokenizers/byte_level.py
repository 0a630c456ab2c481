"""Bytes of text that the tokens of a byte-level tokenizer stand for.

In a vocabulary of byte-level BPE, a character of a token stands for one byte, so lengths of tokens are enough to say
which part of a text each of them is made of.
"""

import json
from typing import Any

import numpy as np
import numpy.typing as npt
import tokenizers


def byte_lengths(library: tokenizers.Tokenizer) -> npt.NDArray[np.int64] | None:
    """Returns the number of bytes that each id stands for; None if the tokenizer is not at the level of bytes.

    Args:
        library: a tokenizer of the library.
    """
    stated = json.loads(library.to_str())
    if (stated["model"].get("type") or "BPE") != "BPE" or not _keeps_bytes(stated):
        return None
    lengths = np.zeros(max(library.get_vocab(with_added_tokens=True).values(), default=-1) + 1, dtype=np.int64)
    for token, index in stated["model"]["vocab"].items():
        lengths[index] = len(token)
    for index, token in library.get_added_tokens_decoder().items():
        lengths[index] = len(token.content.encode())
    return lengths


def _keeps_bytes(stated: dict[str, Any]) -> bool:
    """True if a tokenizer maps each byte of a text to a character, and changes none but by normal form C."""
    normalizers, steps = (
        _steps(stated.get("normalizer"), "normalizers"),
        _steps(stated.get("pre_tokenizer"), "pretokenizers"),
    )
    bytes_of = [one for one in steps if one["type"] == "ByteLevel"]
    others = [one for one in steps if one["type"] != "ByteLevel"]
    return (
        all(one["type"] == "NFC" for one in normalizers)
        and len(bytes_of) == 1
        and not bytes_of[0].get("add_prefix_space")
        and all(one["type"] in ("Split", "Digits") and one.get("behavior") != "Removed" for one in others)
    )


def _steps(found: dict[str, Any] | None, name: str) -> list[dict[str, Any]]:
    if found is None:
        return []
    return list(found[name]) if found["type"] == "Sequence" else [found]
