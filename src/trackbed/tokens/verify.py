"""Verification of a pair: header, sizes and offsets, and every byte against its seal."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from trackbed.errors import FormatError
from trackbed.files import FileSum, checksum_file, drop_pages
from trackbed.tokens.commit import interruption
from trackbed.tokens.format import SequenceIndex, open_index
from trackbed.tokens.paths import get_bin_path, get_idx_path, get_seal_path
from trackbed.tokens.seal import read_seal

__all__ = ["Verified", "verify", "verify_content"]

_STEP = 1 << 20  # sequences checked at a time, which bounds the memory of a check


@dataclass(frozen=True, slots=True)
class Verified:
    """Properties of a verified pair."""

    dtype: str
    sequences: int
    documents: int
    tokens: int
    bin_bytes: int
    idx_bytes: int


def verify(path_prefix: str) -> Verified:
    """Check header, sizes, lengths, offsets and document borders of a pair.

    Raises:
        FormatError: a check failed. The message names the file and the field of the first failure, with both values.
        FileNotFoundError: one of the files is missing.
    """
    idx_path, bin_path = Path(get_idx_path(path_prefix)), Path(get_bin_path(path_prefix))
    if interruption(path_prefix):
        open_index(idx_path)  # raises an error that says how to finish the pair
    bin_bytes = bin_path.stat().st_size
    index = open_index(idx_path)
    tokens = _check_sequences(index, idx_path)
    _check_borders(index, idx_path)
    if tokens * index.dtype_size != bin_bytes:
        msg = (
            f"{bin_path}: the {tokens} tokens of {idx_path.name} have {tokens * index.dtype_size} bytes, "
            f"this file has {bin_bytes}"
        )
        raise FormatError(msg)
    return Verified(
        dtype=np.dtype(index.dtype).name,
        sequences=index.sequence_count,
        documents=index.document_count - 1,
        tokens=tokens,
        bin_bytes=bin_bytes,
        idx_bytes=idx_path.stat().st_size,
    )


def verify_content(path_prefix: str, *, progress: Callable[[int], None] | None = None) -> Verified:
    """`verify`, then compare counts, sizes and every byte with the pair's seal.

    Args:
        path_prefix: path of the pair without `.bin` and `.idx`.
        progress: called with the number of bytes of each piece that was read.

    Raises:
        FormatError: a check failed. The message names the file and the field of the first failure, with both values.
        FileNotFoundError: a file is missing. `seal` creates a missing seal.
    """
    verified = verify(path_prefix)
    sealed = read_seal(Path(get_seal_path(path_prefix)))
    for field in ("dtype", "sequences", "documents"):
        found, wanted = getattr(verified, field), getattr(sealed, field)
        if found != wanted:
            msg = f"{get_idx_path(path_prefix)}: the seal says {field} {str(wanted)[:200]}, found {found}"
            raise FormatError(msg)
    _check_bytes(Path(get_idx_path(path_prefix)), sealed.idx, progress)
    _check_bytes(Path(get_bin_path(path_prefix)), sealed.bin, progress)
    return verified


def _check_sequences(index: SequenceIndex, path: Path) -> int:
    """Check that each sequence begins where the previous one ends. Returns the number of tokens."""
    tokens = 0
    for start in range(0, index.sequence_count, _STEP):
        lengths = index.sequence_lengths[start : start + _STEP]
        if lengths.min() < 0:
            at = start + int(lengths.argmin())
            msg = f"{path}: the length of sequence {at} must be at least 0, found {index.sequence_lengths[at]}"
            raise FormatError(msg)
        ends = tokens + np.cumsum(lengths, dtype=np.int64)
        wanted = (ends - lengths) * index.dtype_size
        pointers = index.sequence_pointers[start : start + _STEP]
        wrong = np.flatnonzero(pointers != wanted)
        if len(wrong):
            at = int(wrong[0])
            msg = f"{path}: the offset of sequence {start + at} must be {wanted[at]}, found {pointers[at]}"
            raise FormatError(msg)
        tokens = int(ends[-1])
        drop_pages(lengths)
        drop_pages(pointers)
    return tokens


def _check_borders(index: SequenceIndex, path: Path) -> None:
    """Check that document borders begin at 0, never decrease, and end at the number of sequences."""
    borders = index.document_indices
    if borders[0] != 0 or borders[-1] != index.sequence_count:
        msg = (
            f"{path}: document borders must go from 0 to the sequence_count {index.sequence_count}, "
            f"found {borders[0]} to {borders[-1]}"
        )
        raise FormatError(msg)
    for start in range(0, len(borders), _STEP):
        part = borders[start : start + _STEP + 1]
        falls = np.flatnonzero(part[1:] < part[:-1])
        if len(falls):
            at = start + int(falls[0])
            msg = f"{path}: document border {at + 1} must be at least {borders[at]}, found {borders[at + 1]}"
            raise FormatError(msg)
        drop_pages(part)


def _check_bytes(path: Path, sealed: FileSum, progress: Callable[[int], None] | None) -> None:
    size = path.stat().st_size
    if size != sealed.size_bytes:
        msg = f"{path}: the seal says {sealed.size_bytes} bytes, this file has {size}"
        raise FormatError(msg)
    found = checksum_file(path, progress=progress).chunks()
    for chunk, (have, want) in enumerate(zip(found, sealed.crc32, strict=False)):
        if have != want:
            msg = f"{path}: the seal says CRC-32 {want} for chunk {chunk}, found {have}"
            raise FormatError(msg)
    if len(found) != len(sealed.crc32):
        msg = f"{path}: the seal must list {len(found)} chunks, found {len(sealed.crc32)}"
        raise FormatError(msg)
