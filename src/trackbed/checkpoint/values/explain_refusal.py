"""Errors about values that cannot be saved, or not as they are: where they lie, and what to do."""

import dataclasses
import datetime as dt
import re
import types
from argparse import Namespace
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Set, ValuesView
from enum import Enum
from io import BytesIO
from pickle import PicklingError, UnpicklingError
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
import torch
from torch import _weights_only_unpickler as torch_unpickler

from trackbed.checkpoint.format.allowed_classes import allowing
from trackbed.checkpoint.state.partial_tensors import abbreviated, elements_of, printable, tensors_in
from trackbed.checkpoint.values.pickler import RefusedError, survey
from trackbed.checkpoint.values.storages import has_plain_storage

PICKLE_ERRORS: Final = (PicklingError, TypeError, AttributeError, ValueError, RuntimeError)
"""Errors of values that cannot be pickled."""
_GLOBAL: Final = re.compile(r"GLOBAL ([\w.<>]+)|(?:class|operand|global)[^\w]*([\w<>]+\.[\w.<>]+)")
_NEVER_REFUSED: Final = (str, bytes, bool, float, complex, types.NoneType)
_ATOMS: Final = (int, float, complex, str, bytes, np.ndarray, np.generic, BaseException, type)
"""Values that are named as they are, and not by what pickle makes of them."""
_FUNCTIONS: Final = (types.FunctionType, types.BuiltinFunctionType, types.MethodType)


class _Reader(torch_unpickler.Unpickler):
    """Reads the pickle of a survey, which has no elements of tensors."""

    def persistent_load(self, pid: Any) -> None:
        """Reads a storage, which is not there."""


def refusal(value: Any, where: str) -> str | None:
    """Says what in a value cannot be saved, and what to do; None if there is nothing.

    Args:
        value: value that is pickled.
        where: name of file or item.
    """
    root = value[0] if type(value) is list and len(value) == 1 else value  # objects are saved in lists of one
    problem = _problem(root)
    if problem is None:
        return _mixed_views(root, where)
    path, values, problem = _innermost(root, problem)
    for depth, holder in enumerate(values):
        if hasattr(type(holder), "state_dict"):
            # What it consists of is its own affair.
            kind = _name(type(holder))
            return f"{where}: {_place(path[:depth])}must be a plain value, but is of {kind}: save its state_dict()"
    return f"{where}: {_place(path)}{_sentence(values[-1], problem)}"


def _mixed_views(value: Any, where: str) -> str | None:
    """Names two tensors that view the same memory with different types, which `torch.save` refuses."""
    first: dict[int, tuple[str, torch.dtype]] = {}
    for path, tensor in tensors_in(value):
        if isinstance(tensor, torch.Tensor) and has_plain_storage(tensor):
            other, dtype = first.setdefault(tensor.untyped_storage()._cdata, (path, tensor.dtype))
            if dtype != tensor.dtype:
                return (
                    f"{where}: {path} must be of type {dtype}, as {other}, which views the same memory, but is of "
                    f"{tensor.dtype}: save a clone() of one of them"
                )
    return None


def _place(path: list[str]) -> str:
    return f"{abbreviated(path)} " if path else ""


def _sentence(value: Any, problem: Exception) -> str:
    """Says what a value must be, what it is, and how to save it."""
    if isinstance(problem, RefusedError):
        return f"{problem}: save {_plain_form(value)}"
    if isinstance(problem, RecursionError):
        return "must be nested less deeply, or not contain itself"
    if not isinstance(problem, UnpicklingError):
        return f"must be a value that can be pickled, but: {problem}: save {_plain_form(value)}, or leave it out"
    if type(value) is np.ndarray or isinstance(value, np.generic):
        kept = "an array or a scalar of numbers, bool, text, bytes or times"
        return f"must be {kept}, but is of {value.dtype}: save value.tolist()"
    name = _name(_named(value))
    if class_in(problem) is None:
        return f"must be a value that comes back, but this {name} does not, {without_advice(problem)}: {_advice(value)}"
    short = name.rpartition(".")[2]
    return f"must be made of classes that are allowed, but has {short!r} ({name}): {_advice(value)}"


def _problem(value: Any, allowed: Iterable[Any] = ()) -> Exception | None:
    """Error that keeps a value from being saved; None if there is none."""
    try:
        surveyed = survey(value, stream := BytesIO())
        has_defaultdicts = b"defaultdict" in stream.getvalue()
        with allowing(*allowed, with_defaultdicts=has_defaultdicts):
            found = _Reader(BytesIO(stream.getvalue())).load()  # type: ignore[no-untyped-call]
    except Exception as error:  # noqa: BLE001  what classes of the program raise when they are read is of any kind
        return error
    is_compared = (surveyed.has_own_classes or has_defaultdicts) and not isinstance(value, torch.Tensor)
    if is_compared and (place := place_of_change(value, found)) is not None:
        return UnpicklingError(f"it comes back as another value{' at ' + place if place else ''}")
    return None


def _innermost(value: Any, problem: Exception) -> tuple[list[str], list[Any], Exception]:
    """Finds the first value in another one that cannot be saved, and has no such value in it.

    Returns:
        Its place, the values from the other one to it, and its error.
    """
    path: list[str] = []
    values = [value]
    above = {id(value)}
    while True:
        for name, below in _elements(value):
            if type(below) in _NEVER_REFUSED or id(below) in above:
                continue
            found = _problem(below)
            if found is not None:
                path.append(printable(name))
                above.add(id(below))
                value, problem = below, found
                values.append(value)
                break
        else:
            return path, values, problem


