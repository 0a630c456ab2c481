"""How much a pair holds, from a few bytes of its index: for plans over thousands of pairs.

Shapes: N sequences, D documents, B places in the file.
"""

import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from trackbed.errors import ArgumentError, FormatError
from trackbed.tokens.format import HEADER_BYTES, Header, decode_header
from trackbed.tokens.paths import get_bin_path, get_idx_path

__all__ = ["PairSize", "pair_size", "tokens_before"]

_LENGTH: Final = struct.Struct("<i")
_NUMBER: Final = struct.Struct("<q")


@dataclass(frozen=True, slots=True, kw_only=True)
class PairSize:
    """What a pair holds."""

    dtype: type[np.number[Any]]
    sequences: int
    documents: int
    tokens: int
    """Where the last sequence ends; the sum of all lengths in a pair that is not damaged."""


def pair_size(path_prefix: str) -> PairSize:
    """What a pair holds, from its header and its last sequence. No file stays open.

    Raises:
        ArgumentError: one of the files is missing.
        FormatError: the index is damaged, or points outside the data.
    """
    missing = [path for path in (get_idx_path(path_prefix), get_bin_path(path_prefix)) if not Path(path).exists()]
    if missing:
        msg = f"{path_prefix}: a .bin and an .idx file must exist, missing {' and '.join(missing)}"
        raise ArgumentError(msg)
    with _Index.open(path_prefix) as index:
        return PairSize(
            dtype=index.header.dtype,
            sequences=index.header.sequence_count,
            documents=index.header.document_count - 1,
            tokens=index.tokens_before(index.header.sequence_count),
        )


def tokens_before(path_prefix: str, sequences: Sequence[int]) -> list[int]:
    """`[B]` tokens of a pair before each of the given sequences, from as many entries of its index.

    Args:
        path_prefix: path of the pair without `.bin` and `.idx`.
        sequences: `[B]` numbers in `[0, N]`.

    Raises:
        ArgumentError: a number is out of range.
        FormatError: the index is damaged, or points outside the data.
    """
    with _Index.open(path_prefix) as index:
        return [index.tokens_before(sequence) for sequence in sequences]


class _Index:
    """An `.idx` whose entries are read one by one.

    Args:
        descriptor: of the file, closed with this object.
        header: what its first bytes say.
        data_bytes: size of the `.bin`.
        path: name of the `.idx`, for errors.
    """

    def __init__(self, descriptor: int, header: Header, data_bytes: int, path: Path) -> None:
        self.header = header
        self._descriptor = descriptor
        self._data_bytes = data_bytes
        self._path = path

    @classmethod
    def open(cls, path_prefix: str) -> "_Index":
        """Open the index of a pair, and check its size."""
        path = Path(get_idx_path(path_prefix))
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            header = decode_header(os.pread(descriptor, HEADER_BYTES, 0), path=path)
            _check_bytes(os.fstat(descriptor).st_size, header, path)
            return cls(descriptor, header, Path(get_bin_path(path_prefix)).stat().st_size, path)
        except BaseException:
            os.close(descriptor)
            raise

    def __enter__(self) -> "_Index":
        return self

    def __exit__(self, *_error: object) -> None:
        os.close(self._descriptor)

    def tokens_before(self, sequence: int) -> int:
        """Tokens before a sequence in `[0, N]`."""
        count, token_bytes = self.header.sequence_count, np.dtype(self.header.dtype).itemsize
        if not 0 <= sequence <= count:
            msg = f"{self._path}: a sequence must be in [0, {count}], found {sequence}"
            raise ArgumentError(msg)
        if count == 0:
            return 0
        entry = min(sequence, count - 1)
        end = self._number(_NUMBER, HEADER_BYTES + 4 * count + 8 * entry)
        if sequence == count:
            end += self._number(_LENGTH, HEADER_BYTES + 4 * entry) * token_bytes
        if not 0 <= end <= self._data_bytes:
            msg = f"{self._path}: sequence {entry} must lie inside the .bin of {self._data_bytes} bytes, found {end}"
            raise FormatError(msg)
        return end // token_bytes

    def _number(self, form: struct.Struct, offset: int) -> int:
        return int(form.unpack(os.pread(self._descriptor, form.size, offset))[0])


def _check_bytes(size: int, header: Header, path: Path) -> None:
    if size not in (header.size_bytes, header.size_bytes + header.sequence_count):
        msg = (
            f"{path}: sequence_count {header.sequence_count} and document_count {header.document_count} make "
            f"{header.size_bytes} bytes, or {header.sequence_count} more with modes, this file has {size}"
        )
        raise FormatError(msg)
