"""Verification of a pair: header, sizes and offsets, and every byte against its seal."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from trackbed.errors import FormatError
from trackbed.files import Checksum, FileSum, checksum_file, drop_pages
from trackbed.files.stores import is_address
from trackbed.plural import number_of
from trackbed.tokens.content import PairContent
from trackbed.tokens.format import SequenceIndex
from trackbed.tokens.paths import BESIDE, get_beside_path, get_idx_path, get_seal_path
from trackbed.tokens.seal import read_seal
from trackbed.tokens.trained_tokens import TRAINED

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


def verify(path_prefix: str, *, idx_cache: str | None = None, beside: bool = True) -> Verified:
    """Checks header, sizes, lengths, offsets and document borders of a pair.

    Args:
        path_prefix: path or address of the pair without `.bin` and `.idx`.
        idx_cache: folder of copies of `.idx` objects, for an address; None for `default_idx_cache()`.
        beside: False to leave out the files beside the pair, such as its mask.

    Raises:
        FormatError: a check failed, or a file beside the pair that its seal names is missing, or one that it does not
            name is there. The message names the file and the field of the first failure, with both values.
        FileNotFoundError: one of the files is missing.
        ArgumentError: one of the objects is missing.
        StoreError: an object store refuses, or does not answer in time.
    """
    verified = verify_opened(PairContent.open(path_prefix, idx_cache=idx_cache))
    if beside and not is_address(path_prefix):
        _check_sizes_beside(path_prefix)
    return verified


def _check_sizes_beside(path_prefix: str) -> None:
    """Checks that the files beside a pair are those that its seal names, and as large as it says."""
    names: tuple[str, ...] = BESIDE
    try:
        sealed = read_seal(get_seal_path(path_prefix)).beside or {}
    except FileNotFoundError:  # a pair needs no seal, unless it has a mask
        sealed, names = {}, (TRAINED,)
    except FormatError:  # `verify_content` says what is wrong with it
        return
    for name in dict.fromkeys((*names, *sealed)):
        path = Path(get_beside_path(path_prefix, name))
        found = path.stat().st_size if path.is_file() else None
        wanted = sealed[name].size_bytes if name in sealed else None
        if wanted is None and path.exists():
            raise _not_named(path)
        if found == wanted:
            continue
        what = "no file" if found is None else f"{found} bytes"
        raise FormatError(f"{path}: the seal says {wanted} bytes, found {what}")


def _not_named(path: Path) -> FormatError:
    return FormatError(f"{path}: the seal of the pair must name it, found none: remove it, or seal the pair again")


def verify_opened(content: PairContent) -> Verified:
    """`verify` for a pair that is already open."""
    index, bin_path, bin_bytes = content.index, content.bin_path, content.bin_bytes
    idx_path = str(index.path)
    tokens = _check_sequences(index, idx_path)
    _check_borders(index, idx_path)
    if tokens * index.dtype_size != bin_bytes:
        raise FormatError(
            f"{bin_path}: the {number_of(tokens, 'token')} of {Path(idx_path).name} must have "
            f"{tokens * index.dtype_size:,} bytes, found {bin_bytes:,}"
        )
    return Verified(
        dtype=np.dtype(index.dtype).name,
        sequences=index.sequence_count,
        documents=index.document_count - 1,
        tokens=tokens,
        bin_bytes=bin_bytes,
        idx_bytes=index.ends.size_bytes,
    )


def verify_content(
    path_prefix: str, *, progress: Callable[[int], None] | None = None, idx_cache: str | None = None
) -> Verified:
    """`verify`, then compare counts, sizes and every byte with the pair's seal.

    Args:
        path_prefix: path or address of the pair without `.bin` and `.idx`.
        progress: called with the number of bytes of each piece that was read.
        idx_cache: folder of copies of `.idx` objects, for an address; None for `default_idx_cache()`.

    Raises:
        FormatError: a check failed. The message names the file and the field of the first failure, with both values.
        FileNotFoundError: a file is missing. `seal` creates a missing seal.
    """
    content = PairContent.open(path_prefix, idx_cache=idx_cache)
    verified = verify_opened(content)
    sealed = read_seal(get_seal_path(path_prefix))
    for field in ("dtype", "sequences", "documents"):
        found, wanted = getattr(verified, field), getattr(sealed, field)
        if found != wanted:
            raise FormatError(f"{get_idx_path(path_prefix)}: the seal says {field} {str(wanted)[:200]}, found {found}")
    _check_bytes(get_idx_path(path_prefix), sealed.idx, lambda: content.checksum_idx(progress), verified.idx_bytes)
    _check_bytes(content.bin_path, sealed.bin, lambda: content.checksum_bin(progress), verified.bin_bytes)
    if not is_address(path_prefix):
        _check_beside(path_prefix, sealed.beside or {}, progress)
    return verified


def _check_beside(path_prefix: str, sealed: Mapping[str, FileSum], progress: Callable[[int], None] | None) -> None:
    """Checks the files beside a pair against its seal."""
    for name in {*sealed, *BESIDE}:
        path = Path(get_beside_path(path_prefix, name))
        if name in sealed:
            size = path.stat().st_size
            _check_bytes(str(path), sealed[name], partial(checksum_file, path, progress=progress), size)
        elif path.exists():
            raise _not_named(path)


def _check_sequences(index: SequenceIndex, path: str) -> int:
    """Checks that each sequence begins where the previous one ends. Returns the number of tokens."""
    tokens = 0
    for start in range(0, index.sequence_count, _STEP):
        lengths = index.sequence_lengths[start : start + _STEP]
        if lengths.min() < 0:
            at = start + int(lengths.argmin())
            raise FormatError(
                f"{path}: the length of sequence {at} must be at least 0, found {index.sequence_lengths[at]}"
            )
        ends = tokens + np.cumsum(lengths, dtype=np.int64)
        wanted = (ends - lengths) * index.dtype_size
        pointers = index.sequence_pointers[start : start + _STEP]
        wrong = np.flatnonzero(pointers != wanted)
        if len(wrong):
            at = int(wrong[0])
            raise FormatError(f"{path}: the offset of sequence {start + at} must be {wanted[at]}, found {pointers[at]}")
        tokens = int(ends[-1])
        drop_pages(lengths)
        drop_pages(pointers)
    return tokens


def _check_borders(index: SequenceIndex, path: str) -> None:
    """Checks that document borders begin at 0, never decrease, and end at the number of sequences."""
    borders = index.document_indices
    if borders[0] != 0 or borders[-1] != index.sequence_count:
        raise FormatError(
            f"{path}: document borders must go from 0 to the sequence_count {index.sequence_count}, "
            f"found {borders[0]} to {borders[-1]}"
        )
    for start in range(0, len(borders), _STEP):
        part = borders[start : start + _STEP + 1]
        falls = np.flatnonzero(part[1:] < part[:-1])
        if len(falls):
            at = start + int(falls[0])
            raise FormatError(
                f"{path}: document border {at + 1} must be at least {borders[at]}, found {borders[at + 1]}"
            )
        drop_pages(part)


def _check_bytes(path: str, sealed: FileSum, compute: Callable[[], Checksum], size: int) -> None:
    if size != sealed.size_bytes:
        raise FormatError(f"{path}: the seal says {sealed.size_bytes} bytes, this file has {size}")
    found = compute().chunks()
    for chunk, (have, want) in enumerate(zip(found, sealed.crc32, strict=False)):
        if have != want:
            raise FormatError(f"{path}: the seal says CRC-32 {want} for chunk {chunk}, found {have}")
    if len(found) != len(sealed.crc32):
        raise FormatError(f"{path}: the seal must list {len(found)} chunks, found {len(sealed.crc32)}")
