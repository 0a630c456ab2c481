"""Functions that pickles of checkpoints call in the place of classes of data.

Each takes data alone, and no more memory than its arguments have: none multiplies, formats or calls what it is given.
"""

import enum
from collections import defaultdict, deque
from typing import Any, Final

import numpy as np

FACTORY_KINDS: Final[tuple[type, ...]] = (bool, int, float, str, list, dict, set)
"""Factories that a `defaultdict` may have, besides None."""
SCALAR_KINDS: Final = "biufcSUmM"
"""Kinds of NumPy's types whose elements are numbers, text, bytes or times."""
_SCALAR: Final[Any] = np.float64(0).__reduce__()[0]


class FactoryStandIn:
    """Stands for a factory while a pickle is read, so that the pickle cannot call it."""

    __slots__ = ("kind",)

    def __init__(self, kind: type) -> None:
        self.kind = kind


FACTORY_STAND_INS: Final = tuple((FactoryStandIn(kind), f"builtins.{kind.__name__}") for kind in FACTORY_KINDS)
"""Stand-ins with the names that pickles have."""


def rebuild_bytes() -> bytes:
    """Empty bytes, which pickles of protocol 2 write as a call. Others are written as text."""
    return b""


def rebuild_bytearray(content: Any = b"", encoding: str | None = None) -> bytearray:
    """A bytearray of bytes, or of text with its encoding."""
    if encoding is None:
        _require(content, bytes, "bytearray")
        return bytearray(content)
    _require(content, str, "bytearray")
    return bytearray(content, encoding)


def rebuild_frozenset(elements: list[Any]) -> frozenset[Any]:
    """A frozenset of the elements of a list."""
    _require(elements, list, "frozenset")
    return frozenset(elements)


def rebuild_deque(elements: list[Any] | tuple[()] = (), maxlen: int | None = None) -> deque[Any]:
    """A deque of the elements of a list."""
    if elements != ():
        _require(elements, list, "deque")
    return deque(elements, maxlen)


def rebuild_enum_member(kind: Any, name: Any) -> enum.Enum:
    """Takes the place of `getattr`, as which Python 3.11.0 to 3.11.3 pickle members of enums: of nothing else."""
    if not isinstance(kind, enum.EnumType) or name not in kind.__members__:
        raise TypeError(f"getattr must be of a member of an enum, found {str(name)[:80]!r}")
    member: enum.Enum = kind.__members__[name]
    return member


def rebuild_defaultdict(factory: Any = None, contents: dict[Any, Any] | None = None) -> defaultdict[Any, Any]:
    """A defaultdict of one of the factories that hold data.

    Args:
        factory: None, the stand-in of a factory, or the factory itself where the program has allowed it.
        contents: its items.
    """
    kind = factory.kind if isinstance(factory, FactoryStandIn) else factory
    if kind is not None and kind not in FACTORY_KINDS:
        raise TypeError(f"defaultdict: the factory must be None or one of {_names(FACTORY_KINDS)}, found {kind!r}")
    if contents is not None:
        _require(contents, dict, "defaultdict")
    return defaultdict(kind, contents or {})


def rebuild_numpy_scalar(dtype: np.dtype[Any], content: bytes) -> Any:
    """A NumPy scalar, of its bytes."""
    _require(content, bytes, "NumPy scalar")
    if not isinstance(dtype, np.dtype) or dtype.kind not in SCALAR_KINDS or dtype.subdtype is not None:
        raise TypeError(f"NumPy scalar: must be a number, text, bytes or a time, found the type {dtype!r}")
    if len(content) != dtype.itemsize:
        raise ValueError(f"NumPy scalar: {dtype!r} must have {dtype.itemsize:,} bytes, found {len(content):,}")
    return _SCALAR(dtype, content)


def _require(value: object, kind: type, what: str) -> None:
    """Raises TypeError unless a value is of a class, and of no other class below it."""
    if type(value) is not kind:
        raise TypeError(f"{what}: must be made of a {kind.__name__}, found {type(value).__name__}")


def _names(kinds: tuple[type, ...]) -> str:
    return ", ".join(kind.__name__ for kind in kinds)
