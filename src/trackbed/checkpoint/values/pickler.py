"""Pickles of values, made so that torch's reader of weights reads them back equal and of their class."""

import datetime as dt
import pickle
from collections import Counter, OrderedDict, defaultdict, deque
from dataclasses import dataclass, field
from enum import Enum
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
import torch

from trackbed.checkpoint.values.rebuild import FACTORY_KINDS, SCALAR_KINDS
from trackbed.checkpoint.values.storages import Copies, copy_of, has_plain_storage

PROTOCOL: Final = 2
"""Protocol of `torch.save`."""
_CONTAINERS: Final = (dict, list, deque)
_FILLED: Final = (OrderedDict, Counter)
"""Containers besides `dict` and `list` that torch's reader fills with the items that follow in the pickle."""
_WITH_EQUALITY: Final = (Enum, tuple, str, int, float, complex, bytes, set, frozenset, dict, list)
_PLAIN_TENSORS: Final = (torch.Tensor, torch.nn.Parameter)


class RefusedError(Exception):
    """A value would come back as another, or not at all.

    Args:
        value: the value.
        reason: what it must be, and what it is.
    """

    def __init__(self, value: Any, reason: str) -> None:
        super().__init__(reason)
        self.value = value


@dataclass(slots=True)
class Survey:
    """Tensors, storages and classes that a pickle of a value would have."""

    tensors: list[torch.Tensor] = field(default_factory=list)
    """Plain tensors and parameters."""
    storages: list[Any] = field(default_factory=list)
    """Storages that are values themselves."""
    has_own_classes: bool = False
    """True if there are values of classes of the program that are equal by what they hold."""


def survey(value: Any, stream: Any = None) -> Survey:
    """Looks through all that a pickle of a value would have.

    Args:
        value: value.
        stream: takes a pickle with the attributes of tensors in their places, and nothing in those of arrays; None for
            none.
    """
    found = Survey()
    _SurveyPickler(_Nowhere() if stream is None else stream, found).dump(value)
    return found


class _Nowhere:
    """A stream that takes all."""

    def write(self, content: Any) -> int:
        """Drops some bytes."""
        return len(content)


class _SurveyPickler(pickle.Pickler):
    def __init__(self, stream: Any, found: Survey) -> None:
        super().__init__(stream, PROTOCOL)
        self._found = found

    def persistent_id(self, value: Any) -> Any:
        """Names storages, which are not written."""
        if isinstance(value, torch.UntypedStorage):
            raise RefusedError(value, "must be a tensor or a storage with a type, but is an UntypedStorage")
        if isinstance(value, torch.storage.TypedStorage) or torch.is_storage(value):
            self._found.storages.append(value)
            return ("storage", len(self._found.storages))
        return None

    def reducer_override(self, value: Any) -> Any:
        """Puts the attributes of a plain tensor in its place."""
        if type(value) in _PLAIN_TENSORS and has_plain_storage(value):
            self._found.tensors.append(value)
            return (OrderedDict, (), dict(vars(value))) if vars(value) else (OrderedDict, ())
        if type(value) is np.ndarray and value.dtype.kind in SCALAR_KINDS:
            return OrderedDict, ()
        if isinstance(value, _WITH_EQUALITY) and type(value) not in _FILLED and not isinstance(value, np.generic):
            self._found.has_own_classes = True
        return _reduced(value)


def pickle_module(copies: Copies) -> Any:
    """Module that `torch.save` takes as its `pickle_module`.

    Args:
        copies: memory in which tensors are written, from `own_memory`.
    """

    class Pickler(pickle.Pickler):
        def reducer_override(self, value: Any) -> Any:
            if type(value) in _PLAIN_TENSORS:
                other = copy_of(value, copies)
                return NotImplemented if other is None else other.__reduce_ex__(PROTOCOL)  # type: ignore[no-untyped-call]
            return _reduced(value)

    return SimpleNamespace(Pickler=Pickler, __name__="pickle")


class _LongLong:
    """Pickles as the type of `np.longlong` or `np.ulonglong`, which NumPy writes as that of 64 bits."""

    def __init__(self, char: str) -> None:
        self._char = char

    def __reduce__(self) -> tuple[Any, ...]:
        return np.dtype, (self._char, False, True)


def _reduced(value: Any) -> Any:
    """Returns the reduction of a value for its pickle; NotImplemented where pickle's own way is read back."""
    kind = type(value)
    if kind is defaultdict:
        # One call with the contents, as torch's reader fills no defaultdict or deque.
        _check_factory(value)
        return defaultdict, (value.default_factory, dict(value))
    if kind is deque:
        return deque, (list(value),) if value.maxlen is None else (list(value), value.maxlen)
    if kind is dt.datetime or kind is dt.time:
        return value.__reduce_ex__(4)  # protocols below 4 lose `fold`
    if isinstance(value, np.str_ | np.bytes_) and value[-1:] in ("\0", b"\0"):
        raise RefusedError(value, "must be text or bytes that NumPy keeps, but ends with NUL")
    if kind is np.longlong or kind is np.ulonglong:
        return value.__reduce__()[0], (_LongLong(value.dtype.char), value.tobytes())
    if isinstance(value, Enum):
        return kind, (value._value_,)  # by value: some versions of Python write a call of getattr
    if isinstance(value, _CONTAINERS) and kind not in _FILLED:
        _check_filled_by_call(value)
    return NotImplemented


def _check_factory(value: defaultdict[Any, Any]) -> None:
    factory = value.default_factory
    if factory is not None and factory not in FACTORY_KINDS:
        names = ", ".join(kind.__name__ for kind in FACTORY_KINDS)
        name = getattr(factory, "__qualname__", type(factory).__qualname__)
        raise RefusedError(value, f"must be a defaultdict whose factory is None or one of {names}, but it is {name}")


def _check_filled_by_call(value: Any) -> None:
    """Raises RefusedError if a container of another class is filled item by item, which torch's reader does not do."""
    kind, reduced = type(value), value.__reduce_ex__(PROTOCOL)
    if isinstance(reduced, tuple) and any(part is not None for part in reduced[3:5]):
        plain = next(one for one in _CONTAINERS if isinstance(value, one)).__name__
        name = f"{kind.__module__}.{kind.__qualname__}"
        raise RefusedError(value, f"must be a plain {plain} to come back as it is, but is of {name}")
