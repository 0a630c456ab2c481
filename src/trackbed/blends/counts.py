"""Parsing of large numbers: 2T, 1.5B, 300_000."""

import re
from fractions import Fraction
from typing import Final

from trackbed.errors import ArgumentError

__all__ = ["parse_count"]

_POWERS: Final = {"": 0, "K": 3, "M": 6, "B": 9, "T": 12}
_MOST_CHARS: Final = 64
_COUNT: Final = re.compile(r"(\d[\d_,]*(?:\.\d+)?)\s*([KMBT]?)")


def parse_count(text: str) -> int:
    """Parses a whole number with an optional unit.

    Args:
        text: digits, optionally grouped by `_` or `,`, then optionally K, M, B or T: thousands to trillions.

    Raises:
        ArgumentError: the text is no such number, or the number is not whole.

    >>> parse_count("1.5T"), parse_count("300_000")
    (1500000000000, 300000)
    """
    match = _COUNT.fullmatch(text.strip()) if len(text) <= _MOST_CHARS else None
    # Exact, unlike Decimal, which rounds to the precision of its context.
    number = Fraction(re.sub("[_,]", "", match[1])) * 10 ** _POWERS[match[2]] if match else None
    if number is None or number.denominator > 1:
        shown = text if len(text) <= _MOST_CHARS else f"{text[:_MOST_CHARS]}..."
        msg = f"a count must be a whole number such as 300_000, 20M, 1.5B or 2T, found {shown!r}"
        raise ArgumentError(msg)
    return int(number)
