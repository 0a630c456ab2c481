"""Tokenizers without a file: bytes, and numbers written as text."""

import re
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from trackbed.datasets.megatron_releases import last_null_id
from trackbed.datasets.tokenizers.base import Adapter, MegatronIdentity
from trackbed.errors import ArgumentError

_EOD_TEXT: Final = "<eod>"
_LARGEST_ID: Final = 2**31 - 1  # tokens are at most int32


class ByteTokenizer(Adapter):
    """Tokenizer whose ids are the UTF-8 bytes of a text; 256 ends a document.

    Args:
        megatron_identity: identity of the tokenizer in a Megatron job that shares the cache.

    >>> ByteTokenizer().tokenize("hi").tolist()
    [104, 105]
    """

    def __init__(self, *, megatron_identity: MegatronIdentity | None = None) -> None:
        super().__init__(megatron_identity=megatron_identity)

    @property
    def eod(self) -> int:
        return 256

    def tokenize(self, text: str) -> npt.NDArray[np.uint8]:
        return np.frombuffer(text.encode(), dtype=np.uint8)

    def tokenize_batch(self, texts: Sequence[str]) -> list[npt.NDArray[np.uint8]]:
        """Returns the token ids of each text."""
        return [self.tokenize(text) for text in texts]

    @property
    def fingerprint(self) -> str:
        """String that changes when the ids change."""
        return "bytes"

    def detokenize(self, ids: npt.NDArray[np.integer[Any]]) -> str:
        """Returns the text; invalid UTF-8 becomes the replacement character, the end of a document `<eod>`."""
        parts = np.split(np.asarray(ids), np.flatnonzero(np.asarray(ids) >= 256))
        texts = [part[part < 256].astype(np.uint8).tobytes().decode(errors="replace") for part in parts]
        return _EOD_TEXT.join(texts)

    @property
    def byte_lengths(self) -> npt.NDArray[np.int64]:
        """One byte for each id but the end of a document, which no text has."""
        return np.array([*[1] * 256, 0], dtype=np.int64)

    def offsets(self, ids: list[int], text: str) -> list[int]:
        """Returns the character of the text at which each of the ids begins; a byte inside one begins with it.

        Raises:
            ArgumentError: the ids are not those of the text.
        """
        is_own = (
            all(0 <= token < self.vocab_size for token in ids) and self.detokenize(np.array(ids, dtype=int)) == text
        )
        self._check_own(ids, list(ids) if is_own else [], text)
        return char_offsets(bytes([token]) if token < 256 else _EOD_TEXT.encode() for token in ids)

    @cached_property
    def vocab(self) -> dict[str, int]:
        return {**{f"<0x{byte:02X}>": byte for byte in range(256)}, _EOD_TEXT: 256}

    @property
    def vocab_size(self) -> int:
        return 257


class NullTokenizer(Adapter):
    """Tokenizer for texts of decimal numbers separated by spaces, which are the ids.

    Args:
        vocab_size: ids are in `[0, vocab_size]`, the last of which ends a document.
        megatron_identity: identity of the tokenizer in a Megatron job that shares the cache.
        release: release of Megatron Core whose `NullTokenizer` this equals: from 0.18 on, ids are in `[0, vocab_size)`.

    Raises:
        ArgumentError: `vocab_size` is below 1, or the end of a document is beyond int32.

    >>> NullTokenizer(100).tokenize("5 7").tolist()
    [5, 7]
    >>> NullTokenizer(100, release="0.19").eod
    99
    """

    def __init__(
        self, vocab_size: int, *, megatron_identity: MegatronIdentity | None = None, release: str = "0.16.1"
    ) -> None:
        if not 1 <= vocab_size <= _LARGEST_ID:
            raise ArgumentError(f"vocab_size must be in [1, {_LARGEST_ID}], found {vocab_size}")
        super().__init__(megatron_identity=megatron_identity, vocab_size=vocab_size)
        self._ids = last_null_id(release, int(vocab_size))

    @property
    def eod(self) -> int:
        return self._ids

    def tokenize(self, text: str) -> npt.NDArray[np.int64]:
        """Returns `[T]` token ids of a text.

        Raises:
            ArgumentError: the text has something other than numbers in `[0, vocab_size]`.
        """
        try:
            ids = np.array([int(word) for word in text.split()], dtype=np.int64)
        except (ValueError, OverflowError) as error:
            raise ArgumentError(
                f"a text must be decimal numbers in [0, {self._ids}], found {text[:40]!r}: {error}"
            ) from None
        outside = ids[(ids < 0) | (ids > self._ids)]
        if len(outside):
            raise ArgumentError(f"a text must be decimal numbers in [0, {self._ids}], found {outside[0]}")
        return ids

    def tokenize_batch(self, texts: Sequence[str]) -> list[npt.NDArray[np.int64]]:
        """Returns the token ids of each text."""
        return [self.tokenize(text) for text in texts]

    @property
    def fingerprint(self) -> str:
        """String that changes when the ids change."""
        return f"null {self._ids}"

    def detokenize(self, ids: npt.NDArray[np.integer[Any]]) -> str:
        return " ".join(map(str, np.asarray(ids).tolist()))

    def offsets(self, ids: list[int], text: str) -> list[int]:
        """Returns the character of the text at which each of its numbers begins.

        Raises:
            ArgumentError: the ids are not those of the text.
        """
        self._check_own(ids, self.tokenize(text).tolist(), text)
        return [word.start() for word in re.finditer(r"\S+", text)]

    @cached_property
    def vocab(self) -> dict[str, int]:
        return {str(index): index for index in range(self.vocab_size)}

    @property
    def vocab_size(self) -> int:
        return self._ids + 1


def char_offsets(tokens: Iterable[bytes]) -> list[int]:
    r"""Returns the character at which each token begins, in the text of their concatenated UTF-8.

    A token that begins inside a character is said to begin with it.

    >>> char_offsets([b"na", b"\xc3", b"\xafve"])
    [0, 2, 2]
    """
    offsets = []
    num_chars = 0
    for token in tokens:
        offsets.append(max(num_chars - _is_inside(token[0]), 0) if token else num_chars)
        num_chars += sum(not _is_inside(byte) for byte in token)
    return offsets


def _is_inside(byte: int) -> bool:
    """True if the byte continues a character."""
    return 0x80 <= byte < 0xC0
