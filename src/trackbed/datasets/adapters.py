"""Built-in tokenizers: Hugging Face `tokenizers` files, bytes, and numbers written as text."""

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import tokenizers

from trackbed.datasets.tokenizer import MegatronTokenizer
from trackbed.errors import ArgumentError

__all__ = [
    "END_OF_DOCUMENT_TOKENS",
    "ByteTokenizer",
    "HuggingFaceTokenizer",
    "MegatronIdentity",
    "NullTokenizer",
]

END_OF_DOCUMENT_TOKENS: Final = ("<|endoftext|>", "<|end_of_text|>", "<eod>", "</s>")
"""Candidates for the default end-of-document token: the first one in the vocabulary is used."""


@dataclass(frozen=True, slots=True)
class MegatronIdentity:
    """Identity of a tokenizer of Megatron Core, as it appears in the names of cached indices.

    A real Megatron job finds an index only if its tokenizer has the identity with which the index was built.
    """

    class_path: str
    """Module and class, for instance that of `DefaultTokenizerText` in megatron-core 0.16.1."""
    path: str | None = None
    """Path given to `MegatronTokenizer.from_pretrained`."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments given to `from_pretrained`, in their order."""

    def unique_identifiers(self) -> "OrderedDict[str, Any]":
        """Returns the identifiers that Megatron Core hashes."""
        named = {name: str(value) for name, value in self.options.items()}
        return OrderedDict([("class", self.class_path), ("tokenizer_path", self.path), *named.items()])


class _Adapter(MegatronTokenizer):
    """Base of the built-in tokenizers: replaces the identity by that of a Megatron tokenizer if one is given."""

    def __init__(self, *paths: str, megatron_identity: MegatronIdentity | None, **options: Any) -> None:
        super().__init__(*paths, **options)
        if megatron_identity is not None:
            self.unique_identifiers = megatron_identity.unique_identifiers()


class HuggingFaceTokenizer(_Adapter):
    """Tokenizer from a file of Hugging Face `tokenizers` (`tokenizer.json`).

    Text that reads like a special token is tokenised as plain text unless `special_tokens` is True.

    Args:
        path: the JSON file.
        eod_token: token that ends a document; by default the first of `END_OF_DOCUMENT_TOKENS` in the vocabulary.
        pad_token: token that pads short samples, or None.
        special_tokens: True to map special tokens written out in a text to their ids.
        megatron_identity: identity of the tokenizer in a Megatron job that shares the cache.

    Raises:
        ArgumentError: the file is not a tokenizer, or lacks a token that was named. If no end-of-document token
            was named and the default is missing, `eod` raises it.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        eod_token: str | None = None,
        pad_token: str | None = None,
        special_tokens: bool = False,
        megatron_identity: MegatronIdentity | None = None,
    ) -> None:
        self._tokenizer = _load(Path(path))
        self._tokenizer.encode_special_tokens = not special_tokens
        self._special_tokens = special_tokens
        self._path = str(path)
        self._eod = None if eod_token is None else find_token(self._tokenizer, [eod_token], path=str(path))
        self._pad = None if pad_token is None else find_token(self._tokenizer, [pad_token], path=str(path))
        options = {"eod_token": eod_token, "pad_token": pad_token, "special_tokens": special_tokens or None}
        super().__init__(
            str(path),
            megatron_identity=megatron_identity,
            **{name: value for name, value in options.items() if value is not None},
        )

    def __getstate__(self) -> dict[str, Any]:
        return vars(self).copy()

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        # The library does not pickle this setting.
        self._tokenizer.encode_special_tokens = not self._special_tokens

    def tokenize(self, text: str) -> npt.NDArray[np.int64]:
        return np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.int64)

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns the token ids of each text, as `tokenize`, on all cores that the library may use."""
        return [found.ids for found in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)]

    @property
    def fingerprint(self) -> str:
        """String that changes when the ids change: SHA-256 of the tokenizer, marked if special tokens are mapped."""
        digest = hashlib.sha256(self._tokenizer.to_str().encode()).hexdigest()
        return f"{digest}{' special' if self._special_tokens else ''}"

    def detokenize(self, ids: npt.NDArray[np.integer[Any]]) -> str:
        return str(self._tokenizer.decode(np.asarray(ids).tolist(), skip_special_tokens=False))

    @property
    def vocab(self) -> dict[str, int]:
        return dict(self._tokenizer.get_vocab(with_added_tokens=True))

    @property
    def inv_vocab(self) -> dict[int, str]:
        return {index: token for token, index in self.vocab.items()}

    @property
    def vocab_size(self) -> int:
        return max(self.vocab.values()) + 1

    @property
    def eod(self) -> int:
        if self._eod is None:
            self._eod = find_token(self._tokenizer, END_OF_DOCUMENT_TOKENS, path=self._path)
        return self._eod

    @property
    def pad(self) -> int:
        if self._pad is None:
            self._lacks("pad")
        return self._pad


