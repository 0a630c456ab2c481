"""Checks of shards before any data moves. Pure.

Shards of one rank with one key must be parts of one tensor or object; main replicas of all ranks must cover each tensor
once, and have all that any rank has a copy of. The checks of all ranks are the same on every rank.

Shapes: N shards of all ranks, B boxes, D axes.
"""

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations
from math import prod
from typing import Final

import numpy as np
import numpy.typing as npt

from trackbed.checkpoint.plan.assignment import group_copies
from trackbed.checkpoint.plan.shard_table import DTYPES, Table, has_elements
from trackbed.checkpoint.state.sharded_object import ShardedObject
from trackbed.checkpoint.state.sharded_tensor import ShardedTensor, is_main_replica
from trackbed.errors import CheckpointError

Int64s = npt.NDArray[np.int64]

_MAX_CELLS: Final = 1 << 25
_RANKS_SHOWN: Final = 8
_PROBLEMS_SHOWN: Final = 20


def require_valid(table: Table, advice: str = "") -> None:
    """Checks the shards of all ranks; see `find_problems`.

    Args:
        table: shards of all ranks.
        advice: end of the error.

    Raises:
        CheckpointError: there are problems; the message has the first 20.
    """
    raise_problems(find_problems(table), advice)


def raise_problems(problems: Sequence[str], advice: str = "") -> None:
    """Raises CheckpointError with the first 20 of some problems and an advice, if there are any."""
    if problems:
        more = len(problems) - _PROBLEMS_SHOWN
        shown = [*problems[:_PROBLEMS_SHOWN], *([f"and {more:,} more"] if more > 0 else []), *filter(None, [advice])]
        raise CheckpointError("; ".join(shown))


def find_problems(table: Table) -> list[str]:
    """Describes what keeps the shards of all ranks from being one checkpoint.

    All shards of a key must agree in kind, type and shape. Main replicas must cover each tensor and each grid of
    objects, and no element twice.

    Args:
        table: shards of all ranks.

    Returns:
        One sentence for each problem: key, region and ranks; none if all is well.
    """
    problems = list(_conflicts(table))
    if problems:
        return problems
    mains = np.flatnonzero((table.is_main == 1) & (table.shape > 0).all(axis=1))
    mains = mains[np.argsort(table.key[mains], kind="stable")]
    bounds = np.searchsorted(table.key[mains], np.arange(len(table.keys) + 1))
    first_of_key = _first_rows(table)
    for number in np.flatnonzero(~_has_one_whole(table, mains, bounds)).tolist():
        start, stop = bounds[number : number + 2].tolist()
        problems += _gaps_and_overlaps(table, int(first_of_key[number]), mains[start:stop])
    return problems


def _has_one_whole(table: Table, mains: Int64s, bounds: Int64s) -> npt.NDArray[np.bool_]:
    """`[K]` True for keys whose only main replica is the whole tensor, which is most often so."""
    found: npt.NDArray[np.bool_] = np.diff(bounds) == 1
    rows = mains[bounds[:-1][found]]
    found[found] = (table.shape[rows] == table.global_shape[rows]).all(axis=1)
    return found


def _first_rows(table: Table) -> Int64s:
    """`[K]` first row of each key."""
    rows = np.empty(len(table.keys), dtype=np.int64)
    rows[table.key[::-1]] = np.arange(len(table) - 1, -1, -1)
    return rows


def _conflicts(table: Table) -> Iterator[str]:
    """Yields a sentence for each key whose shards contradict each other, and each shard outside its tensor."""
    rows = np.flatnonzero((table.shape > 0).all(axis=1))  # those without elements belong to no rank
    first = np.empty(len(table.keys), dtype=np.int64)
    first[table.key[rows[::-1]]] = rows[::-1]
    first = first[table.key[rows]]
    different = (
        (table.dtype[rows] != table.dtype[first])
        | (table.num_axes[rows] != table.num_axes[first])
        | (table.global_shape[rows] != table.global_shape[first]).any(axis=1)
    )
    seen: set[int] = set()
    for row, other in zip(rows[different].tolist(), first[different].tolist(), strict=True):
        if int(table.key[row]) not in seen:
            seen.add(int(table.key[row]))
            both = f"{_kind(table, row)} and {_kind(table, other)}"
            yield f"{table.keys[table.key[row]]}: all shards must have one kind, type and shape, but {both}"
    outside = (table.offset[rows] < 0) | (table.offset[rows] + table.shape[rows] > table.global_shape[rows])
    for row in rows[outside.any(axis=1)].tolist():
        what = f"rank {table.rank[row]} has {table.region(row)}"
        yield f"{table.keys[table.key[row]]}: each box must lie within {_shape(table, row)}, but {what}"


