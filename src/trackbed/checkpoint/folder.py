"""Folder of a checkpoint: its files, how they are opened, how they appear, and errors about folders of other saves."""

import errno
import logging
import os
import re
import shutil
import stat
from collections.abc import Callable, Container, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import orjson

from trackbed.checkpoint.format.catalogue import EMPTY, Catalogue
from trackbed.checkpoint.format.config_file import CONFIG_NAME, maybe_load_config
from trackbed.checkpoint.format.dcp_metadata import DCP_METADATA, decode_metadata
from trackbed.checkpoint.format.extents import SIDE_NAME, SideFile
from trackbed.checkpoint.format.safe_pickle import RefusedClassError, load_torch_item
from trackbed.checkpoint.format.safetensors_files import catalogue_of, has_files
from trackbed.checkpoint.io.boxes import BoxReader
from trackbed.checkpoint.io.file_reader import maybe_read_file
from trackbed.checkpoint.ranks import Meeting
from trackbed.errors import ArgumentError, CheckpointError
from trackbed.files.checksum import crc32
from trackbed.files.publish import flush_to_disk, publish
from trackbed.files.publish_folder import commit_folder, flush_files
from trackbed.files.regular import kind_of
from trackbed.files.stores.address import is_address, lost_address_hint

logger = logging.getLogger(__name__)

COMMON_NAME: Final = "common.pt"
PLAIN_TENSORS: Final = "trackbed.plain_tensors"
"""Key in the common state of the paths of plain tensors that are stored as tensors, by their keys."""
_DATA_FILE: Final = re.compile(r".*__\d+_\d+\.distcp")
_OWN_NAMES: Final = (CONFIG_NAME, DCP_METADATA, SIDE_NAME, COMMON_NAME, "integrity.json")
"""Names of files of a checkpoint besides those with items; the last may have been written by Megatron Core 0.19."""
_COMMON_OBJECT: Final = "common_state/shard_0_1"
"""Object in which Megatron Core 0.19 keeps what 0.16 has in `common.pt`."""
_BACKENDS: Final = ("torch_dist",)
_MOST_NAME_BYTES: Final = 255  # of every file system of Linux but few


def data_name(rank: int, number: int = 0) -> str:
    """Name of a file with items of a rank."""
    return f"__{rank}_{number}.distcp"


@dataclass(frozen=True, slots=True)
class CheckpointFolder:
    """A checkpoint that is opened."""

    path: Path
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
        with BoxReader(self.path, self.catalogue) as reader:
            for key in self.catalogue.objects:
                if is_left_out(key):
                    continue
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


