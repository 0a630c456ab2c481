"""Values that a program gives for the record of a run."""

from collections.abc import Sequence
from typing import Any

import orjson
import torch

from trackbed.errors import ArgumentError


def checked_numbers(values: Any, what: str) -> list[float]:
    """Returns a number, or each of a sequence or array, as a float.

    Raises:
        ArgumentError: it is none; `what` names it.

    >>> checked_numbers(1, "loss"), checked_numbers([0.5, 2], "loss")
    ([1.0], [0.5, 2.0])
    """
    plain = values.tolist() if hasattr(values, "tolist") else values
    several = plain if isinstance(plain, Sequence) and not isinstance(plain, (str, bytes)) else [plain]
    found = str(values)[:80]
    if any(isinstance(one, (str, bytes)) for one in several):
        raise ArgumentError(f"{what} must be a number, or a sequence of numbers, found {found!r}")
    try:
        return [float(one) for one in several]
    except (TypeError, ValueError, OverflowError) as error:
        raise ArgumentError(f"{what} must be a number, or a sequence of numbers, found {found!r}: {error}") from None


def plain_value(name: str, value: Any) -> Any:
    """Returns a value as JSON has it; a tensor of torch, which may have yet to be computed, as it is.

    Raises:
        ArgumentError: JSON has no such value.

    >>> import numpy as np
    >>> plain_value("lr", np.float64(0.1)), plain_value("note", None)
    (0.1, None)
    """
    if value is None or type(value) is float:
        return value
    if isinstance(value, torch.Tensor):
        if value.numel() != 1:
            raise ArgumentError(f"{name} must be one number, found a tensor of shape {list(value.shape)}")
        return value
    plain = value.item() if hasattr(value, "item") else value
    try:
        orjson.dumps(plain)
    except (TypeError, ValueError, RecursionError) as error:
        raise ArgumentError(f"{name} must be a value that JSON has, found {str(value)[:80]!r}: {error}") from None
    return plain
