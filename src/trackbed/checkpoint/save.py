"""Saves a checkpoint with all ranks."""

import hashlib
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from trackbed.checkpoint.begin_save import AnySave, begin_save
from trackbed.checkpoint.commit import any_target
from trackbed.checkpoint.folder import COMMON_NAME, PLAIN_TENSORS
from trackbed.checkpoint.format.catalogue import Catalogue
from trackbed.checkpoint.format.config_file import CONFIG_NAME, CheckpointingConfig
from trackbed.checkpoint.format.dcp_metadata import DCP_METADATA, encode_metadata
from trackbed.checkpoint.format.extents import SIDE_NAME, Described, FileChecksum, SideFile
from trackbed.checkpoint.format.safe_pickle import torch_bytes
from trackbed.checkpoint.io.file_reader import AnyFolder
from trackbed.checkpoint.io.file_writer import WrittenItem, write_items
from trackbed.checkpoint.io.written_files import WrittenFiles, catalogue_of
from trackbed.checkpoint.local_save import LocalSave
from trackbed.checkpoint.megatron_arguments import refuses_megatron_arguments
from trackbed.checkpoint.paused_collector import paused_collector
from trackbed.checkpoint.plan.assignment import Assignment, assign_balanced, choose_main_replicas, join_assignments
from trackbed.checkpoint.plan.copies import check_copies_agree
from trackbed.checkpoint.plan.cut_parts import cut_parts
from trackbed.checkpoint.plan.divided_plan import DividedPlan, DividedTable, plan_divided
from trackbed.checkpoint.plan.shard_table import (
    Table,
    gather_table,
    is_written,
    join_tables,
    ranks_of_keys,
    tabulate,
    without_writers,
)
from trackbed.checkpoint.plan.validate import require_distinct, require_main_replicas, require_valid
from trackbed.checkpoint.ranks import Meeting, Observer, Phases, Ranks, meet
from trackbed.checkpoint.state.describe import StateToSave, describe_state, has_divided, take_states
from trackbed.checkpoint.state.divided_tensors import UNDIVIDED, DividedTensor, view_of
from trackbed.checkpoint.state.partial_tensors import refuse_partial_shards, refuse_partial_tensors
from trackbed.checkpoint.state.plain_tensors import check_plain_tensors_agree, digesting
from trackbed.checkpoint.state.sharded_object import ShardedObject
from trackbed.checkpoint.state.sharded_tensor import ShardedTensor, is_main_replica
from trackbed.comm.torch_group import check_initialized
from trackbed.errors import CheckpointError
from trackbed.files.checksum import crc32

Shard = ShardedTensor | ShardedObject
Assign = Callable[[Table, int], Assignment]
_SAVE: Final = "save"
"""First item of what ranks exchange in a save: a rank at another operation sends something else."""
_OBJECT_ROUNDING: Final = 64 << 10
"""Sizes of objects are rounded down to multiples of this, so that a plan outlives objects that grow a little."""
_last_plans: Final[WeakKeyDictionary[Any, "_LastPlan"]] = WeakKeyDictionary()


