"""Makes a folder a checkpoint, whole or not at all."""

import errno
import logging
import os
import re
import shutil
from pathlib import Path
from typing import Final

from trackbed.checkpoint.folder import COMMON_NAME, any_folder, local_folder
from trackbed.checkpoint.format.config_file import CONFIG_NAME, maybe_load_config
from trackbed.checkpoint.format.dcp_metadata import DCP_METADATA
from trackbed.checkpoint.format.extents import SIDE_NAME
from trackbed.checkpoint.io.file_reader import AnyFolder
from trackbed.errors import ArgumentError, CheckpointError
from trackbed.files.publish import flush_to_disk, publish
from trackbed.files.publish_folder import commit_folder, flush_files

logger = logging.getLogger(__name__)

_DATA_FILE: Final = re.compile(r".*__\d+_\d+\.distcp")
_OWN_NAMES: Final = (CONFIG_NAME, DCP_METADATA, SIDE_NAME, COMMON_NAME, "integrity.json")
"""Names of files of a checkpoint besides those with items; the last may have been written by Megatron Core 0.19."""
_MOST_NAME_BYTES: Final = 255  # of every file system of Linux but few


def any_target(path: str | Path) -> AnyFolder:
    """Folder that is to become a checkpoint: an absolute path, or an address of an object store.

    Raises:
        ArgumentError: see `target_folder` and `any_folder`.
    """
    folder = any_folder(path)
    return target_folder(folder) if isinstance(folder, Path) else folder


def target_folder(path: str | Path) -> Path:
    """Absolute path of a folder that is to become a checkpoint.

    Raises:
        ArgumentError: it is an address; its name is too long; it is the working directory of this process, which would
            be left in a removed folder; a volume is mounted there; or it is no checkpoint, and has files that a
            checkpoint would replace.
    """
    folder = local_folder(path).absolute()
    num_bytes = len(os.fsencode(folder.name))
    if num_bytes > _MOST_NAME_BYTES:
        raise ArgumentError(
            f"folder: its name must have at most {_MOST_NAME_BYTES} bytes, but has {num_bytes}: {folder.name[:40]!r}..."
        )
    if folder.is_dir() and os.path.ismount(folder):
        raise ArgumentError(_mounted(folder))
    if folder.is_dir() and not is_checkpoint(folder) and (folder / CONFIG_NAME).exists():
        raise ArgumentError(f"folder: {CONFIG_NAME} there must be of a checkpoint, but {folder / CONFIG_NAME} is not")
    if folder.is_dir() and folder.samefile("."):
        raise ArgumentError(
            f"folder: must be another folder than the working directory, which it replaces, found {str(path)!r}"
        )
    return folder


def _mounted(path: Path) -> str:
    return (
        f"folder: must be a folder that can be replaced, but a volume is mounted at {path}: save into a folder "
        f"below it, such as {path / 'step-0000100'}"
    )


def commit_checkpoint(partial: Path, final: Path) -> None:
    """Makes the files of a partial folder the checkpoint `final`: whole, or not at all.

    An absent or empty folder takes the name by one rename. An earlier checkpoint is exchanged with the new one, which
    takes over all files there that belong to no checkpoint. Into a folder with other files alone the new ones move,
    `metadata.json` last, without which the checkpoint is not whole.

    Raises:
        CheckpointError: a folder has the name of a file of the checkpoint, or a volume is mounted at `final`.
        OSError: a file cannot be renamed or flushed.
    """
    try:
        _commit(partial, final)
    except OSError as error:
        if error.errno in (errno.EBUSY, errno.EXDEV) and final.is_dir():
            raise CheckpointError(_mounted(final)) from error  # some mounts are seen only when they refuse
        raise


def _commit(partial: Path, final: Path) -> None:
    if not final.is_dir() or final.is_symlink() or is_checkpoint(final) or not any(final.iterdir()):
        # One rename or exchange: readers, and whoever comes after a kill, find the earlier checkpoint or the new one,
        # and never files of both.
        if final.is_dir() and is_checkpoint(final):
            # Before the exchange: after it the earlier folder is removed with all that is left in it.
            _take_over_others(final, partial)
        if commit_folder(partial, final, may_replace=is_checkpoint):
            logger.warning("%s: a checkpoint that was there has been replaced", final)
        return
    # The names that make a folder a checkpoint come last. In another order, a kill in between would leave a folder that
    # looks complete and lacks files.
    last = (SIDE_NAME, DCP_METADATA, CONFIG_NAME)
    names = sorted(os.listdir(partial), key=lambda name: (last.index(name) if name in last else -1, name))  # noqa: PTH208
    for name in names:
        # All names are looked at before the first moves, so that this error leaves the folder as it was.
        if (final / name).is_dir():
            raise CheckpointError(
                f"{final / name}: must be no folder, because a file of the checkpoint takes its place"
            )
    for name in names:
        # After a loss of power the disk may have later renames and lack earlier ones. So those of all other files are
        # on the disk before `metadata.json` gets its name.
        if name == CONFIG_NAME:
            flush_to_disk(final)
        publish(partial / name, final / name)
    flush_to_disk(final)
    shutil.rmtree(partial, ignore_errors=True)


def is_name_of_checkpoint(name: str) -> bool:
    """True for names that files of a checkpoint have."""
    return "/" not in name and (_DATA_FILE.fullmatch(name) is not None or name in _OWN_NAMES)


def _take_over_others(final: Path, partial: Path) -> None:
    """Links the files of other programs into the new folder, or copies them, before it replaces the old one."""
    # Second names, no moves: until the exchange the earlier checkpoint must be whole where it is, as this process may
    # be killed at any moment.
    for path in final.iterdir():
        if is_name_of_checkpoint(path.name) or (partial / path.name).exists():
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.copytree(path, partial / path.name, symlinks=True, copy_function=link_or_copy)
        else:
            link_or_copy(str(path), str(partial / path.name))


def link_or_copy(source: str, target: str) -> None:
    """Gives a file a second name, or copies it where the file system has no links."""
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:
        # The bytes of a copy must be on the disk before the exchange is.
        shutil.copy2(source, target, follow_symlinks=False)
        flush_files([Path(target)])


def is_checkpoint(path: Path) -> bool:
    """True if a folder looks like a complete checkpoint, which may be replaced by another."""
    return any((path / name).is_file() for name in (DCP_METADATA, SIDE_NAME)) or _has_config(path)


def _has_config(path: Path) -> bool:
    try:
        return maybe_load_config(path) is not None
    except CheckpointError:
        return False
