"""Nested dictionaries and lists of a state: search, division, merging, comparison. Names are Megatron Core 0.16.1's.

A tree is a dictionary or list of trees and leaves; a tuple is a leaf.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch

Tree = dict[Any, Any] | list[Any]
Path = tuple[Any, ...]
Differences = tuple[list[Any], list[Any], list[Any]]


def extract_matching_values(
    x: Tree,
    predicate: Callable[[Any], bool],
    return_lists_as_dicts: bool = False,  # noqa: FBT001, FBT002  Megatron Core's signature
) -> tuple[Tree, Tree]:
    """Divides a tree into the leaves for which `predicate` is true, and the others, in the same structure.

    Containers are new. A list leaves out the elements of the other part, unless `return_lists_as_dicts` turns it into a
    dictionary by position. A container without leaves of a part is left out of that part, but an empty one goes to the
    second.

    Raises:
        ValueError: `x` is neither a dictionary nor a list.
    """
    if not isinstance(x, dict | list):
        raise ValueError(f"state: must be a dictionary or a list, found {type(x).__name__}")  # noqa: TRY004  Megatron Core's type
    matching = _PartialContainer(x, return_lists_as_dicts)
    others = _PartialContainer(x, return_lists_as_dicts)
    for key, value in x.items() if isinstance(x, dict) else enumerate(x):
        if not isinstance(value, dict | list):
            (matching if predicate(value) else others).add(key, value)
            continue
        below, rest = extract_matching_values(value, predicate, return_lists_as_dicts)
        if below:
            matching.add(key, below)
        if rest or not value:
            others.add(key, rest)
    return matching.tree, others.tree


class _PartialContainer:
    """Container that receives some of the elements of another one."""

    def __init__(self, like: Tree, is_dict: bool) -> None:  # noqa: FBT001  called with Megatron Core's flag
        self.tree: Tree = {} if isinstance(like, dict) or is_dict else []

    def add(self, key: Any, value: Any) -> None:
        """Adds an element."""
        if isinstance(self.tree, dict):
            self.tree[key] = value
        else:
            self.tree.append(value)


def diff(x1: Any, x2: Any, prefix: Path = ()) -> Differences:
    """Compares two trees.

    Returns:
        Paths that only the first has, those that only the second has, and `(path, type, type)` of each leaf that
        differs, which for tensors has the number, shape and positions of the elements that differ.
    """
    if isinstance(x1, dict) and isinstance(x2, dict):
        left = [(*prefix, key) for key in x1.keys() - x2.keys()]
        right = [(*prefix, key) for key in x2.keys() - x1.keys()]
        return _joined(left, right, (diff(x1[key], x2[key], (*prefix, key)) for key in x2.keys() & x1.keys()))
    if isinstance(x1, list | tuple | np.ndarray) and type(x1) is type(x2):
        pairs = enumerate(zip(x1, x2, strict=False))
        below = (diff(one, other, (*prefix, number)) for number, (one, other) in pairs)
        lengths = len(x1) - 1, len(x2) - 1
        return _joined(list(range(*lengths, -1)), list(range(*lengths[::-1], -1)), below)
    if hasattr(x1, "replica_id") and type(x1) is type(x2):
        return diff(x1.data, x2.data, (*prefix, type(x1)))
    found = _mismatch(x1, x2)
    return [], [], [] if found is None else [(prefix, type(x1), type(x2), *found)]


def _joined(only_left: list[Any], only_right: list[Any], parts: Iterable[Differences]) -> Differences:
    mismatches: list[Any] = []
    for left, right, different in parts:
        only_left.extend(left)
        only_right.extend(right)
        mismatches.extend(different)
    return only_left, only_right, mismatches


def _mismatch(x1: Any, x2: Any) -> tuple[Any, ...] | None:
    """Details of a difference between two leaves; None if they are equal."""
    if isinstance(x1, torch.Tensor) and isinstance(x2, torch.Tensor):
        if x1.shape != x2.shape or x1.dtype != x2.dtype:
            return x1.shape, x2.shape
        different = x1.cpu() != x2.cpu()
        return (different.sum(), different.shape, different.nonzero().tolist()) if bool(different.any()) else None
    try:
        return () if bool(x1 != x2) else None
    except (RuntimeError, ValueError):
        return ()


def nested_values(x: Tree) -> Iterator[Any]:
    """Yields the leaves of a tree in order."""
    for _, _, value in nested_items_iter(x):
        yield value


def nested_items_iter(x: Tree) -> Iterator[tuple[Any, Any, Any]]:
    """Yields `(container, key, leaf)` for each leaf of a tree in order."""
    for key, value in x.items() if isinstance(x, dict) else enumerate(x):
        if isinstance(value, dict | list):
            yield from nested_items_iter(value)
        else:
            yield x, key, value


def dict_list_map_outplace(f: Callable[[Any], Any], x: Any) -> Any:
    """Returns a tree of `f(leaf)` for each leaf, in new containers."""
    if isinstance(x, dict):
        return {key: dict_list_map_outplace(f, value) for key, value in x.items()}
    if isinstance(x, list):
        return [dict_list_map_outplace(f, value) for value in x]
    return f(x)


def merge(x1: Tree, x2: Tree, key: Path = ()) -> Tree:
    """Adds the leaves of `x2` to `x1`, and returns `x1`. Lists must have the same length, or the first none.

    Raises:
        ValueError: both have a leaf in one place, or lists of different lengths; the message has the path.
    """
    if isinstance(x1, dict) and isinstance(x2, dict):
        for name, value in x2.items():
            x1[name] = merge(x1[name], value, (*key, name)) if name in x1 else value
        return x1
    if isinstance(x1, list) and isinstance(x2, list):
        if not x1:
            x1[:] = x2
            return x1
        if len(x1) != len(x2):
            raise ValueError(
                f"state: lists at {key} must have one length to be merged, but have {len(x1)} and {len(x2)}"
            )
        x1[:] = [merge(one, other, (*key, number)) for number, (one, other) in enumerate(zip(x1, x2, strict=True))]
        return x1
    raise ValueError(
        f"state: one value must be at {key}, but two are to be merged, of {type(x1).__name__} and {type(x2).__name__}"
    )
