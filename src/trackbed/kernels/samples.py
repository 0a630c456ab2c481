"""Typed wrappers of the kernels that cut a stream of documents into samples.

Shapes: D documents in the file, V visits to them, S samples.
"""

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from trackbed.cancellation import Poll, current_poll
from trackbed.errors import ArgumentError
from trackbed.kernels import _native
from trackbed.kernels.outputs import check_output

_LONGEST: Final = int(np.iinfo(np.int32).max)
_LAST_TOKEN: Final = int(np.iinfo(np.int64).max)


def sample_index(
    lengths: npt.NDArray[np.int32],
    visits: npt.NDArray[np.integer[Any]],
    rows: npt.NDArray[np.integer[Any]],
    *,
    sequence_length: int,
    extra_token: int,
    num_threads: int = 1,
    poll: Poll = None,
) -> None:
    """Fills `rows` with the start of each sample in the stream of visited documents.

    Args:
        lengths: `[D]` tokens in each document, at least 0 for each visited document.
        visits: `[V]` document visited at each step, each in `[0, D)`.
        rows: `[S + 1, 2]` receives the visit of stream token `k * sequence_length`, and its offset in that visit; must
            be int64 if `visits` are int64.
        sequence_length: tokens from one sample's start to the next, at least 1.
        extra_token: 1 if a sample also holds the first token of the next one, else 0.
        num_threads: at least 1; the result does not depend on it.
        poll: progress callback, called with the number of rows done.

    Raises:
        ArgumentError: a visited document's length is negative, a visit is out of range, or another argument is out of
            range.
    """
    _check_rows(rows, sequence_length, extra_token, dtypes=(np.int32, np.int64))
    visits, known = _vector("visits", visits), _bytes_of(_vector("lengths", lengths))
    if visits.dtype.itemsize > rows.dtype.itemsize or visits.dtype.kind == "u":
        _check_range("visits", visits, len(lengths) - 1)
    visit_type = np.int32 if visits.dtype == np.int32 else np.int64 if rows.dtype == np.int64 else np.int32
    visits = np.require(visits, dtype=visit_type, requirements=["C", "A"])
    first = _native.sample_index(
        known,
        visits,
        sequence_length,
        extra_token,
        rows.reshape(-1),
        max(num_threads, 1),
        current_poll(poll),
    )
    if first < len(visits):
        _check_range("visits", visits, len(lengths) - 1)
        _check_range("lengths", lengths, _LONGEST)


def pair_lengths(
    documents: npt.NDArray[np.integer[Any]],
    lengths: npt.NDArray[np.integer[Any]],
    pairs: npt.NDArray[np.uint64],
    *,
    poll: Poll = None,
) -> None:
    """Fills `pairs` with documents and their lengths, which a shuffle then moves together.

    Args:
        documents: `[N]` numbers in `[0, 2**31)`.
        lengths: `[N]` tokens in each of these documents.
        pairs: `[E * N]` receives the length in the upper 32 bits and the document in the lower ones, once per epoch.
        poll: progress callback.

    Raises:
        ArgumentError: a number does not fit, or an argument has another type or shape.
    """
    lengths, documents = _vector("lengths", lengths), _vector("documents", documents)
    check_output("pairs", pairs, dtypes=(np.uint64,))
    num_epochs = len(pairs) // max(len(documents), 1)
    if len(documents) != len(lengths) or num_epochs * len(documents) != len(pairs):
        found = f"{len(pairs)}, {len(documents)} and {len(lengths)}"
        raise ArgumentError(f"pairs must be a multiple of documents, each of which has a length, found {found}")
    if documents.dtype != np.int32:
        _check_range("documents", documents, _LONGEST)
    numbers = np.require(documents, dtype=np.int32, requirements=["C", "A"])
    _native.pair_lengths(numbers, _bytes_of(lengths), pairs, current_poll(poll))