@refuses_megatron_arguments({"sharded_state_dict": "state", "checkpoint_dir": "folder"})
@paused_collector()
def save(
    state: dict[str, Any],
    folder: str | Path,
    *,
    content_metadata: dict[str, Any] | None = None,
    group: Ranks = None,
    direct: bool = True,
    observe: Observer | None = None,
) -> None:
    """Collective over `group`: saves a state dictionary as a checkpoint, which appears whole or not at all.

    The exception is a folder that has only files of other programs: these are kept, and the files of the checkpoint
    appear beside them one after the other.

    Example, on every rank: `save({**sharded_state(model, optimizer), "step": 100}, "checkpoints/step-0000100")`.

    Ranks that have copies of the same shard divide the writing among themselves. The state dictionary is not changed.

    Args:
        state: dictionary with a `ShardedTensor` for each tensor that all ranks write, a `ShardedObject` for each object
            of one rank, and plain tensors and values, which rank 0 writes. The main replicas of all ranks must cover
            each tensor once. Plain values load as equal values of the same class; one that would not is refused,
            with an error that names its place. Plain tensors of 64 KiB or more must be the same on all ranks that have
            them. A `DTensor` is written by the ranks of its mesh, under its path in the state, joined by dots, as key,
            and so are plain tensors in dictionaries, by the first rank that has them, where a rank has a `DTensor`.
            Objects with `state_dict` and `load_state_dict`, such as modules, are asked for their state.
        folder: folder of the checkpoint, neither a link nor the working directory, or an address of an object store. An
            earlier checkpoint there is replaced, where the file system can exchange two folders.
        content_metadata: description of the contents, which `load` returns under the key "content_metadata".
        group: the ranks, as a `comm.Group` or a process group of torch; by default those of `torch.distributed`, or
            this process alone.
        direct: True to write past the page cache where the file system allows it.
        observe: called with the name and the seconds of each phase.

    Raises:
        ArgumentError: an argument is Megatron Core's, which `trackbed.megatron.save` takes, or this process is one of
            several and `torch.distributed` was not initialised.
        CheckpointError: on every rank, with the rank that failed and its message. The folder is as it was before,
            unless the error came while the checkpoint was given its name, or from `observe` after that.
    """
    if group is None:
        check_initialized("save")
    with meet("save", group) as meeting:
        content = {} if content_metadata is None else {"content_metadata": content_metadata}
        _save(state, any_target(folder), meeting, Phases(observe), content=content, direct=direct)


def _save(
    state: dict[str, Any],
    folder: AnyFolder,
    meeting: Meeting,
    phases: Phases,
    *,
    content: dict[str, Any],
    direct: bool,
) -> None:
    planned = plan_save(state, meeting, phases)
    begun = begin_save(folder, meeting)
    with digesting(planned.compared if meeting.size > 1 else {}, meeting.poll) as plain_tensors:
        with phases("write"):
            check_copies_agree(meeting, planned.described.divided, planned.plan.divided)
            written = begun.target(meeting.rank, 0).write(planned.values, meeting.poll, direct=direct)
        with phases("collect"):
            own_tensors = plain_tensors()
            written_by_rank, digests = collect(meeting, written, own_tensors.digest())
            check_plain_tensors_agree(meeting, own_tensors, digests, planned.plan.divided.paths)
    with phases("commit"):
        if meeting.rank == 0:
            begun.commit(descriptions(planned.plan, written_by_rank, planned.contents(content), begun))


@dataclass(frozen=True, slots=True)
class PlannedSave:
    """A save that is ready to be written: what each rank writes is known, and nothing is on the disk."""

    described: StateToSave
    """State of this rank."""
    plan: "SavePlan"
    values: list[torch.Tensor | bytes]
    """What this rank writes, in order: views of its tensors, and bytes of its objects."""

    @property
    def compared(self) -> dict[str, Any]:
        """Values whose large tensors must be the same on all ranks that have them."""
        plain = {entry.key: entry.data for entry in self.described.divided if entry.division == UNDIVIDED}
        return self.described.common | plain

    def contents(self, more: dict[str, Any]) -> dict[str, bytes]:
        """Small files of the checkpoint by name, with its plain values and further ones.

        Raises:
            CheckpointError: a value could not be loaded.
        """
        common = self.described.common_with(more | _paths_in_common(self.plan))
        config = CheckpointingConfig("torch_dist", 1)
        return {COMMON_NAME: torch_bytes(common, COMMON_NAME), CONFIG_NAME: config.encode()}


def plan_save(state: dict[str, Any], meeting: Meeting, phases: Phases) -> PlannedSave:
    """Collective over the ranks: describes a state, and agrees on what each rank writes of it.

    Raises:
        CheckpointError: the state cannot be saved, or a rank is at another operation.
    """
    with phases("describe"):
        state, _ = take_states(state)
        divides = has_divided(state)
        described = _described(state, divides=divides)
    try:
        with phases("plan"):
            shards, objects, plan = _planned(described, meeting, divides=divides)
    except OthersDivideError:
        with phases("describe"):
            described = _described(state, divides=True)
        with phases("plan"):
            shards, objects, plan = _planned(described, meeting, divides=True)
    if meeting.rank == 0:
        _check_places(described.common, plan)
    values = shard_values(shards, objects, plan, meeting.rank)
    values += divided_values(described.divided, plan.divided, meeting.rank)
    return PlannedSave(described, plan, values)


