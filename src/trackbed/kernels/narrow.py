"""Typed wrapper of the kernel that converts token ids to a narrower type."""

from typing import Any

import numpy as np
import numpy.typing as npt

from trackbed.errors import ArgumentError
from trackbed.kernels import _native


def narrow(source: npt.NDArray[Any], dtype: np.dtype[Any]) -> bytes:
    """Converts `[N]` integers to another integer type without changing any value. Returns their bytes.

    Raises:
        ArgumentError: a value does not fit `dtype` (the message contains it), `source` is not a vector of native
            integers, or `dtype` is not a type of indexed files.
    """
    try:
        stored, first = _native.narrow(source, dtype.char if dtype.isnative else "?")
    except (TypeError, ValueError):
        found = f"{source.dtype.str}{list(source.shape)} and {dtype.str}"
        raise ArgumentError(
            f"source and dtype must be a vector of native integers and a native integer type, found {found}"
        ) from None
    if first < len(source):
        limits = np.iinfo(dtype)
        raise ArgumentError(
            f"a token must be an integer in [{limits.min}, {limits.max}] to be stored as {dtype}, found {source[first]}"
        )
    return stored
