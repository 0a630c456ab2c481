"""Inputs in object stores: which objects an address stands for."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Final, NamedTuple

from trackbed.errors import ArgumentError
from trackbed.files import is_partial_name, stores
from trackbed.files.stores import Address, ObjectRange, ObjectStamp, parse_address
from trackbed.preprocess.folder_walk import FolderWalk, LeftOut, Reason, is_hidden
from trackbed.preprocess.work_files import is_own_file
from trackbed.tokens.paths import get_bin_path, get_idx_path, get_seal_path
from trackbed.tokens.shard_list import SHARD_LIST_SUFFIX

_AT_ONCE: Final = 4096
_UNLISTED: Final = ("http", "https")
_SEAL: Final = get_seal_path("")


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
    """Returns the files below a folder of this host: links are followed as those of a path are."""
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
            stem = prefix.rpartition("-of-")[0].rpartition("-")[0]
            if f"{stem}{SHARD_LIST_SUFFIX}" in listed:
                yield f"{stem}{SHARD_LIST_SUFFIX}"