def _kind(table: Table, row: int) -> str:
    what = "an object" if table.is_object[row] else f"a tensor of {DTYPES[table.dtype[row]]}"
    return f"rank {table.rank[row]} has {what} of shape {_shape(table, row)}"


def _shape(table: Table, row: int) -> tuple[int, ...]:
    return tuple(table.global_shape[row, : table.num_axes[row]].tolist())


def _gaps_and_overlaps(table: Table, example: int, rows: Int64s) -> list[str]:
    """Sentences about the main replicas of one key.

    Args:
        table: shards of all ranks.
        example: a row of the key.
        rows: its main replicas with elements.
    """
    key = table.keys[table.key[example]]
    axes = int(table.num_axes[example])
    whole = table.global_shape[example, :axes]
    if not whole.all():
        return []
    if not len(rows):
        region = f"[{', '.join(f'0:{size}' for size in whole.tolist())}]"
        return [f"{key}: main replicas must cover {region}, but no rank has one"]
    first, shape = table.offset[rows, :axes], table.shape[rows, :axes]
    if axes == 0:
        whole, first, shape = (
            np.ones(1, np.int64),
            np.zeros((len(rows), 1), np.int64),
            np.ones((len(rows), 1), np.int64),
        )
    if _is_tiling(first, shape, whole):
        return []
    return _describe(table, key, rows, first, shape, whole)


def cover_once(first: Int64s, shape: Int64s, whole: Int64s) -> bool:
    """True if boxes cover all elements of a tensor, and none twice.

    Args:
        first: `[B, D]` first element of each box, within the tensor.
        shape: `[B, D]` shape of each box, without zeros.
        whole: `[D]` shape of the tensor.
    """
    if not whole.all():
        return True
    covered = sum(prod(size) for size in shape.tolist())
    if covered != prod(whole.tolist()):
        return False
    return len(first) == 1 or _is_tiling(first, shape, whole) or _are_disjoint(first, first + shape)


def _are_disjoint(first: Int64s, end: Int64s) -> bool:
    """True if no element is in two boxes."""
    order = np.lexsort(first.T[::-1])
    first, end = first[order], end[order]
    for number in range(1, len(first)):
        near = np.flatnonzero(end[:number, 0] > first[number, 0])
        if ((first[near] < end[number]) & (end[near] > first[number])).all(axis=1).any():
            return False
    return True


