"""Folder of a checkpoint: how it is opened, and errors about folders of other saves."""

import logging
import os
from collections.abc import Callable, Container, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import orjson

from trackbed.checkpoint.format.catalogue import EMPTY, Catalogue
from trackbed.checkpoint.format.config_file import CONFIG_NAME, read_config
from trackbed.checkpoint.format.dcp_metadata import DCP_METADATA, decode_metadata
from trackbed.checkpoint.format.extents import SIDE_NAME, SideFile
from trackbed.checkpoint.format.marker import MARKER_NAME, Marker, is_save_id
from trackbed.checkpoint.format.safe_pickle import RefusedClassError, load_torch_item
from trackbed.checkpoint.format.safetensors_files import catalogue_of, has_files
from trackbed.checkpoint.io.boxes import BoxReader
from trackbed.checkpoint.io.file_reader import AnyFolder, check_size, has_file, maybe_read_file
from trackbed.checkpoint.io.stored_folder import StoredFolder, read_markers
from trackbed.checkpoint.ranks import Meeting
from trackbed.errors import ArgumentError, CheckpointError
from trackbed.files.checksum import crc32
from trackbed.files.stores.address import is_address, lost_address_hint, parse_address

logger = logging.getLogger(__name__)

COMMON_NAME: Final = "common.pt"
PLAIN_TENSORS: Final = "trackbed.plain_tensors"
"""Key in the common state of the paths of plain tensors that are stored as tensors, by their keys."""
_COMMON_OBJECT: Final = "common_state/shard_0_1"
"""Object in which Megatron Core 0.19 keeps what 0.16 has in `common.pt`."""
_BACKENDS: Final = ("torch_dist",)
_MOST_REPLACEMENTS: Final = 20
_STORES: Final = ("s3", "gs", "az")
"""Schemes of addresses of checkpoints."""


