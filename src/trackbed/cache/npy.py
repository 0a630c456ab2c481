"""The `.npy` files of an entry: NumPy's own format, read without trusting it.

Shapes: as the header states, once it was compared with the size of the file.
"""

import math
import mmap
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from trackbed.errors import ArgumentError, FormatError
from trackbed.files import map_readonly, open_regular

_LONGEST_HEADER: Final = 4096
_ALIGNMENT: Final = 64
_GROWTH_DIGITS: Final = 21
_MAGIC: Final = b"\x93NUMPY\x01\x00"
_HEADER: Final = re.compile(
    rb"\{'descr': '(?P<dtype>\|[iu]1|<[iu][248]|<f[248])', 'fortran_order': False, "
    rb"'shape': \((?P<shape>(?:\d{1,19}(?:,|(?:, \d{1,19})+))?)\), \} *\n"
)


@dataclass(frozen=True, slots=True)
class NpyHeader:
    """Header of a `.npy` file."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    data_at: int
    """Byte at which the data begins."""

    @property
    def size_bytes(self) -> int:
        """Size of the whole file."""
        return self.data_at + math.prod(self.shape) * self.dtype.itemsize


def read_npy_header(raw: bytes, *, path: str | Path) -> NpyHeader:
    """Parses the first bytes of a `.npy` file.

    Only what `numpy.save` writes for plain numbers is understood: nothing in a header is evaluated.
    """
    if raw[:8] != _MAGIC:
        raise FormatError(f"{path}: a .npy of version 1.0 must begin with {_MAGIC!r}, found {raw[:8]!r}")
    data_at = 10 + int.from_bytes(raw[8:10], "little")
    header = _HEADER.fullmatch(raw[10:data_at])
    if header is None or len(raw) < data_at:
        raise FormatError(
            f"{path}: a .npy header must describe plain numbers in C order, found {raw[10 : min(data_at, 140)]!r}"
        )
    shape = tuple(int(length) for length in header["shape"].split(b",") if length.strip())
    return NpyHeader(np.dtype(header["dtype"].decode()), shape, data_at)


def read_npy_start(path: str | Path) -> bytes:
    """Reads as much of the file at `path` as the longest header has."""
    descriptor, _ = open_regular(path)
    try:
        return os.pread(descriptor, _LONGEST_HEADER, 0)
    finally:
        os.close(descriptor)


def map_npy(path: str | Path) -> npt.NDArray[Any]:
    """Maps the array in the file at `path` read-only; the map lives as long as the array."""
    descriptor, size = open_regular(path)
    try:
        header = read_npy_header(os.pread(descriptor, _LONGEST_HEADER, 0), path=path)
        if size != header.size_bytes:
            raise FormatError(
                f"{path}: {header.dtype} of shape {header.shape} makes {header.size_bytes} bytes, found {size}"
            )
        if size == header.data_at:
            return np.empty(header.shape, dtype=header.dtype)
        mapped = map_readonly(descriptor, size)
    except OSError as error:
        error.filename = str(path)
        raise
    finally:
        os.close(descriptor)
    return mapped[header.data_at :].view(header.dtype).reshape(header.shape)


def encode_npy_header(dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    """Returns the bytes that `numpy.save` writes before the data of an array of numbers in C order.

    numpy.save leaves room for the first length to grow to 21 digits, and fills up, by 1 to 64 spaces, to a multiple
    of 64 bytes.
    """
    if dtype.kind not in "biuf" or not dtype.isnative:
        raise ArgumentError(f"a .npy of the cache must hold plain numbers, found {dtype}")
    described = f"{{'descr': '{dtype.str}', 'fortran_order': False, 'shape': {shape!r}, }}"
    described += " " * (_GROWTH_DIGITS - len(str(shape[0])) if shape else 0)
    filled = described.ljust(((len(described) + 11) // _ALIGNMENT + 1) * _ALIGNMENT - 11) + "\n"
    return _MAGIC + len(filled).to_bytes(2, "little") + filled.encode()


def create_npy(path: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> tuple[npt.NDArray[Any], mmap.mmap]:
    """Creates a file whose array is mapped for writing. Its space on the disk is reserved at once.

    Returns:
        The array, and the map of the whole file.
    """
    header = encode_npy_header(dtype, shape)
    size = len(header) + math.prod(shape) * dtype.itemsize
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        os.posix_fallocate(descriptor, 0, size)  # else a full disk would be a bus error while the array is filled
        mapped = mmap.mmap(descriptor, size)
        mapped[: len(header)] = header
    except OSError as error:
        error.filename = path
        raise
    finally:
        os.close(descriptor)
    return np.frombuffer(mapped, dtype=dtype, offset=len(header)).reshape(shape), mapped
