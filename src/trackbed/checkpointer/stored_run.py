"""A folder of an object store with the checkpoints of a run."""

import logging
from collections.abc import Callable, Sequence

from trackbed.checkpoint.begin_save import AnySave
from trackbed.checkpoint.format.dcp_metadata import DCP_METADATA
from trackbed.checkpoint.format.extents import Described
from trackbed.checkpoint.format.marker import Marker
from trackbed.checkpoint.io.file_reader import AnyFolder
from trackbed.checkpoint.io.stored_folder import StoredFolder, read_markers
from trackbed.checkpoint.stored_save import (
    change_marker,
    give_up_saves,
    hide_stored_checkpoint,
    remove_unnamed_saves,
    state_of_save,
)
from trackbed.checkpointer.lease import Lease
from trackbed.checkpointer.steps import StepNames
from trackbed.errors import StoreError, TrackbedError
from trackbed.files.publish import Writer

logger = logging.getLogger(__name__)


class StoredRun:
    """A folder of an object store with the checkpoints of a run.

    Args:
        folder: the folder.
    """

    def __init__(self, folder: StoredFolder) -> None:
        self._folder = folder
        self._lease: Lease | None = None

    def __str__(self) -> str:
        """Address of the folder."""
        return str(self._folder)

    def take(self, names: StepNames) -> None:
        """Takes the lease of the folder, and gives up the saves of jobs that are known to be dead.

        Raises:
            CheckpointError: another job keeps checkpoints there.
            StoreError: the store refuses, or does not answer in time.
        """
        self._lease = Lease(self._folder)
        try:
            self._remove_dead(names, self._lease.previous)
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Lets another job keep checkpoints there."""
        if self._lease is not None:
            self._lease.release()

    def path(self, name: str) -> str:
        """Address of a checkpoint."""
        return f"{self._folder}/{name}"

    def folder_of(self, name: str) -> AnyFolder:
        """Folder of a checkpoint."""
        return self._folder / name

    def steps(self, names: StepNames) -> list[int]:
        """Steps of the checkpoints that are there, in rising order.

        Raises:
            StoreError: the store refuses, or does not answer in time.
        """
        steps = []
        folders = self._folders(names)
        for (step, folder), marker in zip(folders.items(), read_markers(list(folders.values())), strict=True):
            if isinstance(marker, StoreError):
                raise marker
            # One that cannot be read is damaged, as a load says.
            if (
                isinstance(marker, TrackbedError)
                or (marker is not None and marker.current is not None)
                or folder.opened_as(None).has(DCP_METADATA)
            ):
                steps.append(step)
        return steps

    def commit(self, save: AnySave, described: Described, later: Sequence[AnyFolder]) -> list[str]:
        """Makes a save a checkpoint, and sets others aside before; see `LocalRun.commit`."""
        if self._lease is not None:
            self._lease.check()
        aside: list[tuple[StoredFolder, str]] = []
        try:
            for folder in later:
                if isinstance(folder, StoredFolder):
                    before = change_marker(folder, Marker.superseded)
                    if before.current is not None:
                        aside.append((folder, before.current.save_id))
            save.commit(described)
        except BaseException:
            for folder, save_id in aside:
                _reinstate(folder, save_id)
            raise
        return [f"{folder}/{save_id}" for folder, save_id in aside]

    def hide(self, name: str) -> Callable[[], None]:
        """Makes a checkpoint none, and returns a function that removes its objects.

        Raises:
            StoreError: the store refuses, or does not answer in time.
        """
        return hide_stored_checkpoint(self._folder / name)

    def _folders(self, names: StepNames) -> dict[int, StoredFolder]:
        """Folders of steps, which may have no checkpoint, in rising order."""
        found = {name: names.step_of(name) for name in self._folder.folders()}
        steps = sorted((step, name) for name, step in found.items() if step is not None)
        return {step: self._folder / name for step, name in steps}

    def _remove_dead(self, names: StepNames, previous: str | None) -> None:
        """Gives up saves whose writers are dead, on this host or because their lease has run out."""
        elsewhere = []
        folders = list(self._folders(names).values())
        for folder, marker in zip(folders, read_markers(folders), strict=True):
            if isinstance(marker, TrackbedError):
                logger.warning("%s: is passed over: %s", folder, marker)
                continue
            for save in () if marker is None else marker.unfinished:
                state = state_of_save(save)
                if state is Writer.dead or (save.writer == previous and state is not Writer.living):
                    give_up_saves(folder, [save.save_id])
                else:
                    elsewhere.append(f"{folder}/{save.save_id} ({save.writer})")
        if previous is not None and folders:
            remove_unnamed_saves(folders)
        if elsewhere:
            logger.warning(
                "%s: has unfinished saves of other hosts, which may be removed if no job there saves (trackbed ckpt "
                "clean): %s",
                self,
                ", ".join(elsewhere),
            )


def _reinstate(folder: StoredFolder, save_id: str) -> None:
    """Makes a save that was set aside the checkpoint again."""
    try:
        change_marker(folder, lambda marker: marker.reinstated(save_id))
    except TrackbedError as error:
        logger.warning("%s/%s: was set aside, and must be the checkpoint again, but: %s", folder, save_id, error)
