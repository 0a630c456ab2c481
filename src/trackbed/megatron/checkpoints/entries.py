"""Search and renaming of entries in sharded state dictionaries. Names are Megatron Core 0.16.1's."""

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from trackbed.checkpoint.state.factory import ShardedTensorFactory as Factory
from trackbed.checkpoint.state.sharded_base import ShardedBase
from trackbed.checkpoint.state.sharded_object import LocalNonpersistentObject, ShardedObject
from trackbed.checkpoint.state.sharded_tensor import ShardedTensor
from trackbed.checkpoint.state.tree import Tree, extract_matching_values, nested_values
from trackbed.megatron.checkpoints.trees import dict_list_map_inplace

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
    return _divide(sharded_state_dict, ShardedTensor, Factory)


def extract_sharded_tensors_or_nonpersistent(sharded_state_dict: Tree) -> tuple[Tree, Tree]:
    """Divides a state dictionary into tensors, factories and local values, and all else."""
    return _divide(sharded_state_dict, ShardedTensor, LocalNonpersistentObject, Factory)


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
    with logger_stack(name, logger) as (names, found):
        start = time.time()
        try:
            yield
        finally:
            seconds = time.time() - start
            if seconds >= threshold:
                default = logging.DEBUG if threshold == float("-inf") else logging.WARNING
                found.log(default if level is None else level, "%s took %.4fs", names, seconds)


def debug_msg(msg: str) -> None:
    """Logs a message with the names of the blocks around it."""
    with logger_stack() as (names, found):
        found.debug("%s %s", names, msg)
