"""A save into an object store: its claim in the marker, its objects, and its commit by one conditional write."""

import logging
import re
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from trackbed.checkpoint.commit import is_name_of_checkpoint
from trackbed.checkpoint.format.config_file import CONFIG_NAME
from trackbed.checkpoint.format.dcp_metadata import DCP_METADATA
from trackbed.checkpoint.format.extents import SIDE_NAME, Described, FileChecksum
from trackbed.checkpoint.format.marker import (
    MARKER_NAME,
    MOST_MARKER_BYTES,
    CommittedSave,
    Marker,
    UnfinishedSave,
    is_save_id,
)
from trackbed.checkpoint.io.object_writer import OBJECT_BYTES
from trackbed.checkpoint.io.stored_folder import StoredFolder, read_markers
from trackbed.checkpoint.io.targets import ObjectsTarget
from trackbed.errors import CheckpointError, StoreError, TrackbedError
from trackbed.files import stores
from trackbed.files.checksum import crc32
from trackbed.files.publish import Writer, own_writer, state_of_writer
from trackbed.files.stores import Address, ObjectVersion, parse_address

logger = logging.getLogger(__name__)

_PROBE_NAME: Final = "trackbed.probe"
_OTHER_NAMES: Final = re.compile(r"trackbed\.probe|written\.\d+")
"""Names of objects that a save writes besides the files of a checkpoint."""
_MOST_TRIES: Final = 100
"""Conditional writes that fail, one after the other, because other programs change the marker."""
_NO_VERSION: Final = ObjectVersion('"00000000000000000000000000000000"', "1")
_checked: Final[set[str]] = set()
"""Buckets that are known to refuse writes whose condition does not hold."""
_writing: Final[set[str]] = set()
"""Saves of this process that are being written."""
_lock: Final = threading.Lock()


class StoredSave:
    """A save that is being written to a folder of a store.

    Args:
        folder: the folder.
        save_id: id of the save, under which its objects lie.
    """

    most_item_bytes: Final = OBJECT_BYTES
    """Bytes from which on an item is cut into several."""

    def __init__(self, folder: StoredFolder, save_id: str) -> None:
        self.folder = folder
        """Folder of the checkpoint."""
        self.save_id = save_id
        """Id of the save."""

    def __str__(self) -> str:
        """Address of its objects."""
        return f"{self.folder}/{self.save_id}"

    def target(self, rank: int, number: int, *, num_files: int = 0, cuts: bool = True) -> ObjectsTarget:
        """Returns the target of a part of a rank; see `LocalSave.target`."""
        del number
        return ObjectsTarget(str(self), rank, num_files, cuts)

    def put(self, name: str, content: bytes) -> None:
        """Writes a small file."""
        stores.put_bytes(self._address_of(name), content)

    def take(self, name: str) -> bytes:
        """Reads a small file, and removes it."""
        address = self._address_of(name)
        _, content = stores.read_object(address, most_bytes=MOST_MARKER_BYTES)
        stores.delete_object(address)
        return content

    def commit(self, described: Described) -> None:
        """Makes this save the checkpoint, and removes the one before.

        Args:
            described: small files.

        Raises:
            CheckpointError: another program has given the save up, or changes the marker again and again.
            StoreError: the store refuses, or does not answer in time. The marker may have been written.
        """
        for name, content in described.contents.items():
            self.put(name, content)
        side = described.contents[SIDE_NAME]
        own = CommittedSave(self.save_id, {**described.files, SIDE_NAME: FileChecksum(len(side), crc32(side))})

        def committed(marker: Marker) -> Marker:
            if self.save_id not in {one.save_id for one in marker.unfinished}:
                raise CheckpointError(
                    f"{self.folder}: must be saved by the job that began to, but another program has given this "
                    "save up since (trackbed ckpt clean, or a save that took its writer for dead)"
                )
            return marker.committed(own)

        before = change_marker(self.folder, committed)
        _writing.discard(self.save_id)
        old = [] if before.current is None else [before.current.save_id]
        if before.current is None:
            _remove_plain_files(self.folder)
        else:
            logger.warning("%s: a checkpoint that was there has been replaced", self.folder)
        remove_saves(self.folder, old)

    def give_up(self) -> None:
        """Removes what is written, after a failure. Where the store does not answer, `trackbed ckpt clean` does it."""
        _writing.discard(self.save_id)
        try:
            give_up_saves(self.folder, [self.save_id])
        except TrackbedError as error:
            logger.warning("%s: what a failed save has written must be removed, but: %s", self.folder, error)

    def _address_of(self, name: str) -> Address:
        return parse_address(f"{self.folder}/{self.save_id}/{name}")


