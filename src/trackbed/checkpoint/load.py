"""Loads a checkpoint with all ranks; tensors of other types only where no value changes."""

import logging
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import compress
from math import prod
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, TypeAlias, get_args, overload

import numpy as np
import orjson
import torch

from trackbed.checkpoint.folder import CheckpointFolder, any_folder, open_for_all
from trackbed.checkpoint.format.catalogue import Catalogue, StoredTensor
from trackbed.checkpoint.io.boxes import BoxReader, BoxToFill, fill_boxes
from trackbed.checkpoint.io.file_reader import AnyFolder
from trackbed.checkpoint.io.stored_folder import StoredFolder
from trackbed.checkpoint.megatron_arguments import refuses_megatron_arguments
from trackbed.checkpoint.paused_collector import paused_collector
from trackbed.checkpoint.plan.exchange import Exchange, exchange_parts, must_exchange, parse_exchange, plan_parts
from trackbed.checkpoint.plan.shard_table import gather_table, has_elements, tabulate
from trackbed.checkpoint.plan.validate import cover_once, require_distinct, require_valid
from trackbed.checkpoint.ranks import Meeting, Observer, Phases, Ranks, meet
from trackbed.checkpoint.state.describe import (
    StateToLoad,
    describe_request,
    has_divided,
    put_in_order,
    take_states,
)
from trackbed.checkpoint.state.divided_tensors import PartOfDivided, key_of
from trackbed.checkpoint.state.left_out import below_empty
from trackbed.checkpoint.state.objects_with_state import OwnState, give_states
from trackbed.checkpoint.state.sharded_object import ShardedObject
from trackbed.checkpoint.state.sharded_tensor import ShardedTensor
from trackbed.errors import ArgumentError, CheckpointError
from trackbed.plural import number_of

logger = logging.getLogger(__name__)

Rename = Mapping[str, str] | Callable[[str], str]
Shard = ShardedTensor | ShardedObject
Strict: TypeAlias = Literal["raise", "log", "ignore"]
"""Handling of keys that are asked for and not stored."""

_STRICT: Final = get_args(Strict)
_OWN_NAMES: Final = {
    "sharded_state_dict": "state",
    "checkpoint_dir": "folder",
    "validate_access_integrity": "allow_parts=True for False",
    "process_group": "group",
}


@overload
def load(
    folder: str | Path,
    /,
    *,
    group: Ranks = None,
    observe: Observer | None = None,
) -> dict[str, Any]: ...


@overload
def load(
    state: dict[str, Any],
    folder: str | Path,
    *,
    strict: Strict = "raise",
    allow_parts: bool = False,
    rename: Rename | None = None,
    group: Ranks = None,
    exchange: Exchange = "auto",
    allow_cast: bool = False,
    observe: Observer | None = None,
) -> dict[str, Any]: ...


