"""Which rank writes what of `DTensor`s and of the plain tensors beside them. Pure.

The place of every part follows from the mesh and the placements, so that ranks with the same tensors send one
description of them, and none where all have the same. Each rank finds what it writes by itself.
"""

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import orjson
import torch

from trackbed.checkpoint.format.catalogue import DTYPE_OF
from trackbed.checkpoint.plan.assignment import Assignment
from trackbed.checkpoint.plan.shard_table import DTYPES, Table
from trackbed.checkpoint.state.divided_tensors import UNDIVIDED, DividedTensor, Division, LocalBox
from trackbed.errors import CheckpointError

Numbers = tuple[int, ...]
Int64s = npt.NDArray[np.int64]

_CUT: Final = -1
"""In the place of the number of a copy: each copy writes a part of every box."""
_SMALLEST_CUT: Final = 8 << 20
"""Bytes of a box below which it is not cut among its copies."""
_ITEM_BYTES: Final = 128 << 10
"""Bytes that take as long to write as an item takes besides its bytes."""


class Described(NamedTuple):
    """Tensor as every rank that has it describes it."""

    key: str
    dtype: torch.dtype
    shape: Numbers
    division: Division
    alias_of: str
    """Key of another one with the same memory; empty if there is none."""
    path: tuple[str | int, ...] = ()
    """Path in the state, of a tensor that is not divided."""


