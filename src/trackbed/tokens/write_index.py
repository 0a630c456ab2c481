"""Writer of `.idx` files, in pieces of bounded size.

Shapes: N sequences, D documents.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from trackbed.files import Checksum, Writeback
from trackbed.tokens.idx_header import Header, encode_header

_STEP: Final = 1 << 18  # elements per piece: a few MiB, which stay in the CPU cache


def write_index(
    path: Path,
    dtype: type[np.number[Any]],
    lengths: npt.NDArray[np.int32],
    borders: npt.NDArray[np.int64],
    modes: npt.NDArray[np.int8] | None,
) -> Checksum:
    """Writes the new file `path`. Returns its checksum.

    Args:
        path: path of the file, which must not exist.
        dtype: type of the tokens in the `.bin`.
        lengths: `[N]` tokens in each sequence, each at least 0.
        borders: `[D + 1]` first sequence of each document, then N.
        modes: `[N]` mode of each sequence, or None in a file without modes.
    """
    checksum = Checksum()
    with path.open("xb", buffering=0) as file:
        writeback = Writeback(file.fileno())
        for part in _parts(dtype, lengths, borders, modes):
            view = memoryview(part)
            checksum.update(view)
            while view:
                view = view[file.write(view) :]
            writeback.grown(checksum.size_bytes)
    return checksum


def _parts(
    dtype: type[np.number[Any]],
    lengths: npt.NDArray[np.int32],
    borders: npt.NDArray[np.int64],
    modes: npt.NDArray[np.int8] | None,
) -> Iterator[bytes]:
    yield encode_header(Header(dtype, len(lengths), len(borders)))
    for piece in _pieces(lengths):
        yield piece.astype("<i4", copy=False).tobytes()
    end = 0
    for piece in _pieces(lengths):
        ends = end + np.cumsum(piece, dtype=np.int64)
        yield ((ends - piece) * np.dtype(dtype).itemsize).astype("<i8", copy=False).tobytes()
        end = int(ends[-1])
    for piece in _pieces(borders):
        yield piece.astype("<i8", copy=False).tobytes()
    if modes is not None:
        yield modes.tobytes()


def _pieces(array: npt.NDArray[Any]) -> Iterator[npt.NDArray[Any]]:
    return (array[start : start + _STEP] for start in range(0, len(array), _STEP))
