"""Classes that pickles of checkpoints may have, besides those that torch and the program allow.

They hold data alone. Jobs of Megatron-LM save their arguments and the states of their random numbers with them, and
`import megatron.core` allows them, too.
"""

import contextlib
import threading
from argparse import Namespace
from collections.abc import Iterator
from contextvars import ContextVar
from io import BytesIO
from pathlib import PosixPath
from signal import Signals
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
import torch

__all__ = ["UnknownObject", "allowing", "naming_unknown", "stand_in", "unknown_names"]

_RECONSTRUCT: Final = np.ndarray([]).__reduce__()[0]
_DATA: Final[tuple[Any, ...]] = (
    BytesIO,
    Namespace,
    PosixPath,
    Signals,
    SimpleNamespace,
    np.dtype,
    np.ndarray,
    (_RECONSTRUCT, "numpy.core.multiarray._reconstruct"),  # as NumPy 1 writes it
    (_RECONSTRUCT, "numpy._core.multiarray._reconstruct"),
    *(type(np.dtype(kind)) for kind in "?bhilqBHILQefdFD"),
)
_LOCK: Final = threading.Lock()
"""Held while torch's list of allowed classes has more than before."""
_NAMES: Final[ContextVar[set[str] | None]] = ContextVar("unknown_names", default=None)


class UnknownObject:
    """Object of a class that is not allowed, of which there is the name and the state, and no more."""

    class_name = ""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments
        self.state: Any = None

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
        return self.class_name, getattr(self, "arguments", ()), getattr(self, "state", None)


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
def allowing(*others: Any) -> Iterator[None]:
    """Allows classes of data, and others, for a `torch.load` inside the block."""
    with _LOCK:
        # What the program has allowed stays allowed afterwards.
        present = torch.serialization.get_safe_globals()
        with torch.serialization.safe_globals([one for one in (*_DATA, *others) if one not in present]):
            yield
