"""Assignment of shards to the ranks that write them: pure, and the same on every rank."""

from dataclasses import dataclass, fields, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from trackbed.checkpoint.plan.shard_table import FIRST_OF_COPIES, Table
from trackbed.kernels import assign_least_loaded

Int64s = npt.NDArray[np.int64]

_ITEM_BYTES: Final = 128 << 10
"""Bytes that take as long to write as an item takes besides its bytes."""
_SMALLEST_CUT: Final = 4 << 20
"""Bytes below which a shard is not cut."""


@dataclass(frozen=True, slots=True, eq=False)
class Assignment:
    """Parts of shards, and the ranks that write them. W parts."""

    row: Int64s
    """`[W]` row of the shard in the table, one that the writing rank has."""
    rank: Int64s
    """`[W]` rank that writes the part."""
    start: Int64s
    """`[W]` first row of the part along the axis that is cut."""
    stop: Int64s
    """`[W]` end of the part along that axis."""
    axis: Int64s
    """`[W]` axis that is cut; -1 for a whole shard."""

    def of_rank(self, rank: int) -> "Assignment":
        """Parts that a rank writes."""
        own = self.rank == rank
        return Assignment(self.row[own], self.rank[own], self.start[own], self.stop[own], self.axis[own])


def assign_to_main_replicas(table: Table, num_ranks: int) -> Assignment:
    """Has each main replica written by its rank, whole."""
    rows = np.flatnonzero((table.is_main == 1) & (table.shape > 0).all(axis=1))
    zeros = np.zeros(len(rows), dtype=np.int64)
    return Assignment(rows, table.rank[rows], zeros, zeros, zeros - 1)


def group_copies(table: Table, rows: Int64s) -> tuple[Int64s, Int64s]:
    """Orders shards such that copies of one follow each other, in rank order.

    Args:
        table: shards of all ranks.
        rows: rows of shards with elements.

    Returns:
        The rows in that order, and the place of the first copy of each shard.
    """
    whole, offset, shape = table.global_shape[rows], table.offset[rows], table.shape[rows]
    first_element, last_element = np.zeros(len(rows), dtype=np.int64), np.zeros(len(rows), dtype=np.int64)
    for axis in range(whole.shape[1]):
        first_element = first_element * whole[:, axis] + offset[:, axis]
        last_element = last_element * whole[:, axis] + offset[:, axis] + shape[:, axis] - 1
    order = np.lexsort((table.rank[rows], last_element, first_element, table.key[rows]))
    rows, columns = rows[order], (table.key[rows][order], first_element[order], last_element[order])
    is_new = np.ones(len(rows), dtype=bool)
    is_new[1:] = np.logical_or.reduce([column[1:] != column[:-1] for column in columns])
    return rows, np.flatnonzero(is_new)


def choose_main_replicas(table: Table) -> Table:
    """Makes the first of several equal boxes the main replica, where no rank knows that its own is."""
    rows = np.flatnonzero((table.is_main == FIRST_OF_COPIES) & (table.shape > 0).all(axis=1))
    if not len(rows):
        return table
    is_main = np.where(table.is_main == FIRST_OF_COPIES, 0, table.is_main)
    ordered, first = group_copies(table, rows)
    is_main[ordered[first]] = 1
    return replace(table, is_main=is_main)


def assign_balanced(table: Table, num_ranks: int) -> Assignment:
    """Shares the shards among the ranks that have them, so that all take equally long.

    A shard costs its bytes and a fixed amount. Large ones are cut along their first axis with several elements. Copies
    of tensors are equal, so any will do; an object is written by its main replica.

    Of a tensor that has no elements on any rank, the first rank that has it writes its box.

    Deterministic: the largest part goes first, to the rank with the least so far among the ranks with the shard.

    Args:
        table: shards of all ranks, without problems.
        num_ranks: number of ranks.
    """
    empty = _without_elements(table)
    rows = np.flatnonzero((table.shape > 0).all(axis=1) & ((table.is_main == 1) | ~table.is_object))
    if not len(rows):
        return empty
    rows, first = group_copies(table, rows)
    end = np.append(first[1:], len(rows))
    is_written = np.maximum.reduceat(table.is_main[rows], first) == 1
    first, end = first[is_written], end[is_written]
    sizes = table.num_bytes[rows[first]]
    mean = max(int((sizes + _ITEM_BYTES).sum()) // num_ranks, _SMALLEST_CUT)
    shard, axis, start, stop = _cut(table, rows[first], end - first, mean)
    length = np.where(axis < 0, 1, table.shape[rows[first]][shard, axis])
    costs = sizes[shard] // length * np.where(axis < 0, 1, stop - start) + _ITEM_BYTES
    # What all ranks have fills up what the others leave.
    order = np.lexsort((start, shard, -costs, (end - first)[shard] == num_ranks))
    shard = shard[order]
    place = assign_least_loaded(costs[order], first[shard], end[shard], table.rank[rows], num_ranks)
    chosen = rows[place]
    return join_assignments(Assignment(chosen, table.rank[chosen], start[order], stop[order], axis[order]), empty)


def _without_elements(table: Table) -> Assignment:
    """Has the first box of each tensor that has no elements written by its rank."""
    rows = np.flatnonzero((table.global_shape == 0).any(axis=1))
    keys, first = np.unique(table.key[rows], return_index=True)
    of_others = table.key[(table.global_shape > 0).all(axis=1)]
    rows = rows[first[~np.isin(keys, of_others)]]
    zeros = np.zeros(len(rows), dtype=np.int64)
    return Assignment(rows, table.rank[rows], zeros, zeros, zeros - 1)


def join_assignments(one: Assignment, other: Assignment) -> Assignment:
    """Returns the parts of both."""
    if not len(other.row):
        return one
    names = (field.name for field in fields(Assignment))
    return Assignment(*(np.concatenate([getattr(one, name), getattr(other, name)]) for name in names))


def _cut(table: Table, examples: Int64s, num_holders: Int64s, mean: int) -> tuple[Int64s, Int64s, Int64s, Int64s]:
    """Cuts shards that cost more than the mean of a rank into as many parts as they have holders, at most.

    Args:
        table: shards of all ranks.
        examples: `[S]` a row of each shard.
        num_holders: `[S]` ranks that have each shard.
        mean: bytes that a part may have.

    Returns:
        `[P]` number of the shard of each part; axis that is cut, -1 for a whole shard; first row and end of the part
        along that axis, zeros for a whole shard.
    """
    size, shape = table.num_bytes[examples], table.shape[examples]
    axis = np.argmax(shape > 1, axis=1) if shape.shape[1] else np.zeros(len(examples), dtype=np.int64)
    length = shape[np.arange(len(examples)), axis] if shape.shape[1] else np.ones(len(examples), dtype=np.int64)
    count = np.minimum(np.minimum(num_holders, -(-size // mean)), length)
    count[table.is_object[examples] | (size < 2 * _SMALLEST_CUT)] = 1
    count = np.maximum(count, 1)
    shard = np.repeat(np.arange(len(examples)), count)
    number = np.arange(len(shard)) - np.repeat(np.cumsum(count) - count, count)
    is_cut = count[shard] > 1
    start = np.where(is_cut, length[shard] * number // count[shard], 0)
    stop = np.where(is_cut, length[shard] * (number + 1) // count[shard], 0)
    return shard, np.where(is_cut, axis[shard], -1), start, stop