class OthersDivideError(CheckpointError):
    """Some ranks have `DTensor`s, and others have none: all must store plain tensors as DCP does. Every rank raises."""


def _described(state: dict[str, Any], *, divides: bool) -> StateToSave:
    described = describe_state(state, divides=divides)
    refuse_partial_tensors(described.common)
    refuse_partial_shards(described.shards)
    return described


def _planned(
    described: StateToSave, meeting: Meeting, *, divides: bool
) -> tuple[list[Shard], dict[int, bytes], "SavePlan"]:
    """Collective over the ranks: returns what this rank may write, bytes of its objects, and `agree_on_plan`'s plan."""
    require_distinct(described.shards, described.places, meeting.rank)
    shards = list(filter(is_written, described.shards))
    objects = encode_objects(shards)
    numbers = _numbers_of_ranks(meeting) if described.divided else {}
    divided = DividedTable.of(described.divided, described.aliases, numbers)
    plan = agree_on_plan(meeting, shards, objects, assign_balanced, divided=divided, divides=divides)
    return shards, objects, plan


@dataclass(frozen=True, slots=True, eq=False)
class SavePlan:
    """Plan of a save, the same on every rank but for `first_row`."""

    table: Table
    """Shards of all ranks."""
    assignment: Assignment
    """Part of the shards that each rank writes."""
    first_row: int
    """Row of this rank's first shard."""
    divided: DividedPlan = field(default_factory=DividedPlan)
    """Tensors whose places all ranks know, which are written behind the shards."""

    def parts(self) -> tuple[Table, Assignment]:
        """All that is written, by all ranks."""
        if not self.divided.tensors:
            return self.table, self.assignment
        table, assignment = self.divided.expand()
        moved = replace(assignment, row=assignment.row + len(self.table))
        return join_tables([self.table, table]), join_assignments(self.assignment, moved)


