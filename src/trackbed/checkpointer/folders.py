"""The folder of a run: one job at a time keeps it, and each checkpoint in it is whole at any moment, or none."""

import contextlib
import errno
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from trackbed.checkpoint.commit import commit_checkpoint
from trackbed.errors import CheckpointError
from trackbed.files.folder_lock import FolderLock
from trackbed.files.publish import Writer, find_partials, flush_to_disk, new_partial, publish, remove_partial

logger = logging.getLogger(__name__)

LOCK_NAME: Final = ".checkpointer.lock"
_PARTIAL: Final = "partial."


def lock_folder(folder: Path) -> FolderLock:
    """Takes the lock of a folder of checkpoints.

    Raises:
        CheckpointError: another job, or another Checkpointer of this one, keeps checkpoints there.
        OSError: the file of the lock cannot be opened.
    """
    return FolderLock(folder, LOCK_NAME, partial(_refusal, folder))


def _refusal(folder: Path, holder: str | None) -> CheckpointError:
    if holder is None:
        return CheckpointError(f"{folder}: must be kept by one Checkpointer, but one of this process is open")
    return CheckpointError(f"{folder}: must be kept by one job, but {holder} keeps checkpoints in it")


def remove_dead_partials(folder: Path, is_name: Callable[[str], bool]) -> None:
    """Removes what killed jobs on this host have left of checkpoints. Names what those of other hosts have left.

    Args:
        folder: folder of the checkpoints.
        is_name: true for names of checkpoints.

    Raises:
        OSError: it cannot be removed.
    """
    elsewhere = []
    for found in find_partials(folder):
        if not found.final_name.startswith(_PARTIAL) or not is_name(found.final_name.removeprefix(_PARTIAL)):
            continue
        if found.writer is Writer.dead:
            remove_partial(Path(found.path))
        elif found.writer is Writer.elsewhere:
            elsewhere.append(found.path)
    if elsewhere:
        logger.warning(
            "%s: has partial folders of other hosts, which may be removed if no job there saves: %s",
            folder,
            ", ".join(elsewhere),
        )


def hide_checkpoint(folder: Path) -> Path:
    """Gives a checkpoint the name of a partial folder, and returns that. Where it stays, the next writer removes it.

    Raises:
        OSError: it cannot be renamed.
    """
    partial = new_partial(folder.with_name(f"{_PARTIAL}{folder.name}"))
    publish(folder, partial)
    flush_to_disk(folder.parent)
    return partial


def remove_checkpoint(folder: Path) -> None:
    """Removes a checkpoint. Killed in between, it leaves a partial folder, which the next writer removes.

    Raises:
        OSError: it cannot be removed.
    """
    remove_partial(hide_checkpoint(folder))


@contextlib.contextmanager
def set_aside(folders: Sequence[Path], *, is_undone: Callable[[], bool]) -> Iterator[list[Path]]:
    """Gives checkpoints other names, and the old ones again if the block fails. Yields the other names.

    Args:
        folders: the checkpoints.
        is_undone: called if the block fails: False to leave the other names.

    Raises:
        OSError: one cannot be renamed.
    """
    moved: list[Path] = []
    try:
        for folder in folders:
            names = (folder.with_name(f"{folder.name}.{number}.superseded") for number in itertools.count(1))
            free = next(name for name in names if not name.exists())
            publish(folder, free)
            moved.append(free)
        if moved:
            flush_to_disk(moved[0].parent)
        yield moved
    except BaseException:
        if is_undone():
            for folder, name in zip(folders, moved, strict=False):
                publish(name, folder)
        raise


def commit_or_replace(partial: Path, final: Path) -> None:
    """Makes a partial folder the checkpoint `final`, also where the file system cannot exchange two folders.

    An earlier checkpoint of the name gets another one first then, and is removed afterwards: a kill in between leaves
    it under that name.

    Raises:
        CheckpointError: see `commit_checkpoint`.
        OSError: a folder cannot be renamed.
    """
    try:
        commit_checkpoint(partial, final)
    except OSError as error:
        if error.errno != errno.EOPNOTSUPP or not final.is_dir() or not partial.is_dir():
            raise
        with set_aside([final], is_undone=partial.exists) as aside:
            commit_checkpoint(partial, final)
        try:
            remove_checkpoint(*aside)
        except OSError as left:
            logger.warning("%s: the earlier checkpoint must be removed after its replacement, but: %s", aside[0], left)