@refuses_megatron_arguments(_OWN_NAMES)
@paused_collector()
def load(
    state: dict[str, Any] | str | Path,
    folder: str | Path | None = None,
    *,
    strict: Strict = "raise",
    allow_parts: bool = False,
    rename: Rename | None = None,
    group: Ranks = None,
    exchange: Exchange = "auto",
    allow_cast: bool = False,
    observe: Observer | None = None,
) -> dict[str, Any]:
    """Collective over `group`: loads a checkpoint of Trackbed, Megatron Core or torch, in any layout.

    `load(folder)` returns the plain tensors and values of a checkpoint, and none of the tensors that `sharded_state`
    has saved: use `load_sharded_state`. `load(state, folder)` returns them too, with the tensors and objects for which
    the state has a `ShardedTensor` or `ShardedObject`. Other plain tensors and values of the state are ignored. In a
    checkpoint of `torch.distributed.checkpoint` everything is a tensor or an object to ask for; `open_checkpoint` reads
    it without a state.

    Args:
        state: state with a `ShardedTensor` for each tensor and a `ShardedObject` for each object that is wanted. The
            `data` of a `ShardedTensor` is filled if it is not None, and so is each `DTensor`, whose key is its path in
            the state, and each plain tensor in dictionaries whose path is the key of a stored tensor. Objects with
            `state_dict` and `load_state_dict` get their state. The dictionary is not changed. The folder, if only plain
            tensors and values are wanted.
        folder: folder of the checkpoint, or its address in an object store, if it is not the first argument.
        strict: handling of keys that this rank asks for and that are not stored. "raise" for an error, "log" and
            "ignore" to leave them out, with and without a warning. `differing_keys` returns them.
        allow_parts: False to check that the main replicas of all ranks cover each tensor once, so that nothing is
            forgotten. True to load parts of tensors.
        rename: mapping or function that gives the key under which a tensor is stored, for keys that have changed.
        group: the ranks, as a `comm.Group` or a process group of torch; by default those of `torch.distributed`, or
            this process alone.
        exchange: how tensors are read that several ranks want. "none": each rank reads them. "flat": one rank reads and
            sends them to the others. "auto": "none" for a folder if all ranks are on one host, otherwise "flat".
        allow_cast: True if tensors may be loaded into types that cannot hold all their values.
        observe: called with the name and the seconds of each phase.

    Returns:
        State with the loaded tensors and objects, and the plain tensors and values of the checkpoint.

    Raises:
        ArgumentError: `strict` or `exchange` is unknown, or an argument is Megatron Core's, which
            `trackbed.megatron.load` takes.
        CheckpointError: on every rank, with the rank that failed and its message. Names, shapes and types are checked
            on all ranks before the first tensor is filled; where a file turns out to be damaged later, tensors of the
            state may have been filled.
    """
    state, folder = _state_and_folder(state, folder)
    _check_strict(strict)
    parse_exchange(exchange)
    phases = Phases(observe)
    with meet("load", group) as meeting:
        with phases("open"):
            request_state, owners = take_states(state)
            request = describe_request(request_state, fills_plain=True)
            opened = open_for_all(any_folder(folder), meeting)
            request, shards, others = _without_plain_values(request, opened.catalogue, rename)
            # The parts of DTensors cover them by their placements.
            own = [shard for shard in shards if not isinstance(shard, PartOfDivided)]
            table, _ = gather_table(meeting, tabulate(own, meeting.rank))
            not_stored = _not_stored(shards, opened.catalogue) if strict != "raise" else set()
            if not_stored:
                if strict == "log":
                    logger.warning(
                        "%s: keys that are asked for must be stored, but %s are not, and are left out",
                        opened.path,
                        sorted(not_stored),
                    )
                is_kept = [shard.key not in not_stored for shard in shards]
                request = request.only(is_kept)
                shards = list(compress(shards, is_kept))
            for shard in shards:
                require_loadable(shard, opened.catalogue, allow_cast=allow_cast)
            if not allow_parts:
                require_distinct(shards, request.places, meeting.rank)
                require_valid(table, "load parts with allow_parts=True")
            asked = {shard.unique_key if isinstance(shard, ShardedObject) else shard.key for shard in shards}
            common, returned = opened.load_values(asked)
            _check_plain_values(others, common, opened.path, strict)
            # All ranks meet in it, so that no tensor is filled where another rank refuses its own.
            _check_all_asked_for(owners, asked | returned, opened.catalogue, meeting, strict)
            left = opened.catalogue.tensors.keys() - returned
            if not shards and left and meeting.rank == 0:
                tensors = number_of(len(left), "sharded tensor")
                logger.warning("%s: none of its %s is asked for; open_checkpoint reads them, too", opened.path, tensors)
            elif meeting.rank == 0:
                _tell_left_out(below_empty(left, request_state), opened.path)
        with phases("read"), opened.naming_replacement():
            values = load_shards(shards, opened, meeting, exchange=exchange)
        with phases("merge"):
            loaded = request.fill(common, values)
            if has_divided(request_state):
                put_in_order(loaded, request_state)
            give_states(loaded, owners, may_lack=strict != "raise")
            return loaded