def begin_stored_save(folder: StoredFolder, save_id: str) -> StoredSave:
    """Says in the marker that a save begins, and removes what dead processes of this host have left of others.

    Raises:
        StoreError: the store has no conditional writes, refuses, or does not answer in time.
        CheckpointError: the marker is damaged, or other programs change it again and again.
    """
    if is_save_id(folder.name):
        raise CheckpointError(
            f"{folder}: must be the folder of a checkpoint, but its name is that of the files of a save: save to "
            f"{str(folder).rpartition('/')[0]}"
        )
    dead: list[str] = []

    def begun(marker: Marker) -> Marker:
        dead[:] = [one.save_id for one in marker.unfinished if is_given_up(one)]
        return marker.without_unfinished(set(dead)).with_unfinished(UnfinishedSave(save_id, own_writer()))

    _writing.add(save_id)
    try:
        before = change_marker(folder, begun)
    except BaseException:
        _writing.discard(save_id)
        raise
    save = StoredSave(folder, save_id)
    try:
        _check_conditions(folder, save_id)
    except BaseException:
        save.give_up()
        raise
    remove_saves(folder, dead)
    if before.current is not None or before.unfinished:
        remove_unnamed_saves([folder])
    return save


def is_given_up(save: UnfinishedSave) -> bool:
    """True for a save whose process has ended on this host, or is this one, and does not write it any more."""
    if save.writer == own_writer():
        return save.save_id not in _writing
    return state_of_writer(save.writer) is Writer.dead


def state_of_save(save: UnfinishedSave) -> Writer:
    """State of the writer of an unfinished save; `dead` for a save that cannot become a checkpoint any more."""
    return Writer.dead if is_given_up(save) else state_of_writer(save.writer)


def change_marker(folder: StoredFolder, change: Callable[[Marker], Marker]) -> Marker:
    """Changes the marker of a checkpoint, and returns what it was before.

    Args:
        folder: folder of the checkpoint.
        change: returns the marker to write; called again if another program has changed it meanwhile.

    Raises:
        StoreError: the store refuses, or does not answer in time.
        CheckpointError: the marker is damaged, or other programs change it again and again.
    """
    address = parse_address(f"{folder}/{MARKER_NAME}")
    for _ in range(_MOST_TRIES):
        version: ObjectVersion | None = None
        before = Marker()
        try:
            version, content = stores.read_version(address, most_bytes=MOST_MARKER_BYTES)
            before = Marker.decode(content, address.text)
        except FileNotFoundError:
            pass
        if stores.put_if(address, change(before).encode(), version) is not None:
            return before
    raise CheckpointError(f"{address.text}: must be written by few programs at a time, but others always came first")


def give_up_saves(folder: StoredFolder, save_ids: Iterable[str]) -> None:
    """Removes unfinished saves. Their writers cannot commit any more.

    Raises:
        StoreError: the store refuses, or does not answer in time.
        CheckpointError: the marker is damaged, or other programs change it again and again.
    """
    given_up = set(save_ids)
    # The marker first: a writer that is not dead, but slow, must find that it may not commit before its objects go.
    before = change_marker(folder, lambda marker: marker.without_unfinished(given_up))
    current = None if before.current is None else before.current.save_id
    remove_saves(folder, given_up - {current})


