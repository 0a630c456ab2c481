"""Writes the shards of all ranks to a folder, and what describes them."""

import os
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch

from trackbed.checkpoint.format.dcp_metadata import METADATA_NAME, encode_metadata
from trackbed.checkpoint.format.safe_pickle import torch_bytes
from trackbed.checkpoint.format.side_file import SIDE_NAME, SideFile, StoredFile
from trackbed.checkpoint.io.rank_file import WrittenItem, write_items
from trackbed.checkpoint.io.written_files import WrittenFiles, catalogue_of
from trackbed.checkpoint.plan.assignment import Assignment
from trackbed.checkpoint.plan.main_replicas import require_main_replicas
from trackbed.checkpoint.plan.table import Table, gather_table, tabulate
from trackbed.checkpoint.plan.validate import require_valid
from trackbed.checkpoint.ranks import Meeting
from trackbed.checkpoint.state.sharded_base import is_main_replica
from trackbed.checkpoint.state.sharded_object import ShardedObject
from trackbed.checkpoint.state.sharded_tensor import ShardedTensor
from trackbed.errors import CheckpointError
from trackbed.files.checksum import crc32
from trackbed.files.publish import write_new
from trackbed.files.publish_folder import flush_files, make_partial_folder

__all__ = [
    "SavePlan",
    "agree_on_plan",
    "collect",
    "collect_beside",
    "encode_objects",
    "make_partial",
    "shard_values",
    "write_descriptions",
    "write_shards",
]

Shard = ShardedTensor | ShardedObject
Choose = Callable[[Table, int], Assignment]


@dataclass(frozen=True, slots=True, eq=False)
class SavePlan:
    """Plan of a save, the same on every rank but for `first_row`."""

    table: Table
    """Shards of all ranks."""
    assignment: Assignment
    """Parts of them that are written, and by whom."""
    first_row: int
    """Row of this rank's first shard."""


@dataclass(frozen=True, slots=True)
class _LastPlan:
    """Plan of the last save over some ranks."""

    name: str
    """Digest of the table of all ranks."""
    digest: bytes
    """Digest of this rank's table."""
    choose: Choose
    is_validated: bool
    """True if main replicas are known to cover each tensor once."""
    plan: SavePlan


_SAVE: Final = "save"
"""Word with which ranks that save begin, so that one at another operation is noticed."""
_OBJECT_STEP: Final = 64 << 10

_last_plans: Final[WeakKeyDictionary[Any, _LastPlan]] = WeakKeyDictionary()


def encode_objects(shards: Sequence[Shard], *, writes_storages: bool = False) -> dict[int, bytes]:
    """Bytes of the objects that this rank may write, by their place among the shards.

    Args:
        shards: shards of this rank.
        writes_storages: see `torch_bytes`.

    Raises:
        CheckpointError: one has a class that is not allowed, so that it could not be loaded.
    """
    return {
        number: torch_bytes([shard.data], shard.unique_key, writes_storages=writes_storages)
        for number, shard in enumerate(shards)
        if isinstance(shard, ShardedObject) and is_main_replica(shard.replica_id)
    }