@dataclass(frozen=True, slots=True, eq=False)
class DividedTable:
    """Tensors of a rank that is not alone in having them."""

    tensors: tuple[Described, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Keys of shards of other kinds that have the memory of an earlier one, and the key of that one."""

    @classmethod
    def of(
        cls, entries: Iterable[DividedTensor], aliases: Mapping[str, str], number_of: Mapping[int, int]
    ) -> "DividedTable":
        """Makes the table of a rank.

        Args:
            entries: its tensors.
            aliases: see the attribute.
            number_of: numbers of the ranks of the save, by their numbers in the mesh.

        Raises:
            CheckpointError: a mesh has other ranks.
        """
        divisions: dict[Division, Division] = {}
        tensors = []
        for entry in entries:
            division = divisions.get(entry.division)
            if division is None:
                others = [rank for rank in entry.division.ranks if rank not in number_of]
                if others:
                    raise CheckpointError(
                        f"{entry.key}: the ranks of its mesh must take part in the save, but rank {others[0]} does not"
                    )
                ranks = tuple(number_of[rank] for rank in entry.division.ranks)
                division = divisions[entry.division] = entry.division._replace(ranks=ranks)
            path = tuple(key if isinstance(key, int) else str(key) for key in entry.path)
            tensors.append(Described(entry.key, entry.dtype, entry.shape, division, entry.alias_of, path))
        return cls(tuple(tensors), aliases)

    def encode(self) -> bytes:
        """Serializes the table."""
        numbers = {
            division: number for number, division in enumerate(dict.fromkeys(one.division for one in self.tensors))
        }
        rows = [
            [one.key, str(one.dtype).removeprefix("torch."), one.shape, numbers[one.division], one.alias_of, one.path]
            for one in self.tensors
        ]
        return orjson.dumps([list(map(tuple, numbers)), rows, sorted(self.aliases.items())])

    @classmethod
    def decode(cls, content: bytes) -> "DividedTable":
        """Parses the result of `encode`."""
        divisions, rows, aliases = orjson.loads(content)
        known = [
            Division(tuple(ranks), tuple(mesh_shape), tuple(map(tuple, placements)))
            for ranks, mesh_shape, placements in divisions
        ]
        tensors = (
            Described(key, DTYPE_OF[dtype], tuple(shape), known[number], alias_of, tuple(path))
            for key, dtype, shape, number, alias_of, path in rows
        )
        return cls(tuple(tensors), dict(aliases))

    def digest(self) -> str:
        """Hash of 16 bytes of all that the table says, in hexadecimal; empty for an empty one."""
        if not self.tensors and not self.aliases:
            return ""
        return hashlib.blake2b(self.encode(), digest_size=16).hexdigest()


class PlannedTensor(NamedTuple):
    """Tensor, and the copies that write it."""

    key: str
    dtype: torch.dtype
    shape: Numbers
    division: Division
    copy: int
    """Number of the copy that writes; -1 if each writes a part; of an undivided tensor, the rank."""


class PartToWrite(NamedTuple):
    """Part of a box that a rank writes."""

    tensor: int
    """Number of the tensor in the plan."""
    box: LocalBox


@dataclass(frozen=True, slots=True, eq=False)
class DividedPlan:
    """Tensors to write, the same on every rank."""

    tensors: tuple[PlannedTensor, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Keys of tensors, also of shards of other kinds, that are not written, and the key of what they are."""
    paths: Mapping[str, tuple[str | int, ...]] = field(default_factory=dict)
    """Path in the state of each tensor that is not divided."""
    on_several_meshes: Mapping[str, tuple[Division, ...]] = field(default_factory=dict)
    """Divisions of tensors that have more than one. The first is written; the others must have the same values."""

    def parts_of(self, rank: int) -> Iterator[PartToWrite]:
        """Yields what a rank writes, in order."""
        for number, tensor in enumerate(self.tensors):
            if tensor.division == UNDIVIDED:
                if tensor.copy == rank:
                    yield PartToWrite(number, _whole(tensor.shape))
                continue
            coordinate = tensor.division.coordinate(rank)
            if coordinate is not None:
                for box in _parts(tensor, coordinate):
                    yield PartToWrite(number, box)

    def expand(self) -> tuple[Table, Assignment]:
        """Returns what all ranks write, as a table of their parts, in the order of each rank's files."""
        parts_of_kind: dict[tuple[Numbers, Division, int], _Parts] = {}
        found: list[tuple[int, _Parts]] = []
        for number, tensor in enumerate(self.tensors):
            kind = tensor.shape, tensor.division, tensor.copy
            if kind not in parts_of_kind:
                parts_of_kind[kind] = _Parts.of(tensor)
            found.append((number, parts_of_kind[kind]))
        num_axes = max((len(tensor.shape) for tensor in self.tensors), default=1) or 1
        counts = [len(parts.rank) for _, parts in found]
        rank = _joined([parts.rank for _, parts in found])
        offset = _joined([_widened(parts.offset, num_axes, 0) for _, parts in found]).reshape(-1, num_axes)
        shape = _joined([_widened(parts.shape, num_axes, 1) for _, parts in found]).reshape(-1, num_axes)
        whole = np.ones((len(self.tensors), num_axes), dtype=np.int64)
        for number, tensor in enumerate(self.tensors):
            whole[number, : len(tensor.shape)] = tensor.shape
        key = np.repeat(np.arange(len(self.tensors)), counts)
        order = np.argsort(rank, kind="stable")
        key, rank, offset, shape = key[order], rank[order], offset[order], shape[order]
        dtypes = np.array([DTYPES.index(tensor.dtype) for tensor in self.tensors], dtype=np.int64)
        item_bytes = np.array([tensor.dtype.itemsize for tensor in self.tensors], dtype=np.int64)
        axes = np.array([len(tensor.shape) for tensor in self.tensors], dtype=np.int64)
        zeros = np.zeros(len(key), dtype=np.int64)
        table = Table(
            tuple(tensor.key for tensor in self.tensors),
            key=key,
            dtype=dtypes[key],
            num_axes=axes[key],
            num_bytes=shape.prod(axis=1) * item_bytes[key],
            is_main=zeros + 1,
            is_regular=zeros,
            may_differ=zeros,
            rank=rank,
            global_shape=whole[key],
            offset=offset,
            shape=shape,
        )
        return table, Assignment(np.arange(len(key)), rank, zeros, zeros, zeros - 1)


class _Parts(NamedTuple):
    """Parts of one tensor that the ranks write. P parts, D axes."""

    rank: Int64s
    """`[P]`"""
    offset: Int64s
    """`[P, D]`"""
    shape: Int64s
    """`[P, D]`"""

    @classmethod
    def of(cls, tensor: PlannedTensor) -> "_Parts":
        if tensor.division == UNDIVIDED:
            pairs = [(tensor.copy, _whole(tensor.shape))]
        else:
            coordinates = np.ndindex(*tensor.division.mesh_shape)
            pairs = [
                (rank, box)
                for rank, coordinate in zip(tensor.division.ranks, coordinates, strict=True)
                for box in _parts(tensor, coordinate)
            ]
        size = len(pairs), len(tensor.shape)
        return cls(
            np.array([rank for rank, _ in pairs], dtype=np.int64),
            np.array([box.offset for _, box in pairs], dtype=np.int64).reshape(size),
            np.array([box.shape for _, box in pairs], dtype=np.int64).reshape(size),
        )


def _joined(arrays: list[Int64s]) -> Int64s:
    return np.concatenate(arrays) if arrays else np.zeros(0, dtype=np.int64)


def _widened(boxes: Int64s, num_axes: int, fill: int) -> Int64s:
    missing = num_axes - boxes.shape[1]
    return np.pad(boxes, ((0, 0), (0, missing)), constant_values=fill) if missing else boxes


def _whole(shape: Numbers) -> LocalBox:
    zeros = (0,) * len(shape)
    return LocalBox(zeros, zeros, shape)


def _parts(tensor: PlannedTensor, coordinate: Sequence[int]) -> Iterator[LocalBox]:
    """Yields the parts of a tensor that the rank at a place of its mesh writes."""
    division = tensor.division
    if 0 in tensor.shape:
        if not any(coordinate):  # it has no elements, but a type and a shape
            yield division.boxes(tensor.shape, coordinate)[0]
        return
    copy = division.copy_number(coordinate)
    if tensor.copy not in (_CUT, copy):
        return
    for box in division.boxes(tensor.shape, coordinate):
        part = box if tensor.copy != _CUT else _cut(box, copy, division.num_copies())
        if 0 not in part.shape:
            yield part


def _cut(box: LocalBox, number: int, count: int) -> LocalBox:
    """One of several parts of a box, along its first axis of more than one element."""
    axis = next((axis for axis, size in enumerate(box.shape) if size > 1), None)
    if axis is None:
        return box if number == 0 else box._replace(shape=(0,) * max(1, len(box.shape)))
    start, stop = (box.shape[axis] * place // count for place in (number, number + 1))

    def moved(first: Numbers) -> Numbers:
        return (*first[:axis], first[axis] + start, *first[axis + 1 :])

    shape = (*box.shape[:axis], stop - start, *box.shape[axis + 1 :])
    return LocalBox(moved(box.offset), moved(box.local_offset), shape)


def plan_divided(
    tables: Sequence[tuple[DividedTable, Sequence[int]]], ranks_of_shards: Mapping[str, set[int]]
) -> DividedPlan:
    """Plans what each rank writes.

    Args:
        tables: the different tables of all ranks, each with the ranks that have it, in the order of their first ranks.
        ranks_of_shards: ranks that have shards of other kinds, by key.

    Raises:
        CheckpointError: the ranks contradict each other, or a rank of a mesh lacks a tensor.
    """
    described: dict[str, list[tuple[Described, Sequence[int]]]] = defaultdict(list)
    for table, ranks in tables:
        for tensor in table.tensors:
            described[tensor.key].append((tensor, ranks))
    for key in described.keys() & ranks_of_shards.keys():
        rank = described[key][0][1][0]
        raise CheckpointError(
            f"{key}: all shards must have one kind, type and shape, but rank {rank} has a tensor there and rank "
            f"{min(ranks_of_shards[key])} a shard of its own"
        )
    several, firsts = {}, list[Described]()
    for key, found in described.items():
        first = found[0][0]
        firsts.append(first)
        _check_alike(key, found)
        _check_complete(key, found)
        divisions = tuple(dict.fromkeys(tensor.division for tensor, _ in found))
        if len(divisions) > 1:
            several[key] = divisions
    owners = {key: found[0][1][0] for key, found in described.items()}
    aliases = {
        first.key: first.alias_of
        for first in firsts
        if first.alias_of
        and all(tensor.alias_of == first.alias_of for tensor, _ in described[first.key])
        # Plain tensors may differ between ranks: those of one rank are stored, which must have both in one memory.
        and (first.division != UNDIVIDED or owners[first.key] == owners[first.alias_of])
    }
    aliases |= _aliases_of_shards(tables, ranks_of_shards)
    written = [tensor for tensor in firsts if tensor.key not in aliases]
    copies = _choose_copies(written)
    tensors = (
        PlannedTensor(
            *tensor[:4], copy=owners[tensor.key] if tensor.division == UNDIVIDED else copies.get(tensor.key, 0)
        )
        for tensor in written
    )
    paths = {first.key: first.path for first in firsts if first.division == UNDIVIDED}
    return DividedPlan(tuple(tensors), aliases, paths, several)


def _check_alike(key: str, found: Sequence[tuple[Described, Sequence[int]]]) -> None:
    first, first_ranks = found[0]
    for tensor, ranks in found[1:]:
        are_plain = tensor.division == first.division == UNDIVIDED  # small ones may differ, large ones are compared
        if not are_plain and (
            tensor[1:3] != first[1:3] or (tensor.division == UNDIVIDED) != (first.division == UNDIVIDED)
        ):
            raise CheckpointError(
                f"{key}: all shards must have one kind, type and shape, but rank {first_ranks[0]} has "
                f"{_kind_of(first)} and rank {ranks[0]} {_kind_of(tensor)}"
            )


def _kind_of(tensor: Described) -> str:
    what = "a plain tensor" if tensor.division == UNDIVIDED else "a DTensor"
    return f"{what} of {tensor.dtype} and shape {tensor.shape}"


def _check_complete(key: str, found: Sequence[tuple[Described, Sequence[int]]]) -> None:
    """Checks that each rank of a mesh has a tensor in its state."""
    holders: dict[Division, set[int]] = defaultdict(set)
    for tensor, ranks in found:
        holders[tensor.division].update(ranks)
    for division, of_division in holders.items():
        missing = set(division.ranks) - of_division
        if missing:
            raise CheckpointError(
                f"{key}: each rank of the mesh of a DTensor must have it in its state, but rank {min(missing)} lacks it"
            )


def _aliases_of_shards(
    tables: Sequence[tuple[DividedTable, Sequence[int]]], ranks_of_shards: Mapping[str, set[int]]
) -> dict[str, str]:
    """Aliases that hold on each rank that has the tensor."""
    ranks_of_alias: dict[tuple[str, str], set[int]] = defaultdict(set)
    for table, ranks in tables:
        for pair in table.aliases.items():
            ranks_of_alias[pair].update(ranks)
    return {
        key: other
        for (key, other), ranks in ranks_of_alias.items()
        if ranks_of_shards.get(key, set()) == ranks & ranks_of_shards.get(key, set()) and key in ranks_of_shards
    }


def _choose_copies(tensors: Sequence[Described]) -> dict[str, int]:
    """Number of the copy that writes each tensor that has copies, so that all write as much."""
    of_division: dict[Division, list[tuple[int, str]]] = defaultdict(list)
    for tensor in tensors:
        if tensor.division.num_copies() > 1:
            num_parts = len(tensor.division.ranks) // tensor.division.num_copies()
            num_bytes = -(-prod(tensor.shape) // num_parts) * tensor.dtype.itemsize
            of_division[tensor.division].append((num_bytes, tensor.key))
    chosen = {}
    for division, sizes in of_division.items():
        loads = np.zeros(division.num_copies(), dtype=np.int64)
        mean = sum(num_bytes for num_bytes, _ in sizes) // len(loads)
        for num_bytes, key in sorted(sizes, key=lambda one: -one[0]):
            if num_bytes >= max(_SMALLEST_CUT, mean):
                chosen[key] = _CUT
                continue
            least = int(loads.argmin())
            loads[least] += num_bytes + _ITEM_BYTES
            chosen[key] = least
    return chosen
