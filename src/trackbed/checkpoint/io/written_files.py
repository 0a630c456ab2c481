"""Files that ranks have written, as numbers: what they send each other, and the contents of the checkpoint."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Self

import numpy as np
import numpy.typing as npt

from trackbed.checkpoint.format.catalogue import Catalogue, StoredTensor
from trackbed.checkpoint.format.extents import FileChecksum
from trackbed.checkpoint.io.file_writer import WrittenItem
from trackbed.checkpoint.plan.assignment import Assignment
from trackbed.checkpoint.plan.shard_table import DTYPES, Table
from trackbed.checkpoint.state.sharded_object import ShardedObject
from trackbed.errors import CheckpointError

Int64s = npt.NDArray[np.int64]

_FIELDS: Final = 6


@dataclass(frozen=True, slots=True, eq=False)
class WrittenFiles:
    """Files that a rank has written. N items, in the order of the rank's assignment."""

    files: Mapping[str, FileChecksum]
    items: Int64s
    """`[N, 6]` number of the file of each item, its start and size, start and size of its payload, and number of its
    checksums."""
    sums: npt.NDArray[np.uint32]
    """Checksums of the payloads."""

    @classmethod
    def make(cls, files: Mapping[str, FileChecksum], items: Sequence[tuple[str, WrittenItem]]) -> Self:
        """Collects items, each with the name of its file."""
        number_of = {name: number for number, name in enumerate(files)}
        numbers = [
            (number_of[name], item.start, item.num_bytes, item.payload_start, item.payload_bytes, len(item.sums))
            for name, item in items
        ]
        sums = np.array([found for _, item in items for found in item.sums], dtype=np.uint32)
        return cls(files, np.array(numbers, dtype=np.int64).reshape(-1, _FIELDS), sums)

    def unpacked(self) -> Iterator[tuple[str, FileChecksum, WrittenItem]]:
        """Yields name and checksum of the file of each item, and the item."""
        files = list(self.files.items())
        first = 0
        for number, start, num_bytes, payload_start, payload_bytes, count in self.items.tolist():
            name, stored = files[number]
            sums = self.sums[first : first + count].tolist()
            first += count
            yield name, stored, WrittenItem(start, num_bytes, payload_start, payload_bytes, sums)

    @classmethod
    def join(cls, parts: Sequence[Self]) -> Self:
        """Joins files of one rank, at least one, whose items follow each other."""
        if len(parts) == 1:
            return parts[0]
        items = np.concatenate([part.items for part in parts])
        first_file = np.cumsum([0, *(len(part.files) for part in parts)])[:-1]
        items[:, 0] += np.repeat(first_file, [len(part.items) for part in parts])
        files = {name: found for part in parts for name, found in part.files.items()}
        return cls(files, items, np.concatenate([part.sums for part in parts]))

    def encode(self) -> bytes:
        """Serializes the numbers."""
        sizes = np.array([(found.num_bytes, found.crc) for found in self.files.values()], dtype="<i8")
        text = "\0".join(self.files).encode()
        head = np.array([len(text), len(self.files), len(self.items)], dtype="<i8")
        numbers = self.items.astype("<i8", copy=False).tobytes()
        return b"".join([head.tobytes(), text, sizes.tobytes(), numbers, self.sums.astype("<u4", copy=False).tobytes()])

    @classmethod
    def decode(cls, content: bytes) -> Self:
        """Parses the result of `encode`."""
        num_chars, num_files, num_items = np.frombuffer(content, dtype="<i8", count=3).tolist()
        place = 24 + num_chars
        names = content[24:place].decode().split("\0") if num_files else []
        sizes = np.frombuffer(content, dtype="<i8", count=2 * num_files, offset=place).reshape(-1, 2).tolist()
        place += 16 * num_files
        items = np.frombuffer(content, dtype="<i8", count=_FIELDS * num_items, offset=place).reshape(-1, _FIELDS)
        sums = np.frombuffer(content, dtype="<u4", offset=place + items.nbytes)
        files = {name: FileChecksum(*size) for name, size in zip(names, sizes, strict=True)}
        return cls(files, items.astype(np.int64, copy=False), sums.astype(np.uint32, copy=False))


