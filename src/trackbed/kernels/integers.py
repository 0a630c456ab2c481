"""Check for integers that excludes bools."""

from operator import index

__all__ = ["is_integer"]


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
