"""Checks of output arrays, which kernels must write in place: a converted copy would be filled and lost."""

from typing import Any

import numpy as np
import numpy.typing as npt

from trackbed.errors import ArgumentError


def check_output(name: str, array: npt.NDArray[Any], *, dtypes: tuple[type[np.integer[Any]], ...]) -> None:
    """Checks that a kernel can write to an output in place."""
    if array.dtype not in dtypes or not array.flags.carray:
        wanted = " or ".join(np.dtype(dtype).name for dtype in dtypes)
        raise ArgumentError(
            f"{name} must be a contiguous, aligned and writable array of {wanted}, found {array.dtype}, "
            f"strides {array.strides} and writable {array.flags.writeable}"
        )