@dataclass(frozen=True, slots=True)
class _LastPlan:
    """Plan of the last save over some ranks."""

    table_digest: str
    """Digest of the table of all ranks."""
    own_digest: bytes
    """Digest of this rank's table."""
    assign: Assign
    is_validated: bool
    """True if main replicas are known to cover each tensor once."""
    plan: SavePlan


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
    meeting: Meeting,
    shards: Sequence[Shard],
    objects: Mapping[int, bytes],
    assign: Assign,
    *,
    validates: bool = True,
    divided: DividedTable | None = None,
    divides: bool = False,
) -> SavePlan:
    """Collective over the ranks: plans a save.

    If the tables of all ranks are those of the last save, its plan is used again, and the tables are not exchanged.

    Args:
        meeting: the ranks.
        shards: shards of this rank.
        objects: bytes of its objects, from `encode_objects`.
        assign: assigns to each rank what it writes, from the table of all and the number of ranks.
        validates: True to check that main replicas cover each tensor once; False to check only that every element of
            which a rank has a copy is in a main replica.
        divided: tensors of this rank whose places all ranks know.
        divides: True if plain tensors are among these.

    Raises:
        OthersDivideError: `divides` is not the same on all ranks.
        CheckpointError: main replicas leave something out, or a rank is at another operation.
    """
    sizes = [len(objects.get(number, b"")) for number, shard in enumerate(shards) if isinstance(shard, ShardedObject)]
    own_table = tabulate(shards, meeting.rank, [size // _OBJECT_ROUNDING * _OBJECT_ROUNDING for size in sizes])
    divided = divided or DividedTable()
    divided_digest = divided.digest()
    own_digest = own_table.digest() + bytes.fromhex(divided_digest)
    last = _last_plans.get(meeting.group) if meeting.size > 1 else None
    if last is not None and (
        (last.own_digest, last.assign) != (own_digest, assign) or (validates and not last.is_validated)
    ):
        last = None
    digests = [divided_digest]
    if meeting.size > 1:
        own = [_SAVE, None if last is None else last.table_digest, divided_digest, divides]
        announced = meeting.group.all_gather(own)
        for rank, announcement in enumerate(announced):
            if not isinstance(announcement, list) or announcement[:1] != [_SAVE]:
                raise CheckpointError(f"all ranks must save at the same time, but rank {rank} is at another operation")
        # Only if every rank still has that plan: a rank that gathers alone would wait for the others.
        if last is not None and all(digest == last.table_digest for _, digest, *_ in announced):
            return last.plan
        if len({is_divided for *_, is_divided in announced}) > 1:
            raise OthersDivideError("save: all ranks must store plain tensors alike, but some of them have DTensors")
        digests = [digest for _, _, digest, _ in announced]
    table, first_row = gather_table(meeting, own_table)
    table = choose_main_replicas(table)
    if validates:
        require_valid(table)
    else:
        require_main_replicas(table)
    tables = exchange_divided(meeting, divided, digests)
    divided_plan = plan_divided(tables, ranks_of_keys(table)) if tables else DividedPlan()
    table = without_writers(table, divided_plan.aliases)
    plan = SavePlan(table, assign(table, meeting.size), first_row, divided_plan)
    if meeting.size > 1:
        digest = hashlib.blake2b(table.digest() + "".join(digests).encode(), digest_size=16).hexdigest()
        _last_plans[meeting.group] = _LastPlan(digest, own_digest, assign, validates, plan)
    return plan


def exchange_divided(
    meeting: Meeting, own: DividedTable, digests: Sequence[str]
) -> list[tuple[DividedTable, list[int]]]:
    """Collective over the ranks: returns the different tables of all ranks, each with the ranks that have it.

    Args:
        meeting: the ranks.
        own: table of this rank.
        digests: digest of the table of each rank; empty for an empty one.
    """
    ranks_of_digest: dict[str, list[int]] = {}
    for rank, digest in enumerate(digests):
        if digest:
            ranks_of_digest.setdefault(digest, []).append(rank)
    if len(set(digests)) == 1:  # each rank has what the others could send
        return [(own, ranks) for ranks in ranks_of_digest.values()]
    return [
        (DividedTable.decode(meeting.broadcast(own.encode() if meeting.rank == ranks[0] else b"", ranks[0])), ranks)
        for ranks in ranks_of_digest.values()
    ]


def _numbers_of_ranks(meeting: Meeting) -> dict[int, int]:
    """Numbers of the ranks of a save, by their numbers among all processes."""
    ranks = list(range(meeting.size))
    if meeting.process_group is not None:
        ranks = dist.get_process_group_ranks(meeting.process_group)
    elif meeting.size == 1 and dist.is_available() and dist.is_initialized():
        ranks = [dist.get_rank()]
    return {rank: number for number, rank in enumerate(ranks)}


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


def _check_places(common: Any, plan: SavePlan) -> None:
    """Checks that no plain value of rank 0 lies where another rank has a tensor."""
    for key, path in plan.divided.paths.items():
        found = common
        for part in path:
            if not isinstance(found, dict) or part not in found:
                break
            found = found[part]
        else:
            raise CheckpointError(
                f"{key}: must be a tensor on all ranks that have it, but is a plain value of {type(found).__name__} on "
                "rank 0"
            )
        if not isinstance(found, dict):
            raise CheckpointError(
                f"{key}: must lie in dictionaries on all ranks, but rank 0 has a {type(found).__name__} on its path"
            )


def _paths_in_common(plan: SavePlan) -> dict[str, Any]:
    """Entry of the common state with the paths of plain tensors that are stored as tensors."""
    return {PLAIN_TENSORS: dict(plan.divided.paths)} if plan.divided.paths else {}


def divided_values(entries: Sequence[DividedTensor], plan: DividedPlan, rank: int) -> list[torch.Tensor]:
    """Values that a rank writes of tensors whose places all ranks know, as views, in the order of the plan."""
    of_key = {entry.key: entry.data for entry in entries}
    return [view_of(of_key[plan.tensors[part.tensor].key], part.box) for part in plan.parts_of(rank)]


def write_shards(
    folder: Path,
    values: Sequence[torch.Tensor | bytes],
    names: Sequence[str],
    poll: Callable[[], None] = lambda: None,
    *,
    direct: bool,
    in_place: bool = False,
) -> WrittenFiles:
    """Writes a rank's part of the shards to files of its own.

    Args:
        folder: folder of the files.
        values: result of `shard_values`.
        names: name of the file of each value.
        poll: called again and again; may raise to end the work.
        direct: True to write past the page cache where the file system allows it.
        in_place: see `FileWriter`.

    Raises:
        OSError: a file cannot be written.
    """
    items: list[tuple[str, WrittenItem] | None] = [None] * len(values)
    files = {}
    for name in dict.fromkeys(names):
        numbers = [number for number, other in enumerate(names) if other == name]
        own = (values[number] for number in numbers)
        written = write_items(folder / name, own, direct=direct, in_place=in_place, poll=poll)
        files[name] = FileChecksum(written.num_bytes, written.crc)
        for number, item in zip(numbers, written.items, strict=True):
            items[number] = (name, item)
    return WrittenFiles.make(files, [item for item in items if item is not None])


def _parts(assignment: Assignment) -> Iterable[tuple[int, int, int, int]]:
    columns = (assignment.row, assignment.start, assignment.stop, assignment.axis)
    return zip(*(column.tolist() for column in columns), strict=True)


def _value(shard: Shard, content: bytes, start: int, stop: int, axis: int) -> torch.Tensor | bytes:
    """Returns the bytes of an object, or the slice of a tensor along an axis; the whole tensor for axis -1."""
    if isinstance(shard, ShardedObject):
        return content
    if shard.data is None:
        raise CheckpointError(f"{shard.key}: a tensor that is saved must have data, but has none")
    data = shard.data.detach()[(None,) * shard.prepend_axis_num]
    return data if axis < 0 else data.narrow(axis, start, stop - start)


def collect(meeting: Meeting, written: WrittenFiles, note: bytes = b"") -> tuple[list[WrittenFiles], list[bytes]]:
    """Collective over the ranks: tells rank 0 what each has written.

    Args:
        meeting: the ranks.
        written: files of this rank.
        note: a few bytes of this rank.

    Returns:
        Files of each rank, in rank order; on ranks other than 0, nothing. And the few bytes of each rank.
    """
    contents, notes = meeting.gather_to_first(written.encode(), note)
    return list(map(WrittenFiles.decode, contents)), notes


def descriptions(
    plan: SavePlan, written_by_rank: Sequence[WrittenFiles], contents: Mapping[str, bytes], save: AnySave
) -> Described:
    """Small files of a checkpoint: further ones, `.metadata`, and the side file, which lists them all.

    Args:
        plan: plan of the save.
        written_by_rank: files of all ranks.
        contents: further files by name.
        save: the save.
    """
    parts = cut_parts(*plan.parts(), save.most_item_bytes)
    catalogue = catalogue_of(*parts, written_by_rank).with_aliases(plan.divided.aliases)
    return with_side_file(save.save_id, catalogue, written_by_rank, contents)


def with_side_file(
    save_id: str, catalogue: Catalogue, written_by_rank: Sequence[WrittenFiles], contents: Mapping[str, bytes]
) -> Described:
    """Adds `.metadata` and the side file to the small files of a checkpoint.

    Args:
        save_id: id of the save.
        catalogue: contents of the checkpoint.
        written_by_rank: files of all ranks.
        contents: further files by name.
    """
    contents = {DCP_METADATA: encode_metadata(catalogue), **contents}
    files = {name: stored for written in written_by_rank for name, stored in written.files.items()}
    files |= {name: FileChecksum(len(content), crc32(content)) for name, content in contents.items()}
    return Described({**contents, SIDE_NAME: SideFile(save_id, files, catalogue).encode()}, files)


def write_descriptions(
    folder: Path, plan: SavePlan, written_by_rank: Sequence[WrittenFiles], contents: dict[str, bytes]
) -> None:
    """Writes further files, `.metadata`, and the side file, which lists them all, and flushes them.

    Args:
        folder: folder of the files.
        plan: plan of the save.
        written_by_rank: files of all ranks.
        contents: further files by name.

    Raises:
        OSError: a file cannot be written.
    """
    save = LocalSave(folder, folder, uuid.uuid4().hex)
    save.put_all(descriptions(plan, written_by_rank, contents, save))
