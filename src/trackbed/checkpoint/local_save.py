"""A save into a folder of a file system: a partial folder, and its commit by one rename."""

from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeAlias

from trackbed.checkpoint.commit import commit_checkpoint
from trackbed.checkpoint.format.extents import Described
from trackbed.checkpoint.io.targets import FileTarget, data_name
from trackbed.files.publish import remove_partial, write_new
from trackbed.files.publish_folder import flush_files

Rename: TypeAlias = Callable[[Path, Path], None]
"""Gives a whole partial folder the name of the checkpoint."""


class LocalSave:
    """A save that is being written to a partial folder.

    Args:
        partial: the partial folder.
        folder: the folder that is to be the checkpoint.
        save_id: id of the save.
    """

    most_item_bytes: Final = None
    """Items are not cut."""

    def __init__(self, partial: Path, folder: Path, save_id: str) -> None:
        self.partial = partial
        """The partial folder."""
        self.folder = folder
        """The folder that is to be the checkpoint."""
        self.save_id = save_id
        """Id of the save."""

    def __str__(self) -> str:
        """Path of the partial folder."""
        return str(self.partial)

    def target(self, rank: int, number: int, *, num_files: int = 0, cuts: bool = True) -> FileTarget:
        """Returns the target of a part of a rank.

        Args:
            rank: the rank.
            number: number of the part.
            num_files: number of the files that the rank has written.
            cuts: True if items may be cut.
        """
        del num_files, cuts
        return FileTarget(self.partial, data_name(rank, number))

    def give_up(self) -> None:
        """Removes what is written, after a failure.

        Raises:
            OSError: it cannot be removed.
        """
        remove_partial(self.partial)

    def put(self, name: str, content: bytes) -> None:
        """Writes a small file."""
        write_new(self.partial / name, content)

    def put_all(self, described: Described) -> None:
        """Writes the small files, and flushes them.

        Raises:
            OSError: one cannot be written.
        """
        for name, content in described.contents.items():
            self.put(name, content)
        flush_files(self.partial / name for name in described.contents)

    def take(self, name: str) -> bytes:
        """Reads a small file, and removes it."""
        content = (self.partial / name).read_bytes()
        (self.partial / name).unlink(missing_ok=True)
        return content

    def commit(self, described: Described, rename: Rename | None = None) -> None:
        """Makes this save the checkpoint, in the place of the one before.

        Args:
            described: small files.
            rename: gives the partial folder its name; None for `commit_checkpoint`.

        Raises:
            CheckpointError: the folder cannot be replaced.
            OSError: a file cannot be written or renamed.
        """
        self.put_all(described)
        (rename or commit_checkpoint)(self.partial, self.folder)