def _tell_left_out(keys: Sequence[str], path: AnyFolder) -> None:
    """Logs stored tensors for whose place the state has an empty dictionary."""
    if keys:
        logger.warning(
            "%s: %s must be in the state to be loaded, but the state has an empty dictionary in its place: "
            "load_sharded_state loads an optimizer that has made no step",
            path,
            number_of(len(keys), "tensor") + f" such as {keys[0]}",
        )


class PartialRequest(NamedTuple):
    """Parts of tensors that can be loaded from a checkpoint; result of `check_parts`."""

    state: StateToLoad
    shards: list[Shard]
    """Its tensors and objects, under their stored keys."""
    folder: CheckpointFolder

    def read(self, common: dict[str, Any], meeting: Meeting) -> dict[str, Any]:
        """Collective over the ranks where they exchange tensors: reads the parts.

        Args:
            common: plain values in which they are put. The dictionary is changed.
            meeting: the ranks.
        """
        with self.folder.naming_replacement():
            values = load_shards(self.shards, self.folder, meeting, exchange="auto")
        return self.state.fill(common, values)


def check_parts(
    state: dict[str, Any], folder: CheckpointFolder, *, rename: Rename | None, allow_cast: bool
) -> PartialRequest:
    """Checks that what this rank wants of some tensors can be loaded, by itself.

    Args:
        state: state as for `load`.
        folder: opened checkpoint.
        rename: see `load`.
        allow_cast: see `load`.

    Raises:
        CheckpointError: something is not stored, or in another shape or type.
    """
    request = describe_request(state)
    shards = _renamed(request.shards, rename)
    for shard in shards:
        require_loadable(shard, folder.catalogue, allow_cast=allow_cast)
    return PartialRequest(request, shards, folder)


class DifferingKeys(NamedTuple):
    """Keys of sharded tensors and objects that only a checkpoint or only a state has."""

    not_asked_for: set[str]
    """Stored, and asked for by no rank; the same on all ranks."""
    not_stored: set[str]
    """Asked for by this rank, and not stored. Tensors without elements are left out: they need not be stored."""


def differing_keys(
    state: dict[str, Any], folder: str | Path, *, rename: Rename | None = None, group: Ranks = None
) -> DifferingKeys:
    """Collective over `group`: compares the keys of a state with those of a checkpoint, and loads nothing.

    Args:
        state: state as for `load`.
        folder: folder of the checkpoint.
        rename: mapping or function that gives the key under which a tensor is stored.
        group: the ranks, as for `load`.

    Raises:
        CheckpointError: on every rank, with the rank that failed and its message.
    """
    with meet("differing_keys", group) as meeting:
        request = describe_request(take_states(state)[0], fills_plain=True)
        opened = open_for_all(any_folder(folder), meeting)
        catalogue = opened.catalogue
        _, shards, others = _without_plain_values(request, catalogue, rename)
        table, _ = gather_table(meeting, tabulate(shards, meeting.rank))
        lacking = {one.key for one in others if not _has(opened.load_common(), one.path)} if others else set()
        return DifferingKeys(_stored_keys(catalogue) - set(table.keys), _not_stored(shards, catalogue) | lacking)


def _check_strict(strict: Any) -> None:
    if strict not in _STRICT:
        raise ArgumentError(
            f"strict: must be 'raise', 'log' or 'ignore', found {strict!r}: differing_keys returns keys that one side "
            "has, and Megatron Core's words are for trackbed.megatron.load"
        )


def _state_and_folder(
    state: dict[str, Any] | str | Path, folder: str | Path | None
) -> tuple[dict[str, Any], str | Path]:
    if isinstance(state, (str, Path)) and folder is None:
        return {}, state
    if isinstance(state, (str, Path)) or folder is None:
        raise ArgumentError(
            "load: must be called as load(folder) or load(state, folder), found arguments of "
            f"{type(state).__name__} and {type(folder).__name__}"
        )
    return state, folder


def _renamed(shards: Sequence[Shard], rename: Rename | None) -> list[Shard]:
    """The shards under their stored keys."""
    if rename is None:
        return list(shards)
    stored_key = rename if callable(rename) else lambda key: rename.get(key, key)
    return [replace(shard, key=stored_key(shard.key)) for shard in shards]


