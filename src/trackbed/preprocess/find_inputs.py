"""Search for inputs below folders and addresses, and the names that are never inputs: hidden ones, and Trackbed's own.

Linked folders are followed, and each real folder is visited once.
"""

import errno
import os
import re
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from itertools import islice
from pathlib import Path
from typing import Final, NamedTuple

from trackbed.errors import ArgumentError
from trackbed.files import is_partial_name, stores
from trackbed.files.stores import Address, ObjectRange, ObjectStamp, parse_address
from trackbed.tokens.commit import is_pending_name
from trackbed.tokens.format import is_indexed
from trackbed.tokens.paths import BESIDE, get_beside_path, get_bin_path, get_idx_path, get_seal_path
from trackbed.tokens.shard_list import SHARD_LIST_SUFFIX, is_shard_list

_HIDDEN: Final = (".", "_")


class Reason(Enum):
    """Reason why a name is not read."""

    HIDDEN = "hidden"
    """Its name begins with `.` or `_`, as the names of temporary files and of other programs' notes do."""
    GIVEN_TWICE = "given twice"
    """It is another name of a file or folder that is read."""
    UNKNOWN_SUFFIX = "unknown suffix"
    """Its suffix is of no known format."""
    WRITTEN_BY_TRACKBED = "written by trackbed"
    """It belongs to a tokenised pair, or to an unfinished run."""


class LeftOut(NamedTuple):
    """A file, folder or object that is not read."""

    name: str
    """Path or address; a folder stands for all that is in it."""
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


UNFINISHED_SUFFIX: Final = ".unfinished"
"""Suffix of the folder to which a run saves its work."""

RECORD_NAME: Final = "record.json"
LOCK_NAME: Final = "lock"
_SAVED: Final = re.compile(r"\d+\.(bin|lengths|counts|modes|places|files)")
_BIN, _IDX, _SEAL = get_bin_path(""), get_idx_path(""), get_seal_path("")
_BESIDE = tuple(get_beside_path("", name) for name in BESIDE)


def is_saved_name(name: str) -> bool:
    """True for the files of tokens and arrays in an unfinished folder.

    >>> is_saved_name("0.bin"), is_saved_name("corpus.bin")
    (True, False)
    """
    return _SAVED.fullmatch(name) is not None


def is_work_file(path: Path) -> bool:
    """True for a file that a running or killed run has written, and for a folder with its saved work."""
    name = path.name
    if is_partial_name(name) or is_pending_name(name):
        return True
    if name.endswith(UNFINISHED_SUFFIX) and path.is_dir():
        return all(_is_saved(entry) for entry in os.listdir(path))  # noqa: PTH208  names are all that is wanted
    return path.parent.name.endswith(UNFINISHED_SUFFIX) and _is_saved(name)


def is_own_file(path: Path) -> bool:
    """True for work files, for the files of a pair and those beside it, and for lists of shards."""
    prefix, suffix = os.path.splitext(path)  # noqa: PTH122  with_suffix refuses some names
    if path.name.endswith(_SEAL) or is_work_file(path) or is_shard_list(path):
        return True
    return suffix in (_BIN, _IDX, *_BESIDE) and is_indexed(prefix)


def _is_saved(name: str) -> bool:
    return name in (RECORD_NAME, LOCK_NAME) or is_saved_name(name) or is_partial_name(name)


_AT_ONCE: Final = 4096
_UNLISTED: Final = ("http", "https")


class Listed(NamedTuple):
    """Objects that an address stands for."""

    addresses: list[Address]
    is_folder: bool
    left_out: list[LeftOut]


def find_objects(text: str, walk: FolderWalk) -> Listed:
    """Returns the object at an address, or those below it, sorted by the parts of their names.

    A folder of this host, such as `file:///data`, is walked as a path is. Files that Trackbed writes are left out of a
    folder, and names that begin with `.` or `_` below it.
    """
    address = parse_address(text)
    if address.scheme == "file" and Path(address.key).is_dir():
        return _files_below(address, walk)
    if address.key and not address.key.endswith("/"):
        try:
            stores.stamp_of_object(address)
        except FileNotFoundError:
            if address.scheme in _UNLISTED:
                raise
        else:
            return Listed([address], is_folder=False, left_out=[])
    names = [name for name, _ in stores.list_objects(address) if not name.endswith("/")]
    if not names:
        raise ArgumentError(f"{text}: an input must be an object or a folder of objects, found nothing")
    listed, own = set(names), set(_own(names))
    root = f"{address.root}/{address.key.strip('/')}".rstrip("/") + "/"
    hidden = {name: found for name in names if (found := _hidden_part(name, root)) is not None}
    kept = sorted((name for name in names if name not in own and name not in hidden), key=lambda name: name.split("/"))
    left_out = [LeftOut(name, Reason.HIDDEN) for name in sorted(set(hidden.values()))]
    left_out += [LeftOut(name, Reason.WRITTEN_BY_TRACKBED) for name in sorted(own - hidden.keys()) if name in listed]
    return Listed([parse_address(name) for name in kept], is_folder=True, left_out=left_out)


def _files_below(folder: Address, walk: FolderWalk) -> Listed:
    """Returns the files below a folder of this host; links are followed, as below a path."""
    files, left_out = walk.files_below(Path(folder.key))
    own = {path for path in files if is_own_file(path)}
    named = [LeftOut(f"{folder.root}{name}", reason) for name, reason in left_out]
    named += [LeftOut(f"{folder.root}{path}", Reason.WRITTEN_BY_TRACKBED) for path in sorted(own)]
    kept = [parse_address(f"{folder.root}{path}") for path in files if path not in own]
    return Listed(kept, is_folder=True, left_out=named)


def stamps_of(addresses: list[Address]) -> Iterator[ObjectStamp]:
    """Yields the stamp of each object."""
    remaining = iter(addresses)
    while some := list(islice(remaining, _AT_ONCE)):
        for found in stores.stamps_of_objects(some):
            if isinstance(found, Exception):
                raise found
            yield found


def contents_of(objects: list[tuple[Address, ObjectStamp]]) -> list[bytes]:
    """Returns all bytes of small objects."""
    found: list[bytes] = []
    for start in range(0, len(objects), _AT_ONCE):
        some = objects[start : start + _AT_ONCE]
        ranges = [ObjectRange(address, stamp, 0, stamp.size_bytes) for address, stamp in some]
        found += map(bytes, stores.fetch(ranges))
    return found


def _hidden_part(name: str, root: str) -> str | None:
    """Returns the hidden object or folder that an address below `root` is or lies in; None if there is none.

    >>> _hidden_part("s3://bucket/_in/a/_tmp/b.jsonl", "s3://bucket/_in/")
    's3://bucket/_in/a/_tmp'
    """
    parts = name.removeprefix(root).split("/")
    number = next((number for number, part in enumerate(parts) if is_hidden(part)), None)
    return None if number is None else root + "/".join(parts[: number + 1])


def _own(names: list[str]) -> Iterator[str]:
    """Yields the pairs, seals and lists of shards among the names of a folder."""
    listed = set(names)
    for name in names:
        if is_partial_name(name):
            yield name
        if name.endswith(_SEAL):
            prefix = name.removesuffix(_SEAL)
            yield name
            yield from (get_bin_path(prefix), get_idx_path(prefix))
            yield from (f"{prefix}{suffix}" for suffix in _BESIDE)
            stem = prefix.rpartition("-of-")[0].rpartition("-")[0]
            if f"{stem}{SHARD_LIST_SUFFIX}" in listed:
                yield f"{stem}{SHARD_LIST_SUFFIX}"
