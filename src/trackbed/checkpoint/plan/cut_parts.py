"""Cuts what ranks write into parts that are stored by themselves. Pure."""

from dataclasses import fields, replace

import numpy as np
import numpy.typing as npt

from trackbed.checkpoint.io.box_parts import cut_box
from trackbed.checkpoint.plan.assignment import Assignment
from trackbed.checkpoint.plan.shard_table import DTYPES, Table

Int64s = npt.NDArray[np.int64]


def cut_parts(table: Table, assignment: Assignment, most_bytes: int | None) -> tuple[Table, Assignment]:
    """Cuts parts of tensors of more than some bytes, as the ranks cut what they write.

    Args:
        table: shards of all ranks.
        assignment: parts of them, in the order in which each rank writes its own.
        most_bytes: bytes from which on a part is cut; None to cut nothing.

    Returns:
        A table of all parts, and who writes them, in the same order.
    """
    if most_bytes is None or not len(assignment.row):
        return table, assignment
    row = assignment.row
    offset, shape = table.offset[row].copy(), table.shape[row].copy()
    cut = np.flatnonzero(assignment.axis >= 0)
    axis = assignment.axis[cut]
    offset[cut, axis] += assignment.start[cut]
    shape[cut, axis] = assignment.stop[cut] - assignment.start[cut]
    item_bytes = np.array([dtype.itemsize for dtype in DTYPES], dtype=np.int64)[table.dtype[row]]
    is_large = ~table.is_object[row] & (shape.prod(axis=1) * item_bytes > most_bytes)
    if not is_large.any():
        return table, assignment
    counts = np.ones(len(row), dtype=np.int64)
    offsets, shapes = list(offset[:, None]), list(shape[:, None])
    for number in np.flatnonzero(is_large).tolist():
        axes = int(table.num_axes[row[number]])
        first, size = (tuple(box[number, :axes].tolist()) for box in (offset, shape))
        parts = list(cut_box(first, size, int(item_bytes[number]), most_bytes))
        counts[number] = len(parts)
        offsets[number] = _widened([low for low, _ in parts], offset.shape[1], 0)
        shapes[number] = _widened([length for _, length in parts], shape.shape[1], 1)
    source = np.repeat(row, counts)
    columns = {field.name: getattr(table, field.name)[source] for field in fields(Table) if field.name != "keys"}
    cut_table = replace(table, **columns | {"offset": np.concatenate(offsets), "shape": np.concatenate(shapes)})
    zeros = np.zeros(len(source), dtype=np.int64)
    return cut_table, Assignment(np.arange(len(source)), np.repeat(assignment.rank, counts), zeros, zeros, zeros - 1)


def _widened(boxes: list[tuple[int, ...]], num_axes: int, fill: int) -> Int64s:
    rows = np.array(boxes, dtype=np.int64)
    return np.pad(rows, ((0, 0), (0, num_axes - rows.shape[1])), constant_values=fill)