@dataclass(frozen=True, slots=True)
class CheckpointFolder:
    """A checkpoint that is opened."""

    path: AnyFolder
    catalogue: Catalogue
    side: SideFile | None
    """Sizes and checksums of the files, for a checkpoint that Trackbed has saved."""
    common_row: int | None = None
    """Row of the object with the common state, which Megatron Core 0.19 writes in the place of `common.pt`."""
    is_plain: bool = False
    """True for a checkpoint that torch alone has saved, which has no common state."""

    @property
    def all_items(self) -> Catalogue:
        """Contents with the object that has the common state."""
        common = {} if self.common_row is None else {_COMMON_OBJECT: self.common_row}
        return replace(self.catalogue, objects={**self.catalogue.objects, **common})

    def naming_replacement(self) -> AbstractContextManager[None]:
        """Tells a checkpoint that is damaged from one that has been replaced since it was opened, in errors."""
        return naming_replacement(self.path, self.side)

    def load_common(self, is_left_out: Callable[[str], bool] = lambda _: False) -> dict[str, Any]:
        """Loads the state that is not sharded: plain values, and plain tensors that are stored as tensors.

        Args:
            is_left_out: true for keys of tensors that are not wanted.

        Raises:
            CheckpointError: it is damaged, or has classes that are not allowed.
        """
        with self.naming_replacement():
            common = self._load_common()
            if self.is_plain:
                return self._load_values_of_torch(is_left_out)
            paths = common.pop(PLAIN_TENSORS, {})
            wanted = {key: path for key, path in paths.items() if not is_left_out(key)}
            with BoxReader(self.path, self.catalogue) as reader:
                for key, path in wanted.items():
                    put(common, tuple(path), reader.read_tensor(key))
            return common

    def load_values(self, asked: Container[str]) -> tuple[dict[str, Any], set[str]]:
        """Loads the state that is not sharded, without tensors and objects that are asked for.

        Returns:
            The state, and the keys of the plain tensors in it that are stored as tensors, and of objects.
        """
        returned = set[str]()

        def is_left_out(key: str) -> bool:
            if key not in asked:
                returned.add(key)
            return key in asked

        return self.load_common(is_left_out), returned

    def _load_values_of_torch(self, is_left_out: Callable[[str], bool]) -> dict[str, Any]:
        """Objects that torch has saved, and tensors in lists, nested as they were."""
        common: dict[str, Any] = {}
        paths = self.catalogue.paths
        wanted = [key for key in self.catalogue.objects if not is_left_out(key)]
        with BoxReader(self.path, self.catalogue) as reader:
            reader.expect(wanted)
            for key in wanted:
                try:
                    value = reader.read_object(key)
                except RefusedClassError as error:  # the program may not want it
                    logger.warning("%s: an object of the checkpoint is left out: %s", self.path, error)
                    continue
                put(common, paths.get(key, (key,)), value)
            for key in self.catalogue.tensors:
                path = paths.get(key, ())
                if any(isinstance(part, int) for part in path) and not is_left_out(key):
                    put(common, path, reader.read_tensor(key))
        return {key: with_lists(value) for key, value in common.items()}

    def _load_common(self) -> dict[str, Any]:
        content = maybe_read_file(self.path, COMMON_NAME)
        if content is None:
            if self.is_plain:
                return {}
            if self.common_row is None:
                raise CheckpointError(f"{COMMON_NAME}: must be in {self.path}, but is not")
            return self._load_common_object(self.common_row)
        self.check(COMMON_NAME, content)
        return _dictionary(load_torch_item(content, COMMON_NAME), COMMON_NAME)

    def _load_common_object(self, row: int) -> dict[str, Any]:
        catalogue = replace(self.catalogue, objects={_COMMON_OBJECT: row})
        with BoxReader(self.path, catalogue) as reader:
            return _dictionary(reader.read_object(_COMMON_OBJECT), _COMMON_OBJECT)

    def check(self, name: str, content: bytes) -> None:
        """Compares a file with the side file, if there is one.

        Raises:
            CheckpointError: they differ.
        """
        if self.side is None:
            return
        stored = self.side.files.get(name)
        if stored is None or (len(content), crc32(content)) != (stored.num_bytes, stored.crc):
            raise CheckpointError(
                f"{name}: must be the file that {SIDE_NAME} describes, but is damaged, or of another save"
            )


def put(state: dict[Any, Any], path: tuple[Any, ...], value: Any) -> None:
    """Puts a value at a path of nested dictionaries, which are made as needed."""
    *above, last = path
    for key in above:
        state = state.setdefault(key, {})
        if not isinstance(state, dict):
            raise CheckpointError(f"{'.'.join(map(str, path))}: must lie in dictionaries, but {key!r} is none")
    state[last] = value


def with_lists(value: Any) -> Any:
    """Nested dictionaries with lists in the places of those whose keys are positions."""
    if type(value) is not dict:
        return value
    below = {key: with_lists(one) for key, one in value.items()}
    is_list = below and all(isinstance(key, int) for key in below) and sorted(below) == list(range(len(below)))
    return [below[number] for number in range(len(below))] if is_list else below


def _dictionary(found: Any, where: str) -> dict[str, Any]:
    if not isinstance(found, dict):
        raise CheckpointError(f"{where}: must be a dictionary, but is a {type(found).__name__}")
    return found


def open_folder(path: AnyFolder, *, reads_paths: bool = True, checks_sizes: bool = True) -> CheckpointFolder:
    """Opens a checkpoint of Trackbed, Megatron Core or torch.

    Args:
        path: path of the folder.
        reads_paths: False to leave the paths of a checkpoint of `dcp.save` to the caller, who has them.
        checks_sizes: False to leave it to the caller to look whether all files are there.

    Raises:
        CheckpointError: there is none, or it is damaged.
        StoreError: an object store refuses, or does not answer in time.
    """
    if isinstance(path, StoredFolder):
        return _open_stored(path, lambda one: _open_found(one, reads_paths=reads_paths, checks_sizes=checks_sizes))
    return _open_found(path, reads_paths=reads_paths, checks_sizes=checks_sizes)