def _elements(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yields what a container or an object has directly, each with its key, position or attribute."""
    if isinstance(value, _ATOMS):
        return
    if isinstance(value, torch.Tensor):
        yield from vars(value).items()
        return
    if isinstance(value, dict):
        yield from ((f"key {number}", key) for number, key in enumerate(value))
    yield from elements_of(value)


def _named(value: Any) -> Any:
    """The class or function that the error names."""
    return value if isinstance(value, (type, *_FUNCTIONS)) else type(value)


def _name(named: Any) -> str:
    return f"{named.__module__}.{named.__qualname__}"


def _advice(value: Any) -> str:
    """Says how to save a value whose class is not allowed."""
    named = _named(value)
    if "<locals>" not in named.__qualname__:
        for allowed in ([named], _constructors(value), [named, *_constructors(value)]):
            if allowed and _problem(value, allowed) is None:
                names = ", ".join(map(_name, allowed))
                other = f", or save {_plain_form(value)}" if isinstance(value, dict | list | deque) else ""
                return f"if you trust it, call torch.serialization.add_safe_globals([{names}]) first{other}"
    return f"save {_plain_form(value)}"


def _constructors(value: Any) -> list[Any]:
    """Function that a pickle calls to make an object."""
    try:
        reduced = value.__reduce_ex__(2)
    except Exception:  # noqa: BLE001  what cannot be pickled has none
        return []
    has_one = isinstance(reduced, tuple) and hasattr(reduced[0], "__qualname__") and hasattr(reduced[0], "__module__")
    return [reduced[0]] if has_one else []


def _plain_form(value: Any) -> str:
    """Names a form of a value that can be saved."""
    forms: list[tuple[Any, str]] = [
        (dict, "dict(value)"),
        (deque, "collections.deque(value)"),
        (list, "list(value)"),
        (np.str_, '"".join(value)'),
        (np.bytes_, "bytes(value)"),
        ((np.ndarray, np.generic), "value.tolist()"),
        (BaseException, "str(value)"),
        (int, "str(value)"),
        ((*_FUNCTIONS, type), "its name"),
        (tuple, "tuple(value)"),
        ((set, frozenset), "set(value)"),
        ((range, Set, ValuesView), "list(value)"),
        (Mapping, "dict(value)"),
        (memoryview, "bytes(value)"),
        (torch.UntypedStorage, "torch.tensor(value, dtype=torch.uint8)"),
        (dt.tzinfo, "the time in a zone of datetime, as value.astimezone(datetime.timezone.utc)"),
    ]
    found = next((form for kinds, form in forms if isinstance(value, kinds)), None)
    if found is None and dataclasses.is_dataclass(value):
        return "dataclasses.asdict(value)"
    return found or "what it consists of, as numbers, text, tensors, lists and dictionaries"


def class_in(error: UnpicklingError) -> str | None:
    """Name of the class that is not allowed; None if that is not the reason."""
    found = _GLOBAL.search(str(error))
    return None if found is None else next(filter(None, found.groups()))


def without_advice(error: Exception) -> str:
    """First sentence of an error, without what torch says about its argument `weights_only`."""
    text = str(error)
    cause = text.rpartition("WeightsUnpickler error:")[2].strip() or text
    lines = [line.strip() for line in cause.splitlines() if line.strip()]
    said = [line for line in lines if "weights_only" not in line and "weights-only" not in line.lower()]
    return said[0] if said else "it is not a pickle that can be read safely"


def _text(value: Any) -> str:
    """Text of a value, in which elements of sets have one order."""
    if isinstance(value, set | frozenset):
        return f"{{{', '.join(sorted(map(_text, value)))}}}"
    return f"({', '.join(map(_text, value))})" if isinstance(value, tuple) else repr(value)


_COMPARED_ATOMS: Final = (str, bytes, bytearray, int, float, complex)


def place_of_change(saved: Any, loaded: Any) -> str | None:
    """Place of the first difference in value or class; None if there is none, and empty if it is at the top.

    Containers, numbers, text and enums are compared. Tensors, arrays and objects of other classes are taken to be what
    their classes make of themselves.
    """
    return _difference(saved, loaded, "", set())


def _difference(saved: Any, loaded: Any, path: str, seen: set[int]) -> str | None:
    if isinstance(saved, torch.Tensor | np.ndarray):
        return None
    if type(saved) is not type(loaded):
        return path
    if id(saved) in seen:
        return None
    if isinstance(saved, Enum):
        return None if saved is loaded else path
    if isinstance(saved, _COMPARED_ATOMS):
        return None if saved == loaded or (saved != saved and loaded != loaded) else path
    if isinstance(saved, set | frozenset):
        return None if saved == loaded or _text(saved) == _text(loaded) else path  # NaN equals nothing
    if isinstance(saved, Namespace | SimpleNamespace):
        saved, loaded = vars(saved), vars(loaded)
    if not isinstance(saved, dict | list | tuple | deque):
        return None
    if len(saved) != len(loaded):
        return path
    seen.add(id(saved))
    pairs: Iterable[tuple[Any, Any, Any]]
    if isinstance(saved, dict):
        # Keys are compared in their order, which a pickle keeps.
        keys = _difference(list(saved), list(loaded), path, seen)
        if keys is not None:
            return keys
        pairs = ((key, one, other) for (key, one), other in zip(saved.items(), loaded.values(), strict=True))
    else:
        pairs = ((number, one, other) for number, (one, other) in enumerate(zip(saved, loaded, strict=True)))
    for name, one, other in pairs:
        found = _difference(one, other, f"{path}.{printable(name)}" if path else printable(name), seen)
        if found is not None:
            return found
    return None
