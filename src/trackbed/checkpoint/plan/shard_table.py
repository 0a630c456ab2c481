"""Shards as rows of numbers: what ranks send each other, and what plans are made of."""

import hashlib
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt
import orjson
import torch

from trackbed.checkpoint.format.catalogue import DTYPE_OF
from trackbed.checkpoint.ranks import Meeting
from trackbed.checkpoint.state.self_described import DescribedBox
from trackbed.checkpoint.state.sharded_object import ShardedObject
from trackbed.checkpoint.state.sharded_tensor import ShardedTensor, check_key, is_main_replica
from trackbed.errors import CheckpointError

Int64s = npt.NDArray[np.int64]

DTYPES: Final = tuple(sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str))
_NUMBER_OF_DTYPE: Final = {dtype: number for number, dtype in enumerate(DTYPES)}
_OBJECT: Final = -1
FIRST_OF_COPIES: Final = 2
"""In the place of the flag of a main replica: the box of the first rank that has it is one."""
_MAGIC: Final = b"TBTABLE1"
_COLUMNS: Final = ("key", "dtype", "num_axes", "num_bytes", "is_main", "is_regular", "may_differ", "rank")
_BOXES: Final = ("global_shape", "offset", "shape")


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """Shards of one rank, or of all. N shards, D axes of the one with the most.

    An object is a shard of one element; its key is that of its grid. Axes of tensors include prepended ones.
    """

    keys: tuple[str, ...]
    """Keys of tensors and objects."""
    key: Int64s
    """`[N]` number of each shard's key."""
    dtype: Int64s
    """`[N]` number of each tensor's type in `DTYPES`; -1 for an object."""
    num_axes: Int64s
    """`[N]` number of axes."""
    num_bytes: Int64s
    """`[N]` bytes of each shard; of an object, an estimate."""
    is_main: Int64s
    """`[N]` 1 for a main replica; see `choose_main_replicas` for 2."""
    is_regular: Int64s
    """`[N]` 1 for a box of a regular grid."""
    may_differ: Int64s
    """`[N]` 1 for a tensor whose stored shape may differ."""
    rank: Int64s
    """`[N]` rank that has the shard."""
    global_shape: Int64s
    """`[N, D]` shape of the tensor or grid; ones beyond its axes."""
    offset: Int64s
    """`[N, D]` first element of the shard; zeros beyond its axes."""
    shape: Int64s
    """`[N, D]` shape of the shard; ones beyond its axes."""

    def __len__(self) -> int:
        """Number of shards."""
        return len(self.key)

    @property
    def is_object(self) -> npt.NDArray[np.bool_]:
        """`[N]` True for objects."""
        return np.equal(self.dtype, _OBJECT)

    def region(self, row: int) -> str:
        """Text about the place of a shard, such as `[0:4, 2:3]`."""
        axes = int(self.num_axes[row])
        pairs = zip(self.offset[row, :axes].tolist(), self.shape[row, :axes].tolist(), strict=True)
        return f"[{', '.join(f'{first}:{first + size}' for first, size in pairs)}]"

    def encode(self) -> bytes:
        """Serializes the table."""
        head = orjson.dumps([self.keys, len(self), self.offset.shape[1]])
        columns = [getattr(self, name).astype("<i8", copy=False).tobytes() for name in (*_COLUMNS, *_BOXES)]
        return b"".join([_MAGIC, len(head).to_bytes(8, "little"), head, *columns])

    @classmethod
    def decode(cls, content: bytes | memoryview) -> "Table":
        """Parses the result of `encode`.

        Raises:
            CheckpointError: it is another version's.
        """
        view = memoryview(content)
        if bytes(view[:8]) != _MAGIC:
            raise CheckpointError(
                f"table of a rank: must be of this version of Trackbed, but begins with {bytes(view[:8])!r}"
            )
        end = 16 + int.from_bytes(view[8:16], "little")
        keys, count, num_axes = orjson.loads(view[16:end])
        numbers = np.frombuffer(view[end:], dtype="<i8").astype(np.int64, copy=False)
        columns = dict(zip(_COLUMNS, numbers[: len(_COLUMNS) * count].reshape(len(_COLUMNS), count), strict=True))
        boxes = numbers[len(_COLUMNS) * count :].reshape(len(_BOXES), count, num_axes)
        return cls(tuple(keys), **columns, **dict(zip(_BOXES, boxes, strict=True)))

    def digest(self) -> bytes:
        """Hash of 16 bytes of all that the table says."""
        return hashlib.blake2b(self.encode(), digest_size=16).digest()


def has_elements(shard: ShardedTensor | ShardedObject) -> bool:
    """True for all but a tensor without elements, which belongs to no rank."""
    return isinstance(shard, ShardedObject) or 0 not in shard.local_shape


def is_written(shard: ShardedTensor | ShardedObject) -> bool:
    """True for shards with elements, and for those of tensors that have none anywhere, which can be stored."""
    if isinstance(shard, ShardedObject) or has_elements(shard):
        return True
    data = shard.data
    is_dense = data is not None and data.layout is torch.strided and data.device.type != "meta"
    return 0 in shard.global_shape and is_dense and _has_stored_type(shard)