def _open_stored(path: StoredFolder, open_one: Callable[[StoredFolder], CheckpointFolder]) -> CheckpointFolder:
    """Opens the save that the marker names, and another one that takes its place meanwhile."""
    for _ in range(_MOST_REPLACEMENTS):
        found = path.opened()
        try:
            return open_one(found)
        except CheckpointError:
            if found is path or found.replacement() is None:
                raise
    raise CheckpointError(f"{path}: must stay as it is while it is opened, but was replaced {_MOST_REPLACEMENTS} times")


def _open_found(path: AnyFolder, *, reads_paths: bool, checks_sizes: bool) -> CheckpointFolder:
    side = read_side(path)
    if side is not None:
        if checks_sizes:
            _check_sizes(path, side)
        # One that `dcp.save` has written, through a `StorageWriter`, has neither.
        may_be_plain = reads_paths and {COMMON_NAME, CONFIG_NAME}.isdisjoint(side.files)
        catalogue = _with_paths(path, side.catalogue) if may_be_plain else side.catalogue
        is_empty = may_be_plain and not catalogue.tensors and not catalogue.objects
        return CheckpointFolder(path, catalogue, side, is_plain=bool(catalogue.paths) or is_empty)
    config = read_config(path)
    if config is not None and config.sharded_backend not in _BACKENDS:
        raise CheckpointError(
            f"{CONFIG_NAME}: sharded_backend must be {_BACKENDS[0]!r}, but is {config.sharded_backend!r}"
        )
    if config is None and has_file(path, COMMON_NAME):
        raise CheckpointError(f"{path}: must be a complete checkpoint, but has no {CONFIG_NAME}")
    content = maybe_read_file(path, DCP_METADATA)
    if content is None and isinstance(path, Path) and config is None and path.is_dir() and has_files(path):
        return CheckpointFolder(path, catalogue_of(path), None, is_plain=True)
    if content is None:
        raise CheckpointError(f"{path}: must be a distributed checkpoint, but {_what_is_at(path)}")
    return _without_side(path, decode_metadata(content), is_plain=config is None)


def _with_paths(path: AnyFolder, catalogue: Catalogue) -> Catalogue:
    """Contents with the paths that `.metadata` has."""
    content = maybe_read_file(path, DCP_METADATA)
    return catalogue if content is None else replace(catalogue, paths=decode_metadata(content).paths)


def _check_sizes(path: AnyFolder, side: SideFile) -> None:
    """Checks that all files are there, as long as the side file says."""
    if isinstance(path, StoredFolder):
        path.look_at(side.files)
    with naming_folder(path), naming_other_programs(path, side):
        for name, stored in side.files.items():
            check_size(path, name, stored.num_bytes)


def _what_is_at(path: AnyFolder) -> str:
    """Says what is in the place of a checkpoint."""
    if isinstance(path, StoredFolder):
        return _what_is_at_address(path)
    if path.is_file():
        return "is a file: torch.load reads those of torch.save"
    if not path.is_dir():
        return "there is no such folder"
    others = sorted(one.parent.name for one in path.glob(f"*/{DCP_METADATA}"))
    hint = f"; {others[-1]} in it is one" if others else ""
    return f"{DCP_METADATA} cannot be read: there is none{hint}"


def _what_is_at_address(folder: StoredFolder) -> str:
    if folder.save_id is not None and not is_save_id(folder.name):
        return f"{DCP_METADATA}, which {MARKER_NAME} names, cannot be read: it has been removed"
    marker, names = folder.marker(), [name for name in folder.folders() if not is_save_id(name)]
    if marker is not None and marker.set_aside:
        return f"is none any more: it was set aside, and is at {folder}/{marker.set_aside[-1].save_id}"
    markers = read_markers([folder / name for name in names])
    others = [
        name for name, one in zip(names, markers, strict=True) if isinstance(one, Marker) and one.current is not None
    ]
    hint = f"; {others[-1]} in it is one" if others else ""
    return f"{DCP_METADATA} cannot be read: there is no such object{hint}"


