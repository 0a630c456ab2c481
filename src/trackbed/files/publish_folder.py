"""Atomic publication of folders: files are written to a partial folder, which takes the final name once it is complete.

A partial folder lies beside the final one and is named like a partial file of `partial.NAME`, so the next
writer on the same host removes those of dead processes. Many processes, on many hosts, may write files into one:

1. `make_partial_folder`, by one process, which tells the others its path;
2. `flush_files`, by each process for the files that it has written;
3. `commit_folder`, by the first process, once all others are done.

At any moment the final name stands for the old folder, for the new one, or for nothing if there was no old one.
"""

import errno
import logging
import os
import stat
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final, NoReturn

from trackbed.errors import ArgumentError
from trackbed.files import _native
from trackbed.files.publish import clear_dead_partials, flush_to_disk, new_partial, publish, remove_partial

logger = logging.getLogger(__name__)

_CHANGED: Final = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT, errno.ENOTDIR)
"""Errors of a rename if another process has changed the final name since it was examined."""
_NO_EXCHANGE: Final = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)
_MAX_TRIES: Final = 10


def make_partial_folder(final: Path, *, may_replace: Callable[[Path], bool]) -> Path:
    """Creates an empty partial folder for `final`, beside it. Removes partial folders of dead writers first.

    Args:
        final: path of the folder to be published.
        may_replace: returns True for a folder that is not empty if it may be replaced. Called with the path that the
            folder has at that moment.

    Returns:
        Path of the partial folder. This process is its writer: other writers leave it alone while the process lives.
        `remove_partial` removes it if it is not to be published.

    Raises:
        FileExistsError: `final` is not free, and is neither an empty folder nor one that may be replaced.
        ArgumentError: `final` does not end in a name.
        OSError: the folder cannot be created.
    """
    if final.name in ("", ".."):
        raise ArgumentError(f"final must end in the name of a folder, but is {str(final)!r}")
    _is_to_be_replaced(final, final, may_replace)
    # A dead partial folder may be an earlier one whose exchange is not on the disk: a loss of power would undo it.
    flush_to_disk(final.parent)
    # Programs that look for folders by the beginning of their names, such as `iter_*`, do not find it.
    aside = final.with_name(f"partial.{final.name}")
    clear_dead_partials(final.parent, final_name=aside.name)
    partial = new_partial(aside)
    partial.mkdir()
    return partial


def flush_files(paths: Iterable[Path]) -> None:
    """Returns once the bytes of all these files are on the disk.

    Raises:
        OSError: a file cannot be opened, or its bytes cannot be written.
    """
    for path in paths:
        flush_to_disk(path)


def commit_folder(partial: Path, final: Path, *, may_replace: Callable[[Path], bool]) -> bool:
    """Gives a complete partial folder its final name. Returns once the name is on the disk.

    A rename takes a free name, or that of an empty folder. An earlier folder is exchanged with the new one by a single
    system call, and removed afterwards; if that fails, it stays under the name of the partial folder, with a warning.

    Args:
        partial: folder from `make_partial_folder`; all its files have been flushed.
        final: path of the folder to be published.
        may_replace: see `make_partial_folder`.

    Returns:
        True if an earlier folder was replaced.

    Raises:
        FileExistsError: `final` is not free, and is neither an empty folder nor one that may be replaced.
        OSError: a folder cannot be flushed or renamed, or the file system cannot exchange two folders. Unless flushing
            the parent folder failed, `final` is as it was, and `partial` remains.
    """
    for folder, _, _ in os.walk(partial, topdown=False, onerror=_raise):
        flush_to_disk(Path(folder))
    flush_to_disk(final.parent)
    is_replaced = _take_name(partial, final, may_replace)
    # The earlier folder must stay whole until the exchange is on the disk: a loss of power may undo it.
    flush_to_disk(final.parent)
    if is_replaced:
        try:
            remove_partial(partial)
        except OSError as error:
            logger.warning("%s: the earlier folder must be removed after its replacement, but: %s", partial, error)
    return is_replaced


def _take_name(partial: Path, final: Path, may_replace: Callable[[Path], bool]) -> bool:
    """Renames, or exchanges; again if another process has changed the final name. Returns True if it exchanged."""
    for remaining in reversed(range(_MAX_TRIES)):
        is_replaced = _is_to_be_replaced(final, final, may_replace)
        try:
            (_exchange if is_replaced else publish)(partial, final)
        except OSError as error:
            if error.errno not in _CHANGED or not remaining:
                raise
            continue
        break
    if is_replaced:
        try:
            # Another process may have changed the final name just before the exchange.
            _is_to_be_replaced(partial, final, may_replace)
        except BaseException:
            _exchange(partial, final)
            raise
    return is_replaced


def _is_to_be_replaced(path: Path, final: Path, may_replace: Callable[[Path], bool]) -> bool:
    """Returns True for a folder with content that may be replaced, False for an empty folder or none."""
    try:
        mode = path.lstat().st_mode
        if stat.S_ISDIR(mode) and not os.listdir(path):
            return False
    except FileNotFoundError:
        return False
    if not stat.S_ISDIR(mode):
        present = "a symbolic link" if stat.S_ISLNK(mode) else "a file"
    elif may_replace(path):
        return True
    else:
        present = "a folder with other content"
    raise FileExistsError(
        errno.EEXIST,
        f"must be free, an empty folder, or an earlier one that may be replaced, found {present}",
        str(final),
    )


def _exchange(partial: Path, final: Path) -> None:
    """Exchanges the names of two folders."""
    number = _native.exchange_names(os.fsencode(partial), os.fsencode(final))
    if number in _NO_EXCHANGE:
        raise OSError(
            errno.EOPNOTSUPP,
            "must be on a file system that can exchange two folders (renameat2 with RENAME_EXCHANGE) to be replaced, "
            "found one that cannot: remove the folder first, or choose another name",
            str(final),
        )
    if number != 0:
        raise OSError(number, os.strerror(number), str(partial), None, str(final))


def _raise(error: OSError) -> NoReturn:
    raise error
