"""Splits of a dataset into training, validation and test parts, and the parser of blend arguments."""

import re
from collections.abc import Sequence
from enum import Enum
from itertools import accumulate, pairwise
from typing import Final

import numpy as np

from trackbed.errors import ArgumentError

Bounds = tuple[float, float]
"""Part of a dataset, half-open, as fractions in `[0, 1]`."""

_NUMBER: Final = re.compile(r"[.0-9]+")


class Split(Enum):
    """The three parts of a dataset."""

    train = 0
    valid = 1
    test = 2


def normalize(weights: Sequence[float]) -> list[float]:
    """Weights divided by their sum, in doubles, with the sum computed by `np.sum`.

    Raises:
        ArgumentError: a weight is negative or not finite, or the sum is 0 or overflows a double.

    >>> normalize([30, 70])
    [0.3, 0.7]
    """
    array = np.array(weights, dtype=np.float64)
    with np.errstate(over="ignore"):  # checked below
        total = np.sum(array)
    if not np.isfinite(array).all() or (array < 0).any() or not total > 0:
        raise ArgumentError(f"weights must be finite, at least 0 and not all 0, found {list(weights)}")
    if not np.isfinite(total):
        raise ArgumentError(
            f"weights must have a finite sum, but {len(array)} weights of up to {array.max():g} overflow"
        )
    return [float(weight) for weight in array / total]


def parse_and_normalize_split(split: str) -> list[float]:
    """Parses the three shares of a split string.

    Args:
        split: up to three numbers; missing ones are 0.

    Raises:
        ArgumentError: more than three numbers, a word that is not a number, or all numbers 0.

    >>> parse_and_normalize_split("99,1")
    [0.99, 0.01, 0.0]
    """
    words = _NUMBER.findall(split)
    try:
        shares = [float(word) for word in words]
    except ValueError:
        shares = []
    if not 1 <= len(shares) <= len(Split) or not sum(shares) > 0:
        raise ArgumentError(
            f"split must be up to {len(Split)} numbers that are not all 0, such as '99,1,0', found {split!r}"
        )
    return normalize([*shares, *[0.0] * (len(Split) - len(shares))])


def convert_split_vector_to_split_matrix(
    vector_a: Sequence[float], vector_b: Sequence[float] | None = None
) -> list[Bounds | None]:
    """Bounds of each share, None for an empty one.

    Args:
        vector_a: shares that add up to 1.
        vector_b: shares of another split; each part is then the intersection of both splits.

    >>> convert_split_vector_to_split_matrix([0.99, 0.01, 0.0])
    [(0, 0.99), (0.99, 1.0), None]
    >>> convert_split_vector_to_split_matrix([0.99, 0.01, 0.0], [0.98, 0.02, 0.0])
    [(0, 0.98), (0.99, 1.0), None]
    """
    # The sums start from the integer 0, as it appears in the names of cached indices.
    bounds_a = pairwise(accumulate(vector_a, initial=0))
    bounds_b = pairwise(accumulate(vector_a if vector_b is None else vector_b, initial=0))
    common = ((max(a[0], b[0]), min(a[1], b[1])) for a, b in zip(bounds_a, bounds_b, strict=True))
    return [(start, stop) if start < stop else None for start, stop in common]


def split_range(bounds: Bounds, num_elements: int) -> tuple[int, int]:
    """Element range `(start, stop)` of a part, with each bound rounded half to even.

    >>> split_range((0, 0.95), 10)
    (0, 10)
    """
    start, stop = (round(bound * float(num_elements)) for bound in bounds)
    return start, stop


def get_blend_from_list(blend: Sequence[str] | None) -> tuple[list[str], list[float] | None] | None:
    """Parses the prefixes and weights of a blend from command-line arguments.

    Args:
        blend: prefixes, or alternating weights and prefixes, or None.

    Returns:
        Prefixes, and weights or None; None if `blend` is None.

    Raises:
        ArgumentError: the list is empty, or some but not all of the entries in the positions of weights are numbers.

    >>> get_blend_from_list(["30", "web", "70", "books"])
    (['web', 'books'], [30.0, 70.0])
    >>> get_blend_from_list(["web", "books"])
    (['web', 'books'], None)
    """
    if blend is None:
        return None
    if not blend:
        raise ArgumentError("blend must have at least one prefix, found an empty list: pass None for no blend")
    weights = [_number(entry) for entry in blend[::2]]
    if len(blend) % 2 == 1 or all(weight is None for weight in weights):
        return [str(prefix).strip() for prefix in blend], None
    numbers = [weight for weight in weights if weight is not None]
    if len(numbers) < len(weights):
        words = [entry for entry, weight in zip(blend[::2], weights, strict=True) if weight is None]
        raise ArgumentError(
            f"blend must be prefixes, or alternating weights and prefixes, found {words} in place of weights"
        )
    return [str(prefix).strip() for prefix in blend[1::2]], numbers


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
