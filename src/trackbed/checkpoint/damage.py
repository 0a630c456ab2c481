"""Checks every byte of a checkpoint."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from trackbed.checkpoint.folder import CheckpointFolder, any_folder, open_folder, replacement
from trackbed.checkpoint.format.catalogue import Catalogue
from trackbed.checkpoint.format.config_file import CONFIG_NAME, read_config
from trackbed.checkpoint.format.dcp_metadata import DCP_METADATA, decode_metadata
from trackbed.checkpoint.format.extents import SIDE_NAME, SideFile
from trackbed.checkpoint.io.boxes import BoxReader
from trackbed.checkpoint.io.file_reader import maybe_read_file, open_reader
from trackbed.checkpoint.io.range_reader import RangeReader
from trackbed.checkpoint.load import require_covered
from trackbed.errors import ArgumentError, CheckpointError
from trackbed.files.checksum import crc32

_READ_BYTES = 8 << 20


def find_damage(
    folder: str | Path, progress: Callable[[int], None] = lambda _: None, *, share: tuple[int, int] = (0, 1)
) -> Iterator[str]:
    """Yields a sentence about each file or item of a checkpoint that is damaged; none where `load` would succeed.

    Args:
        folder: folder of the checkpoint, or its address in an object store.
        progress: called with numbers of bytes that have been read.
        share: number of this reader, and the number of readers that share the work: each finds other damage.

    Raises:
        ArgumentError: the number of the reader is not below that of readers.
        StoreError: the store refuses, or does not answer in time.
    """
    number, count = share
    if not 0 <= number < count:
        raise ArgumentError(f"share: must be a number from 0 and a larger one, found {share}")
    path = any_folder(folder)
    try:
        opened = open_folder(path)
    except CheckpointError as error:
        yield str(error)
        return
    for problem in _problems(opened, progress, share):
        change = None if opened.side is None else replacement(opened.path, opened.side)
        if change is not None:
            yield f"{path}: must be the checkpoint that was opened, but has been {change} since: verify it again"
            return
        yield problem


def _problems(opened: CheckpointFolder, progress: Callable[[int], None], share: tuple[int, int]) -> Iterator[str]:
    number, count = share
    if opened.side is not None:
        yield from _of_files(opened, opened.side, progress, share)
    else:
        yield from _of_items(opened, progress, share)
    if number == 0:
        yield from _of_description(opened)
    with BoxReader(opened.path, opened.catalogue) as reader:
        share_of_objects = list(opened.catalogue.objects)[number::count]
        reader.expect(share_of_objects)
        for key in share_of_objects:
            try:
                reader.read_object(key)
            except CheckpointError as error:
                yield str(error)


def _of_description(opened: CheckpointFolder) -> Iterator[str]:
    """Problems of what describes the tensors, and of the plain values."""
    if opened.side is not None:
        yield from _of_small_files(opened, opened.side)
    for key, stored in opened.catalogue.tensors.items():
        try:
            require_covered(opened.catalogue, key, (0,) * len(stored.shape), stored.shape)
        except CheckpointError as error:
            yield str(error)
    try:
        if not opened.is_plain:  # the values of others are objects, which are read below
            opened.load_common()
    except CheckpointError as error:
        yield str(error)


def _of_files(
    opened: CheckpointFolder, side: SideFile, progress: Callable[[int], None], share: tuple[int, int]
) -> Iterator[str]:
    """Problems of the files of a checkpoint that Trackbed has saved."""
    for name, stored in list(side.files.items())[share[0] :: share[1]]:
        try:
            with open_reader(opened.path, name) as reader:
                crc = _checksum(reader, stored.num_bytes, name, progress)
        except CheckpointError as error:
            yield str(error)
            continue
        if crc != stored.crc:
            yield f"{name}: its checksum must be {stored.crc:08x}, as {SIDE_NAME} says, but is {crc:08x}: it is damaged"


def _of_small_files(opened: CheckpointFolder, side: SideFile) -> Iterator[str]:
    """Problems of the files that other programs read in the place of the side file."""
    for name, check in ((DCP_METADATA, _check_metadata), (CONFIG_NAME, _check_config)):
        if name in side.files:
            try:
                check(opened)
            except CheckpointError as error:
                yield str(error)
        elif name == DCP_METADATA or not opened.is_plain:  # `dcp.save` writes no other
            yield f"{name}: must be among the files of {SIDE_NAME}, but is not"


def _checksum(reader: RangeReader, num_bytes: int, name: str, progress: Callable[[int], None]) -> int:
    buffer = np.empty(min(_READ_BYTES, num_bytes), dtype=np.uint8)
    crc = 0
    reader.announce(num_bytes)
    for start in range(0, num_bytes, _READ_BYTES):
        piece = buffer[: min(_READ_BYTES, num_bytes - start)]
        reader.read_into(piece, start, name)
        crc = crc32(piece, crc)
        progress(len(piece))
    return crc


def _check_metadata(opened: CheckpointFolder) -> None:
    """Checks that `.metadata` and the side file describe the same items."""
    found = decode_metadata(maybe_read_file(opened.path, DCP_METADATA) or b"")
    if _described(found) != _described(opened.catalogue):
        raise CheckpointError(f"{DCP_METADATA}: must describe the same items as {SIDE_NAME}, but does not")


def _check_config(opened: CheckpointFolder) -> None:
    """Checks that `metadata.json` can be read."""
    read_config(opened.path)


def _described(catalogue: Catalogue) -> dict[str, object]:
    """Items of a catalogue by key, without checksums."""

    def place(row: int) -> tuple[str, int, int]:
        file = catalogue.files[int(catalogue.file[row])]
        return file, int(catalogue.start[row]), int(catalogue.num_bytes[row])

    tensors: dict[str, object] = {
        key: (
            stored.dtype,
            stored.shape,
            sorted((catalogue.box(row, len(stored.shape)), place(row)) for row in stored.rows),
        )
        for key, stored in catalogue.tensors.items()
    }
    return tensors | {key: place(row) for key, row in catalogue.objects.items()}


def _of_items(opened: CheckpointFolder, progress: Callable[[int], None], share: tuple[int, int]) -> Iterator[str]:
    """Problems of the tensors of a checkpoint of Megatron Core or torch."""
    catalogue = opened.catalogue
    items = [(key, row) for key, stored in catalogue.tensors.items() for row in stored.rows]
    with BoxReader(opened.path, catalogue) as reader:
        for key, row in items[share[0] :: share[1]]:
            try:
                reader.check_item(key, row)
            except CheckpointError as error:
                yield str(error)
            progress(int(catalogue.num_bytes[row]))
