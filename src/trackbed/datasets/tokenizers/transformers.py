"""Tokenizer from a folder of Hugging Face files that only transformers can run."""

import hashlib
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from trackbed.datasets.extras import require
from trackbed.datasets.tokenizers.base import Adapter, MegatronIdentity
from trackbed.datasets.tokenizers.huggingface_folder import read_with_transformers, stated_additional, stated_roles
from trackbed.datasets.tokenizers.sampling import check_repeatable
from trackbed.datasets.tokenizers.special_tokens import end_of_document, no_end_of_document
from trackbed.errors import ArgumentError

_CONFIG_FILES: Final = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "config.json")


class TransformersTokenizer(Adapter):
    """Tokenizer from a folder of Hugging Face files, run by `transformers.AutoTokenizer`.

    `HuggingFaceTokenizer` is much faster, and reads the folders of most models. This class is for tokenizers that are
    written in Python, such as that of ByT5. Code in the folder is never run. Text that reads like a special token is
    tokenised as plain text unless `special_tokens` is True. It has no `offsets`.

    Args:
        path: the folder.
        eod_token: token that ends a document; by default a special token such as `<|endoftext|>`, or else the end of a
            text, or else the separator.
        pad_token: token that pads short samples; by default the one that the folder states.
        special_tokens: True to map special tokens written out in a text to their ids.
        megatron_identity: identity of the tokenizer in a Megatron job that shares the cache.

    Raises:
        ArgumentError: transformers is not installed or finds no tokenizer, or a token that was named is missing. If no
            end-of-document token was named and the default is missing, `eod` raises it.
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
        self._path = str(path)
        self._tokenizer = read_with_transformers(Path(path))
        self._special_tokens = special_tokens
        self._digest = _digest(self._tokenizer, Path(path))
        check_repeatable(self.tokenize_batch, where=path)
        self._stated = stated_roles(self._tokenizer)
        if pad_token is not None:
            self._stated["pad"] = self._find(pad_token)
        self._eod = None if eod_token is None else self._find(eod_token)
        super().__init__(
            str(path),
            megatron_identity=megatron_identity,
            eod_token=eod_token,
            pad_token=pad_token,
            special_tokens=special_tokens or None,
        )

    def tokenize(self, text: str) -> npt.NDArray[np.int64]:
        """Returns `[T]` token ids of a text."""
        return np.array(self._encode(text), dtype=np.int64)

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns the token ids of each text, on one core."""
        return [self._encode(text) for text in texts]

    @property
    def fingerprint(self) -> str:
        """String that changes when the ids change: class, version of transformers, and SHA-256 of the files."""
        return f"{self._digest}{' special' if self._special_tokens else ''}"

    def detokenize(self, ids: npt.NDArray[np.integer[Any]]) -> str:
        """Returns the text of token ids; the tokenizer may have normalised it."""
        return str(self._tokenizer.decode(np.asarray(ids).tolist(), skip_special_tokens=False))

    @cached_property
    def vocab(self) -> dict[str, int]:
        """Id of each token. Built on first use."""
        return dict(self._tokenizer.get_vocab())

    @cached_property
    def vocab_size(self) -> int:
        """Exclusive upper bound of the ids."""
        return max(self.vocab.values()) + 1

    @property
    def unknown_id(self) -> int | None:
        """Id of text that the vocabulary does not cover; None if there is none."""
        found: int | None = self._tokenizer.unk_token_id
        return found

    @property
    def eod(self) -> int:
        """Id that ends a document."""
        if self._eod is None:
            special = _special_ids(self._tokenizer)
            self._eod = end_of_document(special.get, self._stated)
            if self._eod is None:
                raise ArgumentError(f"{self._path}: {no_end_of_document(special, self.vocab.get)}")
        return self._eod

    @property
    def _roles(self) -> Mapping[str, int]:
        return self._stated

    @cached_property
    def _additional(self) -> list[int]:
        return list(stated_additional(self._tokenizer))

    def _encode(self, text: str) -> list[int]:
        plain = not self._special_tokens
        found = self._tokenizer(text, add_special_tokens=False, split_special_tokens=plain, verbose=False)
        ids: list[int] = found["input_ids"]
        return ids

    def _find(self, token: str) -> int:
        found = self.vocab.get(token)
        if found is None:
            listed = ", ".join(map(repr, self._tokenizer.all_special_tokens)) or "none"
            raise ArgumentError(f"{self._path}: the tokenizer must have one of {token!r}; its special tokens: {listed}")
        return found


def _special_ids(tokenizer: Any) -> dict[str, int]:
    """Returns the id of each special token of a tokenizer of transformers, with a role or without."""
    added = {str(token): int(index) for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    return added | dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))


def _digest(tokenizer: Any, path: Path) -> str:
    """Returns the class of a tokenizer, the version of transformers, and the SHA-256 of its files."""
    version = require("transformers", where=path).__version__
    digest = hashlib.sha256()
    for name in sorted({*tokenizer.vocab_files_names.values(), *_CONFIG_FILES}):
        if (path / name).is_file():
            digest.update(f"{name}\0".encode() + hashlib.sha256((path / name).read_bytes()).digest())
    return f"{type(tokenizer).__name__} {version} {digest.hexdigest()}"
