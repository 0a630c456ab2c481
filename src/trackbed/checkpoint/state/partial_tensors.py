"""Plain values of a state: the tensors in them, and a check that none is one rank's part of a larger tensor."""

import dataclasses
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch

from trackbed.checkpoint.state.sharded_object import ShardedObject
from trackbed.checkpoint.state.sharded_tensor import ShardedTensor
from trackbed.errors import CheckpointError

_ATTRIBUTES_OF_PARTS: Final = ("to_local", "local_shards", "__create_chunk_list__", "__create_write_items__")
"""Attributes of `DTensor`, of torch's `ShardedTensor`, and of tensors that tell `torch.distributed.checkpoint` which
part of a larger tensor they are."""
_PLAIN: Final = (str, bytes, bytearray, int, float, complex, bool, type(None), type, torch.dtype, torch.device)
_MOST_NAMES: Final = 8
"""Names of a path that an error has."""


def is_part(value: Any) -> bool:
    """True for a tensor of which each rank has only a part, such as a `DTensor`, whatever its placements."""
    if isinstance(value, torch.Tensor):
        return any(hasattr(value, name) for name in _ATTRIBUTES_OF_PARTS)
    return any(hasattr(type(value), name) for name in _ATTRIBUTES_OF_PARTS[-2:])


def refuse_partial_tensors(value: Any, path: str = "") -> None:
    """Checks that a plain value has no tensor, at any depth, of which each rank has only a part.

    Args:
        value: value that is to be pickled.
        path: its key, for the error.

    Raises:
        CheckpointError: it has one; names its key.
    """
    values, seen = [(path, value)], set[int]()
    while values:
        for key, found in tensors_in(values[0][1], values.pop(0)[0]):
            if is_part(found):
                raise CheckpointError(_refusal(key, found))
            if isinstance(found, torch.Tensor) and found.is_meta:
                raise CheckpointError(
                    f"{key or 'state'}: must have values to be saved, but lies on the meta device: call "
                    'to_empty(device="cpu") of its module, or that of the GPU, and load or initialise it'
                )
            if id(found) not in seen:  # pickle stores the attributes of a tensor, too
                seen.add(id(found))
                values += [(f"{key}.{name}", one) for name, one in getattr(found, "__dict__", {}).items()]


def refuse_partial_shards(shards: list[ShardedTensor | ShardedObject]) -> None:
    """Checks the same of the data of entries: the tensor of a `ShardedTensor`, the values in a `ShardedObject`.

    Raises:
        CheckpointError: one has a tensor that is only a part; names its key.
    """
    for shard in shards:
        if isinstance(shard, ShardedObject):
            refuse_partial_tensors(shard.data, shard.unique_key)
        elif is_part(shard.data):
            raise CheckpointError(
                f"{shard.key}: the data of a ShardedTensor must be a local tensor, but are a "
                f"{type(shard.data).__name__}: give its local part, with the place of that in the whole tensor"
            )


def _refusal(key: str, part: Any) -> str:
    return (
        f"{key or 'state'}: a plain value must be whole on every rank, but is a {type(part).__name__}, of which each "
        "rank has a part, and only that of rank 0 would be saved: save the whole tensor (full_tensor() of a DTensor), "
        "describe each local part with trackbed.ShardedTensor, or save with torch.distributed.checkpoint"
    )


def tensors_in(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the tensors, arrays of NumPy, and parts in a value at any depth, each with its path.

    Objects are searched as `pickle` takes them to pieces.

    Args:
        value: value, which is left as it is.
        path: path of the value; keys, positions and attributes below it are joined by dots.
    """
    above: dict[int, Any] = {}
    return _search(value, _is_array, path, above, above.pop)


def _is_array(value: Any) -> bool:
    return (
        isinstance(value, torch.Tensor)
        or is_part(value)
        or (isinstance(value, np.ndarray) and not value.dtype.hasobject)
    )


def search(value: Any, is_wanted: Callable[[Any], bool]) -> Iterator[tuple[str, Any]]:
    """Yields the values for which `is_wanted` is true, at any depth, each once, with a path; see `tensors_in`.

    A value that lies in many places is searched once, so that a file cannot make this take longer than it is long.
    """
    return _search(value, is_wanted, "", {}, lambda _: None)


def printable(key: object) -> str:
    r"""Text of a key or place for errors, without surrogates, which cannot be printed or sent to other ranks.

    >>> print(printable(chr(0xDC80)))
    \udc80
    """
    return str(key).encode("utf-8", "backslashreplace").decode()


def abbreviated(path: Sequence[str]) -> str:
    """Text of a path for errors, of which a long one is cut off.

    >>> abbreviated(["optimizer", "lr"]), abbreviated(list("abcdefghijkl"))
    ('optimizer.lr', 'a.b.c.d.e.f.g.h... (12 levels)')
    """
    if len(path) <= _MOST_NAMES:
        return ".".join(path)
    return f"{'.'.join(path[:_MOST_NAMES])}... ({len(path):,} levels)"


def _search(
    value: Any,
    is_wanted: Callable[[Any], bool],
    path: str,
    entered: dict[int, Any],
    leave: Callable[[int], Any],
) -> Iterator[tuple[str, Any]]:
    """Yields the values for which `is_wanted` is true, each with its path.

    Args:
        value: value.
        is_wanted: true for the values that are yielded, which are not searched.
        path: its path.
        entered: containers by identity, which are not searched again.
        leave: called with the identity of a container that has been searched.
    """
    if isinstance(value, _PLAIN):
        return
    if is_wanted(value):
        yield path, value
        return
    if id(value) in entered:
        return
    entered[id(value)] = value
    for name, below in elements_of(value):
        place = f"{path}.{printable(name)}" if path else printable(name)
        yield from _search(below, is_wanted, place, entered, leave)
    leave(id(value))


def elements_of(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yields what a container or an object has directly, each with its key, position or attribute."""
    if isinstance(value, Mapping):
        yield from value.items()
        yield from ((f"key {number}", key) for number, key in enumerate(value) if not isinstance(key, _PLAIN))
    elif isinstance(value, list | tuple | deque | np.ndarray):
        yield from enumerate(value.flat if isinstance(value, np.ndarray) else value)
    elif isinstance(value, set | frozenset):
        yield from enumerate(value)
    elif dataclasses.is_dataclass(value):
        yield from ((field.name, getattr(value, field.name, None)) for field in dataclasses.fields(value))
    if isinstance(value, dict | list | tuple | set | frozenset | deque) and type(value).__module__ in (
        "builtins",
        "collections",
    ):
        yield from getattr(value, "__dict__", {}).items()  # of an OrderedDict, such as _metadata
        return
    yield from _pickled_parts(value)


def _pickled_parts(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yields the values that `pickle` stores of an object."""
    try:
        reduced = value.__reduce_ex__(2)
    except Exception:  # noqa: BLE001  what cannot be pickled is an error of the pickle, which names its place
        return
    if not isinstance(reduced, tuple):
        return  # a global
    _, arguments, state, elements, pairs = (*reduced, *(None,) * 3)[:5]
    yield from ((f"argument {number}", one) for number, one in enumerate(arguments) if not isinstance(one, type))
    for number, one in enumerate(state if isinstance(state, tuple) else (state,)):
        yield from one.items() if isinstance(one, dict) else [(f"state {number}", one)]
    yield from enumerate(elements or ())
    yield from pairs or ()
