"""Configuration of datasets with masked tokens."""

import logging
import os
from dataclasses import dataclass, field
from numbers import Real
from operator import index
from typing import Any, Final

import numpy as np

from trackbed.datasets.config import BlendedMegatronDatasetConfig, storage_of
from trackbed.errors import ArgumentError
from trackbed.kernels.integers import is_integer

logger = logging.getLogger(__name__)

_HIGHEST_SEED: Final = 2**31 - 2
"""Megatron Core's mapping takes the seed plus 1 as int32."""
_NUMBERS: Final = ("masking_probability", "short_sequence_probability")
_FLAGS: Final = (
    "masking_do_full_word",
    "masking_do_permutation",
    "masking_use_longer_ngrams",
    "masking_use_geometric_distribution",
)
_MOST_WORDS: Final = 1 << 20


@dataclass
class MaskedWordPieceDatasetConfig(BlendedMegatronDatasetConfig):
    """Configuration with the fields, their order and the defaults of megatron-core 0.16.1, then Trackbed's keywords.

    Raises:
        ArgumentError: fields that are missing, contradict each other or are out of range.
    """

    masking_probability: float | None = None
    """Share of a sample's tokens that are masked, in (0, 1); required."""

    short_sequence_probability: float | None = None
    """Approximate share of samples with a random shorter length, in [0, 1]; required."""

    masking_max_ngram: int | None = None
    """Most consecutive words, or tokens, that are masked together, at least 1; required."""

    masking_do_full_word: bool | None = None
    """True to mask whole words, False to mask each of their tokens by itself; required."""

    masking_do_permutation: bool | None = None
    """True to also permute some of the tokens that are not masked; required."""

    masking_use_longer_ngrams: bool | None = None
    """True to favour longer n-grams, False to favour shorter ones; required."""

    masking_use_geometric_distribution: bool | None = None
    """True to draw the lengths of n-grams from a geometric distribution with p = 0.2, cut off at `masking_max_ngram`,
    as SpanBERT does (https://arxiv.org/abs/1907.10529, section 3.1); required."""

    object_storage_cache_path: str | None = field(default=None, kw_only=True)
    """Folder on this host for copies of the `.idx` objects of pairs in object stores; see `GPTDatasetConfig`."""

    def __post_init__(self) -> None:
        """Checks the fields."""
        super().__post_init__()
        storage_of(self)
        wanted = ("tokenizer", *_NUMBERS, "masking_max_ngram", *_FLAGS)
        missing = [name for name in wanted if getattr(self, name) is None]
        if missing:
            raise ArgumentError(f"{', '.join(missing)} must be given, found None")
        if isinstance(self.tokenizer, (str, os.PathLike)):
            raise ArgumentError(
                f"tokenizer must be a tokenizer, found the text {str(self.tokenizer)!r}: "
                f"use trackbed.datasets.open_tokenizer({str(self.tokenizer)!r})"
            )
        for name in _NUMBERS:
            setattr(self, name, as_number(name, getattr(self, name)))
        for name in _FLAGS:
            setattr(self, name, as_flag(name, getattr(self, name)))
        if not is_integer(self.masking_max_ngram) or not 1 <= self.masking_max_ngram <= _MOST_WORDS:  # type: ignore[operator]
            raise ArgumentError(
                f"masking_max_ngram must be a whole number in [1, {_MOST_WORDS}], found {self.masking_max_ngram!r}"
            )
        self.masking_max_ngram = index(self.masking_max_ngram)  # type: ignore[arg-type]  # checked; not NumPy's
        if not is_integer(self.random_seed) or self.random_seed > _HIGHEST_SEED:
            raise ArgumentError(
                f"random_seed must be at most {_HIGHEST_SEED} for masked samples, found {self.random_seed}"
            )
        if not 0 < self.masking_probability < 1:  # type: ignore[operator]  # checked above
            raise ArgumentError(f"masking_probability must be above 0 and below 1, found {self.masking_probability}")
        if not 0 <= self.short_sequence_probability <= 1:  # type: ignore[operator]
            raise ArgumentError(
                f"short_sequence_probability must be in [0, 1], found {self.short_sequence_probability}"
            )
        if self.masking_use_geometric_distribution and self.masking_do_permutation:
            raise ArgumentError(
                "masking_do_permutation must be False with masking_use_geometric_distribution, found both True: "
                "choose one of them"
            )
        if self.masking_use_geometric_distribution and self.masking_use_longer_ngrams:
            logger.warning("masking_use_longer_ngrams has no effect with masking_use_geometric_distribution")

    def check_length(self, *, special_tokens: int) -> None:
        """Checks that a sample has space for tokens of sentences.

        Args:
            special_tokens: tokens of a sample that the tokenizer adds.

        Raises:
            ArgumentError: `sequence_length` is too small.
        """
        least = special_tokens + (2 if self.short_sequence_probability else 1)
        if self.sequence_length < least:
            reason = f"with short_sequence_probability {self.short_sequence_probability}"
            raise ArgumentError(f"sequence_length must be at least {least} {reason}, found {self.sequence_length}")


def as_flag(name: str, value: Any) -> bool | int:
    """Returns a flag as Python has it."""
    if isinstance(value, (bool, np.bool_)):
        return bool(value)
    if is_integer(value) and value in (0, 1):
        return index(value)
    raise ArgumentError(f"{name} must be True or False, found {value!r}")


def as_number(name: str, value: Any) -> float | int:
    """Returns a number as Python has it."""
    if isinstance(value, Real) and not isinstance(value, bool):
        return index(value) if is_integer(value) else float(value)  # type: ignore[arg-type]
    raise ArgumentError(f"{name} must be a number, found {value!r}")
