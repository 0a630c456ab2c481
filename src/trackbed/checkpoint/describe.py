"""State dictionaries as shards and a rest, and back. The caller's containers and entries are left as they are."""

import enum
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Final

from trackbed.checkpoint.mapping import (
    LocalNonpersistentObject,
    ShardedBase,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
    apply_factory_merges,
)
from trackbed.checkpoint.tree import dict_list_map_outplace, extract_matching_values, merge, nested_values
from trackbed.errors import CheckpointError

__all__ = ["Request", "SavedState", "check_places", "describe_request", "describe_state"]

Shard = ShardedTensor | ShardedObject


@dataclass(frozen=True, slots=True)
class SavedState:
    """State that is to be saved."""

    shards: list[Shard]
    """Tensors and objects, in order."""
    common: dict[str, Any]
    """All that is neither sharded nor local."""


@dataclass(frozen=True, slots=True)
class Request:
    """State that is to be loaded."""

    tree: Any
    """Tensors and objects, where they belong."""
    factories: Any
    """Factories that have built parts of the tree; lists are dictionaries by position."""
    local: Any
    """Values that are not stored."""
    shards: list[Shard] = field(default_factory=list)
    """Tensors and objects of the tree, in order."""

    def only(self, is_kept: Iterable[bool]) -> "Request":
        """Returns the request with some of its tensors and objects, told by a flag for each, in order."""
        flags = iter(is_kept)
        tree, _ = extract_matching_values(self.tree, lambda _: next(flags))
        return replace(self, tree=tree, shards=list(nested_values(tree)))

    def fill(self, common: dict[str, Any], values: Iterable[Any]) -> dict[str, Any]:
        """Returns the state with what was loaded.

        Args:
            common: stored state that is not sharded, which is changed.
            values: loaded value of each tensor or object, in order.
        """
        merge(common, self.local)
        loaded = iter(values)
        merge(common, dict_list_map_outplace(lambda _: next(loaded), self.tree))
        apply_factory_merges(common, self.factories)
        return common


class _Kind(enum.Flag):
    """Destination of a part of a state."""

    sharded = enum.auto()
    common = enum.auto()
    local = enum.auto()


_NOTHING: Final = _Kind(0)


def describe_state(state: dict[str, Any]) -> SavedState:
    """Divides a state that is to be saved.

    Args:
        state: state dictionary, which is left as it is.

    Raises:
        CheckpointError: it has a shard in a tuple, or beside other values in a list: it could not be loaded.
    """
    built = dict_list_map_outplace(_built, state)
    check_places(built)
    sharded, rest = extract_matching_values(built, lambda value: isinstance(value, ShardedBase))
    _, common = extract_matching_values(rest, lambda value: isinstance(value, LocalNonpersistentObject))
    return SavedState(list(nested_values(sharded)), common if isinstance(common, dict) else {})


def describe_request(state: dict[str, Any]) -> Request:
    """Divides a state that is to be loaded. Values that are neither sharded nor local are ignored.

    Args:
        state: state dictionary, which is left as it is.

    Raises:
        CheckpointError: see `describe_state`.
    """
    factories, _ = extract_matching_values(
        state, lambda value: isinstance(value, ShardedTensorFactory), return_lists_as_dicts=True
    )
    built = dict_list_map_outplace(_built, state)
    check_places(built)
    tree, rest = extract_matching_values(built, lambda value: isinstance(value, ShardedBase))
    local, _ = extract_matching_values(rest, lambda value: isinstance(value, LocalNonpersistentObject))
    return Request(
        tree,
        dict_list_map_outplace(_named_in_errors, factories),
        dict_list_map_outplace(LocalNonpersistentObject.unwrap, local),
        list(nested_values(tree)),
    )


@contextmanager
def _naming(function: str) -> Iterator[None]:
    """Begins an error in the block with the name of a function of the program.

    Raises:
        CheckpointError: the function failed.
    """
    try:
        yield
    except Exception as error:
        msg = f"{function} failed, {type(error).__name__}: {error}"
        raise CheckpointError(msg) from error


def _named_in_errors(factory: ShardedTensorFactory) -> ShardedTensorFactory:
    """Copy of a factory without data, whose merges name it when they fail."""

    def merge(state: Any) -> Any:
        with _naming(f"{factory.key}: merge_fn"):
            return factory.merge_fn(state)

    return replace(factory, data=None, merge_fn=merge)


def _built(value: Any) -> Any:
    """Result of a factory, with those of factories in it; another value as it is."""
    if not isinstance(value, ShardedTensorFactory):
        return value
    with _naming(f"{value.key}: build_fn"):
        built = value.build()
    return dict_list_map_outplace(_built, built) if isinstance(built, dict | list) else built


def check_places(state: Any) -> None:
    """Checks that all shards of a state lie where `load` finds them again.

    Raises:
        CheckpointError: one is in a tuple, or beside plain values in a list.
    """
    _check(state, ())


def _check(value: Any, path: tuple[Any, ...]) -> _Kind:
    """Kinds of the leaves below a path.

    Raises:
        CheckpointError: the elements of a list go to different places, or a tuple has a shard.
    """
    if isinstance(value, dict):
        found = _NOTHING
        for key, below in value.items():
            found |= _check(below, (*path, key))
        return found or _Kind.common
    if isinstance(value, list):
        kinds = [_check(below, (*path, number)) for number, below in enumerate(value)]
        if len(set(kinds)) > 1:
            msg = (
                f"state: the elements of the list at {_text(path)} must all be shards, or all be plain values, but are "
                "both: it could not be loaded; put the shards in a dictionary"
            )
            raise CheckpointError(msg)
        return kinds[0] if kinds else _Kind.common
    if isinstance(value, LocalNonpersistentObject):
        return _Kind.local
    if isinstance(value, ShardedBase):
        return _Kind.sharded
    if isinstance(value, tuple | set | frozenset) and _has_shard(value):
        msg = (
            f"state: shards must lie in dictionaries and lists, but one is in the {type(value).__name__} at "
            f"{_text(path)}: it could not be loaded"
        )
        raise CheckpointError(msg)
    return _Kind.common


def _has_shard(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_has_shard, value.values()))
    if isinstance(value, list | tuple | set | frozenset):
        return any(map(_has_shard, value))
    return isinstance(value, ShardedBase | LocalNonpersistentObject)


def _text(path: tuple[Any, ...]) -> str:
    return ".".join(map(str, path)) or "the top"