class ByteTokenizer(_Adapter):
    """Tokenizer whose ids are the UTF-8 bytes of a text; 256 ends a document.

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
        return "<eod>".join(texts)

    @property
    def vocab(self) -> dict[str, int]:
        return {token: index for index, token in self.inv_vocab.items()}

    @property
    def inv_vocab(self) -> dict[int, str]:
        return {**{byte: f"<0x{byte:02X}>" for byte in range(256)}, 256: "<eod>"}

    @property
    def vocab_size(self) -> int:
        return 257


class NullTokenizer(_Adapter):
    """Tokenizer for texts of decimal numbers separated by spaces, which are the ids.

    Args:
        vocab_size: ids are in `[0, vocab_size]`; the last one ends a document, as in megatron-core 0.16.1.
        megatron_identity: identity of the tokenizer in a Megatron job that shares the cache.

    >>> NullTokenizer(100).tokenize("5 7").tolist()
    [5, 7]
    """

    def __init__(self, vocab_size: int, *, megatron_identity: MegatronIdentity | None = None) -> None:
        if vocab_size < 1:
            msg = f"vocab_size must be at least 1, found {vocab_size}"
            raise ArgumentError(msg)
        super().__init__(megatron_identity=megatron_identity, vocab_size=vocab_size)
        self._ids = int(vocab_size)

    @property
    def eod(self) -> int:
        return self._ids

    def tokenize(self, text: str) -> npt.NDArray[np.int64]:
        return np.array([int(word) for word in text.split()], dtype=np.int64)

    def tokenize_batch(self, texts: Sequence[str]) -> list[npt.NDArray[np.int64]]:
        """Returns the token ids of each text."""
        return [self.tokenize(text) for text in texts]

    def detokenize(self, ids: npt.NDArray[np.integer[Any]]) -> str:
        return " ".join(map(str, np.asarray(ids).tolist()))

    @property
    def vocab(self) -> dict[str, int]:
        return {str(index): index for index in range(self.vocab_size)}

    @property
    def inv_vocab(self) -> dict[int, str]:
        return {index: str(index) for index in range(self.vocab_size)}

    @property
    def vocab_size(self) -> int:
        return self._ids + 1


def find_token(tokenizer: tokenizers.Tokenizer, candidates: Iterable[str], *, path: str) -> int:
    """Returns the id of the first of the candidates in the vocabulary.

    Raises:
        ArgumentError: there is none; the message lists the tokenizer's special tokens.
    """
    wanted = list(candidates)
    for token in wanted:
        found = tokenizer.token_to_id(token)
        if found is not None:
            return int(found)
    added = tokenizer.get_added_tokens_decoder().values()
    special = ", ".join(repr(token.content) for token in added if token.special) or "none"
    msg = f"{path}: the tokenizer must have one of {', '.join(map(repr, wanted))}; its special tokens: {special}"
    raise ArgumentError(msg)


def _load(path: Path) -> tokenizers.Tokenizer:
    if not path.is_file():
        msg = f"{path}: a tokenizer file must exist, found none"
        raise ArgumentError(msg)
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:
        msg = f"{path}: must be a file of Hugging Face tokenizers: {error}"
        raise ArgumentError(msg) from error
    # A file may enable both for inference; a document must keep all of its tokens and no others.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
