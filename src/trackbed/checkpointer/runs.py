"""The place of the checkpoints of a run: a folder of a file system, or of an object store."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeAlias

from trackbed.checkpoint import open_checkpoint
from trackbed.checkpoint.begin_save import AnySave
from trackbed.checkpoint.folder import any_folder
from trackbed.checkpoint.format.extents import Described
from trackbed.checkpoint.io.file_reader import AnyFolder
from trackbed.checkpoint.local_save import LocalSave
from trackbed.checkpointer.folders import (
    commit_or_replace,
    hide_checkpoint,
    lock_folder,
    remove_dead_partials,
    set_aside,
)
from trackbed.checkpointer.steps import StepNames, steps_in
from trackbed.checkpointer.stored_run import StoredRun
from trackbed.errors import ArgumentError
from trackbed.files.folder_lock import FolderLock
from trackbed.files.publish import remove_partial


class LocalRun:
    """A folder of a file system with the checkpoints of a run.

    Args:
        folder: absolute path of the folder.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock: FolderLock | None = None

    def __str__(self) -> str:
        """Path of the folder."""
        return str(self._folder)

    def take(self, names: StepNames) -> None:
        """Makes the folder, locks it, and removes what killed jobs of this host have left.

        Raises:
            CheckpointError: another job keeps checkpoints there.
            OSError: the folder cannot be made or read.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        self._lock = lock_folder(self._folder)
        try:
            remove_dead_partials(self._folder, lambda name: names.step_of(name) is not None)
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Lets another job keep checkpoints there."""
        if self._lock is not None:
            self._lock.release()

    def path(self, name: str) -> Path:
        """Path of a checkpoint."""
        return self._folder / name

    def folder_of(self, name: str) -> AnyFolder:
        """Folder of a checkpoint."""
        return self._folder / name

    def steps(self, names: StepNames) -> list[int]:
        """Steps of the checkpoints that are there, in rising order.

        Raises:
            OSError: the folder cannot be read.
        """
        return steps_in(self._folder, names)

    def commit(self, save: AnySave, described: Described, later: Sequence[AnyFolder]) -> list[str]:
        """Makes a save a checkpoint, and sets others aside before. Returns the other names of these.

        Args:
            save: the save.
            described: its small files.
            later: the others.
        """
        if not isinstance(save, LocalSave):
            raise ArgumentError(f"{self}: must be given a save into a folder, found {type(save).__name__}")
        if self._lock is not None:
            self._lock.check(self._folder)
        aside: list[Path] = []

        def rename(unfinished: Path, final: Path) -> None:
            # An error may come after the rename, where the partial folder is gone: then it stands.
            folders = [folder for folder in later if isinstance(folder, Path)]
            with set_aside(folders, is_undone=unfinished.exists) as moved:
                aside.extend(moved)
                commit_or_replace(unfinished, final)

        save.commit(described, rename)
        return list(map(str, aside))

    def hide(self, name: str) -> Callable[[], None]:
        """Gives a checkpoint the name of a partial folder, and returns a function that removes it.

        Raises:
            OSError: it cannot be renamed.
        """
        return partial(remove_partial, hide_checkpoint(self._folder / name))


AnyRun: TypeAlias = LocalRun | StoredRun


def remove_checkpoint(path: str | Path) -> None:
    """Removes the checkpoint `path`, unless it was removed before.

    Raises:
        CheckpointError: there is something else.
        OSError: it cannot be removed.
    """
    folder = any_folder(path)
    if isinstance(folder, Path):
        is_removed = not folder.exists()
    else:
        marker = folder.marker()  # which stays
        is_removed = marker is not None and marker.current is None
    if is_removed:
        return
    open_checkpoint(path)
    parent, _, name = str(path).rstrip("/").rpartition("/")
    run_in(parent or ".").hide(name)()


def run_in(folder: str | Path) -> AnyRun:
    """Returns the place of the checkpoints of a run.

    Raises:
        ArgumentError: it is neither a path nor an address of a store.
    """
    found = any_folder(folder)
    return LocalRun(found.absolute()) if isinstance(found, Path) else StoredRun(found)
