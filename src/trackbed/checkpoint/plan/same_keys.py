"""Entries of one rank that have one key, and cannot be one tensor or object: an error that says where they are."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations
from typing import Final

from trackbed.checkpoint.plan.table import has_elements
from trackbed.checkpoint.state.sharded_base import is_main_replica
from trackbed.checkpoint.state.sharded_object import ShardedObject
from trackbed.checkpoint.state.sharded_tensor import ShardedTensor
from trackbed.errors import CheckpointError

Shard = ShardedTensor | ShardedObject
Box = tuple[tuple[int, int], ...]

_MOST_COMPARED: Final = 64
"""Boxes of one key up to which each is compared with each. Those of more are compared by the table of all ranks."""
_ADVICE: Final = (
    'give each a key of its own, as sharded_state(..., prefix="average.") does, or replica_id 1 to one of them if they '
    "are copies"
)


def require_distinct(shards: Sequence[Shard], places: Callable[[], Sequence[str]], rank: int) -> None:
    """Checks the entries of a rank that have the same key.

    Args:
        shards: tensors and objects.
        places: returns the path of each in the state.
        rank: number of the rank.
    """
    if len({shard.key for shard in shards}) == len(shards):
        return
    groups: defaultdict[str, list[tuple[Shard, str]]] = defaultdict(list)
    for shard, place in zip(shards, places(), strict=True):
        if has_elements(shard):
            groups[shard.key].append((shard, place))
    for key, group in groups.items():
        if len(group) > 1:
            _check(key, group, rank)


def _check(key: str, group: list[tuple[Shard, str]], rank: int) -> None:
    first, place = group[0]
    for other, elsewhere in group[1:]:
        if _kind(other) != _kind(first):
            found = f"rank {rank} has {_kind(first)} at {place} and {_kind(other)} at {elsewhere}"
            raise CheckpointError(f"{key}: all shards must have one kind, type and shape, but {found}: {_ADVICE}")
    mains = [(_box(shard), where) for shard, where in group if is_main_replica(shard.replica_id)]
    for box, one, another in _overlaps(mains):
        region = ", ".join(f"{start}:{stop}" for start, stop in box)
        found = f"rank {rank} has 2 times [{region}], at {one} and {another}"
        raise CheckpointError(f"{key}: main replicas must cover each element once, but {found}: {_ADVICE}")


def _overlaps(boxes: list[tuple[Box, str]]) -> Iterator[tuple[Box, str, str]]:
    """Yields common elements of two boxes, and the places of both."""
    seen: dict[Box, str] = {}
    for box, place in boxes:
        if box in seen:
            yield box, seen[box], place
        seen[box] = place
    if len(boxes) > _MOST_COMPARED:
        return
    for (box, place), (other, elsewhere) in combinations(boxes, 2):
        common = tuple((max(one[0], two[0]), min(one[1], two[1])) for one, two in zip(box, other, strict=True))
        if all(start < stop for start, stop in common):
            yield common, place, elsewhere


def _box(shard: Shard) -> Box:
    offset = tuple(shard.global_offset)
    if isinstance(shard, ShardedObject):
        return tuple((start, start + 1) for start in offset)
    shape = (1,) * shard.prepend_axis_num + tuple(shard.local_shape)
    return tuple((start, start + size) for start, size in zip(offset, shape, strict=True))


def _kind(shard: Shard) -> str:
    what = "an object" if isinstance(shard, ShardedObject) else f"a tensor of {shard.dtype}"
    return f"{what} of shape {tuple(shard.global_shape)}"
