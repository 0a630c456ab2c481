"""Masks of other projects, one byte a token, taken in as the trained tokens of a pair.

PaddleNLP writes `<prefix>.lsm`, OLMo-core files of `np.bool_`: both are parallel to the tokens.

Shapes: D documents, R runs, T tokens.
"""

from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from trackbed.errors import ArgumentError, FormatError
from trackbed.files import clear_dead_partials, flush_to_disk, new_partial, publish
from trackbed.tokens.content import PairContent
from trackbed.tokens.format import SequenceIndex
from trackbed.tokens.paths import get_beside_path
from trackbed.tokens.trained_tokens import TRAINED, Runs, TrainedColumns, TrainedTokens

_ZIP: Final = b"PK\3\4"
_STEP_DOCUMENTS: Final = 1 << 14  # bounds the memory


def take_mask(path_prefix: str, mask: Path) -> int:
    """Writes `<prefix>.mask` from a file with one byte for each token of a pair, 1 for a trained one and 0 for others.

    The pair must be sealed afterwards: a mask that its seal does not name is not read.

    Args:
        path_prefix: path of the pair without `.bin` and `.idx`.
        mask: file of bytes, or `.npy` file of an array `[T]` of booleans or bytes. A byte belongs to its own token, not
            to the one before it.

    Returns:
        Number of trained tokens.

    Raises:
        ArgumentError: the file has not one byte for each token.
        FormatError: a byte is neither 0 nor 1, or the file is no array.
        FileNotFoundError: there is no such file.
    """
    index = PairContent.open(path_prefix, idx_cache=None).index
    flags = _open(mask)
    num_tokens = index.data_bytes // index.dtype_size
    if len(flags) != num_tokens:
        raise ArgumentError(
            f"{mask}: a mask must have one byte for each of the {num_tokens:,} tokens of {path_prefix}, found "
            f"{len(flags):,}"
        )
    columns = TrainedColumns()
    done = 0
    for start in range(0, index.document_count - 1, _STEP_DOCUMENTS):
        lengths = _document_lengths(index, start, min(start + _STEP_DOCUMENTS, index.document_count - 1))
        part = np.asarray(flags[done : done + int(lengths.sum())])
        if (part > 1).any():
            at = done + int(np.flatnonzero(part > 1)[0])
            raise FormatError(f"{mask}: a mask must have bytes of 0 and 1, found {part[at - done]} at token {at:,}")
        columns.add(*runs_of_documents(part == 1, lengths), lengths=lengths, where=str(mask))
        done += len(part)
    _write(columns, Path(get_beside_path(path_prefix, TRAINED)))
    return int(np.frombuffer(columns.runs, dtype=np.uint32)[1::2].sum(dtype=np.int64)) if columns.runs else 0


def check_mask(path_prefix: str) -> None:
    """Checks the mask beside a pair on a disk, if there is one, against the lengths of its documents.

    Args:
        path_prefix: path of the pair without `.bin` and `.idx`.

    Raises:
        FormatError: it is damaged, or of other documents.
    """
    path = Path(get_beside_path(path_prefix, TRAINED))
    if path.is_file():
        index = PairContent.open(path_prefix, idx_cache=None).index
        lengths = _document_lengths(index, 0, index.document_count - 1)
        TrainedTokens.of_file(path).check(lengths, where=str(path))


def runs_of_documents(
    is_trained: npt.NDArray[np.bool_], lengths: npt.NDArray[np.integer]
) -> tuple[npt.NDArray[np.int64], Runs]:
    """Returns the `[D]` number of runs of each document, and all `[R, 2]` runs, none of which crosses a border.

    Args:
        is_trained: `[T]` True for each trained token.
        lengths: `[D]` tokens of each document.

    >>> runs_of_documents(np.array([True, True, True, False, True]), np.array([2, 0, 3]))[1].tolist()
    [[0, 2], [0, 1], [2, 1]]
    """
    ends = np.cumsum(lengths, dtype=np.int64)
    begins = np.zeros(len(is_trained) + 1, dtype=np.bool_)
    begins[ends[:-1]] = True
    before = np.zeros(len(is_trained), dtype=np.bool_)
    before[1:] = is_trained[:-1]
    behind = np.zeros(len(is_trained), dtype=np.bool_)
    behind[:-1] = is_trained[1:]
    starts = np.flatnonzero(is_trained & (~before | begins[:-1]))
    stops = np.flatnonzero(is_trained & (~behind | begins[1:])) + 1
    documents = np.searchsorted(ends, starts, side="right")
    bases = (ends - lengths)[documents]
    runs = np.stack([starts - bases, stops - starts], axis=1).astype(np.uint32)
    return np.bincount(documents, minlength=len(lengths)).astype(np.int64), runs


def _open(mask: Path) -> npt.NDArray[np.uint8]:
    """Opens a mask as `[T]` bytes, which are read where they are used."""
    if mask.suffix != ".npy":
        size = mask.stat().st_size
        return np.memmap(mask, dtype=np.uint8, mode="r") if size else np.empty(0, dtype=np.uint8)
    with mask.open("rb") as file:
        begin = file.read(len(_ZIP))
    if begin == _ZIP:
        raise FormatError(f"{mask}: a mask must be one array, found an archive")
    try:
        found = np.load(mask, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise FormatError(f"{mask}: a mask must be an array, found: {error}") from error
    if found.ndim != 1 or found.dtype.itemsize != 1 or found.dtype.kind not in "bui":
        raise FormatError(
            f"{mask}: a mask must be an array [T] of booleans or bytes, found {found.dtype} {found.shape}"
        )
    flags: npt.NDArray[np.uint8] = found.view(np.uint8)
    return flags


def _document_lengths(index: SequenceIndex, start: int, stop: int) -> npt.NDArray[np.int64]:
    borders = index.document_indices[start : stop + 1].astype(np.int64)
    sums = np.concatenate([[0], np.cumsum(index.sequence_lengths[borders[0] : borders[-1]], dtype=np.int64)])
    lengths: npt.NDArray[np.int64] = np.diff(sums[borders - borders[0]])
    return lengths


def _write(columns: TrainedColumns, final: Path) -> None:
    clear_dead_partials(final.parent, final_name=final.name)
    partial = new_partial(final)
    try:
        columns.write(partial)
        flush_to_disk(partial)
        publish(partial, final)
        flush_to_disk(final.parent)
    finally:
        partial.unlink(missing_ok=True)