def _without_side(path: AnyFolder, catalogue: Catalogue, *, is_plain: bool) -> CheckpointFolder:
    """A checkpoint of another program: its contents are without the object that has the common state."""
    objects = dict(catalogue.objects)
    common_row = objects.pop(_COMMON_OBJECT, None)
    return CheckpointFolder(path, replace(catalogue, objects=objects), None, common_row, is_plain=is_plain)


def _open_whole(path: AnyFolder) -> CheckpointFolder:
    """Opens a checkpoint, and checks the files that other programs read in the place of the side file."""
    return _open_stored(path, _open_checked) if isinstance(path, StoredFolder) else _open_checked(path)


def _open_checked(path: AnyFolder) -> CheckpointFolder:
    opened = open_folder(path)
    if opened.side is not None:
        # A strategy that is used alone writes no `metadata.json`.
        with naming_other_programs(opened.path, opened.side):
            for name in sorted({DCP_METADATA, CONFIG_NAME} & opened.side.files.keys()):
                opened.check(name, maybe_read_file(opened.path, name) or b"")
    return opened


def open_for_all(path: AnyFolder, meeting: Meeting) -> CheckpointFolder:
    """Collective over the ranks: opens a checkpoint. Rank 0 alone reads `.metadata`, and checks the small files.

    Raises:
        CheckpointError: there is none, it is damaged, or this rank sees another one than rank 0.
    """
    if meeting.size == 1:
        return _open_whole(path)
    opened, content = None, b""
    if meeting.rank == 0:
        opened = _open_whole(path)
        paths = list(opened.catalogue.paths.items())
        content = orjson.dumps([opened.side and opened.side.save_id, opened.is_plain, paths])
        if opened.side is None:
            content += b"\n" + SideFile("", {}, opened.all_items).encode()
    content = meeting.broadcast(content)
    if opened is not None:
        return opened
    head, _, catalogue_text = content.partition(b"\n")
    save_id, is_plain, paths = orjson.loads(head)
    if isinstance(path, StoredFolder):
        # The save that rank 0 has seen: another one may be committed at any moment.
        path = path.opened_as(save_id)
    if save_id is None:
        catalogue = replace(
            SideFile.decode(catalogue_text).catalogue, paths={key: tuple(place) for key, place in paths}
        )
        if not any(has_file(path, name) for name in (DCP_METADATA, *catalogue.files[:1])):
            raise CheckpointError(
                f"{path}: must be a folder on a file system that all ranks share, but this rank does not see it"
            )
        return _without_side(path, catalogue, is_plain=is_plain)
    opened = open_folder(path, reads_paths=False, checks_sizes=isinstance(path, Path))
    # Another job may replace the checkpoint after rank 0 has looked and before this rank does. Without the comparison
    # each would load a part of its own save.
    if opened.side is None or opened.side.save_id != save_id:
        found = "none" if opened.side is None else opened.side.save_id
        raise CheckpointError(
            f"{path}: must be the same checkpoint on all ranks, of save {save_id}, but is of save {found}"
        )
    catalogue = replace(opened.catalogue, paths={key: tuple(place) for key, place in paths})
    return replace(opened, catalogue=catalogue, is_plain=is_plain)


def load_common(path: AnyFolder) -> dict[str, Any]:
    """Loads the state that is not sharded. Reads no more of the checkpoint than it needs.

    Raises:
        CheckpointError: there is no checkpoint, it is damaged, or has classes that are not allowed.
    """
    if isinstance(path, StoredFolder):
        path = path.opened()
    side = read_side(path)
    if side is None and has_file(path, COMMON_NAME):
        return CheckpointFolder(path, EMPTY, None).load_common()
    return open_folder(path).load_common()


