"""Conversion of tokens from tensors, arrays and lists to the bytes of a `.bin`.

Shapes: T tokens.
"""

import contextlib
import struct
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from trackbed.errors import ArgumentError
from trackbed.kernels import narrow

Buffer = bytes | memoryview

_KINDS: Final = {"i": "iu", "u": "iu", "f": "iuf"}
"""NumPy kinds that can be stored, by the kind of the file's dtype."""


def as_numbers(tensor: Any, dtype: np.dtype[Any], *, where: str) -> npt.NDArray[Any]:
    """Converts a tensor, array or list to `[T]` numbers of a kind that can be stored as `dtype`."""
    if isinstance(tensor, np.ndarray):
        found = tensor.dtype
        if found.kind in _KINDS[dtype.kind] and found.isnative and tensor.ndim == 1 and tensor.flags.c_contiguous:
            return tensor
    if isinstance(tensor, (list, tuple)) and dtype.kind in "iu":
        # The fastest conversion that checks every number of a list; lists that it rejects are handled below.
        with contextlib.suppress(struct.error):
            return np.frombuffer(struct.pack(f"{len(tensor)}{dtype.char}", *tensor), dtype=dtype)
    kind = "numbers" if dtype.kind == "f" else "integers"
    try:
        given = np.asarray(tensor)
        given = given if given.ndim == 1 else given.reshape(-1)
    except ValueError as error:
        raise ArgumentError(f"{where}: tokens stored as {dtype} must be {kind}: {error}") from None
    if given.dtype == dtype:
        return given
    if given.dtype.kind == "U":  # numbers as strings, as Megatron Core accepts them
        with contextlib.suppress(ValueError, OverflowError):
            given = given.astype(dtype if dtype.kind == "f" else np.int64)
    if given.dtype.kind in _KINDS[dtype.kind]:
        return np.ascontiguousarray(given, dtype=given.dtype.newbyteorder("="))
    if given.size == 0:
        return np.empty(0, dtype=dtype)  # NumPy converts an empty list to floats
    raise ArgumentError(f"{where}: tokens stored as {dtype} must be {kind}, found {given.dtype}")


def encode(tokens: npt.NDArray[Any], dtype: np.dtype[Any], *, where: str) -> Buffer:
    """Encodes `[T]` numbers as `dtype` without changing any value. The result shares no memory with the input.

    Raises:
        ArgumentError: a number does not fit `dtype`; the message starts with `where`.
    """
    if tokens.dtype == dtype:
        return tokens.tobytes()
    if dtype.kind == "f":
        rounded = tokens.astype(dtype)
        if tokens.dtype.kind in "iu" and not np.array_equal(rounded, tokens):
            wrong = int(tokens[rounded != tokens][0])
            raise ArgumentError(f"{where}: {dtype} must hold every token unchanged, found {wrong}")
        return rounded.data
    try:
        return narrow(tokens, dtype)
    except ArgumentError as error:
        raise ArgumentError(f"{where}: {error}") from None