def open_folder(path: Path, *, reads_paths: bool = True) -> CheckpointFolder:
    """Opens a checkpoint of Trackbed, Megatron Core or torch.

    Args:
        path: path of the folder.
        reads_paths: False to leave the paths of a checkpoint of `dcp.save` to the caller, who has them.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    side = read_side(path)
    if side is not None:
        with naming_other_programs(path, side):
            for name, stored in side.files.items():
                _check_size(path, name, stored.num_bytes)
        # One that `dcp.save` has written, through a `StorageWriter`, has neither.
        may_be_plain = reads_paths and {COMMON_NAME, CONFIG_NAME}.isdisjoint(side.files)
        catalogue = _with_paths(path, side.catalogue) if may_be_plain else side.catalogue
        is_empty = may_be_plain and not catalogue.tensors and not catalogue.objects
        return CheckpointFolder(path, catalogue, side, is_plain=bool(catalogue.paths) or is_empty)
    config = maybe_load_config(path)
    if config is not None and config.sharded_backend not in _BACKENDS:
        raise CheckpointError(
            f"{CONFIG_NAME}: sharded_backend must be {_BACKENDS[0]!r}, but is {config.sharded_backend!r}"
        )
    if config is None and (path / COMMON_NAME).exists():
        raise CheckpointError(f"{path}: must be a complete checkpoint, but has no {CONFIG_NAME}")
    content = maybe_read_file(path, DCP_METADATA)
    if content is None and config is None and path.is_dir() and has_files(path):
        return CheckpointFolder(path, catalogue_of(path), None, is_plain=True)
    if content is None:
        if path.is_file():
            found = "is a file: torch.load reads those of torch.save"
        else:
            found = f"{DCP_METADATA} cannot be read: there is none" if path.is_dir() else "there is no such folder"
        raise CheckpointError(f"{path}: must be a distributed checkpoint, but {found}{_hint_of_others(path)}")
    return _without_side(path, decode_metadata(content), is_plain=config is None)


def _with_paths(path: Path, catalogue: Catalogue) -> Catalogue:
    """Contents with the paths that `.metadata` has."""
    content = maybe_read_file(path, DCP_METADATA)
    return catalogue if content is None else replace(catalogue, paths=decode_metadata(content).paths)


def _hint_of_others(path: Path) -> str:
    """Names the last checkpoint in a folder of checkpoints, or another format of the files."""
    others = sorted(one.parent.name for one in path.glob(f"*/{DCP_METADATA}"))
    return f"; {others[-1]} in it is one" if others else ""


def _without_side(path: Path, catalogue: Catalogue, *, is_plain: bool) -> CheckpointFolder:
    """A checkpoint of another program: its contents are without the object that has the common state."""
    objects = dict(catalogue.objects)
    common_row = objects.pop(_COMMON_OBJECT, None)
    return CheckpointFolder(path, replace(catalogue, objects=objects), None, common_row, is_plain=is_plain)


def _check_size(path: Path, name: str, num_bytes: int) -> None:
    """Checks that a file is there, and as long as the side file says."""
    try:
        status = (path / name).stat()
    except OSError as error:
        raise CheckpointError(
            f"{name}: must be in {path}, as {SIDE_NAME} says, but is not: {error.strerror}"
        ) from error
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(f"{name}: must be a regular file, as {SIDE_NAME} says, found {kind_of(status.st_mode)}")
    if status.st_size != num_bytes:
        raise CheckpointError(f"{name}: must have {num_bytes:,} bytes, as {SIDE_NAME} says, but has {status.st_size:,}")


def _open_whole(path: Path) -> CheckpointFolder:
    """Opens a checkpoint, and checks the files that other programs read in the place of the side file."""
    opened = open_folder(path)
    if opened.side is not None:
        # A strategy that is used alone writes no `metadata.json`.
        with naming_other_programs(path, opened.side):
            for name in sorted({DCP_METADATA, CONFIG_NAME} & opened.side.files.keys()):
                opened.check(name, maybe_read_file(path, name) or b"")
    return opened


def open_for_all(path: Path, meeting: Meeting) -> CheckpointFolder:
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
    if save_id is None:
        catalogue = replace(
            SideFile.decode(catalogue_text).catalogue, paths={key: tuple(place) for key, place in paths}
        )
        if not any((path / name).exists() for name in (DCP_METADATA, *catalogue.files[:1])):
            raise CheckpointError(
                f"{path}: must be a folder on a file system that all ranks share, but this rank does not see it"
            )
        return _without_side(path, catalogue, is_plain=is_plain)
    opened = open_folder(path, reads_paths=False)
    # Another job may replace the checkpoint after rank 0 has looked and before this rank does. Without the comparison
    # each would load a part of its own save.
    if opened.side is None or opened.side.save_id != save_id:
        found = "none" if opened.side is None else opened.side.save_id
        raise CheckpointError(
            f"{path}: must be the same checkpoint on all ranks, of save {save_id}, but is of save {found}"
        )
    catalogue = replace(opened.catalogue, paths={key: tuple(place) for key, place in paths})
    return replace(opened, catalogue=catalogue, is_plain=is_plain)


def load_common(path: Path) -> dict[str, Any]:
    """Loads the state that is not sharded. Reads no more of the checkpoint than it needs.

    Raises:
        CheckpointError: there is no checkpoint, it is damaged, or has classes that are not allowed.
    """
    side = read_side(path)
    if side is None and (path / COMMON_NAME).exists():
        return CheckpointFolder(path, EMPTY, None).load_common()
    return open_folder(path).load_common()


def _take_over_others(final: Path, partial: Path) -> None:
    """Links the files of other programs into the new folder, or copies them, before it replaces the old one."""
    # Second names, no moves: until the exchange the earlier checkpoint must be whole where it is, as this process may
    # be killed at any moment.
    for path in final.iterdir():
        if _DATA_FILE.fullmatch(path.name) or path.name in _OWN_NAMES or (partial / path.name).exists():
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
    if is_address(path) or lost_address_hint(path):
        raise ArgumentError(f"the folder of a checkpoint must be on a file system, found an address: {str(path)!r}")
    return Path(path)


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


_EARLIER_NAMES: Final = ("common.pt", "metadata.json")
"""Files that a program which saves with torch alone leaves from an earlier save."""


def read_side(path: Path) -> SideFile | None:
    """Reads the side file of a folder; None if there is none."""
    content = maybe_read_file(path, SIDE_NAME)
    return None if content is None else SideFile.decode(content)


@contextmanager
def naming_replacement(path: Path, side: SideFile | None) -> Iterator[None]:
    """Tells a checkpoint that is damaged, whose folder it names, from one that has been replaced or removed since.

    Args:
        path: folder of the checkpoint.
        side: its side file when it was opened.
    """
    try:
        yield
    except CheckpointError as error:
        # After the error, not before the read: the folder can be replaced between a look and a read.
        found = None if side is None else _replacement(path, side)
        if found is None:
            if str(path) in str(error) or type(error) is not CheckpointError:
                raise
            raise CheckpointError(f"{path}: {error}") from error
        raise CheckpointError(
            f"{path}: must be the checkpoint that was opened, but has been {found} since: open it again"
        ) from error


def _replacement(path: Path, side: SideFile) -> str | None:
    """Says how a checkpoint has changed since it was opened; None if it has not."""
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
def naming_other_programs(path: Path, side: SideFile) -> Iterator[None]:
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


def _is_as_described(path: Path, name: str, side: SideFile) -> bool:
    content, stored = maybe_read_file(path, name), side.files.get(name)
    return (
        content is not None and stored is not None and (len(content), crc32(content)) == (stored.num_bytes, stored.crc)
    )


def _is_of_another_program(path: Path, side: SideFile) -> bool:
    """True if `.metadata` is whole, and of another length: torch's says more than Trackbed's."""
    content, stored = maybe_read_file(path, DCP_METADATA), side.files.get(DCP_METADATA)
    if content is None or stored is None or len(content) == stored.num_bytes:
        return False
    try:
        decode_metadata(content)
    except CheckpointError:
        return False
    return True
