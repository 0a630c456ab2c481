"""Leaves of nested states and entries of sharded ones: search, replacement, renaming. Names are Megatron Core 0.16.1's.

A tree is a dictionary or list of trees and leaves; a tuple is a leaf.
"""

import contextlib
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from trackbed.checkpoint.state.sharded_object import LocalNonpersistentObject, ShardedObject
from trackbed.checkpoint.state.sharded_tensor import ShardedBase, ShardedTensor, ShardedTensorFactory
from trackbed.checkpoint.state.tree import Path, Tree, extract_matching_values, nested_items_iter, nested_values


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


logger = logging.getLogger(__name__)

ShardId = tuple[str, tuple[int, ...], Any]
"""Key, place, and a third value that tells tensors (None) from objects (the shape of their grid)."""

_names: list[str] = []
_loggers: list[logging.Logger] = []


def shard_id(sharded_tensor: ShardedTensor) -> ShardId:
    """Name of a box, which its copies share."""
    return sharded_tensor.key, sharded_tensor.global_offset, None


def object_id(sharded_object: ShardedObject) -> ShardId:
    """Name of an object, which its copies share."""
    return sharded_object.key, sharded_object.global_offset, sharded_object.global_shape


def extract_sharded_tensors(sharded_state_dict: Tree) -> tuple[Tree, Tree]:
    """Divides a state dictionary into tensors, and all else."""
    return _divide(sharded_state_dict, ShardedTensor)


def extract_sharded_tensors_and_factories(sharded_state_dict: Tree) -> tuple[Tree, Tree]:
    """Divides a state dictionary into tensors and factories, and all else."""
    return _divide(sharded_state_dict, ShardedTensor, ShardedTensorFactory)


def extract_sharded_tensors_or_nonpersistent(sharded_state_dict: Tree) -> tuple[Tree, Tree]:
    """Divides a state dictionary into tensors, factories and local values, and all else."""
    return _divide(sharded_state_dict, ShardedTensor, LocalNonpersistentObject, ShardedTensorFactory)


def extract_sharded_base(sharded_state_dict: Tree) -> tuple[Tree, Tree]:
    """Divides a state dictionary into tensors, objects and factories, and all else."""
    return _divide(sharded_state_dict, ShardedBase)


def extract_nonpersistent(sharded_state_dict: Tree) -> tuple[Tree, Tree]:
    """Divides a state dictionary into local values, and all else."""
    return _divide(sharded_state_dict, LocalNonpersistentObject)


def _divide(state: Tree, *kinds: type) -> tuple[Tree, Tree]:
    return extract_matching_values(state, lambda value: isinstance(value, kinds))


def add_prefix_for_sharding(sharded_state_dict: Tree, prefix: str) -> None:
    """Puts a prefix before the key of each entry."""
    _rename(sharded_state_dict, lambda key: prefix + key)


def replace_prefix_for_sharding(sharded_state_dict: Tree, old_prefix: str, new_prefix: str) -> None:
    """Replaces the prefix of each key."""

    def rename(key: str) -> str:
        if not key.startswith(old_prefix):
            raise ValueError(f"state: each key must begin with {old_prefix!r}, but one is {key!r}")
        return new_prefix + key.removeprefix(old_prefix)

    _rename(sharded_state_dict, rename)


def apply_prefix_mapping(sharded_state_dict: Tree, prefix_map: Mapping[str, str]) -> None:
    """Replaces the first prefix of the map with which a key begins, if any."""

    def rename(key: str) -> str:
        found = next((prefix for prefix in prefix_map if key.startswith(prefix)), None)
        return key if found is None else prefix_map[found] + key.removeprefix(found)

    _rename(sharded_state_dict, rename)


def _rename(state: Tree, rename: Callable[[str], str]) -> None:
    def change(value: Any) -> Any:
        if isinstance(value, ShardedBase):
            value.key = rename(value.key)
        return value

    dict_list_map_inplace(change, state)


def force_all_tensors_to_non_fp8(sharded_state_dict: Tree) -> None:
    """Replaces data of 8 bits of Transformer Engine by ordinary tensors, in their entries."""
    entries = [value for value in nested_values(sharded_state_dict) if hasattr(value, "data")]
    quantized = [entry for entry in entries if hasattr(entry.data, "dequantize") and hasattr(entry.data, "_quantizer")]
    for entry in quantized:
        entry.data = entry.data.dequantize()


def clean_metadata(metadata: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Returns a copy without `dp_cp_group`, which cannot be saved."""
    return None if metadata is None else {key: value for key, value in metadata.items() if key != "dp_cp_group"}


def zip_strict(*args: Iterable[Any]) -> Iterator[tuple[Any, ...]]:
    """Zips iterables of one length."""
    return zip(*args, strict=True)


@contextlib.contextmanager
def logger_stack(
    name: str | None = None, current_logger: logging.Logger | None = None
) -> Iterator[tuple[str, logging.Logger]]:
    """In the block, names are joined by dots, and the given logger is used.

    Yields:
        Joined names, and the logger of the innermost block with one.
    """
    names, loggers = [name] if name else [], [current_logger] if current_logger else []
    _names.extend(names)
    _loggers.extend(loggers)
    try:
        yield ".".join(_names), (_loggers or [logger])[-1]
    finally:
        del _names[len(_names) - len(names) :], _loggers[len(_loggers) - len(loggers) :]


@contextlib.contextmanager
def debug_time(
    name: str, logger: logging.Logger | None = None, threshold: float = float("-inf"), level: int | None = None
) -> Iterator[None]:
    """Logs the seconds that the block takes.

    Args:
        name: name of the block.
        logger: logger; by default that of the outer block.
        threshold: number of seconds below which nothing is logged.
        level: level of the message; by default WARNING with a threshold, else DEBUG.
    """
    with logger_stack(name, logger) as (names, inner_logger):
        start = time.time()
        try:
            yield
        finally:
            seconds = time.time() - start
            if seconds >= threshold:
                default = logging.DEBUG if threshold == float("-inf") else logging.WARNING
                inner_logger.log(default if level is None else level, "%s took %.4fs", names, seconds)


def debug_msg(msg: str) -> None:
    """Logs a message with the names of the blocks around it."""
    with logger_stack() as (names, found):
        found.debug("%s %s", names, msg)
