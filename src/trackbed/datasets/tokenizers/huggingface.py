"""Tokenizers that the library `tokenizers` of Hugging Face runs, and the one from its files."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tokenizers

from trackbed.datasets.tokenizers.base import Adapter, MegatronIdentity
from trackbed.datasets.tokenizers.byte_level import byte_lengths
from trackbed.datasets.tokenizers.huggingface_folder import read_folder
from trackbed.datasets.tokenizers.other_files import describe_other, missing_tokenizer
from trackbed.datasets.tokenizers.rust_libraries import panics_as_errors
from trackbed.datasets.tokenizers.sampling import switch_off_sampling
from trackbed.datasets.tokenizers.special_tokens import (
    additional_ids,
    end_of_document,
    no_end_of_document,
    usual_roles,
)
from trackbed.errors import ArgumentError


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecialTokens:
    """Special tokens that a file states."""

    roles: Mapping[str, int]
    """Id of each of `ROLES` that the file states."""
    additional: Sequence[int]
    """Ids of the special tokens without a role."""


class LibraryTokenizer(Adapter):
    """Base of the tokenizers that the library `tokenizers` runs.

    Args:
        library: the tokenizer of the library, which is this object's own from now on.
        special: special tokens that its file states.
        path: where it was read, for messages and the identity.
        eod_token: token that ends a document, or None.
        pad_token: token that pads short samples, or None.
        special_tokens: True to map special tokens written out in a text to their ids.
        megatron_identity: identity of the tokenizer in a Megatron job that shares the cache.
        options: other options that decide the ids, for the identity.
    """

    def __init__(
        self,
        library: tokenizers.Tokenizer,
        special: SpecialTokens,
        *,
        path: str,
        eod_token: str | None,
        pad_token: str | None,
        special_tokens: bool,
        megatron_identity: MegatronIdentity | None,
        **options: Any,
    ) -> None:
        # A file may enable both for inference; a document must keep all of its tokens and no others.
        library.no_truncation()
        library.no_padding()
        switch_off_sampling(library, where=path)
        library.encode_special_tokens = not special_tokens
        self._tokenizer = library
        self._special_tokens = special_tokens
        self._path = path
        self._special = special
        self._eod = None if eod_token is None else self._find(eod_token)
        self._pad = None if pad_token is None else self._find(pad_token)
        self._additional_ids = [index for index in special.additional if index not in (self._eod, self._pad)]
        super().__init__(
            path,
            megatron_identity=megatron_identity,
            **options,
            eod_token=eod_token,
            pad_token=pad_token,
            special_tokens=special_tokens or None,
        )

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        # The library does not pickle this setting.
        self._tokenizer.encode_special_tokens = not self._special_tokens

    def tokenize(self, text: str) -> npt.NDArray[np.int64]:
        """Returns `[T]` token ids of a text."""
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
        """Returns the text of token ids; the tokenizer may have normalised it."""
        return str(self._tokenizer.decode(np.asarray(ids).tolist(), skip_special_tokens=False))

    def offsets(self, ids: list[int], text: str) -> list[int]:
        """Returns the character of the text at which each of its tokens begins."""
        found = self._tokenizer.encode(text, add_special_tokens=False)
        self._check_own(ids, found.ids, text)
        return [start for start, _ in found.offsets]

    def ranges(self, ids: list[int], text: str) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Returns the character of the text at which each of its tokens begins, and the one behind its last."""
        found = self._tokenizer.encode(text, add_special_tokens=False)
        self._check_own(ids, found.ids, text)
        pairs = np.array(found.offsets, dtype=np.int64).reshape(-1, 2)
        return pairs[:, 0], pairs[:, 1]

    @property
    def special_token_ids(self) -> list[int]:
        """Ids of all special tokens that were added to the vocabulary."""
        return list(special_ids(self._tokenizer).values())

    @cached_property
    def byte_lengths(self) -> npt.NDArray[np.int64] | None:
        """Bytes of text that each id stands for; None unless tokens are byte sequences."""
        return byte_lengths(self._tokenizer)

    @cached_property
    def vocab(self) -> dict[str, int]:
        """Id of each token, in order of id: the library's order differs from copy to copy. Built on first use."""
        found = self._tokenizer.get_vocab(with_added_tokens=True)
        return dict(sorted(found.items(), key=lambda item: item[1]))

    @cached_property
    def vocab_size(self) -> int:
        """Exclusive upper bound of the ids."""
        return max(self.vocab.values()) + 1

    @cached_property
    def unknown_id(self) -> int | None:
        """Id of text that the vocabulary does not cover; None if there is none."""
        model = self._tokenizer.model
        if isinstance(model, tokenizers.models.Unigram):  # which tells it in its file only
            found: int | None = json.loads(self._tokenizer.to_str())["model"].get("unk_id")
            return found
        token = getattr(model, "unk_token", None)
        return None if token is None else self._tokenizer.token_to_id(token)

    @property
    def eod(self) -> int:
        """Id that ends a document."""
        if self._eod is None:
            special = special_ids(self._tokenizer)
            self._eod = end_of_document(special.get, self._special.roles)
            if self._eod is None:
                raise ArgumentError(f"{self._path}: {no_end_of_document(special, self._tokenizer.token_to_id)}")
        return self._eod

    @property
    def _roles(self) -> Mapping[str, int]:
        return self._special.roles if self._pad is None else {**self._special.roles, "pad": self._pad}

    @property
    def _additional(self) -> list[int]:
        return self._additional_ids

    def _find(self, token: str) -> int:
        found = self._tokenizer.token_to_id(token)
        if found is None:
            listed = ", ".join(map(repr, special_ids(self._tokenizer))) or "none"
            raise ArgumentError(f"{self._path}: the tokenizer must have one of {token!r}; its special tokens: {listed}")
        return int(found)