def cut_pairs(
    pairs: npt.NDArray[np.uint64],
    visits: npt.NDArray[np.int32],
    rows: npt.NDArray[np.int32],
    *,
    sequence_length: int,
    extra_token: int,
    num_threads: int = 1,
    poll: Poll = None,
) -> None:
    """Fills `visits` with the documents of shuffled pairs, and `rows` with the start of each sample in their stream.

    Args:
        pairs: `[V]` document visited at each step and its length, from `pair_lengths`.
        visits: `[V]` receives the documents.
        rows: `[S + 1, 2]` as in `sample_index`.
        sequence_length: tokens from one sample's start to the next, at least 1.
        extra_token: 1 if a sample also holds the first token of the next one, else 0.
        num_threads: at least 1; the result does not depend on it.
        poll: progress callback, called with the number of rows done.

    Raises:
        ArgumentError: a length is negative, or another argument is out of range.
    """
    _check_rows(rows, sequence_length, extra_token, dtypes=(np.int32,))
    check_output("pairs", pairs, dtypes=(np.uint64,))
    check_output("visits", visits, dtypes=(np.int32,))
    if not pairs.shape == visits.shape == (len(visits),):
        raise ArgumentError(f"visits must have the shape of pairs, {list(pairs.shape)}, found {list(visits.shape)}")
    first = _native.cut_pairs(
        pairs, visits, sequence_length, extra_token, rows.reshape(-1), max(num_threads, 1), current_poll(poll)
    )
    if first < len(pairs):
        _check_range("lengths", (pairs >> np.uint64(32)).astype(np.int32), _LONGEST)


def count_tokens(lengths: npt.NDArray[np.int32]) -> tuple[int, int]:
    """Number of tokens in all documents together, and in the shortest one; both 0 without documents.

    Args:
        lengths: `[D]` tokens in each document, which may be unaligned.

    Raises:
        ArgumentError: `lengths` is not a vector of int32.
    """
    if lengths.ndim != 1 or lengths.dtype != np.int32:
        raise ArgumentError(
            f"lengths must be a vector of int32, found dtype {lengths.dtype} and shape {list(lengths.shape)}"
        )
    tokens, shortest = _native.count_tokens(np.ascontiguousarray(lengths).view(np.uint8))
    return int(tokens), int(shortest)


def _check_rows(
    rows: npt.NDArray[Any], sequence_length: int, extra_token: int, *, dtypes: tuple[type[np.integer[Any]], ...]
) -> None:
    if sequence_length < 1 or extra_token not in (0, 1):
        raise ArgumentError(
            f"sequence_length must be at least 1 and extra_token 0 or 1, found {sequence_length} and {extra_token}"
        )
    if rows.ndim != 2 or rows.shape[0] < 1 or rows.shape[1] != 2:
        raise ArgumentError(f"rows must have the shape [S + 1, 2], found {list(rows.shape)}")
    if sequence_length * len(rows) > _LAST_TOKEN:
        raise ArgumentError(
            f"sequence_length * {len(rows)} rows must be at most {_LAST_TOKEN}, found {sequence_length}"
        )
    check_output("rows", rows, dtypes=dtypes)


def _bytes_of(lengths: npt.NDArray[np.integer[Any]]) -> npt.NDArray[np.uint8]:
    """Lengths as bytes of int32: those in an index file are unaligned, and would be copied otherwise."""
    if lengths.dtype != np.int32 and len(lengths):
        _check_range("lengths", lengths, _LONGEST)
    return np.ascontiguousarray(lengths, dtype=np.int32).view(np.uint8)


def _check_range(name: str, array: npt.NDArray[Any], highest: int) -> None:
    """Checks that all numbers are in `[0, highest]`; the error contains the first one that is not."""
    wrong = np.flatnonzero((array < 0) | (array > highest))
    if len(wrong):
        element = f"{name}[{wrong[0]}]"
        raise ArgumentError(f"{name} must be in [0, {highest}], found {element} = {array[wrong[0]]}")


def _vector(name: str, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    if array.ndim != 1 or (len(array) and array.dtype.kind not in "iu"):
        raise ArgumentError(
            f"{name} must be a vector of integers, found dtype {array.dtype} and shape {list(array.shape)}"
        )
    return array
