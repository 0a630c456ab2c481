"""Check that nothing which a rank has is left out of a checkpoint: pure, and the same on every rank.

Shapes: N shards of all ranks, B boxes, D axes.
"""

import itertools
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from trackbed.checkpoint.plan.assignment import group_copies
from trackbed.checkpoint.plan.table import Table
from trackbed.checkpoint.plan.validate import cover_once, name_holders, raise_problems

Int64s = npt.NDArray[np.int64]
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
