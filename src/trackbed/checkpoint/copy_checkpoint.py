"""Copies a checkpoint with all ranks, from one folder or store to another."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

import torch

from trackbed.checkpoint.begin_save import AnySave, begin_save, collect_in
from trackbed.checkpoint.folder import COMMON_NAME, CheckpointFolder, open_for_all
from trackbed.checkpoint.format.catalogue import Catalogue, CatalogueBuilder
from trackbed.checkpoint.format.config_file import CONFIG_NAME
from trackbed.checkpoint.format.extents import Described
from trackbed.checkpoint.io.box_parts import Numbers, cut_box
from trackbed.checkpoint.io.boxes import BoxReader
from trackbed.checkpoint.io.file_reader import AnyFolder, maybe_read_file
from trackbed.checkpoint.io.object_writer import OBJECT_BYTES
from trackbed.checkpoint.io.targets import ObjectsTarget
from trackbed.checkpoint.io.written_files import WrittenFiles
from trackbed.checkpoint.ranks import Meeting
from trackbed.checkpoint.save import with_side_file
from trackbed.errors import CheckpointError

_IN_FLIGHT: Final = 2
"""Objects that are written at the same time: with the next one, 192 MiB of copies."""
_RANK: Final = re.compile(r"__(\d+)_\d+\.distcp\Z")


class Part(NamedTuple):
    """A box of a tensor, or an object, that is copied by itself."""

    key: str
    row: int
    """Row of the item in which it lies."""
    first: Numbers | None
    """First element in the tensor; None for an object."""
    shape: Numbers


def copy_checkpoint(
    source: AnyFolder, target: AnyFolder, meeting: Meeting, commit: Callable[[AnySave, Described], None]
) -> int:
    """Collective over the ranks: copies a checkpoint that Trackbed has saved. Every MiB is verified.

    Each rank copies the files of some ranks. Large boxes are cut, so that a rank holds few of them in memory.

    Args:
        source: folder of the checkpoint.
        target: folder that is to have the copy.
        meeting: the ranks.
        commit: called on rank 0 to make the copy a checkpoint.

    Returns:
        Number of bytes that this rank has copied.

    Raises:
        CheckpointError: there is no such checkpoint, it is damaged, removed meanwhile, or of another program.
        StoreError: a store refuses, or does not answer in time.
        OSError: a file cannot be written.
    """
    opened = open_for_all(source, meeting)
    if opened.side is None or opened.is_plain:
        raise CheckpointError(f"{source}: must be saved by Trackbed to be copied, but is of another program")
    parts = parts_of_ranks(opened.catalogue, meeting.size)
    begun = begin_save(target, meeting)
    with torch.no_grad(), opened.naming_replacement(), BoxReader(opened.path, opened.catalogue, meeting.poll) as reader:
        values = _values(reader, opened.catalogue, parts[meeting.rank])
        target_of_rank = begun.target(meeting.rank, 0, cuts=False)
        if isinstance(target_of_rank, ObjectsTarget):
            target_of_rank = replace(target_of_rank, in_flight=_IN_FLIGHT)
        written = target_of_rank.write(values, meeting.poll)
    written_by_rank = collect_in(begun, meeting, written)
    if meeting.rank == 0:
        catalogue = _joined(opened.catalogue, parts, written_by_rank)
        commit(begun, with_side_file(begun.save_id, catalogue, written_by_rank, _small_files(opened)))
    return sum(stored.num_bytes for stored in written.files.values())


def parts_of_ranks(catalogue: Catalogue, size: int) -> list[list[Part]]:
    """Divides the contents of a checkpoint among ranks, by the ranks that have written them. Pure.

    Args:
        catalogue: the contents.
        size: number of ranks.
    """
    parts: list[list[Part]] = [[] for _ in range(size)]
    rank_of_file = [
        int(found[1]) % size if (found := _RANK.search(name)) else number % size
        for number, name in enumerate(catalogue.files)
    ]
    copied = set[int]()
    for key, tensor in catalogue.tensors.items():
        for row in tensor.rows:
            place = _place(catalogue, row)
            if place in copied:
                continue  # a further name of a tensor
            copied.add(place)
            first, shape = catalogue.box(row, len(tensor.shape))
            own = parts[rank_of_file[int(catalogue.file[row])]]
            own += [Part(key, row, *box) for box in cut_box(first, shape, tensor.dtype.itemsize, OBJECT_BYTES)]
    for key, row in catalogue.objects.items():
        parts[rank_of_file[int(catalogue.file[row])]].append(Part(key, row, None, ()))
    for own in parts:
        own.sort(key=lambda part: _place(catalogue, part.row))
    return parts


def _place(catalogue: Catalogue, row: int) -> int:
    """Number that tells items apart, in the order of files and places."""
    return (int(catalogue.file[row]) << 62) + int(catalogue.start[row])


def _values(reader: BoxReader, catalogue: Catalogue, parts: Sequence[Part]) -> Iterator[torch.Tensor | bytes]:
    for part in parts:
        if part.first is None:
            yield reader.read_bytes(part.row, part.key)
            continue
        value = torch.empty(part.shape, dtype=catalogue.tensors[part.key].dtype, device="cpu")
        reader.read_box(part.key, value, part.first)
        yield value


def _joined(
    catalogue: Catalogue, parts: Sequence[Sequence[Part]], written_by_rank: Sequence[WrittenFiles]
) -> Catalogue:
    """Contents of the copy. Pure."""
    builder = CatalogueBuilder()
    first_of_place: dict[tuple[int, ...], str] = {}
    aliases: dict[str, str] = {}
    for key, tensor in catalogue.tensors.items():
        place = tuple(_place(catalogue, row) for row in tensor.rows)
        first = first_of_place.setdefault(place, key) if place else key
        if first == key:
            builder.add_tensor(key, tensor.dtype, tensor.shape)
        else:
            aliases[key] = first
    for own, written in zip(parts, written_by_rank, strict=True):
        for part, (name, _, item) in zip(own, written.unpacked(), strict=True):
            if part.first is None:
                builder.add_object(part.key, file=name, start=item.start, num_bytes=item.num_bytes, sums=item.sums)
                continue
            builder.add_box(
                part.key,
                part.first,
                part.shape,
                file=name,
                start=item.start,
                num_bytes=item.num_bytes,
                payload_start=item.payload_start,
                payload_bytes=item.payload_bytes,
                sums=item.sums,
            )
    return builder.build().with_aliases(aliases)


def _small_files(opened: CheckpointFolder) -> dict[str, bytes]:
    found = {name: maybe_read_file(opened.path, name) for name in (COMMON_NAME, CONFIG_NAME)}
    contents = {name: content for name, content in found.items() if content is not None}
    for name, content in contents.items():
        opened.check(name, content)
    return contents
