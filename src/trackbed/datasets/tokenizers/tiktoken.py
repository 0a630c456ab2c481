"""Tokenizer from a tiktoken encoding."""

import copy
import hashlib
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from trackbed.datasets.extras import require
from trackbed.datasets.tokenizers.base import Adapter, MegatronIdentity
from trackbed.datasets.tokenizers.bytes_and_numbers import char_offsets
from trackbed.datasets.tokenizers.rust_libraries import panics_as_errors
from trackbed.datasets.tokenizers.special_tokens import additional_ids, end_of_document, no_end_of_document, usual_roles
from trackbed.errors import ArgumentError


class TiktokenTokenizer(Adapter):
    """Tokenizer from an encoding of tiktoken, such as `cl100k_base`, or of one of its plugins.

    tiktoken downloads its encodings if the folder `TIKTOKEN_CACHE_DIR` lacks them. Text that reads like a special token
    is tokenised as plain text unless `special_tokens` is True. The roles of special tokens but padding go by their
    usual names, such as `<|endoftext|>` and `<cls>`.

    Args:
        encoding: name of the encoding.
        eod_token: token that ends a document; by default `<|endoftext|>`, or else another special token with a usual
            name.
        pad_token: token that pads short samples, or None.
        special_tokens: True to map special tokens written out in a text to their ids.
        megatron_identity: identity of the tokenizer in a Megatron job that shares the cache.

    Raises:
        ArgumentError: tiktoken is not installed, does not have the encoding, or the encoding lacks the token.
    """

    def __init__(
        self,
        encoding: str,
        *,
        eod_token: str | None = None,
        pad_token: str | None = None,
        special_tokens: bool = False,
        megatron_identity: MegatronIdentity | None = None,
    ) -> None:
        super().__init__(
            encoding,
            megatron_identity=megatron_identity,
            eod_token=eod_token,
            pad_token=pad_token,
            special_tokens=special_tokens or None,
        )
        self._encoding = _load(encoding)
        self._special_tokens = special_tokens
        self._eod_token = eod_token
        if eod_token is not None:
            self._find(eod_token)
        self._pad = None if pad_token is None else self._find(pad_token)

    def tokenize(self, text: str) -> npt.NDArray[np.int64]:
        """Returns `[T]` token ids of a text."""
        return np.array(self._encode(text), dtype=np.int64)

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns the token ids of each text, on one core."""
        return [self._encode(text) for text in texts]

    @property
    def fingerprint(self) -> str:
        """String that changes when the ids change, except with the split pattern of an encoding of the same name."""
        digest = hashlib.sha256(b"\0".join(self._encoding.token_byte_values())).hexdigest()
        return f"{self._encoding.name} {digest}{' special' if self._special_tokens else ''}"

    def detokenize(self, ids: npt.NDArray[np.integer[Any]]) -> str:
        """Returns the text of token ids; invalid UTF-8 becomes the replacement character."""
        return str(self._encoding.decode(np.asarray(ids).tolist()))

    def offsets(self, ids: list[int], text: str) -> list[int]:
        """Returns the character of the text at which each of the ids begins; one inside a character begins with it."""
        return char_offsets(self._encoding.decode_tokens_bytes(list(ids)))

    @cached_property
    def vocab(self) -> dict[str, int]:
        """Id of each token; bytes that are not valid UTF-8 are written as hexadecimal escapes. Built on first use."""
        return {token: index for index, token in self.inv_vocab.items()}

    @cached_property
    def inv_vocab(self) -> dict[int, str]:
        """Token of each id, as in `vocab`. Built on first use."""
        found = {}
        for index in range(self.vocab_size):
            try:
                found[index] = self._encoding.decode_single_token_bytes(index).decode(errors="backslashreplace")
            except KeyError:
                continue  # not every number is a token
        return found

    @property
    def vocab_size(self) -> int:
        """Exclusive upper bound of the ids."""
        return int(self._encoding.n_vocab)

    @property
    def eod(self) -> int:
        """Id that ends a document."""
        if self._eod_token is not None:
            return self._find(self._eod_token)
        special = self._special
        found = end_of_document(special.get, usual_roles(special.get))
        if found is None:
            raise ArgumentError(f"{self._encoding.name}: {no_end_of_document(sorted(special), self._find_or_none)}")
        return found

    @cached_property
    def _roles(self) -> Mapping[str, int]:
        return {**usual_roles(self._special.get), **({} if self._pad is None else {"pad": self._pad})}

    @cached_property
    def _additional(self) -> list[int]:
        named = [] if self._eod_token is None else [self.eod]
        return additional_ids(self._special, taken=[*self._roles.values(), *named])

    @property
    def _special(self) -> dict[str, int]:
        """Id of each special token."""
        tokens = self._encoding.special_tokens_set
        # encode_single_token would find an ordinary token of the same text first.
        return {token: int(self._encoding.encode(token, allowed_special={token})[0]) for token in tokens}

    def _encode(self, text: str) -> list[int]:
        if self._special_tokens:
            found: list[int] = self._encoding.encode(text, allowed_special="all")
            return found
        plain: list[int] = self._encoding.encode_ordinary(text)
        return plain

    def _find(self, token: str) -> int:
        found = self._find_or_none(token)
        if found is None:
            special = ", ".join(map(repr, sorted(self._encoding.special_tokens_set))) or "none"
            raise ArgumentError(
                f"{self._encoding.name}: the encoding must have {token!r}; its special tokens: {special}"
            )
        return found

    def _find_or_none(self, token: str) -> int | None:
        try:
            return int(self._encoding.encode_single_token(token))
        except KeyError:
            return None


def _load(encoding: str) -> Any:
    library = require("tiktoken", where=f"tiktoken:{encoding}")
    try:
        with panics_as_errors():
            # A copy is pickled with its tokens, the library's own object by name, which another process may not know.
            return copy.copy(library.get_encoding(encoding))
    except Exception as error:
        # The cause may be the name, the network or a file, each with exceptions of another library.
        raise ArgumentError(f"tiktoken:{encoding}: must be an encoding that tiktoken can load: {error}") from error