def catalogue_of(table: Table, assignment: Assignment, written_by_rank: Sequence[WrittenFiles]) -> Catalogue:
    """Contents of a checkpoint.

    Args:
        table: shards of all ranks.
        assignment: parts of them that were written.
        written_by_rank: files of all ranks, in rank order.
    """
    offsets, sizes = _boxes(table, assignment)
    row = assignment.row
    # The items of all ranks, one after another, in the order of the assignment.
    by_rank = np.argsort(assignment.rank, kind="stable")
    items = np.empty((len(row), _FIELDS), dtype=np.int64)
    first_file = np.cumsum([0, *(len(written.files) for written in written_by_rank)])
    joined = np.concatenate([np.zeros((0, _FIELDS), dtype=np.int64), *(written.items for written in written_by_rank)])
    joined[:, 0] += np.repeat(first_file[:-1], [len(written.items) for written in written_by_rank])
    items[by_rank] = joined
    first_sum = np.empty(len(row), dtype=np.int64)
    first_sum[by_rank] = np.cumsum(joined[:, -1]) - joined[:, -1]
    is_object = table.is_object[row]
    order = np.lexsort((*offsets.T[::-1], table.key[row], is_object))
    row, num_tensors = row[order], int((~is_object).sum())
    tensors, objects = _tensors(table, row[:num_tensors]), _objects(table, row[num_tensors:], num_tensors)
    if both := tensors.keys() & objects.keys():
        raise CheckpointError(f"{min(both)}: must be the key of a tensor or the unique key of an object, but is both")
    return Catalogue(
        tensors=tensors,
        objects=objects,
        files=tuple(name for written in written_by_rank for name in written.files),
        file=items[order, 0],
        start=items[order, 1],
        num_bytes=items[order, 2],
        payload_start=items[order, 3],
        payload_bytes=items[order, 4],
        offsets=offsets[order],
        sizes=sizes[order],
        first_sum=first_sum[order],
        sums=np.concatenate([np.zeros(0, dtype=np.uint32), *(written.sums for written in written_by_rank)]),
    )


def _boxes(table: Table, assignment: Assignment) -> tuple[Int64s, Int64s]:
    """First element and shape of each part."""
    offsets, sizes = table.offset[assignment.row], table.shape[assignment.row]
    is_object = table.is_object[assignment.row]
    offsets[is_object], sizes[is_object] = 0, 1
    cut = np.flatnonzero(assignment.axis >= 0)
    axis = assignment.axis[cut]
    offsets[cut, axis] += assignment.start[cut]
    sizes[cut, axis] = assignment.stop[cut] - assignment.start[cut]
    return offsets, sizes


def _tensors(table: Table, rows: Int64s) -> dict[str, StoredTensor]:
    """Tensors of parts that are sorted by key."""
    starts = np.flatnonzero(np.diff(table.key[rows], prepend=-1))
    ends = np.append(starts, len(rows))[1:]
    first = np.repeat(rows[starts], ends - starts)
    is_other = (table.dtype[rows] != table.dtype[first]) | (table.global_shape[rows] != table.global_shape[first]).any(
        axis=1
    )
    if is_other.any():
        key = table.keys[table.key[rows[np.argmax(is_other)]]]
        raise CheckpointError(f"{key}: all boxes must be of one tensor, but are of several types or shapes")
    keys, dtypes, axes = (column[rows[starts]].tolist() for column in (table.key, table.dtype, table.num_axes))
    shapes = table.global_shape[rows[starts]].tolist()
    return {
        table.keys[key]: StoredTensor(DTYPES[dtype], tuple(shape[:num_axes]), range(start, end))
        for key, dtype, shape, num_axes, start, end in zip(
            keys, dtypes, shapes, axes, starts.tolist(), ends.tolist(), strict=True
        )
    }


def _objects(table: Table, rows: Int64s, first: int) -> dict[str, int]:
    """Rows of objects in the catalogue, by their unique keys."""
    rows_of_keys: dict[str, int] = {}
    for number, row in enumerate(rows.tolist()):
        axes = int(table.num_axes[row])
        grid, offset = (tuple(box[row, :axes].tolist()) for box in (table.global_shape, table.offset))
        name = ShardedObject(table.keys[table.key[row]], None, grid, offset).unique_key
        if name in rows_of_keys:
            raise CheckpointError(f"{name}: an object must be stored once, but is twice")
        rows_of_keys[name] = first + number
    return rows_of_keys
