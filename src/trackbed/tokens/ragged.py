"""Ragged arrays of the package awkward, as Megatron Core's `add_documents` takes them."""

from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

_CHUNK: Final = 1_000_000
"""Documents that are flattened at a time."""


def is_ragged(documents: object) -> bool:
    """True for an array of awkward, which is not imported for the question."""
    return type(documents).__module__.partition(".")[0] == "awkward"


def flat_chunks(
    documents: Any, modes: Sequence[int] | None, eod_token: int | None, chunk_size: int | None
) -> Iterator[tuple[npt.NDArray[Any], npt.NDArray[np.int64], Sequence[int] | None]]:
    """Yields concatenated tokens, the number of tokens of each document, and the modes, for some documents at a time.

    Args:
        documents: `[D, ...]` tokens of each document.
        modes: `[D]` mode of each document, or None.
        eod_token: token to append to each document, or None.
        chunk_size: documents at a time, at least 1; None for a million.
    """
    import awkward

    step = chunk_size or _CHUNK
    for first in range(0, len(documents), step):
        chunk = documents[first : first + step]
        lengths = np.asarray(awkward.num(chunk, axis=1), dtype=np.int64)
        tokens = np.asarray(awkward.flatten(chunk, axis=1))
        if eod_token is not None:
            tokens = np.insert(tokens, np.cumsum(lengths), eod_token)
            lengths = lengths + 1
        yield tokens, lengths, None if modes is None else modes[first : first + step]
