"""Typed wrapper of the kernel that cuts documents of sentences into samples.

Shapes: N sentences, D documents, R samples.
"""

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from trackbed.cancellation import Poll, current_poll
from trackbed.errors import ArgumentError, PlanError
from trackbed.kernels import _native
from trackbed.kernels.integers import is_integer
from trackbed.plural import number_of

_HIGHEST_SEED: Final = 2**31 - 2
"""Megatron Core's shuffle takes the seed plus 1 as int32."""
_LONG_SENTENCE: Final = 512
"""Most tokens of a sentence in a document of several."""
_MOST_EPOCHS: Final = 2**31 - 2
_HIGHEST: Final = int(np.iinfo(np.int32).max)
_ENDLESS: Final = int(np.iinfo(np.int64).max)
"""A ratio that no draw of 32 bits reaches, as Megatron Core's ratio above int32 does not."""


def build_mapping(
    borders: npt.NDArray[np.integer[Any]],
    lengths: npt.NDArray[np.integer[Any]],
    *,
    num_samples: int | None,
    max_length: int,
    short_probability: float,
    seed: int,
    min_sentences: int,
    num_epochs: int | None = None,
    poll: Poll = None,
) -> npt.NDArray[np.unsignedinteger[Any]]:
    """Cuts documents into samples of whole sentences, in random order: Megatron Core's `build_mapping`.

    A sample takes sentences of one document until they have its target length, which is `max_length`, or a random one
    of at least 2; the rest of a document is not left with a single sentence. Documents with a sentence of more than
    512 tokens are left out, unless it is their only one. Whole epochs are cut, until there are `num_samples`.

    Args:
        borders: `[D + 1]` first sentence of each document, then the end of the last one.
        lengths: `[N]` tokens in each sentence.
        num_samples: samples to give at least; None for one epoch.
        max_length: target length, at least 1; at least 2 if some samples are to be short.
        short_probability: approximate share of short samples, in `[0, 1]`.
        seed: in `[0, 2**31 - 2]`.
        min_sentences: fewest sentences of a sample, at least 1.
        num_epochs: most epochs, at least 1; None for one without `num_samples`, else for as many as are needed.
        poll: progress callback, called with the number of rows done.

    Returns:
        `[R, 3]` first sentence of each sample, the one after its last, and its target length; uint32, or uint64 for
        2**32 sentences and more.

    Raises:
        ArgumentError: an argument is out of range.
        PlanError: samples are requested, and no document can give one.

    >>> lengths = np.full(6, 4, dtype=np.int32)
    >>> rules = {"max_length": 8, "short_probability": 0.0, "seed": 1, "min_sentences": 1}
    >>> build_mapping(np.array([0, 1, 6]), lengths, num_samples=None, **rules)
    array([[3, 6, 8],
           [1, 3, 8],
           [0, 1, 8]], dtype=uint32)
    """
    _check_range("max_length", max_length, 2 if short_probability > 0 else 1, _HIGHEST)
    _check_range("seed", seed, 0, _HIGHEST_SEED)
    _check_range("min_sentences", min_sentences, 1, _HIGHEST)
    if not 0 <= short_probability <= 1:
        raise ArgumentError(f"short_probability must be in [0, 1], found {short_probability}")
    if num_epochs is None:
        num_epochs = 1 if num_samples is None else _MOST_EPOCHS
    _check_range("num_epochs", num_epochs, 1, _MOST_EPOCHS)
    if num_samples is not None:
        _check_range("num_samples", num_samples, 0, 2**64 - 1)
    starts = np.require(borders, dtype=np.int64, requirements=["C", "A"])  # those of an index file are unaligned
    known = _checked_lengths(lengths)
    is_within = starts.ndim == 1 and (not len(starts) or (starts[0] >= 0 and starts[-1] <= len(lengths)))
    if not is_within or (np.diff(starts) < 0).any():
        raise ArgumentError(f"borders must not decrease, and be in [0, {len(lengths)}], found {starts}")
    documents = np.empty(2 * max(len(starts) - 1, 0), dtype=np.int64)
    documents = documents[: 2 * _native.find_documents(starts, known, min_sentences, documents, current_poll(poll))]
    if num_samples and not len(documents):
        count = max(len(starts) - 1, 0)
        msg = f"there must be documents to give {number_of(num_samples, 'sample')}, found none"
        if count:
            sentences = f"{min_sentences} sentence{'s' if min_sentences > 1 else ''}"
            msg = (
                f"a document must have at least {sentences}, and none of more than {_LONG_SENTENCE} tokens if it has "
                f"several, to give samples, found none that has among {count}"
            )
        raise PlanError(msg)
    most = 2**64 - 1 if num_samples is None else num_samples
    ratio = _ratio(short_probability)
    rules = np.array([num_epochs, most, max_length, ratio, seed, min_sentences], dtype=np.uint64).view(np.int64)
    is_wide = len(lengths) > np.iinfo(np.uint32).max
    return _native.build_mapping(documents, known, rules, is_wide, current_poll(poll))


def _ratio(probability: float) -> int:
    """Number N such that one sample in N is short, rounded as in C; 0 if none is.

    >>> _ratio(0.1), _ratio(0.4), _ratio(1.0), _ratio(0.0)
    (10, 3, 1, 0)
    """
    if probability == 0:
        return 0
    inverse = 1 / probability
    return int(inverse + 0.5) if inverse < _HIGHEST + 0.5 else _ENDLESS


def _checked_lengths(lengths: npt.NDArray[np.integer[Any]]) -> npt.NDArray[np.uint8]:
    """The bytes of the lengths, which may be unaligned, as int32."""
    if lengths.ndim != 1 or (len(lengths) and not 0 <= int(lengths.min()) <= int(lengths.max()) <= _HIGHEST):
        found = f"shape {list(lengths.shape)}" if lengths.ndim != 1 else f"{lengths.min()} to {lengths.max()}"
        raise ArgumentError(f"lengths must be a vector of numbers in [0, 2**31), found {found}")
    return np.ascontiguousarray(lengths, dtype=np.int32).view(np.uint8)


def _check_range(name: str, value: Any, lowest: int, highest: int) -> None:
    if not is_integer(value) or not lowest <= value <= highest:
        raise ArgumentError(f"{name} must be a whole number in [{lowest}, {highest}], found {value!r}")
