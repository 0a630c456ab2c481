"""Reads the shards that ranks want, wherever their elements are stored."""

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np
import torch

from trackbed.checkpoint.exact_cast import is_exact_cast
from trackbed.checkpoint.folder import CheckpointFolder
from trackbed.checkpoint.format.catalogue import Catalogue, StoredTensor
from trackbed.checkpoint.io.box_reader import BoxReader
from trackbed.checkpoint.io.parallel_read import Place, read_places
from trackbed.checkpoint.plan.exchange import Exchange, exchange_parts, must_exchange, plan_parts
from trackbed.checkpoint.plan.table import gather_table, has_elements, tabulate
from trackbed.checkpoint.plan.validate import cover_once
from trackbed.checkpoint.ranks import Meeting
from trackbed.checkpoint.state.sharded_object import ShardedObject
from trackbed.checkpoint.state.sharded_tensor import ShardedTensor
from trackbed.errors import CheckpointError

__all__ = ["load_shards", "require_covered", "require_loadable"]

Shard = ShardedTensor | ShardedObject


def require_loadable(shard: Shard, catalogue: Catalogue, *, allow_cast: bool) -> None:
    """Checks that a shard can be loaded. A tensor without elements need not be stored, as older checkpoints lack them.

    Raises:
        CheckpointError: it is not stored, or in another shape or type.
    """
    if isinstance(shard, ShardedObject):
        if shard.unique_key not in catalogue.objects:
            msg = f"{shard.unique_key}: must be an object of the checkpoint, but is not there"
            raise CheckpointError(msg)
        return
    stored = catalogue.tensors.get(shard.key)
    if stored is None:
        if not has_elements(shard):
            return
        msg = f"{shard.key}: must be a tensor of the checkpoint, but is not there"
        raise CheckpointError(msg)
    wanted = tuple(shard.global_shape)
    if wanted != stored.shape and not (shard.allow_shape_mismatch and len(wanted) == len(stored.shape)):
        msg = f"{shard.key}: must have the shape {wanted} that is wanted, but is stored as {stored.shape}"
        raise CheckpointError(msg)
    if not has_elements(shard):
        return
    if not allow_cast and not is_exact_cast(stored.dtype, shard.dtype):
        msg = (
            f"{shard.key}: values of {stored.dtype} must be loaded into a type that can hold them, but are wanted in "
            f"{shard.dtype}: pass allow_cast=True to round them"
        )
        raise CheckpointError(msg)
    _check_coverage(shard, catalogue, stored)


def _check_coverage(shard: ShardedTensor, catalogue: Catalogue, stored: StoredTensor) -> None:
    shape = (1,) * shard.prepend_axis_num + tuple(shard.local_shape)
    offset = tuple(shard.global_offset)
    # A target may be longer than what is stored, where that is allowed.
    pairs = zip(offset, shape, stored.shape, strict=True)
    require_covered(catalogue, shard.key, offset, tuple(max(0, min(size, end - start)) for start, size, end in pairs))


def require_covered(catalogue: Catalogue, key: str, offset: tuple[int, ...], shape: tuple[int, ...]) -> None:
    """Checks that each element of a box of a tensor is stored once.

    Raises:
        CheckpointError: one is not, or several times.
    """
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
    msg = f"{key}: all {prod(shape):,} elements of [{region}] must be stored once, but {found:,} are{twice}"
    raise CheckpointError(msg)


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
    found: list[Any] = [
        None if isinstance(shard, ShardedObject) else _target(shard) if shard.data is None else shard.data
        for shard in shards
    ]
    with torch.no_grad():
        exchanged: set[int] = set()
        if must_exchange(meeting, exchange):
            exchanged = _exchange(shards, found, folder, meeting)
        places = []
        with BoxReader(folder.path, folder.catalogue) as reader:
            for number, shard in enumerate(shards):
                if isinstance(shard, ShardedObject):
                    meeting.poll()
                    found[number] = reader.read_object(shard.unique_key)
                elif number not in exchanged and has_elements(shard):
                    box = _box(shard, found[number])
                    if shard.allow_shape_mismatch:
                        box.zero_()
                    places.append(Place(shard.key, box, tuple(shard.global_offset)))
        # Ranks begin at different places, so that each byte comes from the disk once where they share a page cache.
        first = len(places) * meeting.rank // meeting.size
        read_places(places[first:] + places[:first], folder.path, folder.catalogue, meeting.poll)
    return found


def _target(shard: ShardedTensor) -> torch.Tensor:
    return torch.empty(tuple(shard.local_shape), dtype=shard.dtype, device="cpu")


def _box(shard: ShardedTensor, data: torch.Tensor) -> torch.Tensor:
    """Data of a shard with all axes of its tensor."""
    return data.detach()[(None,) * shard.prepend_axis_num]


def _exchange(shards: Sequence[Shard], found: Sequence[Any], folder: CheckpointFolder, meeting: Meeting) -> set[int]:
    """Collective over the ranks: fills tensors that several ranks want. Returns their places in `shards`."""
    tensors = {
        number: shard
        for number, shard in enumerate(shards)
        if isinstance(shard, ShardedTensor) and has_elements(shard) and not shard.allow_shape_mismatch
    }
    numbers = list(tensors)
    described = [
        replace(shard, data=None, dtype=folder.catalogue.tensors[shard.key].dtype) for shard in tensors.values()
    ]
    table, first = gather_table(meeting, tabulate(described, meeting.rank))
    parts = plan_parts(table, meeting.size)

    def target(row: int) -> torch.Tensor:
        number = numbers[row - first]
        return _box(tensors[number], found[number])

    with BoxReader(folder.path, folder.catalogue) as reader:

        def read(key: str, box: torch.Tensor, place: tuple[int, ...]) -> None:
            meeting.poll()
            reader.read_box(key, box, place)

        exchange_parts(meeting, table, parts, target, read)
    rows = {row - first for part in parts for row in part.rows.tolist()}
    return {numbers[row] for row in rows if 0 <= row < len(numbers)}
