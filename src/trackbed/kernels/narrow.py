"""Typed door to the kernel that stores token ids in a narrower type."""

from typing import Any

import numpy as np
import numpy.typing as npt

from trackbed.errors import ArgumentError
from trackbed.kernels import _native

__all__ = ["narrow"]


def narrow(source: npt.NDArray[Any], target: npt.NDArray[Any]) -> None:
    """Copy `[N]` integers to a vector of another integer type, every one of them unchanged.

    Raises:
        ArgumentError: `target` cannot hold one of them, which the message names; or they are not two vectors
            of integers, equally long, `target` contiguous and writable.
    """
    try:
        # A strided target would be copied, and the copy filled and lost.
        first = _native.narrow(source, target) if target.flags.c_contiguous else -1
    except (TypeError, ValueError):
        first = -1
    if first < 0:
        msg = (
            "source and target must be vectors of native integers, equally long, target contiguous and "
            f"writable, found {_described(source)} and {_described(target)}"
        )
        raise ArgumentError(msg)
    if first < len(source):
        limits = np.iinfo(target.dtype)
        msg = (
            f"a token must be an integer in [{limits.min}, {limits.max}] to be stored as {target.dtype}, "
            f"found {source[first]}"
        )
        raise ArgumentError(msg)


def _described(array: npt.NDArray[Any]) -> str:
    return f"{array.dtype.str}{list(array.shape)} with strides {array.strides}"