def tabulate(shards: Iterable[ShardedTensor | ShardedObject], rank: int, object_bytes: Sequence[int] = ()) -> Table:
    """Makes the table of a rank's shards, in their order.

    Args:
        shards: tensors and objects.
        rank: number of this rank.
        object_bytes: size of each object in order; by default zeros.

    Raises:
        CheckpointError: a key is no text, or a tensor has elements that cannot be stored: quantized, sparse or without
            values.
    """
    keys: dict[str, int] = {}
    rows, boxes = [], []
    sizes = iter(object_bytes)
    for shard in shards:
        check_key(shard.key)
        key = keys.setdefault(shard.key, len(keys))
        is_main = FIRST_OF_COPIES if isinstance(shard, DescribedBox) else int(is_main_replica(shard.replica_id))
        if isinstance(shard, ShardedObject):
            rows.append((key, _OBJECT, len(shard.global_shape), next(sizes, 0), is_main, 1, 0, rank))
            boxes.append((shard.global_shape, shard.global_offset, (1,) * len(shard.global_shape)))
            continue
        _check_type(shard)
        shape = (1,) * shard.prepend_axis_num + tuple(shard.local_shape)
        num_bytes = int(np.prod(shape, dtype=np.int64)) * shard.dtype.itemsize
        flags = (is_main, int(shard.has_regular_grid), int(shard.allow_shape_mismatch))
        rows.append((key, _NUMBER_OF_DTYPE[shard.dtype], len(shape), num_bytes, *flags, rank))
        boxes.append((tuple(shard.global_shape), tuple(shard.global_offset), shape))
    num_axes = max((len(box[0]) for box in boxes), default=1) or 1  # one for the sake of those without axes
    padded = np.zeros((len(_BOXES), len(boxes), num_axes), dtype=np.int64)
    padded[0] = padded[2] = 1
    for row, box in enumerate(boxes):
        for place, numbers in enumerate(box):
            padded[place, row, : len(numbers)] = numbers
    columns = np.array(rows, dtype=np.int64).reshape(-1, len(_COLUMNS)).T
    return Table(
        tuple(keys), **dict(zip(_COLUMNS, map(np.ascontiguousarray, columns), strict=True)),
        **dict(zip(_BOXES, padded, strict=True)),
    )  # fmt: skip


def _check_type(shard: ShardedTensor) -> None:
    """Raises CheckpointError unless the elements of a tensor can be stored as they are."""
    data = shard.data
    if not _has_stored_type(shard):
        raise CheckpointError(
            f"{shard.key}: must be of a type whose elements are their values, but is of {shard.dtype}"
        )
    if data is not None and (data.layout is not torch.strided or data.device.type == "meta"):
        raise CheckpointError(f"{shard.key}: must be a dense tensor with values, but is {data.layout} on {data.device}")


def _has_stored_type(shard: ShardedTensor) -> bool:
    return str(shard.dtype).removeprefix("torch.") in DTYPE_OF


def gather_table(meeting: Meeting, own: Table) -> tuple[Table, int]:
    """Collective over the ranks: returns the table of the shards of all ranks, and the row of this rank's first."""
    tables = [Table.decode(content) for content in meeting.gather(own.encode())]
    return join_tables(tables), sum(map(len, tables[: meeting.rank]))


def join_tables(tables: Sequence[Table]) -> Table:
    """Joins the tables of several ranks, in their order."""
    keys: dict[str, int] = {}
    numbers = [np.array([keys.setdefault(key, len(keys)) for key in table.keys], dtype=np.int64) for table in tables]
    num_axes = max((table.offset.shape[1] for table in tables), default=0)
    columns = {name: np.concatenate([getattr(table, name) for table in tables]) for name in _COLUMNS if name != "key"}
    columns["key"] = np.concatenate([number[table.key] for number, table in zip(numbers, tables, strict=True)])
    boxes = {
        name: np.concatenate([_widened(getattr(table, name), num_axes, int(name != "offset")) for table in tables])
        for name in _BOXES
    }
    return Table(tuple(keys), **columns, **boxes)


def _widened(box: Int64s, num_axes: int, fill: int) -> Int64s:
    missing = num_axes - box.shape[1]
    return np.pad(box, ((0, 0), (0, missing)), constant_values=fill) if missing else box


def ranks_of_keys(table: Table) -> dict[str, set[int]]:
    """Ranks that have a shard with elements, by its key."""
    rows = np.flatnonzero((table.shape > 0).all(axis=1))
    ranks: dict[str, set[int]] = {}
    for key, rank in zip(table.key[rows].tolist(), table.rank[rows].tolist(), strict=True):
        ranks.setdefault(table.keys[key], set()).add(rank)
    return ranks


def without_writers(table: Table, keys: Container[str]) -> Table:
    """Returns a table in which no rank writes the tensors with some keys."""
    numbers = [number for number, key in enumerate(table.keys) if key in keys]
    if not numbers:
        return table
    return replace(table, is_main=np.where(np.isin(table.key, numbers), 0, table.is_main))
