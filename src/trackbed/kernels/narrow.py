"""Typed door to the kernel that stores token ids in a narrower type."""

from typing import Any

import numpy as np
import numpy.typing as npt

from trackbed.errors import ArgumentError
from trackbed.kernels import _native

__all__ = ["narrow"]


def narrow(source: npt.NDArray[Any], dtype: np.dtype[Any]) -> bytes:
    """The bytes of `[N]` integers in another integer type, every one of them unchanged.

    Raises:
        ArgumentError: `dtype` cannot hold one of them, which the message names; or they are no vector of native
            integers, or `dtype` is no type that an indexed file holds.
    """
    try:
        stored, first = _native.narrow(source, dtype.char if dtype.isnative else "?")
    except (TypeError, ValueError):
        found = f"{source.dtype.str}{list(source.shape)} and {dtype.str}"
        msg = f"source and dtype must be a vector of native integers and a native integer type, found {found}"
        raise ArgumentError(msg) from None
    if first < len(source):
        limits = np.iinfo(dtype)
        msg = (
            f"a token must be an integer in [{limits.min}, {limits.max}] to be stored as {dtype}, found {source[first]}"
        )
        raise ArgumentError(msg)
    return stored
