"""Errors about folders that are not, or no more, the checkpoint that was opened, or that a side file describes."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from trackbed.checkpoint.format.dcp_metadata import METADATA_NAME, decode_metadata
from trackbed.checkpoint.format.extents import SIDE_NAME, SideFile
from trackbed.checkpoint.io.reader import maybe_read_file
from trackbed.errors import CheckpointError
from trackbed.files.checksum import crc32

_NAMES: Final = ("common.pt", "metadata.json")
"""Files that a program which saves with torch alone leaves from an earlier save."""


def read_side(path: Path) -> SideFile | None:
    """Reads the side file of a folder; None if there is none."""
    content = maybe_read_file(path, SIDE_NAME)
    return None if content is None else SideFile.decode(content)


@contextmanager
def naming_replacement(path: Path, side: SideFile | None) -> Iterator[None]:
    """Tells a checkpoint that is damaged from one that has been replaced or removed since it was opened.

    Args:
        path: folder of the checkpoint.
        side: its side file when it was opened.
    """
    try:
        yield
    except CheckpointError as error:
        found = None if side is None else _replacement(path, side)
        if found is None:
            raise
        raise CheckpointError(
            f"{path}: must be the checkpoint that was opened, but has been {found} since: open it again"
        ) from error


def _replacement(path: Path, side: SideFile) -> str | None:
    """Says how a checkpoint has changed since it was opened; None if it has not."""
    if not path.exists():
        return "removed"
    try:
        present = read_side(path)
    except CheckpointError:
        return None
    if present is None:
        return "replaced by another program"
    return None if present.save_id == side.save_id else "replaced by another save"


@contextmanager
def naming_other_programs(path: Path, side: SideFile) -> Iterator[None]:
    """Tells a checkpoint that is damaged from one over which another program has saved.

    Args:
        path: folder of the checkpoint.
        side: its side file.
    """
    try:
        yield
    except CheckpointError as error:
        if not _is_of_another_program(path, side):
            raise
        old = [SIDE_NAME, *(name for name in _NAMES if _is_as_described(path, name, side))]
        raise CheckpointError(
            f"{path}: must be the checkpoint that {SIDE_NAME} describes, but another program has saved here since: "
            f"remove {', '.join(old)} (from the earlier save) to read what it has saved"
        ) from error


def _is_as_described(path: Path, name: str, side: SideFile) -> bool:
    content, stored = maybe_read_file(path, name), side.files.get(name)
    return (
        content is not None and stored is not None and (len(content), crc32(content)) == (stored.num_bytes, stored.crc)
    )


def _is_of_another_program(path: Path, side: SideFile) -> bool:
    """True if `.metadata` is whole, and of another length: torch's says more than Trackbed's."""
    content, stored = maybe_read_file(path, METADATA_NAME), side.files.get(METADATA_NAME)
    if content is None or stored is None or len(content) == stored.num_bytes:
        return False
    try:
        decode_metadata(content)
    except CheckpointError:
        return False
    return True
