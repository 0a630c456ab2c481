"""The `.npy` files of an entry: NumPy's own format, read without trusting it.

Shapes: whatever the header says, once it was compared with the size of the file.
"""

import io
import math
import mmap
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from trackbed.errors import FormatError
from trackbed.files import Checksum, write_new

__all__ = ["NpyHeader", "encode_npy_header", "map_npy", "read_npy_header", "read_npy_spec", "write_npy"]

_LONGEST_HEADER: Final = 4096
_MAGIC: Final = b"\x93NUMPY\x01\x00"
_HEADER: Final = re.compile(
    rb"\{'descr': '(?P<dtype>\|[iu]1|<[iu][248]|<f[248])', 'fortran_order': False, "
    rb"'shape': \((?P<shape>(?:\d{1,19}(?:,|(?:, \d{1,19})+))?)\), \} *\n"
)


@dataclass(frozen=True, slots=True)
class NpyHeader:
    """What a `.npy` says it holds."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    data_at: int
    """Byte at which the data begins."""

    @property
    def size_bytes(self) -> int:
        """Size of the whole file."""
        return self.data_at + math.prod(self.shape) * self.dtype.itemsize


def read_npy_header(raw: bytes, *, path: str | Path) -> NpyHeader:
    """What the first bytes of a `.npy` say.

    Only what `numpy.save` writes for plain numbers is understood: nothing in a header is evaluated.

    Raises:
        FormatError: they are no header of version 1.0, or of something else than numbers in C order.
    """
    if raw[:8] != _MAGIC:
        msg = f"{path}: a .npy of version 1.0 must begin with {_MAGIC!r}, found {raw[:8]!r}"
        raise FormatError(msg)
    data_at = 10 + int.from_bytes(raw[8:10], "little")
    header = _HEADER.fullmatch(raw[10:data_at])
    if header is None or len(raw) < data_at:
        msg = f"{path}: a .npy header must describe plain numbers in C order, found {raw[10 : min(data_at, 140)]!r}"
        raise FormatError(msg)
    shape = tuple(int(length) for length in header["shape"].split(b",") if length.strip())
    return NpyHeader(np.dtype(header["dtype"].decode()), shape, data_at)


def read_npy_spec(path: Path) -> NpyHeader:
    """The header of the file at `path`.

    Raises:
        FormatError: there is none that can be read.
    """
    with path.open("rb") as file:
        return read_npy_header(file.read(_LONGEST_HEADER), path=path)


def map_npy(path: str | Path) -> npt.NDArray[Any]:
    """The array in the file at `path`, mapped read-only; the map lives as long as the array.

    Raises:
        FormatError: the file is no `.npy`, or shorter or longer than its header says.
        FileNotFoundError: there is no such file.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        header = read_npy_header(os.pread(descriptor, _LONGEST_HEADER, 0), path=path)
        size = os.fstat(descriptor).st_size
        if size != header.size_bytes:
            msg = f"{path}: {header.dtype} of shape {header.shape} makes {header.size_bytes} bytes, found {size}"
            raise FormatError(msg)
        if size == header.data_at:
            return np.empty(header.shape, dtype=header.dtype)
        mapped = mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
    finally:
        os.close(descriptor)
    return np.frombuffer(mapped, dtype=header.dtype, offset=header.data_at).reshape(header.shape)


def encode_npy_header(array: npt.NDArray[Any]) -> bytes:
    """The bytes that `numpy.save` puts before the data of `array`."""
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, np.lib.format.header_data_from_array_1_0(array))
    return file.getvalue()


def write_npy(path: str | Path, array: npt.NDArray[Any]) -> Checksum:
    """Write `array`, in C order, to the new file `path`, byte for byte as `numpy.save` does."""
    return write_new(path, encode_npy_header(array), np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
