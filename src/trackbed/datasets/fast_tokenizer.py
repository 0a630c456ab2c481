"""Tokenizer from a file of Hugging Face `tokenizers` that uses fastokens, whose byte-level BPE is fifty times as fast.

fastokens reads the same files and claims to give the same ids. That is checked first: generated texts of many kinds,
with tokens of the file in them, must have the same ids as with `tokenizers`.

Shapes: D texts, T token ids of all texts.
"""

import importlib.metadata
import random
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import tokenizers

from trackbed.datasets.adapters import HuggingFaceTokenizer
from trackbed.datasets.one_core import one_core

__all__ = ["FastTokenizer", "UnsuitableError", "check_texts"]

_TEXTS: Final = 300
_PARTS: Final = 40
_WORDS: Final = (  # words, between spaces
    "the The THE cat don't WE'LL it's 's 'S def return x; std::vector<int> snake_case camelCase <div> &amp; "
    "http://a.b/c?d=e 0 7 42 2026 123456789 3.14 0x1F 1e-9 . , ... -- !? ({[ ]}) \" ' ` \\ / // /* */ # ## == != -> _ "
    # Accents in one and in two characters, ligatures, cases, quotes; digits of other scripts; scripts; emoji in parts.
    "na\u00efve e\u0301 \ufb01 \u00df \u0130 \u01c5 \u2019s \u0663 \u00bd \u2167 \u00b2 "
    "\u6771\u4eac \u3053\u3093\u306b\u3061\u306f \uc548\ub155 \u4e2d\u6587\u3002 \uff0c \u03b5\u03bb\u03bb "
    "\u041f\u0440\u0438\u0432\u0435\u0442 \u0645\u0631\u062d\u0628\u0627 \u05e9\u05dc\u05d5\u05dd "
    "\u0928\u092e\u0938\u094d\u0924\u0947 \u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35 "
    "\U0001f642 \U0001f469\u200d\U0001f469\u200d\U0001f467 \U0001f1e9\U0001f1ea \U0001f44d\U0001f3fd"
)
_SPACES: Final = [*"   \t\n\r\v\f\u0085\u00a0\u2028\u3000", "  ", "   ", "\t\t", "\n\n", "\r\n"]
_RARE: Final = [*"\u200b\u200d\ufeff\ufffd\ue000\U0010fffd\x00\x7f\x1b"]
_LONG: Final = ["a" * 33, "=" * 70, "ab" * 40, " " * 33, "\n" * 9, "x" * 300]


class UnsuitableError(Exception):
    """fastokens cannot replace `tokenizers` for a file; the message says why."""


class FastTokenizer(HuggingFaceTokenizer):
    """`HuggingFaceTokenizer` that tokenises batches with fastokens.

    Args:
        path: the JSON file.
        eod_token: token that ends a document; by default the first of `END_OF_DOCUMENT_TOKENS` in the vocabulary.
        special_tokens: True to map special tokens written out in a text to their ids.

    Raises:
        ArgumentError: as `HuggingFaceTokenizer`.
        UnsuitableError: fastokens is not installed, cannot read the file, or gives other ids.
    """

    def __init__(self, path: str | Path, *, eod_token: str | None = None, special_tokens: bool = False) -> None:
        super().__init__(path, eod_token=eod_token, special_tokens=special_tokens)
        self.unique_identifiers["class"] = HuggingFaceTokenizer.__name__  # the ids are the same
        self._fast = _load(self._json)
        with one_core():
            self._check()

    def __getstate__(self) -> dict[str, Any]:
        left_out = ("_fast", "_tokenizer")
        return {**{name: value for name, value in vars(self).items() if name not in left_out}, "_json": self._json}

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
        texts = list(check_texts(self._tokenizer))
        wanted = HuggingFaceTokenizer.tokenize_batch(self, texts)
        try:
            found = self.tokenize_batch(texts)
        except Exception as error:  # a Rust library may raise any exception
            msg = f"fastokens cannot tokenise with it: {error}"
            raise UnsuitableError(msg) from error
        for text, have, want in zip(texts, found, wanted, strict=True):
            if have != want:
                at = next((n for n, pair in enumerate(zip(have, want, strict=False)) if len(set(pair)) > 1), len(want))
                msg = f"fastokens finds other ids than tokenizers: in {text[:40]!r}... at token {at}"
                raise UnsuitableError(msg)


def check_texts(tokenizer: Any) -> Iterator[str]:
    """Generates texts of many kinds for a tokenizer of `tokenizers`: a hundred kilobytes, the same on every call."""
    draw = random.Random(0)
    added = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
    kinds = [*_WORDS.split(), *_SPACES * 3, *_RARE, *_LONG, *draw.sample(added, min(len(added), 20))]
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    yield ""
    for _ in range(_TEXTS):
        yield "".join(draw.choices(kinds, k=draw.randrange(1, _PARTS)))
        yield tokenizer.decode([draw.randrange(size) for _ in range(_PARTS)], skip_special_tokens=False)


def _load(json: str) -> Any:
    try:
        version = importlib.metadata.version("fastokens")
        from fastokens import Tokenizer
    except ImportError as error:
        msg = "fastokens is not installed (pip install 'trackbed[text]')"
        raise UnsuitableError(msg) from error
    try:
        return Tokenizer.from_json_str(json)
    except Exception as error:
        msg = f"fastokens {version} cannot read it: {error}"
        raise UnsuitableError(msg) from error