def _without_plain_values(
    request: StateToLoad, catalogue: Catalogue, rename: Rename | None
) -> tuple[StateToLoad, list[Shard], list[PartOfDivided]]:
    """Leaves out plain tensors that are not stored as tensors.

    Returns:
        The request without them, its shards under their stored keys, and the plain tensors that were left out.
    """
    shards = _renamed(request.shards, rename)
    others = [
        shard
        for shard in shards
        if isinstance(shard, PartOfDivided) and shard.is_plain and shard.key not in catalogue.tensors
    ]
    if not others:
        return request, shards, []
    left_out = set(map(id, others))
    is_kept = [id(shard) not in left_out for shard in shards]
    return request.only(is_kept), list(compress(shards, is_kept)), others


def _check_plain_values(
    others: Iterable[PartOfDivided], common: dict[str, Any], path: AnyFolder, strict: Strict
) -> None:
    """Checks that plain tensors of the state that are not stored as tensors are plain values of the checkpoint."""
    lacking = [one.key for one in others if not _has(common, one.path)]
    if lacking and strict == "raise":
        raise CheckpointError(
            f"{lacking[0]}: must be a tensor or a plain value of the checkpoint, but is not there"
            + (f", and {number_of(len(lacking) - 1, 'other')}" if len(lacking) > 1 else "")
        )
    if lacking and strict == "log":
        logger.warning("%s: plain tensors of the state must be stored, but %s are not", path, lacking)


def _check_all_asked_for(
    owners: Sequence[OwnState], found: Container[str], catalogue: Catalogue, meeting: Meeting, strict: Strict
) -> None:
    """Collective over the ranks: checks that tensors in the states of objects are asked for by a rank.

    An optimizer that has not stepped, for example, asks for none: it would go on with a part of its state.
    """
    starts = tuple(f"{key_of(owner.path)}." for owner in owners)
    lacking = [key for key in catalogue.tensors if starts and key.startswith(starts) and key not in found]
    if not any(meeting.group.all_gather(bool(lacking))):
        return
    # Stages of a pipeline ask for tensors of their own.
    of_ranks = [set(orjson.loads(content)) for content in meeting.gather(orjson.dumps(lacking))]
    nobodys = sorted(set.intersection(*of_ranks))
    if nobodys and strict == "raise":
        more = f", and {number_of(len(nobodys) - 1, 'other')}" if len(nobodys) > 1 else ""
        raise CheckpointError(
            f"{nobodys[0]}: must be asked for by the object whose state it is, but it has no such tensor{more}: an "
            "optimizer has some only after a step; trackbed.sharded_state(model, optimizer) and load_sharded_state "
            "need none"
        )
    if nobodys and strict == "log":
        logger.warning("tensors of objects in the state are stored that these have not asked for: %s", nobodys)


def _has(state: Any, path: Sequence[Any]) -> bool:
    """True if there is a value at a path of nested dictionaries."""
    for key in path:
        if not isinstance(state, dict) or key not in state:
            return False
        state = state[key]
    return True


def _stored_keys(catalogue: Catalogue) -> set[str]:
    return {*catalogue.tensors, *(ShardedObject.empty_from_any_key(name).key for name in catalogue.objects)}


def _not_stored(shards: Sequence[Shard], catalogue: Catalogue) -> set[str]:
    """Keys of shards that a checkpoint does not have. Tensors without elements need not be stored."""
    return {shard.key for shard in shards if has_elements(shard)} - _stored_keys(catalogue)


