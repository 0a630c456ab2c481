"""Checks for integers that exclude bools."""

from operator import index

from trackbed.errors import ArgumentError


def check_at_least(least: int, **values: object) -> None:
    """Checks that values, given by name, are whole numbers of at least `least`.

    Raises:
        ArgumentError: one is not.
    """
    for name, value in values.items():
        if not is_integer(value) or value < least:  # type: ignore[operator]  # an integer
            raise ArgumentError(f"{name} must be a whole number of at least {least}, found {value!r}")


def is_integer(value: object) -> bool:
    """True for an integer of Python or of NumPy; False for 1.0, "1", None and True.

    >>> [is_integer(value) for value in (1, 1.0, "1", None, True)]
    [True, False, False, False, False]
    """
    try:
        index(value)  # type: ignore[arg-type]  # raises a TypeError for other types
    except TypeError:
        return False
    return not isinstance(value, bool)
