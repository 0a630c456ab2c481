"""Walk of a folder of inputs: linked folders are followed, hidden names left out, each real folder visited once."""

import errno
import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Final, NamedTuple

from trackbed.errors import ArgumentError

_HIDDEN: Final = (".", "_")


class Reason(Enum):
    """Reason why a name is not read."""

    HIDDEN = "hidden"
    """Its name begins with `.` or `_`, as those of temporary files and of notes of other programs do."""
    GIVEN_TWICE = "given twice"
    """It is another name of a file or folder that is read."""
    UNKNOWN_SUFFIX = "unknown suffix"
    """Its suffix is not that of a format."""
    WRITTEN_BY_TRACKBED = "written by trackbed"
    """It belongs to a tokenised pair, or to an unfinished run."""


class LeftOut(NamedTuple):
    """A file, folder or object that is not read."""

    name: str
    """Path or address; that of a folder stands for all that is in it."""
    reason: Reason


def is_hidden(name: str) -> bool:
    """True for a name that is left out below a given folder, as Spark, Hive and pyarrow do.

    >>> is_hidden("_temporary"), is_hidden(".part-0.jsonl"), is_hidden("part-0.jsonl")
    (True, True, False)
    """
    return name.startswith(_HIDDEN)


def names_by_reason(found: Iterable[LeftOut]) -> dict[str, tuple[str, ...]]:
    """Returns the names that were left out for each reason; no key for a reason without names."""
    names: dict[str, list[str]] = {}
    for one in found:
        names.setdefault(one.reason.value, []).append(one.name)
    return {reason.value: tuple(names[reason.value]) for reason in Reason if reason.value in names}


_LEADS_NOWHERE: Final = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)

FolderId = tuple[int, int] | str


@dataclass(slots=True)
class FolderWalk:
    """Walk of one folder after another, which visits each real folder once, under the first name that leads to it."""

    _visited: set[FolderId] = field(default_factory=set)

    def files_below(self, folder: Path) -> tuple[list[Path], list[LeftOut]]:
        """Returns the files in a folder and below, and the names that were left out, both sorted by path.

        Folders that are no links come first: where a link leads to a folder of the same tree, its files keep their own
        paths.
        """
        files: list[Path] = []
        left_out: list[LeftOut] = []
        roots = [folder]
        while roots:
            links: list[Path] = []
            for root in roots:
                self._visit(root, files, links, left_out)
            roots = sorted(links)
        return sorted(files), sorted(left_out, key=lambda one: Path(one.name))

    def _visit(self, root: Path, files: list[Path], links: list[Path], left_out: list[LeftOut]) -> None:
        """Visits a folder and those in it that are no links."""
        folders = [root]
        while folders:
            folder = folders.pop()
            identity = _identity_of(folder)
            if identity in self._visited:
                left_out.append(LeftOut(str(folder), Reason.GIVEN_TWICE))
                continue
            self._visited.add(identity)
            with os.scandir(folder) as entries:
                for entry in entries:
                    path = folder / entry.name
                    if is_hidden(entry.name):
                        left_out.append(LeftOut(str(path), Reason.HIDDEN))
                    elif entry.is_symlink():
                        (links if _leads_to_folder(path) else files).append(path)
                    else:
                        (folders if entry.is_dir() else files).append(path)
            folders.sort(reverse=True)


def dead_link(path: Path) -> ArgumentError:
    """Returns the error of a link that leads to nothing."""
    return ArgumentError(
        f"{path}: a link must lead to a file or a folder, found none at {path.readlink()}; "
        "restore what it leads to, or remove the link"
    )


def _leads_to_folder(link: Path) -> bool:
    try:
        return stat.S_ISDIR(link.stat().st_mode)
    except OSError as error:
        if error.errno in _LEADS_NOWHERE:
            raise dead_link(link) from None
        raise


def _identity_of(folder: Path) -> FolderId:
    """Device and inode of the real folder; its real path where the file system has no inodes."""
    status = folder.stat()
    return (status.st_dev, status.st_ino) if status.st_ino else os.path.realpath(folder)