def agree_on_plan(
    meeting: Meeting, shards: Sequence[Shard], objects: Mapping[int, bytes], choose: Choose, *, validates: bool = True
) -> SavePlan:
    """Collective over the ranks: plans a save.

    If the tables of all ranks are those of the last save, its plan is used again, and the tables are not exchanged.

    Args:
        meeting: the ranks.
        shards: shards of this rank.
        objects: bytes of its objects, from `encode_objects`.
        choose: chooses what each rank writes, from the table of all and the number of ranks.
        validates: True to check that main replicas cover each tensor once; else they must cover what any rank has.

    Raises:
        CheckpointError: they do not.
    """
    # Rounded, so that an object that grows a little changes no plan.
    sizes = [len(objects.get(number, b"")) for number, shard in enumerate(shards) if isinstance(shard, ShardedObject)]
    own = tabulate(shards, meeting.rank, [size // _OBJECT_STEP * _OBJECT_STEP for size in sizes])
    digest = own.digest()
    last = _last_plans.get(meeting.group) if meeting.size > 1 else None
    if last is not None and ((last.digest, last.choose) != (digest, choose) or (validates and not last.is_validated)):
        last = None
    if meeting.size > 1:
        said = meeting.group.all_gather([_SAVE, None if last is None else last.name])
        for rank, one in enumerate(said):
            if not isinstance(one, list) or one[:1] != [_SAVE]:
                msg = f"all ranks must save at the same time, but rank {rank} is at another operation"
                raise CheckpointError(msg)
        if last is not None and all(name == last.name for _, name in said):
            return last.plan
    table, first_row = gather_table(meeting, own)
    if validates:
        require_valid(table)
    else:
        require_main_replicas(table)
    plan = SavePlan(table, choose(table, meeting.size), first_row)
    if meeting.size > 1:
        _last_plans[meeting.group] = _LastPlan(table.digest().hex(), digest, choose, validates, plan)
    return plan


def make_partial(folder: Path, meeting: Meeting) -> Path:
    """Collective over the ranks: creates a partial folder beside the one that a checkpoint is to have.

    It is removed if the meeting fails.

    Raises:
        CheckpointError: this rank saves to another folder than rank 0, or does not see the partial one.
    """
    final = folder.absolute()
    offer = None
    if meeting.rank == 0:
        final.parent.mkdir(parents=True, exist_ok=True)
        path = make_partial_folder(final, may_replace=lambda found: found.is_dir())
        meeting.partials.append(path)
        offer = [_SAVE, str(path), os.path.realpath(final)]
    offered = meeting.group.broadcast(offer)
    if not isinstance(offered, list) or offered[:1] != [_SAVE]:
        msg = "all ranks must save at the same time, but rank 0 is at another operation"
        raise CheckpointError(msg)
    partial, real = Path(offered[1]), offered[2]
    if os.path.realpath(final) != real:
        msg = f"folder: must be the same on all ranks, but rank {meeting.rank} saves to {final}, and rank 0 to {real}"
        raise CheckpointError(msg)
    if not partial.is_dir():
        msg = f"{partial}: must be a folder on a file system that all ranks share, but this rank does not see it"
        raise CheckpointError(msg)
    return partial


def shard_values(
    shards: Sequence[Shard], objects: Mapping[int, bytes], plan: SavePlan, rank: int
) -> list[torch.Tensor | bytes]:
    """Values that a rank writes, in the order of its part of the plan: bytes of objects, and views of tensors.

    Args:
        shards: shards of the rank, in the order of its table.
        objects: bytes of its objects, from `encode_objects`.
        plan: plan of the save.
        rank: number of the rank.

    Raises:
        CheckpointError: a tensor has no data.
    """
    return [
        _value(shards[row - plan.first_row], objects.get(row - plan.first_row, b""), start, stop, axis)
        for row, start, stop, axis in _parts(plan.assignment.of_rank(rank))
    ]


def write_shards(
    folder: Path,
    values: Sequence[torch.Tensor | bytes],
    names: Sequence[str],
    poll: Callable[[], None] = lambda: None,
    *,
    direct: bool,
) -> WrittenFiles:
    """Writes a rank's part of the shards to files of its own.

    Args:
        folder: folder of the files.
        values: result of `shard_values`.
        names: name of the file of each value.
        poll: called again and again; may raise to end the work.
        direct: True to write past the page cache where the file system allows it.

    Raises:
        OSError: a file cannot be written.
    """
    items: list[tuple[str, WrittenItem] | None] = [None] * len(values)
    files = {}
    for name in dict.fromkeys(names):
        numbers = [number for number, found in enumerate(names) if found == name]
        written = write_items(folder / name, (values[number] for number in numbers), direct=direct, poll=poll)
        files[name] = StoredFile(written.num_bytes, written.crc)
        for number, item in zip(numbers, written.items, strict=True):
            items[number] = (name, item)
    return WrittenFiles.make(files, [item for item in items if item is not None])


def _parts(assignment: Assignment) -> Iterable[tuple[int, int, int, int]]:
    columns = (assignment.row, assignment.start, assignment.stop, assignment.axis)
    return zip(*(column.tolist() for column in columns), strict=True)


def _value(shard: Shard, content: bytes, start: int, stop: int, axis: int) -> torch.Tensor | bytes:
    """Value that is written for a part of a shard: the bytes of an object, or elements, all for axis -1."""
    if isinstance(shard, ShardedObject):
        return content
    if shard.data is None:
        msg = f"{shard.key}: a tensor that is saved must have data, but has none"
        raise CheckpointError(msg)
    data = shard.data.detach()[(None,) * shard.prepend_axis_num]
    return data if axis < 0 else data.narrow(axis, start, stop - start)


def collect(meeting: Meeting, written: WrittenFiles) -> list[WrittenFiles]:
    """Collective over the ranks: returns what each has written, in rank order."""
    return collect_beside(meeting, written, b"")[0]


def collect_beside(meeting: Meeting, written: WrittenFiles, more: bytes) -> tuple[list[WrittenFiles], list[bytes]]:
    """Collective over the ranks: like `collect`, and returns further bytes of each, as many on every rank."""
    contents = meeting.gather(more + written.encode())
    found = [WrittenFiles.decode(content[len(more) :]) for content in contents]
    return found, [content[: len(more)] for content in contents]


def write_descriptions(folder: Path, plan: SavePlan, found: Sequence[WrittenFiles], contents: dict[str, bytes]) -> None:
    """Writes `.metadata` and the side file, and further files that it is to describe, and flushes them.

    Args:
        folder: folder of the files.
        plan: plan of the save.
        found: files of all ranks.
        contents: further files by name.

    Raises:
        OSError: a file cannot be written.
    """
    catalogue = catalogue_of(plan.table, plan.assignment, found)
    contents = {METADATA_NAME: encode_metadata(catalogue), **contents}
    files = {name: stored for written in found for name, stored in written.files.items()}
    files |= {name: StoredFile(len(content), crc32(content)) for name, content in contents.items()}
    contents[SIDE_NAME] = SideFile(uuid.uuid4().hex, files, catalogue).encode()
    for name, content in contents.items():
        write_new(folder / name, content)
    flush_files(folder / name for name in contents)