def require_loadable(shard: Shard, catalogue: Catalogue, *, allow_cast: bool) -> None:
    """Checks that a shard can be loaded. A tensor without elements need not be stored, as older checkpoints lack them.

    Raises:
        CheckpointError: it is not stored, or in another shape or type.
    """
    if isinstance(shard, PartOfDivided) and shard.is_elsewhere:
        return
    if isinstance(shard, ShardedObject):
        if shard.unique_key not in catalogue.objects:
            raise CheckpointError(f"{shard.unique_key}: must be an object of the checkpoint, but is not there")
        return
    if shard.data is not None and shard.data.is_meta:
        raise CheckpointError(
            f"{shard.key}: the tensor to fill must have memory, but lies on the meta device: call "
            'to_empty(device="cpu") of its module first, or that of the GPU'
        )
    if shard.data is not None and _overlaps_itself(shard.data):
        raise CheckpointError(f"{shard.key}: the tensor to fill must have memory for each element, but is expanded")
    stored = catalogue.tensors.get(shard.key)
    if stored is None:
        if not has_elements(shard):
            return
        raise CheckpointError(f"{shard.key}: must be a tensor of the checkpoint, but is not there")
    wanted = tuple(shard.global_shape)
    if wanted != stored.shape and not (shard.allow_shape_mismatch and len(wanted) == len(stored.shape)):
        raise CheckpointError(
            f"{shard.key}: must have the shape {wanted} that is wanted, but is stored as {stored.shape}"
        )
    if not has_elements(shard):
        return
    if not allow_cast and not is_exact_cast(stored.dtype, shard.dtype):
        raise CheckpointError(
            f"{shard.key}: values of {stored.dtype} must be loaded into a type that can hold them, but are wanted in "
            f"{shard.dtype}: pass allow_cast=True to round them"
        )
    _check_coverage(shard, catalogue, stored)


def _overlaps_itself(tensor: torch.Tensor) -> bool:
    return any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


def _check_coverage(shard: ShardedTensor, catalogue: Catalogue, stored: StoredTensor) -> None:
    shape = (1,) * shard.prepend_axis_num + tuple(shard.local_shape)
    offset = tuple(shard.global_offset)
    # A target may be longer than what is stored, where that is allowed.
    pairs = zip(offset, shape, stored.shape, strict=True)
    require_covered(catalogue, shard.key, offset, tuple(max(0, min(size, end - start)) for start, size, end in pairs))


def require_covered(catalogue: Catalogue, key: str, offset: tuple[int, ...], shape: tuple[int, ...]) -> None:
    """Checks that each element of a box of a tensor is stored once."""
    common = catalogue.overlaps(key, offset, shape) if 0 not in shape else []
    if len(common) == 1 and common[0][1:] == (offset, tuple(map(sum, zip(offset, shape, strict=True)))):
        return
    boxes = np.array([(first, end) for _, first, end in common], dtype=np.int64).reshape(-1, 2, len(shape))
    low, sizes = np.array(offset, dtype=np.int64), boxes[:, 1] - boxes[:, 0]
    if cover_once(boxes[:, 0] - low, sizes, np.array(shape, dtype=np.int64)):
        return
    region = ", ".join(f"{start}:{start + size}" for start, size in zip(offset, shape, strict=True))
    found = sum(prod(size) for size in sizes.tolist())
    twice = ", some of them twice" if found >= prod(shape) else ""
    raise CheckpointError(
        f"{key}: all {prod(shape):,} elements of [{region}] must be stored once, but {found:,} are{twice}"
    )


def load_shards(
    shards: Sequence[Shard], folder: CheckpointFolder, meeting: Meeting, *, exchange: Exchange = "none"
) -> list[Any]:
    """Loads tensors and objects, with an exchange collectively over the ranks.

    Args:
        shards: shards that `require_loadable` accepts, with stored keys. Tensors with data are filled.
        folder: opened checkpoint.
        meeting: the ranks.
        exchange: see `Exchange`.

    Returns:
        Loaded values, in order.

    Raises:
        CheckpointError: a file is damaged, or a rank failed.
    """
    loaded: list[Any] = [
        None if isinstance(shard, ShardedObject) else _target(shard) if shard.data is None else shard.data
        for shard in shards
    ]
    with torch.no_grad():
        exchanged: set[int] = set()
        if must_exchange(meeting, exchange, is_stored=isinstance(folder.path, StoredFolder)):
            exchanged = _exchange(shards, loaded, folder, meeting)
        places = []
        with BoxReader(folder.path, folder.catalogue) as reader:
            reader.expect(shard.unique_key for shard in shards if isinstance(shard, ShardedObject))
            for number, shard in enumerate(shards):
                if isinstance(shard, ShardedObject):
                    meeting.poll()
                    loaded[number] = reader.read_object(shard.unique_key)
                elif number not in exchanged and has_elements(shard):
                    box = _box(shard, loaded[number])
                    if shard.allow_shape_mismatch:
                        box.zero_()
                    places.append(BoxToFill(shard.key, box, tuple(shard.global_offset)))
        # Ranks begin at different places, so that each byte comes from the disk once where they share a page cache.
        first = len(places) * meeting.rank // meeting.size
        fill_boxes(places[first:] + places[:first], folder.path, folder.catalogue, meeting.poll)
    return loaded


