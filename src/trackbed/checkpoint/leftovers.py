"""Objects that unfinished saves have left in a store."""

from collections.abc import Iterable
from dataclasses import dataclass

from trackbed.checkpoint.folder import any_folder
from trackbed.checkpoint.format.marker import MARKER_NAME, Marker, UnfinishedSave, is_save_id
from trackbed.checkpoint.io.stored_folder import StoredFolder, read_markers
from trackbed.checkpoint.stored_save import give_up_saves, is_given_up
from trackbed.errors import ArgumentError, TrackbedError
from trackbed.files.publish import Writer, state_of_writer
from trackbed.files.stores import list_objects, parse_address


@dataclass(frozen=True, slots=True)
class Leftover:
    """A save that did not end, or has not ended yet."""

    folder: str
    """Address of the checkpoint that it was to be."""
    save_id: str
    num_objects: int
    num_bytes: int
    writer: str
    """Host, number and start of the process that began it; empty if the marker does not name the save any more."""
    state: Writer
    """State of that process; `dead` for a save that cannot become a checkpoint any more."""

    @property
    def address(self) -> str:
        """Address of its objects."""
        return f"{self.folder}/{self.save_id}"


def find_leftovers(folder: str) -> list[Leftover]:
    """Lists unfinished saves of a checkpoint in an object store, or of the checkpoints in a folder of it.

    Args:
        folder: address of a checkpoint, or of a folder of checkpoints.

    Raises:
        ArgumentError: it is no address of a store.
        CheckpointError: a marker is damaged.
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
        if isinstance(marker, TrackbedError):
            raise marker
        for save in unfinished_among(sizes[place], marker):
            found = sizes[place].get(save.save_id, [])
            leftovers.append(Leftover(place, save.save_id, len(found), sum(found), save.writer, state_of_save(save)))
    return leftovers


def unfinished_among(save_ids: Iterable[str], marker: Marker) -> list[UnfinishedSave]:
    """Returns saves that a marker names as unfinished, and those that it does not name, without a writer. Pure.

    Args:
        save_ids: ids of saves of which there are objects.
        marker: marker of their folder, which was read after these were listed.
    """
    unfinished = {save.save_id: save for save in marker.unfinished}
    named = {save.save_id for save in (*marker.set_aside, *filter(None, [marker.current]))}
    return [unfinished.get(one, UnfinishedSave(one, "")) for one in sorted({*save_ids, *unfinished} - named)]


def state_of_save(save: UnfinishedSave) -> Writer:
    """State of the writer of an unfinished save; `dead` for a save that cannot become a checkpoint any more."""
    return Writer.dead if not save.writer or is_given_up(save) else state_of_writer(save.writer)


def remove_leftover(leftover: Leftover) -> None:
    """Removes an unfinished save. If its writer lives, its save fails.

    Raises:
        CheckpointError: the marker is damaged, or other programs change it again and again.
        StoreError: the store refuses, or does not answer in time.
    """
    give_up_saves(StoredFolder(leftover.folder), [leftover.save_id])
