"""Checks of the shards of all ranks, before any data moves: pure, and the same on every rank."""

from collections.abc import Iterator, Sequence
from math import prod
from typing import Final

import numpy as np
import numpy.typing as npt

from trackbed.checkpoint.plan.table import DTYPES, Table
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
    """Like `_describe`, for boxes with very many different edges: compares each box with those that begin before it."""
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