def _is_tiling(first: Int64s, shape: Int64s, whole: Int64s) -> bool:
    """True if boxes of one shape, at multiples of that shape, cover everything once."""
    size = shape[0]
    if (shape != size).any() or (first % size).any() or (whole % size).any():
        return False
    grid = whole // size
    if int(np.prod(grid.astype(object))) != len(first):
        return False
    cells = np.ravel_multi_index(tuple((first // size).T), tuple(grid.tolist()))
    return len(np.unique(cells)) == len(first)


def _describe(table: Table, key: str, rows: Int64s, first: Int64s, shape: Int64s, whole: Int64s) -> list[str]:
    """Finds elements that no box has, or several have, by painting the boxes on a grid of all their edges."""
    end = first + shape
    edges = [np.unique(np.concatenate([first[:, axis], end[:, axis], [0, whole[axis]]])) for axis in range(len(whole))]
    counts_of_cells = [len(edge) - 1 for edge in edges]
    if int(np.prod(np.array(counts_of_cells, dtype=object))) > _MAX_CELLS:
        return _describe_pairs(table, key, rows, first, end, whole)
    paint = np.zeros([len(edge) for edge in edges], dtype=np.int32)
    lows = [np.searchsorted(edge, first[:, axis]) for axis, edge in enumerate(edges)]
    highs = [np.searchsorted(edge, end[:, axis]) for axis, edge in enumerate(edges)]
    for corner in np.ndindex(*(2,) * len(whole)):
        place = tuple(highs[axis] if is_high else lows[axis] for axis, is_high in enumerate(corner))
        np.add.at(paint, place, -1 if sum(corner) % 2 else 1)
    for axis in range(len(whole)):
        np.cumsum(paint, axis=axis, out=paint)
    paint = paint[tuple(slice(0, count) for count in counts_of_cells)]
    problems = []
    for is_wrong, what in ((paint > 1, "cover each element once"), (paint < 1, "cover all elements")):
        if not is_wrong.any():
            continue
        cell = np.unravel_index(int(np.argmax(is_wrong)), paint.shape)
        low = np.array([edge[number] for edge, number in zip(edges, cell, strict=True)], dtype=np.int64)
        high = np.array([edge[number + 1] for edge, number in zip(edges, cell, strict=True)], dtype=np.int64)
        holders = rows[((first <= low) & (end >= high)).all(axis=1)]
        region = ", ".join(f"{start}:{stop}" for start, stop in zip(low.tolist(), high.tolist(), strict=True))
        problems.append(f"{key}: main replicas must {what}, but {name_holders(table, holders)} [{region}]")
    return problems


def _describe_pairs(table: Table, key: str, rows: Int64s, first: Int64s, end: Int64s, whole: Int64s) -> list[str]:
    """Like `_describe`, for boxes with very many different edges: compares each box with all that begin before it."""
    order = np.lexsort(first.T[::-1])
    first, end, rows = first[order], end[order], rows[order]
    for number in range(1, len(rows)):
        near = np.flatnonzero(end[:number, 0] > first[number, 0])
        common = near[((first[near] < end[number]) & (end[near] > first[number])).all(axis=1)]
        if len(common):
            both = rows[[int(common[0]), number]]
            found = f"{name_holders(table, both)} {table.region(int(both[1]))}"
            return [f"{key}: main replicas must cover each element once, but {found}"]
    covered = sum(int(np.prod(size.astype(object))) for size in end - first)
    total = int(np.prod(whole.astype(object)))
    if covered == total:
        return []
    return [f"{key}: main replicas must cover all {total:,} elements, but cover {covered:,}"]


def name_holders(table: Table, rows: Int64s) -> str:
    """Text about the ranks that have some shards, with the verb, such as `ranks 0, 2 have`."""
    ranks = sorted(set(table.rank[rows].tolist()))
    if not ranks:
        return "no rank has"
    if len(ranks) == 1:
        times = f" {len(rows)} times" if len(rows) > 1 else ""
        return f"rank {ranks[0]} has{times}"
    shown = ", ".join(map(str, ranks[:_RANKS_SHOWN]))
    return f"ranks {shown}{' and others' if len(ranks) > _RANKS_SHOWN else ''} have"


Box = tuple[tuple[int, int], ...]


def require_main_replicas(table: Table) -> None:
    """Checks that main replicas have all elements of which a rank has a copy; see `find_lost`.

    Args:
        table: shards of all ranks.

    Raises:
        CheckpointError: they do not; the message has the first 20 keys.
    """
    raise_problems(find_lost(table))


def find_lost(table: Table) -> list[str]:
    """Describes copies that no rank would save, because no main replica has some of their elements.

    Elements that no rank has at all may be missing, as in a checkpoint of some parts, and the boxes of copies may be
    other ones than those of the main replicas.

    Args:
        table: shards of all ranks.

    Returns:
        One sentence for each key: region, and the ranks that have it; none if all is well.
    """
    copies = np.flatnonzero((table.is_main == 0) & (table.shape > 0).all(axis=1))
    if not len(copies):
        return []
    return [*_lost(table, copies[~table.is_object[copies]]), *_lost(table, copies[table.is_object[copies]])]


def _lost(table: Table, copies: Int64s) -> Iterator[str]:
    """Yields a sentence for each key with a copy that is lost.

    Args:
        table: shards of all ranks.
        copies: shards that are no main replicas, either tensors or objects.
    """
    if not len(copies):
        return
    mains = np.flatnonzero(
        (table.is_main == 1) & (table.shape > 0).all(axis=1) & (table.is_object == table.is_object[copies[0]])
    )
    copies = copies[~_is_in_whole(table, copies, mains)]
    if not len(copies):
        return
    rows, starts = group_copies(table, np.concatenate([mains, copies]))
    stops = np.append(starts[1:], len(rows))
    is_saved = np.maximum.reduceat(table.is_main[rows], starts) == 1
    left = np.flatnonzero(~is_saved)
    order = np.argsort(table.key[mains], kind="stable")
    mains = mains[order]
    for key, group in itertools.groupby(left.tolist(), lambda number: int(table.key[rows[starts[number]]])):
        start, stop = np.searchsorted(table.key[mains], [key, key + 1]).tolist()
        first, shape = table.offset[mains[start:stop]], table.shape[mains[start:stop]]
        whole = table.global_shape[mains[start]] if start < stop else np.zeros_like(table.offset[0])
        covered = whole if start < stop and cover_once(first, shape, whole) else np.zeros_like(whole)
        for number in group:
            holders = rows[starts[number] : stops[number]]
            offset, size = table.offset[holders[0]], table.shape[holders[0]]
            if (offset + size <= covered).all():
                continue
            missing = _first_missing(offset, size, first, shape)
            if missing is not None:
                region = ", ".join(f"{low}:{high}" for low, high in missing[: int(table.num_axes[holders[0]])])
                yield (
                    f"{table.keys[key]}: what a rank has must be in a main replica of some rank, but no main replica "
                    f"has [{region}], of which {name_holders(table, holders)} a copy: replica_id must be 0 on one rank"
                )
                break


def _is_in_whole(table: Table, copies: Int64s, mains: Int64s) -> npt.NDArray[np.bool_]:
    """True for copies of a tensor of which one main replica is the whole, which is most often so."""
    size = np.zeros((len(table.keys), table.shape.shape[1]), dtype=np.int64)
    whole = mains[(table.shape[mains] == table.global_shape[mains]).all(axis=1)]
    size[table.key[whole]] = table.shape[whole]
    is_outside = table.offset[copies] + table.shape[copies] > size[table.key[copies]]
    return np.logical_not(is_outside.any(axis=1))


def _first_missing(offset: Int64s, size: Int64s, first: Int64s, shape: Int64s) -> Box | None:
    """A part of a box that other boxes do not cover; None if they cover it.

    Args:
        offset: `[D]` first element of the box.
        size: `[D]` its shape.
        first: `[B, D]` first elements of the other boxes.
        shape: `[B, D]` their shapes.
    """
    low, high = np.maximum(first, offset), np.minimum(first + shape, offset + size)
    is_near = (low < high).all(axis=1)
    left: list[Box] = [tuple(zip(offset.tolist(), (offset + size).tolist(), strict=True))]
    for lows, highs in zip(low[is_near].tolist(), high[is_near].tolist(), strict=True):
        other: Box = tuple(zip(lows, highs, strict=True))
        left = [part for box in left for part in _without(box, other)]
        if not left:
            return None
    return left[0]


def _without(box: Box, other: Box) -> Iterator[Box]:
    """Yields disjoint boxes of the elements that are not in another box.

    >>> list(_without(((0, 4), (0, 4)), ((1, 2), (0, 3))))
    [((0, 1), (0, 4)), ((2, 4), (0, 4)), ((1, 2), (3, 4))]
    """
    if any(stop <= low or high <= start for (start, stop), (low, high) in zip(box, other, strict=True)):
        yield box
        return
    inner = list(box)
    for axis, (low, high) in enumerate(other):
        start, stop = inner[axis]
        for part in ((start, low), (high, stop)):
            if part[0] < part[1]:
                yield (*inner[:axis], part, *inner[axis + 1 :])
        inner[axis] = max(start, low), min(stop, high)


Shard = ShardedTensor | ShardedObject

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
            _check_group(key, group, rank)


def _check_group(key: str, group: list[tuple[Shard, str]], rank: int) -> None:
    first, place = group[0]
    for other, elsewhere in group[1:]:
        if _kind_of(other) != _kind_of(first):
            found = f"rank {rank} has {_kind_of(first)} at {place} and {_kind_of(other)} at {elsewhere}"
            raise CheckpointError(f"{key}: all shards must have one kind, type and shape, but {found}: {_ADVICE}")
    mains = [(_box_of(shard), where) for shard, where in group if is_main_replica(shard.replica_id)]
    for box, one, another in _overlaps(mains):
        region = ", ".join(f"{start}:{stop}" for start, stop in box)
        found = f"rank {rank} has 2 times [{region}], at {one} and {another}"
        raise CheckpointError(f"{key}: main replicas must cover each element once, but {found}: {_ADVICE}")


def _overlaps(boxes: list[tuple[Box, str]]) -> Iterator[tuple[Box, str, str]]:
    """Yields common elements of two boxes, and the places of both."""
    seen: dict[Box, str] = {}
    for box, path in boxes:
        if box in seen:
            yield box, seen[box], path
        seen[box] = path
    if len(boxes) > _MOST_COMPARED:
        return
    for (box, path), (other, other_path) in combinations(boxes, 2):
        common = tuple((max(one[0], two[0]), min(one[1], two[1])) for one, two in zip(box, other, strict=True))
        if all(start < stop for start, stop in common):
            yield common, path, other_path


def _box_of(shard: Shard) -> Box:
    offset = tuple(shard.global_offset)
    if isinstance(shard, ShardedObject):
        return tuple((start, start + 1) for start in offset)
    shape = (1,) * shard.prepend_axis_num + tuple(shard.local_shape)
    return tuple((start, start + size) for start, size in zip(offset, shape, strict=True))


def _kind_of(shard: Shard) -> str:
    what = "an object" if isinstance(shard, ShardedObject) else f"a tensor of {shard.dtype}"
    return f"{what} of shape {tuple(shard.global_shape)}"
