"""Telling integers from what looks like them."""

from operator import index

__all__ = ["is_whole"]


def is_whole(value: object) -> bool:
    """True for an integer of Python or of NumPy; False for 1.0, "1", None and True.

    >>> [is_whole(value) for value in (1, 1.0, "1", None, True)]
    [True, False, False, False, False]
    """
    try:
        index(value)  # type: ignore[arg-type]  # it says whether it is one
    except TypeError:
        return False
    return not isinstance(value, bool)