def any_folder(path: str | Path) -> AnyFolder:
    """Folder of a checkpoint: a path, or an address of an object store.

    Raises:
        ArgumentError: it is neither, or an address that has no bucket, or a secret in it.
    """
    if not isinstance(path, str) or not is_address(path):
        return local_folder(path)
    address = parse_address(path.rstrip("/"))
    if address.scheme not in _STORES:
        known = ", ".join(_STORES)
        raise ArgumentError(
            f"{address.text}: the address of a checkpoint must have one of the schemes {known}, found {address.scheme}"
        )
    return StoredFolder(address.text)


def local_folder(path: str | Path) -> Path:
    """Path of a folder on a file system.

    Raises:
        ArgumentError: it is the address of an object store, or no path.
    """
    if path is None:
        raise ArgumentError(
            "the folder of a checkpoint must be a path, but is None, as latest_checkpoint returns where there is none"
        )
    if not isinstance(path, str | os.PathLike):
        raise ArgumentError(
            f"the folder of a checkpoint must be a path, but is of {type(path).__name__}: the state comes first, then "
            "the folder"
        )
    if not os.fspath(path):
        raise ArgumentError("the folder of a checkpoint must be a path, found an empty text")
    if is_address(path):
        raise ArgumentError(f"{path}: must be a folder on a file system here, found an address")
    if hint := lost_address_hint(path):
        raise ArgumentError(f"{path}: must be a folder, or an address such as s3://bucket/run{hint}")
    return Path(path)


_EARLIER_NAMES: Final = ("common.pt", "metadata.json")
"""Files that a program which saves with torch alone leaves from an earlier save."""


def read_side(path: AnyFolder) -> SideFile | None:
    """Reads the side file of a folder; None if there is none."""
    content = maybe_read_file(path, SIDE_NAME)
    return None if content is None else SideFile.decode(content)


@contextmanager
def naming_replacement(path: AnyFolder, side: SideFile | None) -> Iterator[None]:
    """Tells a checkpoint that is damaged, whose folder it names, from one that has been replaced or removed since.

    Args:
        path: folder of the checkpoint.
        side: its side file when it was opened.
    """
    try:
        yield
    except CheckpointError as error:
        # After the error, not before the read: the folder can be replaced between a look and a read.
        found = None if side is None else replacement(path, side)
        if found is None:
            with naming_folder(path):
                raise
        raise CheckpointError(
            f"{path}: must be the checkpoint that was opened, but has been {found} since: open it again"
        ) from error


@contextmanager
def naming_folder(path: AnyFolder) -> Iterator[None]:
    """Has errors name a folder."""
    try:
        yield
    except CheckpointError as error:
        if str(path) in str(error) or type(error) is not CheckpointError:
            raise
        raise CheckpointError(f"{path}: {error}") from error


def replacement(path: AnyFolder, side: SideFile) -> str | None:
    """Says how a checkpoint has changed since it was opened; None if it has not."""
    if isinstance(path, StoredFolder):
        return path.replacement()
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
def naming_other_programs(path: AnyFolder, side: SideFile) -> Iterator[None]:
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
        old = [SIDE_NAME, *(name for name in _EARLIER_NAMES if _is_as_described(path, name, side))]
        raise CheckpointError(
            f"{path}: must be the checkpoint that {SIDE_NAME} describes, but another program has saved here since: "
            f"remove {', '.join(old)} (from the earlier save) to read what it has saved"
        ) from error


def _is_as_described(path: AnyFolder, name: str, side: SideFile) -> bool:
    content, stored = maybe_read_file(path, name), side.files.get(name)
    return (
        content is not None and stored is not None and (len(content), crc32(content)) == (stored.num_bytes, stored.crc)
    )


def _is_of_another_program(path: AnyFolder, side: SideFile) -> bool:
    """True if `.metadata` is whole, and of another length: torch's says more than Trackbed's."""
    content, stored = maybe_read_file(path, DCP_METADATA), side.files.get(DCP_METADATA)
    if content is None or stored is None or len(content) == stored.num_bytes:
        return False
    try:
        decode_metadata(content)
    except CheckpointError:
        return False
    return True