def hide_stored_checkpoint(folder: StoredFolder) -> Callable[[], None]:
    """Makes a checkpoint none, and returns a function that removes its objects.

    Raises:
        StoreError: the store refuses, or does not answer in time.
        CheckpointError: the marker is damaged, or other programs change it again and again.
    """
    before = change_marker(folder, Marker.without_current)

    def remove() -> None:
        if before.current is None:
            _remove_plain_files(folder)
        else:
            remove_saves(folder, [before.current.save_id])

    return remove


def remove_unnamed_saves(folders: Sequence[StoredFolder]) -> None:
    """Removes objects of saves that the markers of some folders do not name: of programs that were killed meanwhile.

    Folders without a marker are left alone, as another program may be copying a checkpoint there, and so are folders
    with files that no checkpoint has. What fails is logged.
    """
    try:
        listed = stores.list_folders([parse_address(str(folder)) for folder in folders])
        # Markers are read after the listing: a save that began, or ended, meanwhile is named by them.
        markers = read_markers(folders)
    except TrackbedError as error:
        logger.warning("%s: what killed programs have left must be removed, but: %s", folders[0], error)
        return
    for folder, below, marker in zip(folders, listed, markers, strict=True):
        for save_id in sorted(marker.unnamed(filter(is_save_id, below)) if isinstance(marker, Marker) else ()):
            _remove_unnamed(folder, save_id)


def _remove_unnamed(folder: StoredFolder, save_id: str) -> None:
    prefix = f"{folder}/{save_id}/"
    try:
        found = [address for address, _ in stores.list_objects(parse_address(f"{folder}/{save_id}"))]
        names = {address.removeprefix(prefix) for address in found}
        if not all(is_name_of_checkpoint(name) or _OTHER_NAMES.fullmatch(name) for name in names):
            return
        remove_objects(found)
        logger.warning("%s: %d objects that a killed program had left have been removed", prefix, len(found))
    except TrackbedError as error:
        logger.warning("%s: must be removed, but: %s", prefix, error)


def remove_saves(folder: StoredFolder, save_ids: Iterable[str]) -> None:
    """Removes objects of saves that the marker does not name any more. What fails is logged: `ckpt clean` finds it."""
    for save_id in save_ids:
        try:
            remove_objects(address for address, _ in stores.list_objects(parse_address(f"{folder}/{save_id}")))
        except TrackbedError as error:
            logger.warning("%s/%s: must be removed, but: %s", folder, save_id, error)


def remove_objects(addresses: Iterable[str]) -> None:
    """Removes objects of one bucket."""
    stores.delete_objects(map(parse_address, addresses))


def _remove_plain_files(folder: StoredFolder) -> None:
    """Removes the files of a checkpoint that another program has put into the folder itself."""
    prefix = f"{folder}/"
    try:
        found = [address for address, _ in stores.list_objects(parse_address(str(folder)))]
        names = {address.removeprefix(prefix): address for address in found}
        if not names.keys() & {DCP_METADATA, CONFIG_NAME, SIDE_NAME}:
            return
        remove_objects(address for name, address in names.items() if is_name_of_checkpoint(name))
    except TrackbedError as error:
        logger.warning("%s: files of the earlier checkpoint must be removed, but: %s", folder, error)


def _check_conditions(folder: StoredFolder, save_id: str) -> None:
    """Checks that the store refuses writes whose condition does not hold.

    Raises:
        StoreError: it does not.
    """
    probe = parse_address(f"{folder}/{save_id}/{_PROBE_NAME}")
    with _lock:
        if probe.root in _checked:
            return
        version = stores.put_if(probe, b"first", None)
        again = stores.put_if(probe, b"second", None)
        other = stores.put_if(probe, b"third", _NO_VERSION)
        stores.delete_object(probe)
        if version is None or again is not None or other is not None:
            raise StoreError(
                f"{probe.root}: the store must have conditional writes (If-None-Match and If-Match), without which two "
                "saves could become one checkpoint, but ignores their conditions"
            )
        _checked.add(probe.root)
