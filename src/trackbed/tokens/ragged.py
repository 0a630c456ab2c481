"""Ragged arrays of the package awkward, as Megatron Core's `add_documents` takes them."""

from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from trackbed.errors import ArgumentError
from trackbed.kernels.integers import is_integer
from trackbed.tokens.encode import as_numbers, encode

_CHUNK: Final = 1_000_000
"""Documents that are flattened at a time."""


def is_ragged(documents: object) -> bool:
    """True for an array of awkward, which is not imported for the question."""
    return type(documents).__module__.partition(".")[0] == "awkward"


def flat_chunks(
    documents: Any, modes: Any, eod_token: int | None, chunk_size: int | None, dtype: np.dtype[Any], where: str
) -> Iterator[tuple[npt.NDArray[Any], npt.NDArray[np.int64], Sequence[int] | None]]:
    """Yields concatenated tokens, the number of tokens of each document, and the modes, for some documents at a time.

    Args:
        documents: `[D, ...]` tokens of each document.
        modes: `[D]` mode of each document, or None.
        eod_token: token to append to each document, or None.
        chunk_size: documents at a time, at least 1; None for a million.
        dtype: type of the tokens in the file.
        where: name of the file, for errors.

    Raises:
        ArgumentError: the array has another form, or an argument is out of range.
    """
    import awkward

    if chunk_size is not None and (not is_integer(chunk_size) or chunk_size < 1):
        raise ArgumentError(f"{where}: chunk_size must be a whole number of at least 1, found {chunk_size!r}")
    if eod_token is not None and not is_integer(eod_token):
        raise ArgumentError(f"{where}: eod_token must be a whole number, found {eod_token!r}")
    if modes is not None and len(modes) != len(documents):
        raise ArgumentError(f"{where}: there must be a mode for each of {len(documents)} documents, found {len(modes)}")
    step = chunk_size or _CHUNK
    for first in range(0, len(documents), step):
        chunk = documents[first : first + step]
        try:
            lengths = np.asarray(awkward.num(chunk, axis=1), dtype=np.int64)
            tokens = np.asarray(awkward.flatten(chunk, axis=1))
        except (TypeError, ValueError) as error:  # also AxisError, of arrays of one dimension
            reason = str(error).partition("\n")[0]
            raise ArgumentError(
                f"{where}: documents must be a ragged array of whole numbers [D, ...]: {reason}"
            ) from None
        # The numbers of no tokens have no type.
        tokens = _stored(tokens if tokens.size else tokens.astype(dtype), dtype, where)
        if eod_token is not None:
            tokens = np.insert(tokens, np.cumsum(lengths), _stored([eod_token], dtype, where)[0])
            lengths = lengths + 1
        yield tokens, lengths, None if modes is None else modes[first : first + step]


def _stored(numbers: Any, dtype: np.dtype[Any], where: str) -> npt.NDArray[Any]:
    """Numbers in the type of the file, which they must fit."""
    return np.frombuffer(encode(as_numbers(numbers, dtype, where=where), dtype, where=where), dtype)
