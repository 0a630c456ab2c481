"""Putting an entry in its place: every file whole under its final name, the manifest last."""

from collections.abc import Mapping
from typing import Any

import numpy.typing as npt

from trackbed.cache.entry import Entry, Place
from trackbed.cache.manifest import FileRecord, Manifest, encode_manifest
from trackbed.cache.npy import write_npy
from trackbed.errors import CacheError
from trackbed.files import Checksum, clear_dead_partials, new_partial, publish

__all__ = ["write_entry"]


def write_entry(entry: Entry, place: Place, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
    """Write description, arrays and manifest of an entry to `place`.

    Partial files lie in `.trackbed/partial/`, where this removes those that a killed writer left.

    Raises:
        CacheError: the folder cannot be written, or the disk is full; nothing partial is left behind.
    """
    partials = entry.own / "partial"
    started = {}
    try:
        for folder in (place.directory, place.manifest.parent, partials):
            if not folder.is_dir():
                folder.mkdir(parents=True, exist_ok=True)
        clear_dead_partials(partials)
        records = {}
        for name, final in place.files(entry.arrays).items():
            started[final] = new_partial(final, directory=partials)
            if name == "description":
                started[final].write_bytes(entry.description.encode())
                checksum = Checksum()
                checksum.update(entry.description.encode())
            else:
                checksum = write_npy(started[final], arrays[name])
            records[final.name] = FileRecord.of(checksum)
        started[place.manifest] = new_partial(place.manifest, directory=partials)
        started[place.manifest].write_bytes(encode_manifest(Manifest(entry.fingerprint, entry.decisions, records)))
        # An old manifest speaks of other files; without any, an interrupted writer's are judged one by one.
        place.manifest.unlink(missing_ok=True)
        for final in list(started):
            publish(started[final], final)
            del started[final]
    except OSError as error:
        msg = (
            f"{error.filename or place.directory}: the index {entry.stem} cannot be written: {error.strerror}; "
            "path_to_cache must name a folder with room that you may write to"
        )
        raise CacheError(msg) from error
    finally:
        for partial in started.values():
            partial.unlink(missing_ok=True)
