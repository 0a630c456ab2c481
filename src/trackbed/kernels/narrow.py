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
        ArgumentError: `target` cannot hold one of them, which the message names.
    """
    first = _native.narrow(source, target)
    if first < len(source):
        limits = np.iinfo(target.dtype)
        msg = (
            f"a token must be an integer in [{limits.min}, {limits.max}] to be stored as {target.dtype}, "
            f"found {source[first]}"
        )
        raise ArgumentError(msg)
