"""Checks of the arrays that describe many documents: lengths, counts and modes.

Shapes: N sequences, D documents.
"""

from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from trackbed.errors import ArgumentError

_MAX_INT32: Final = 2**31 - 1


class DocumentArrays(NamedTuple):
    """Checked arrays of documents to append."""

    lengths: npt.NDArray[np.int32]
    """`[N]` tokens in each sequence."""
    counts: npt.NDArray[np.int32] | None
    """`[D]` sequences in each document; None if each has one."""
    modes: npt.NDArray[np.int8] | None
    """`[N]` mode of each sequence; None if all are 0."""


def check_documents(
    lengths: Any, num_tokens: int, *, counts: Any = None, modes: Any = None, where: str
) -> DocumentArrays:
    """Checks the arrays of documents against each other and against the number of their tokens.

    Args:
        lengths: `[N]` tokens in each sequence, each in `[0, 2**31)`; their sum is `num_tokens`.
        num_tokens: tokens of all documents.
        counts: `[D]` sequences in each document, each at least 0; their sum is N. None if each has one.
        modes: `[N]` mode of each sequence, in `[-128, 127]`; None if all are 0.
        where: path for error messages.

    Raises:
        ArgumentError: an array has another shape or dtype, or a number is out of its range.
    """
    checked = _as_parts(lengths, ("lengths", "the length of sequence"), (num_tokens, "tokens"), where)
    in_documents = None
    if counts is not None:
        names = ("counts", "the number of sequences of document")
        in_documents = _as_parts(counts, names, (len(checked), "sequences"), where)
    return DocumentArrays(checked, in_documents, None if modes is None else _as_modes(modes, len(checked), where=where))


def _as_parts(given: Any, names: tuple[str, str], whole: tuple[int, str], where: str) -> npt.NDArray[np.int32]:
    """Checks numbers that must add up to a whole. `names` are a noun for all numbers and one for each."""
    parts = np.asarray(given)
    if parts.ndim != 1 or (parts.dtype.kind not in "iu" and parts.size):
        raise ArgumentError(
            f"{where}: {names[0]} must be integers in one dimension, found {parts.dtype}{list(parts.shape)}"
        )
    if parts.size and not (parts.min() >= 0 and parts.max() <= _MAX_INT32):
        wrong = int(np.flatnonzero((parts < 0) | (parts > _MAX_INT32))[0])
        raise ArgumentError(f"{where}: {names[1]} {wrong} must be in [0, 2**31), found {parts[wrong]}")
    added = parts.sum(dtype=np.int64)
    if added != whole[0]:
        raise ArgumentError(f"{where}: {names[0]} must add up to the {whole[0]} {whole[1]}, found {added}")
    return parts.astype(np.int32)


def _as_modes(given: Any, num_sequences: int, *, where: str) -> npt.NDArray[np.int8]:
    modes = np.asarray(given)
    if modes.shape != (num_sequences,) or (modes.dtype.kind not in "iu" and modes.size):
        raise ArgumentError(
            f"{where}: there must be one integer mode for each of {num_sequences} sequences, "
            f"found {modes.dtype}{list(modes.shape)}"
        )
    if modes.size and not (modes.min() >= -128 and modes.max() <= 127):
        raise ArgumentError(f"{where}: modes must be in [-128, 127], found {modes.min()} to {modes.max()}")
    return modes.astype(np.int8)
