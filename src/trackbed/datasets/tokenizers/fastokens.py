"""Tokenizer from a file of Hugging Face `tokenizers` that uses fastokens, whose byte-level BPE is fifty times as fast.

fastokens reads the same files and claims to give the same ids. That is checked first: generated texts of many kinds,
with tokens of the file in them, must have the same ids as with `tokenizers`.

Shapes: D texts, T token ids of all texts.
"""

import importlib.metadata
import logging
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tokenizers

from trackbed.datasets.tokenizers.huggingface import HuggingFaceTokenizer
from trackbed.datasets.tokenizers.huggingface_folder import check_texts
from trackbed.datasets.tokenizers.kinds import AnyTokenizer, is_path, open_tokenizer
from trackbed.datasets.tokenizers.rust_libraries import one_core, panics_as_errors


class UnsuitableError(Exception):
    """fastokens cannot replace `tokenizers` for a file; the message says why."""


class FastTokenizer(HuggingFaceTokenizer):
    """`HuggingFaceTokenizer` that tokenises batches with fastokens.

    Args:
        opened: the tokenizer; its files are not read again.

    Raises:
        UnsuitableError: fastokens is not installed, cannot read the file, or gives other ids.
    """

    def __init__(self, opened: HuggingFaceTokenizer) -> None:
        vars(self).update(vars(opened))
        self._fast = _load(self._json)
        with one_core():
            self._check()

    def __getstate__(self) -> dict[str, Any]:
        state = {name: value for name, value in super().__getstate__().items() if name not in ("_fast", "_tokenizer")}
        return {**state, "_json": self._json}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._fast = _load(self._json)

    @cached_property
    def _json(self) -> str:
        return str(self._tokenizer.to_str())

    @cached_property
    def _tokenizer(self) -> Any:  # type: ignore[override]  # in a copy, created on first use: batches do not need it
        made = tokenizers.Tokenizer.from_str(self._json)
        made.encode_special_tokens = not self._special_tokens
        return made

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns the token ids of each text, on one core."""
        ids, offsets = self.tokenize_flat(texts)
        return [part.tolist() for part in np.split(ids, offsets[1:-1])] if len(texts) else []

    def tokenize_flat(self, texts: Sequence[str]) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.int64]]:
        """Returns `[T]` ids of all texts, concatenated, and the `[D + 1]` offset at which each text begins, then T."""
        ids, offsets = self._fast.encode_batch_flat(list(texts), split_special_tokens=not self._special_tokens)
        return np.frombuffer(ids, dtype=np.uint32), np.frombuffer(offsets, dtype=np.uint64).astype(np.int64)

    def _check(self) -> None:
        try:
            with panics_as_errors():
                texts = list(check_texts(self._tokenizer))
                expected = HuggingFaceTokenizer.tokenize_batch(self, texts)
        except Exception as error:
            raise UnsuitableError(
                f"tokenizers fails at one of the texts that the two are compared with: {error}"
            ) from error
        try:
            with panics_as_errors():
                found = self.tokenize_batch(texts)
        except Exception as error:  # a Rust library may raise any exception
            raise UnsuitableError(f"fastokens cannot tokenise with it: {error}") from error
        for text, have, want in zip(texts, found, expected, strict=True):
            if have != want:
                at = next((n for n, pair in enumerate(zip(have, want, strict=False)) if len(set(pair)) > 1), len(want))
                raise UnsuitableError(f"fastokens finds other ids than tokenizers: in {text[:40]!r}... at token {at}")


def _load(json: str) -> Any:
    try:
        version = importlib.metadata.version("fastokens")
        from fastokens import Tokenizer
    except ImportError as error:
        raise UnsuitableError("fastokens is not installed (pip install '.[text]' in Trackbed's clone)") from error
    try:
        with panics_as_errors():
            return Tokenizer.from_json_str(json)
    except Exception as error:
        raise UnsuitableError(f"fastokens {version} cannot read it: {error}") from error


logger = logging.getLogger(__name__)


def open_fastest_tokenizer(
    name: str, *, lower_case: bool = False, eod_token: str | None = None, special_tokens: bool = False
) -> AnyTokenizer:
    """Opens a tokenizer with the fastest library that produces the same ids as `open_tokenizer`'s.

    For files and folders of Hugging Face `tokenizers`, uses fastokens if it is installed, can read the file, and
    produces the same ids as `tokenizers` on texts of many kinds; this check takes a second. Otherwise logs a warning
    with the reason.

    Args:
        name: as for `open_tokenizer`.
        lower_case: as for `open_tokenizer`.
        eod_token: as for `open_tokenizer`.
        special_tokens: as for `open_tokenizer`.

    Raises:
        ArgumentError: as `open_tokenizer`.
    """
    opened = open_tokenizer(name, lower_case=lower_case, eod_token=eod_token, special_tokens=special_tokens)
    if not isinstance(opened, HuggingFaceTokenizer):
        return opened
    try:
        return FastTokenizer(opened)
    except UnsuitableError as error:
        logger.warning("%s: using tokenizers instead of the much faster fastokens: %s", name, error)
    return opened


def absolute_name(name: str) -> str:
    """Returns the name of the same tokenizer for a process in another folder.

    >>> absolute_name("bytes")
    'bytes'
    """
    return str(Path(name).absolute()) if is_path(name) else name
