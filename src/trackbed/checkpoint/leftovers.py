"""Objects that unfinished saves have left in a store."""

import logging
from dataclasses import dataclass

from trackbed.checkpoint.folder import any_folder
from trackbed.checkpoint.format.marker import MARKER_NAME, Marker, is_save_id
from trackbed.checkpoint.io.stored_folder import StoredFolder, read_markers
from trackbed.checkpoint.stored_save import give_up_saves, state_of_save
from trackbed.errors import ArgumentError, StoreError, TrackbedError
from trackbed.files.publish import Writer
from trackbed.files.stores import list_objects, parse_address

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Leftover:
    """A save that did not end, or has not ended yet."""

    folder: str
    """Address of the checkpoint that it was to be."""
    save_id: str
    num_objects: int
    num_bytes: int
    writer: str
    """Host, number and start of the process that began it; empty if no marker names the save."""
    state: Writer
    """State of that process; `dead` for a save that cannot become a checkpoint any more, and `elsewhere` where there is
    no marker."""

    @property
    def address(self) -> str:
        """Address of its objects."""
        return f"{self.folder}/{self.save_id}"


def find_leftovers(folder: str) -> list[Leftover]:
    """Lists unfinished saves of a checkpoint in an object store, or of the checkpoints in a folder of it.

    Folders whose marker cannot be read are logged, and passed over.

    Args:
        folder: address of a checkpoint, or of a folder of checkpoints.

    Raises:
        ArgumentError: it is no address of a store.
        StoreError: the store refuses, or does not answer in time.
    """
    root = any_folder(folder)
    if not isinstance(root, StoredFolder):
        raise ArgumentError(f"{folder}: must be an address of an object store, such as s3://bucket/run, found a path")
    sizes: dict[str, dict[str, list[int]]] = {}
    for address, num_bytes in list_objects(parse_address(str(root))):
        *above, name = address.split("/")
        if name == MARKER_NAME:
            sizes.setdefault("/".join(above), {})
        elif above and is_save_id(above[-1]):
            sizes.setdefault("/".join(above[:-1]), {}).setdefault(above[-1], []).append(num_bytes)
    folders = [StoredFolder(place) for place in sorted(sizes)]
    # Markers are read after the listing: a save that began, or ended, meanwhile is named by them.
    leftovers = []
    for place, marker in zip(sorted(sizes), read_markers(folders), strict=True):
        if isinstance(marker, StoreError):
            raise marker
        if isinstance(marker, TrackbedError):
            logger.warning("%s: is passed over: %s", place, marker)
            continue
        unnamed = Marker().unnamed(sizes[place]) if marker is None else marker.unnamed(sizes[place])
        # Without a marker it is not known whether another program copies a checkpoint there, whose marker comes last.
        state = Writer.elsewhere if marker is None else Writer.dead
        saves = [("", save_id, state) for save_id in sorted(unnamed)]
        saves += [(save.writer, save.save_id, state_of_save(save)) for save in (marker or Marker()).unfinished]
        for writer, save_id, state_of_writer in saves:
            found = sizes[place].get(save_id, [])
            leftovers.append(Leftover(place, save_id, len(found), sum(found), writer, state_of_writer))
    return leftovers


def remove_leftover(leftover: Leftover) -> None:
    """Removes an unfinished save. If its writer lives, its save fails.

    Raises:
        CheckpointError: the marker is damaged, or other programs change it again and again.
        StoreError: the store refuses, or does not answer in time.
    """
    give_up_saves(StoredFolder(leftover.folder), [leftover.save_id])
