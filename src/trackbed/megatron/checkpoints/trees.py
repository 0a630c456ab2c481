"""Nested states: replacement, grouping and listing of their leaves. Names are Megatron Core 0.16.1's.

A tree is a dictionary or list of trees and leaves; a tuple is a leaf.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch

from trackbed.checkpoint.state.factory import ShardedTensorFactory
from trackbed.checkpoint.state.tree import Path, Tree, nested_items_iter


def dict_map(f: Callable[[Any], Any], d: Tree) -> None:
    """Replaces each leaf of a tree by `f(leaf)`."""
    for container, key, value in nested_items_iter(d):
        container[key] = f(value)


def dict_map_with_key(f: Callable[[Any, Any], Any], d: Tree) -> None:
    """Replaces each leaf of a tree by `f(key, leaf)`."""
    for container, key, value in nested_items_iter(d):
        container[key] = f(key, value)


def dict_list_map_inplace(f: Callable[[Any], Any], x: Any) -> Any:
    """Replaces each leaf of a tree by `f(leaf)`, and returns the tree; `f(x)` for a leaf."""
    if isinstance(x, dict):
        for key, value in x.items():
            x[key] = dict_list_map_inplace(f, value)
        return x
    if isinstance(x, list):
        x[:] = (dict_list_map_inplace(f, value) for value in x)
        return x
    return f(x)


def map_reduce(
    xs: Iterable[Any],
    key_fn: Callable[[Any], Any] = lambda x: x,
    value_fn: Callable[[Any], Any] = lambda x: x,
    reduce_fn: Callable[[list[Any]], Any] = lambda x: x,
) -> dict[Any, Any]:
    """Groups `value_fn(x)` by `key_fn(x)`, and returns `reduce_fn` of each group by key."""
    groups: defaultdict[Any, list[Any]] = defaultdict(list)
    for x in xs:
        groups[key_fn(x)].append(value_fn(x))
    return {key: reduce_fn(values) for key, values in groups.items()}


def inspect_types(x: Any, prefix: Path = (), indent: int = 4) -> None:
    """Prints the types of all leaves."""
    if isinstance(x, dict | list):
        print()  # noqa: T201  it is there to print
        for key, value in x.items() if isinstance(x, dict) else enumerate(x):
            print(f"{' ' * indent * len(prefix)}{'>' if isinstance(x, dict) else '-'} {key}: ", end="")  # noqa: T201
            inspect_types(value, (*prefix, key), indent)
        return
    print(f"Tensor of shape {x.shape}" if isinstance(x, torch.Tensor) else f"[{type(x)}]: {str(x)[:30]}")  # noqa: T201


def apply_factories(sharded_state_dict: Any) -> None:
    """Replaces each factory in a state dictionary by the state dictionary that it builds."""
    dict_list_map_inplace(
        lambda value: value.build() if isinstance(value, ShardedTensorFactory) else value, sharded_state_dict
    )