class HuggingFaceTokenizer(LibraryTokenizer):
    """Tokenizer from a file of Hugging Face `tokenizers` (`tokenizer.json`), or from a folder with its files.

    Text that reads like a special token is tokenised as plain text unless `special_tokens` is True. The ids of a
    folder are those of `transformers.AutoTokenizer`, which is imported only if `tokenizer.json` alone does not decide
    them. A folder states the roles of its special tokens; in a file, all but padding go by their usual names, such as
    `[CLS]` and `<s>`.

    Args:
        path: the JSON file, or the folder.
        eod_token: token that ends a document; by default a special token such as `<|endoftext|>`, or else the end of a
            text, or else the separator.
        pad_token: token that pads short samples; by default the one that a folder states.
        special_tokens: True to map special tokens written out in a text to their ids.
        megatron_identity: identity of the tokenizer in a Megatron job that shares the cache.

    Raises:
        ArgumentError: the file or folder is not a tokenizer that the library runs, transformers is needed and not
            installed, or a token that was named is missing. If no end-of-document token was named and the default is
            missing, `eod` raises it.
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
        library, special = _load(Path(path))
        super().__init__(
            library,
            special,
            path=str(path),
            eod_token=eod_token,
            pad_token=pad_token,
            special_tokens=special_tokens,
            megatron_identity=megatron_identity,
        )


def special_ids(library: tokenizers.Tokenizer) -> dict[str, int]:
    """Returns the id of each special token that was added to a tokenizer of the library."""
    added = library.get_added_tokens_decoder()
    return {token.content: index for index, token in sorted(added.items()) if token.special}


def _load(path: Path) -> tuple[tokenizers.Tokenizer, SpecialTokens]:
    if path.is_dir():
        folder = read_folder(path)
        return folder.library, SpecialTokens(roles=folder.roles, additional=folder.additional)
    if not path.is_file():
        raise ArgumentError(missing_tokenizer(path))
    try:
        with panics_as_errors():
            library = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:
        other = describe_other(path)
        raise ArgumentError(
            f"{path}: must be a file of Hugging Face tokenizers: {error if other is None else f'found {other}'}"
        ) from error
    special = special_ids(library)
    roles = usual_roles(special.get)
    return library, SpecialTokens(roles=roles, additional=additional_ids(special, taken=roles.values()))