def _target(shard: ShardedTensor) -> torch.Tensor:
    return torch.empty(tuple(shard.local_shape), dtype=shard.dtype, device="cpu")


def _box(shard: ShardedTensor, data: torch.Tensor) -> torch.Tensor:
    """Data of a shard with all axes of its tensor."""
    return data.detach()[(None,) * shard.prepend_axis_num]


def _exchange(shards: Sequence[Shard], targets: Sequence[Any], folder: CheckpointFolder, meeting: Meeting) -> set[int]:
    """Collective over the ranks: fills tensors that several ranks want. Returns their places in `shards`."""
    tensors = {
        number: shard
        for number, shard in enumerate(shards)
        if isinstance(shard, ShardedTensor)
        and has_elements(shard)
        and not shard.allow_shape_mismatch
        and not (isinstance(shard, PartOfDivided) and not shard.has_copies)  # which no other rank wants
    }
    numbers = list(tensors)
    described = [
        replace(shard, data=None, dtype=folder.catalogue.tensors[shard.key].dtype) for shard in tensors.values()
    ]
    table, first = gather_table(meeting, tabulate(described, meeting.rank))
    parts = plan_parts(table, meeting.size)

    def target(row: int) -> torch.Tensor:
        number = numbers[row - first]
        return _box(tensors[number], targets[number])

    def read(places: list[BoxToFill]) -> None:
        fill_boxes(places, folder.path, folder.catalogue, meeting.poll)

    exchange_parts(meeting, table, parts, target, read)
    rows = {row - first for part in parts for row in part.rows.tolist()}
    return {numbers[row] for row in rows if 0 <= row < len(numbers)}


_INTEGERS = (
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.int8, torch.int16, torch.int32, torch.int64),
)
_BITS_OF_INTEGERS = {torch.bool: 1} | {
    dtype: torch.iinfo(dtype).bits - int(torch.iinfo(dtype).min < 0) for dtype in _INTEGERS
}
"""Bits of the largest value of each type."""


@lru_cache
def is_exact_cast(source: torch.dtype, target: torch.dtype) -> bool:
    """True if the second type has all values of the first.

    >>> is_exact_cast(torch.bfloat16, torch.float32), is_exact_cast(torch.int64, torch.float32)
    (True, False)
    """
    if source == target:
        return True
    if target.is_complex:
        return is_exact_cast(_part_of(source), _part_of(target))
    if source in _BITS_OF_INTEGERS and target in _BITS_OF_INTEGERS:
        is_signed = source.is_signed and source != torch.bool
        return _BITS_OF_INTEGERS[source] <= _BITS_OF_INTEGERS[target] and (target.is_signed or not is_signed)
    if not target.is_floating_point:
        return False
    wide = torch.finfo(target)
    if source in _BITS_OF_INTEGERS:
        bits = _BITS_OF_INTEGERS[source]
        return 2.0**-bits * 2 >= wide.eps and 2.0**bits <= wide.max
    if not source.is_floating_point:
        return False
    narrow = torch.finfo(source)
    return (
        narrow.eps >= wide.eps
        and narrow.max <= wide.max
        and narrow.smallest_normal * narrow.eps >= wide.smallest_normal * wide.eps
    )


def _part_of(dtype: torch.dtype) -> torch.dtype:
    """Type of the real part."""
    return dtype.to_real()
