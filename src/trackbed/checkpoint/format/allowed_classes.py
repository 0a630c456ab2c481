"""Classes that pickles of checkpoints may have, besides those that torch and the program allow.

They hold data alone. Jobs of Megatron-LM save their arguments and the states of their random numbers with them, and
`import megatron.core` allows them, too. Names whose class would do more than hold data, such as `bytes`, which makes as
many zeros as it is told, stand for functions of `values/rebuild.py`.
"""

import contextlib
import datetime as dt
import threading
from argparse import Namespace
from collections.abc import Iterator
from contextvars import ContextVar
from io import BytesIO
from pathlib import PosixPath
from signal import Signals
from types import SimpleNamespace
from typing import Any, Final, Self

import numpy as np
import torch
from torch import _weights_only_unpickler as torch_unpickler

from trackbed.checkpoint.values.rebuild import (
    FACTORY_STAND_INS,
    rebuild_bytearray,
    rebuild_bytes,
    rebuild_defaultdict,
    rebuild_deque,
    rebuild_enum_member,
    rebuild_frozenset,
    rebuild_numpy_scalar,
)


def _enum_member(kind: Any, name: Any) -> Any:
    """Member of an enum, or an object that stands for it where the enum is not allowed."""
    if isinstance(kind, type) and issubclass(kind, UnknownObject):
        return kind(name)
    return rebuild_enum_member(kind, name)


_RECONSTRUCT: Final = np.ndarray([]).__reduce__()[0]
_DATA: Final[frozenset[Any]] = frozenset(
    (
        BytesIO,
        Namespace,
        (PosixPath, "pathlib.PosixPath"),
        (PosixPath, "pathlib._local.PosixPath"),  # as Python 3.13 writes it
        Signals,
        *((member, f"signal.{name}") for name, member in Signals.__members__.items()),  # as Python 3.11.0 to 3.11.3
        SimpleNamespace,
        dt.date,
        dt.datetime,
        dt.time,
        dt.timedelta,
        dt.timezone,
        np.dtype,
        np.ndarray,
        (_RECONSTRUCT, "numpy.core.multiarray._reconstruct"),  # as NumPy 1 writes it
        (_RECONSTRUCT, "numpy._core.multiarray._reconstruct"),
        *(type(np.dtype(kind)) for kind in "?bhilqBHILQefdgFDGSUMm"),
        (rebuild_numpy_scalar, "numpy.core.multiarray.scalar"),
        (rebuild_numpy_scalar, "numpy._core.multiarray.scalar"),
        (rebuild_bytes, "builtins.bytes"),
        (rebuild_frozenset, "builtins.frozenset"),
        (rebuild_deque, "collections.deque"),
        (_enum_member, "builtins.getattr"),
    )
)
_BYTEARRAY: Final = "builtins.bytearray"
_DEFAULTDICT: Final = "collections.defaultdict"
_OF_DEFAULTDICTS: Final[tuple[Any, ...]] = ((rebuild_defaultdict, _DEFAULTDICT), *FACTORY_STAND_INS)
"""Names for pickles with a defaultdict alone: in others `int` is a class that is not allowed."""
_WITH_DEFAULTDICTS: Final = _DATA.union(_OF_DEFAULTDICTS)
_LOCK: Final = threading.Lock()
"""Held while torch's list of allowed classes has more than before."""
_NAMES: Final[ContextVar[set[str] | None]] = ContextVar("unknown_names", default=None)


class UnknownObject:
    """Object of a class that is not allowed, of which there is the name and the state, and no more."""

    class_name = ""

    arguments: tuple[Any, ...]
    state: Any

    def __new__(cls, *arguments: Any) -> Self:
        """Keeps the arguments. Pickles call either the class or this method."""
        made = super().__new__(cls)
        made.arguments, made.state = arguments, None
        return made

    def __setstate__(self, state: Any) -> None:
        """Keeps the state."""
        self.state = state

    def __eq__(self, other: object) -> bool:
        """True if class, arguments and state are equal."""
        return isinstance(other, UnknownObject) and self._parts() == other._parts()

    def __hash__(self) -> int:
        return hash(self.class_name)

    def __repr__(self) -> str:
        """Shows class, arguments and state."""
        return f"<{self.class_name} {self.arguments} {self.state}>"

    def _parts(self) -> tuple[Any, ...]:
        return self.class_name, self.arguments, self.state


def stand_in(name: str) -> type[UnknownObject]:
    """Returns the class of objects of an unknown class."""
    return type("UnknownObject", (UnknownObject,), {"class_name": name})


@contextlib.contextmanager
def naming_unknown() -> Iterator[set[str]]:
    """Loads objects of classes that are not allowed as `UnknownObject` inside the block, for tools that only look.

    Yields:
        Names of these classes, as they are met.
    """
    names: set[str] = set()
    token = _NAMES.set(names)
    try:
        yield names
    finally:
        _NAMES.reset(token)


def unknown_names() -> set[str] | None:
    """Names that `naming_unknown` has yielded; None outside of it."""
    return _NAMES.get()


@contextlib.contextmanager
def allowing(*others: Any, with_defaultdicts: bool = False) -> Iterator[None]:
    """Allows classes of data, and others, for a `torch.load` inside the block.

    Args:
        others: further classes, or pairs of a class and its name.
        with_defaultdicts: True to allow defaultdicts and their factories, which are loaded as stand-ins.
    """
    data = _WITH_DEFAULTDICTS if with_defaultdicts else _DATA
    # What torch allows itself counts more than what is added to its list, so this entry is exchanged there: torch
    # allows the class `bytearray`, which makes zeros of a number.
    of_torch = torch_unpickler._get_allowed_globals()
    with _LOCK:
        # What the program has allowed stays allowed afterwards, and has its meaning inside the block.
        present = torch.serialization.get_safe_globals()
        names = set(map(_name_of, present))
        added: Any = data.union(others) if others else data  # sets, which torch's list is made of
        if names:
            added = {one for one in added if _name_of(one) not in names}
        # But for defaultdict: torch's reader cannot fill one, and the class could not take a stand-in.
        hidden = [one for one in present if with_defaultdicts and _name_of(one) == _DEFAULTDICT]
        if hidden:
            added.add(_OF_DEFAULTDICTS[0])
            _replace_allowed([one for one in present if one not in hidden])
        of_torch[_BYTEARRAY] = rebuild_bytearray
        try:
            with torch.serialization.safe_globals(added):
                yield
        finally:
            of_torch[_BYTEARRAY] = bytearray
            if hidden:
                torch.serialization.add_safe_globals(hidden)


def _replace_allowed(classes: list[Any]) -> None:
    """Replaces torch's list of allowed classes."""
    torch.serialization.clear_safe_globals()
    torch.serialization.add_safe_globals(classes)


def _name_of(allowed: Any) -> str:
    """Name in pickles of an entry of torch's list of allowed classes."""
    return allowed[1] if isinstance(allowed, tuple) else f"{allowed.__module__}.{allowed.__qualname__}"
