"""State dictionaries as shards and a rest, and back. The caller's containers and entries are left as they are."""

import enum
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch

from trackbed.checkpoint.format.catalogue import DTYPE_OF
from trackbed.checkpoint.state.aliases import aliases_of, note_aliases
from trackbed.checkpoint.state.divided_tensors import (
    DividedTensor,
    TensorElsewhere,
    divided_tensor,
    is_divided,
    key_of,
    parts_to_load,
    undivided_tensor,
)
from trackbed.checkpoint.state.objects_with_state import OwnState, has_own_state, state_of
from trackbed.checkpoint.state.partial_tensors import abbreviated, is_part, printable, refuse_partial_tensors
from trackbed.checkpoint.state.self_described import boxes_to_load, boxes_to_save, describes_itself
from trackbed.checkpoint.state.sharded_object import LocalNonpersistentObject, ShardedObject
from trackbed.checkpoint.state.sharded_tensor import (
    ShardedBase,
    ShardedTensor,
    ShardedTensorFactory,
    apply_factory_merges,
    check_key,
)
from trackbed.checkpoint.state.tree import dict_list_map_outplace, extract_matching_values, merge, nested_values
from trackbed.errors import CheckpointError

Shard = ShardedTensor | ShardedObject


@dataclass(frozen=True, slots=True)
class StateToSave:
    """State that is to be saved."""

    shards: list[Shard]
    """Tensors and objects, in order."""
    divided: list[DividedTensor]
    """`DTensor`s and the plain tensors beside them, in order."""
    aliases: dict[str, str]
    """Keys of tensors among the shards that have the memory of an earlier one, and the key of that one."""
    common: dict[str, Any]
    """All that is neither sharded nor local."""
    tree: Any
    """State with what factories have built."""

    def places(self) -> list[str]:
        """Path of each of the shards."""
        return _places_of_shards(self.tree)

    def common_with(self, more: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the common state with further values, in a container of the same class."""
        found: dict[str, Any] = _same_container(self.common, [*self.common.items(), *more.items()])
        return found


@dataclass(frozen=True, slots=True)
class StateToLoad:
    """State that is to be loaded."""

    tree: Any
    """Tensors and objects, where they belong."""
    factories: Any
    """Factories that have built parts of the tree; lists are dictionaries by position."""
    local: Any
    """Values that are not stored."""
    shards: list[Shard] = field(default_factory=list)
    """Tensors and objects of the tree, in order."""

    def places(self) -> list[str]:
        """Path of each tensor and object."""
        return _places_of_shards(self.tree)

    def only(self, is_kept: Iterable[bool]) -> "StateToLoad":
        """Returns the request with some of its tensors and objects, told by a flag for each, in order."""
        tree, factories = _only(self.tree, self.factories, iter(is_kept))
        tree = type(self.tree)() if tree is _NO_VALUE else tree
        return replace(self, tree=tree, factories=factories, shards=list(nested_values(tree)))

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


def put_in_order(loaded: Any, state: Any) -> None:
    """Gives dictionaries the order of those in a state, so that it is the same on all ranks. What is new is last."""
    if isinstance(loaded, dict) and isinstance(state, dict):
        for key in [*(key for key in state if key in loaded), *(key for key in loaded if key not in state)]:
            loaded[key] = loaded.pop(key)
            put_in_order(loaded[key], state.get(key))
    elif isinstance(loaded, list) and isinstance(state, list):
        for one, other in zip(loaded, state, strict=False):
            put_in_order(one, other)


def _only(tree: Any, factories: Any, flags: Iterator[bool]) -> tuple[Any, Any]:
    """Returns the leaves of a tree whose flag is true, and the factories that have built them.

    Elements of a list move up; factories are in dictionaries by position where the tree has lists.
    """
    if not isinstance(tree, dict | list):
        return (tree, factories) if next(flags) else (_NO_VALUE, {})
    is_built = isinstance(factories, ShardedTensorFactory)
    kept, kept_factories = list[tuple[Any, Any]](), dict[Any, Any]()
    for key, below in tree.items() if isinstance(tree, dict) else enumerate(tree):
        found, made_by = _only(below, {} if is_built else factories.get(key, {}), flags)
        if found is not _NO_VALUE:
            place = key if isinstance(tree, dict) else len(kept)
            kept.append((place, found))
            if made_by:
                kept_factories[place] = made_by
    if not kept:
        return _NO_VALUE, {}
    return dict(kept) if isinstance(tree, dict) else [one for _, one in kept], factories if is_built else kept_factories


class _Destination(enum.Flag):
    """Destination of a part of a state."""

    sharded = enum.auto()
    common = enum.auto()
    local = enum.auto()


_NOTHING: Final = _Destination(0)
_NO_VALUE: Final = object()
_WITH_MORE: Final = (dict, list, ShardedTensorFactory)
_STORED_AS_TENSORS: Final = (torch.Tensor, torch.nn.Parameter)
_KEPT_CONTAINERS: Final = (dict, list, OrderedDict, Counter, defaultdict)
"""Containers in which shards and plain values may lie side by side, and which come back as they are."""


def take_states(state: Any) -> tuple[Any, list[OwnState]]:
    """Returns a state with the states of objects in their places, and these objects; see `objects_with_state`."""
    owners: list[OwnState] = []
    if not isinstance(state, dict):
        return state, owners
    with _naming_depth(state):
        return _with_states(state, (), owners), owners


def _with_states(value: Any, path: tuple[Any, ...], owners: list[OwnState]) -> Any:
    if has_own_state(value):
        state = state_of(OwnState(path, value))
        owners.append(OwnState(path, value, state))
        return state
    if type(value) not in _KEPT_CONTAINERS or not _contains(value, has_own_state):
        return value
    items = value.items() if isinstance(value, dict) else enumerate(value)
    return _same_container(value, [(key, _with_states(below, (*path, key), owners)) for key, below in items])


def describe_state(state: dict[str, Any], *, divides: bool = False) -> StateToSave:
    """Divides a state that is to be saved.

    Args:
        state: state dictionary, which is left as it is.
        divides: True if a rank has `DTensor`s. Plain tensors in dictionaries are stored as tensors then, as DCP does.
    """
    if not isinstance(state, dict):
        raise CheckpointError(
            f'state: must be a dictionary, but is of {_class_name(state)}: give the values names, as {{"values": ...}}'
        )
    with _naming_depth(state):
        built = _built_tree(state, (), set())
        if type(built) not in _KEPT_CONTAINERS:
            raise CheckpointError(_other_class(state, ()))
        if divides:
            built = _with_plain_tensors(built, (), _entry_to_save)
        check_places(built)
        common = _plain_part(built)
    leaves: list[Any] = [leaf for leaf in nested_values(built) if isinstance(leaf, ShardedBase)]
    entries = [leaf for leaf in leaves if not isinstance(leaf, TensorElsewhere)]
    for entry in entries:
        check_key(entry.key)
    divided = [entry for entry in entries if isinstance(entry, DividedTensor)]
    shards = [entry for entry in entries if not isinstance(entry, DividedTensor)]
    _check_keys(divided)
    note_aliases(divided)
    return StateToSave(shards, divided, aliases_of(shards), {} if common is _NO_VALUE else common, built)


def _check_keys(divided: Iterable[DividedTensor]) -> None:
    """Checks that no two tensors have one key: paths are joined by dots, which names may have too."""
    seen: set[str] = set()
    for entry in divided:
        if entry.key in seen:
            raise CheckpointError(
                f"{entry.key}: each tensor must have a path of its own in the state, joined by dots, but two have this "
                "one: give one of them another name"
            )
        seen.add(entry.key)


def _entry_to_save(value: torch.Tensor, path: tuple[Any, ...]) -> DividedTensor:
    refuse_partial_tensors(value, key_of(path))
    return undivided_tensor(value, path)


def is_stored_as_tensor(value: Any) -> bool:
    """True for a plain tensor that can be stored as DCP stores tensors: dense, and of a type whose elements are so."""
    return (
        type(value) in _STORED_AS_TENSORS
        and value.layout is torch.strided
        and str(value.dtype).removeprefix("torch.") in DTYPE_OF
        and not is_part(value)
    )


def has_divided(state: Any) -> bool:
    """True if there is a `DTensor`, or a tensor that describes itself, in the containers of a state."""
    return _contains(state, has_parts)


def has_parts(value: Any) -> bool:
    """True for a tensor of which a rank has some boxes, and can tell which."""
    return is_divided(value) or describes_itself(value)


def _with_plain_tensors(
    value: Any, path: tuple[Any, ...], entry_of: Callable[[torch.Tensor, tuple[Any, ...]], Any]
) -> Any:
    """Copy of dictionaries, at any depth, with entries in the places of their plain tensors.

    Lists are left as they are: an entry beside a plain value could not be loaded.
    """
    if not isinstance(value, dict) or type(value) not in _KEPT_CONTAINERS:
        return value
    items = [
        (key, entry_of(below, (*path, key)))
        if is_stored_as_tensor(below)
        else (key, _with_plain_tensors(below, (*path, key), entry_of))
        for key, below in value.items()
    ]
    return _same_container(value, items)


def _places_of_shards(tree: Any) -> list[str]:
    """Path of each shard in a tree, in order."""
    return [_text(path) for path, leaf in _leaves(tree, ()) if isinstance(leaf, ShardedTensor | ShardedObject)]


def _leaves(value: Any, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    if isinstance(value, dict | list):
        for key, below in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _leaves(below, (*path, key))
    else:
        yield path, value


def _built_tree(value: Any, path: tuple[Any, ...], above: set[int]) -> Any:
    """Copy of the containers of a state, of the same classes, with what factories build in the places of these.

    A container of another class is left as it is, and is a leaf, if it has no shard; else it becomes a dictionary or a
    list.

    Args:
        value: state, or a value in it.
        path: its path.
        above: identities of the containers that it lies in.
    """
    value = _entry_of(value, path)
    if isinstance(value, ShardedTensorFactory):
        built = _built(value)
        return _built_tree(built, path, above) if isinstance(built, dict | list) else built
    if not isinstance(value, dict | list):
        return value
    if id(value) in above:
        raise CheckpointError(f"state: {_text(path)} must be a value that does not contain itself, but does")
    is_kept = type(value) in _KEPT_CONTAINERS
    if not is_kept and not _has_shard(value):
        return value
    above.add(id(value))
    copied = []
    for key, below in value.items() if isinstance(value, dict) else enumerate(value):  # few frames for each level
        has_more = isinstance(below, _WITH_MORE) or has_parts(below)
        copied.append((key, _built_tree(below, (*path, key), above) if has_more else below))
    above.discard(id(value))
    if not is_kept:
        _check_only_shards(value, copied, path)
    return _same_container(value, copied)


def _with_parts(value: Any, path: tuple[Any, ...]) -> Any:
    """Copy of the containers of a state that have `DTensor`s, with entries to load in the places of these."""
    if describes_itself(value):
        return boxes_to_load(value, key_of(path))
    if is_divided(value):
        return parts_to_load(divided_tensor(value, key_of(path)), value, key_of(path))
    if not isinstance(value, dict | list) or not _contains(value, has_parts):
        return value
    items = value.items() if isinstance(value, dict) else enumerate(value)
    return _same_container(value, [(key, _with_parts(below, (*path, key))) for key, below in items])


def _entry_of(value: Any, path: tuple[Any, ...]) -> Any:
    """Entry of a `DTensor`, whose key is its path as in DCP; another value as it is."""
    if describes_itself(value):
        return boxes_to_save(value, key_of(path))
    if not is_divided(value):
        return value
    return divided_tensor(value, key_of(path)) or TensorElsewhere(key_of(path), value)


def _check_only_shards(value: Any, items: list[tuple[Any, Any]], path: tuple[Any, ...]) -> None:
    """Checks that a container of another class has no plain values, which are loaded in a dictionary or list."""
    kinds = [_check(below, (*path, key)) for key, below in items]
    if any(_Destination.common in kind for kind in kinds):
        raise CheckpointError(_other_class(value, path))


def _other_class(value: Any, path: tuple[Any, ...]) -> str:
    plain = "dict" if isinstance(value, dict) else "list"
    return (
        f"state: {_text(path)} must be a plain {plain} to come back as it is, but is of {_class_name(value)}: save "
        f"{plain}(value)"
    )


def _same_container(value: Any, items: Iterable[tuple[Any, Any]]) -> Any:
    """New container of other items, of the class of one that is kept; else a dictionary or list."""
    kind = type(value)
    if isinstance(value, list):
        return [below for _, below in items]
    if kind is OrderedDict:
        ordered = OrderedDict(items)
        vars(ordered).update(vars(value))  # such as `_metadata` of a module's state
        return ordered
    if kind is defaultdict:
        return defaultdict(value.default_factory, items)
    return Counter(dict(items)) if kind is Counter else dict(items)


def _plain_part(value: Any) -> Any:
    """The part of a state that is neither sharded nor local; `_NO_VALUE` if all of it is."""
    if isinstance(value, ShardedBase | LocalNonpersistentObject):
        return _NO_VALUE
    if type(value) not in _KEPT_CONTAINERS:
        return value
    kept = []
    for key, below in value.items() if isinstance(value, dict) else enumerate(value):
        part = _plain_part(below)
        if part is not _NO_VALUE:
            kept.append((key, part))
    # An OrderedDict of a module has `_metadata` with the versions of its classes, which its load needs.
    return _same_container(value, kept) if kept or not value or getattr(value, "__dict__", None) else _NO_VALUE


def _class_name(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")


def describe_request(state: dict[str, Any], *, fills_plain: bool = False) -> StateToLoad:
    """Divides a state that is to be loaded. Values that are neither sharded nor local are ignored.

    Args:
        state: state dictionary, which is left as it is.
        fills_plain: True to ask for plain tensors in dictionaries, too, which may not be stored as tensors.
    """
    if not isinstance(state, dict):
        raise CheckpointError(
            f"state: must be a dictionary, but is of {_class_name(state)}: give it the structure that was saved"
        )
    with _naming_depth(state):
        state = _with_parts(state, ())
        if fills_plain:
            state = _with_plain_tensors(
                state, (), lambda value, place: parts_to_load(undivided_tensor(value, place), value, key_of(place))
            )
        factories, _ = extract_matching_values(
            state, lambda value: isinstance(value, ShardedTensorFactory), return_lists_as_dicts=True
        )
        built = dict_list_map_outplace(_built, state)
        check_places(built)
    tree, rest = extract_matching_values(built, lambda value: isinstance(value, ShardedBase))
    local, _ = extract_matching_values(rest, lambda value: isinstance(value, LocalNonpersistentObject))
    return StateToLoad(
        tree,
        dict_list_map_outplace(_named_in_errors, factories),
        dict_list_map_outplace(LocalNonpersistentObject.unwrap, local),
        list(nested_values(tree)),
    )


@contextmanager
def _naming_depth(state: Any) -> Iterator[None]:
    """Names the place of what is nested too deeply for the block."""
    try:
        yield
    except RecursionError:
        raise CheckpointError(f"state: {abbreviated(_deepest_path(state))} must be nested less deeply") from None


def _deepest_path(state: Any) -> list[str]:
    """Path of a value below which containers are nested most deeply, however deep that is."""
    values: list[tuple[Any, Any]] = [((), state)]  # each path as the path above it and its last name
    seen = {id(state)}
    for path, value in values:  # which grows meanwhile, level by level
        for key, below in value.items() if isinstance(value, dict) else enumerate(value):
            if isinstance(below, dict | list) and id(below) not in seen:
                seen.add(id(below))
                values.append(((path, printable(key)), below))
    names, path = list[str](), values[-1][0]
    while path:
        path, name = path
        names.append(name)
    return names[::-1]


@contextmanager
def _naming(function: str) -> Iterator[None]:
    """Begins an error in the block with the name of a function of the program."""
    try:
        yield
    except Exception as error:
        raise CheckpointError(f"{function} failed, {type(error).__name__}: {error}") from error


def _named_in_errors(factory: ShardedTensorFactory) -> ShardedTensorFactory:
    """Copy of a factory without data, whose merges name it when they fail."""

    def merge(state: Any) -> Any:
        with _naming(f"{factory.key}: merge_fn"):
            return factory.merge_fn(state)

    return replace(factory, data=None, merge_fn=merge)


def _built(value: Any) -> Any:
    """Result of a factory, in which further factories are replaced by their results; another value as it is."""
    if not isinstance(value, ShardedTensorFactory):
        return value
    check_key(value.key)
    with _naming(f"{value.key}: build_fn"):
        built = value.build()
    return dict_list_map_outplace(_built, built) if isinstance(built, dict | list) else built


def check_places(state: Any) -> None:
    """Checks that all shards of a state lie where `load` finds them again.

    Raises:
        CheckpointError: one is in a tuple, or beside plain values in a list.
    """
    _check(state, ())


def _check(value: Any, path: tuple[Any, ...]) -> _Destination:
    """Kinds of the leaves below a path."""
    if isinstance(value, dict) and type(value) in _KEPT_CONTAINERS:
        found = _NOTHING
        for key, below in value.items():
            found |= _check(below, (*path, key))
        return found or _Destination.common
    if type(value) is list:
        kinds = [_check(below, (*path, number)) for number, below in enumerate(value)]
        if len(set(kinds)) > 1:
            raise CheckpointError(
                f"state: the elements of the list at {_text(path)} must all be shards, or all be plain values, but are "
                "both: it could not be loaded; put the shards in a dictionary"
            )
        return kinds[0] if kinds else _Destination.common
    if isinstance(value, LocalNonpersistentObject):
        return _Destination.local
    if isinstance(value, ShardedBase):
        return _Destination.sharded
    if isinstance(value, tuple | set | frozenset) and _has_shard(value):
        raise CheckpointError(
            f"state: shards must lie in dictionaries and lists, but one is in the {type(value).__name__} at "
            f"{_text(path)}: it could not be loaded"
        )
    return _Destination.common


def _is_shard(value: Any) -> bool:
    return isinstance(value, ShardedBase | LocalNonpersistentObject) or has_parts(value)


def _has_shard(value: Any) -> bool:
    """True if there is a shard in containers, at any depth."""
    return _contains(value, _is_shard)


def _contains(value: Any, is_wanted: Callable[[Any], bool]) -> bool:
    """True if `is_wanted` is true for a value in containers, at any depth."""
    waiting, seen = [value], set[int]()
    while waiting:
        found = waiting.pop()
        if is_wanted(found):
            return True
        if isinstance(found, dict | list | tuple | set | frozenset) and id(found) not in seen:
            seen.add(id(found))
            waiting += found.values() if isinstance(found, dict) else found
    return False


def _text(path: tuple[Any, ...]) -> str:
    return ".".join(map(printable, path)) or "the top"
