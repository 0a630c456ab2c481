"""Putting an entry in its place: every file whole under its final name, the manifest last."""

import contextlib
import os
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy.typing as npt

from trackbed.cache.entry import Entry, Place
from trackbed.cache.manifest import Manifest, encode_manifest
from trackbed.cache.npy import write_npy
from trackbed.errors import CacheError
from trackbed.files import FileSum, clear_dead_partials, partial_name, publish, write_new

__all__ = ["write_entry"]


def write_entry(entry: Entry, place: Place, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
    """Write description, arrays and manifest of an entry to `place`.

    Partial files lie in `.trackbed/partial/`, where this removes those that a killed writer left.

    Raises:
        CacheError: the folder cannot be written, or the disk is full; nothing partial is left behind.
    """
    started: dict[str, str] = {}
    try:
        for folder in (place.directory, f"{entry.own}/partial"):
            if not os.path.isdir(folder):  # noqa: PTH112  see Place
                os.makedirs(folder, exist_ok=True)  # noqa: PTH103  see Place
        _clear_once(f"{entry.own}/partial")
        _write(entry, place, arrays, started)
        # An old manifest speaks of other files; without any, an interrupted writer's are judged one by one.
        with contextlib.suppress(FileNotFoundError):
            os.unlink(place.manifest)  # noqa: PTH108  see Place
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
            Path(partial).unlink(missing_ok=True)


@lru_cache(maxsize=64)
def _clear_once(partials: str) -> None:
    """Remove what killed writers left; once for each folder in a process, which may write thousands of entries."""
    clear_dead_partials(Path(partials))


def _write(entry: Entry, place: Place, arrays: Mapping[str, npt.NDArray[Any]], started: dict[str, str]) -> None:
    """Write partial files, and note in `started` what each of them is to become."""

    def begin(final: str) -> str:
        started[final] = f"{entry.own}/partial/{partial_name(final.rpartition('/')[2])}"
        return started[final]

    records = {}
    for name, final in place.files(entry.arrays).items():
        if name == "description":
            checksum = write_new(begin(final), entry.description.encode())
        else:
            checksum = write_npy(begin(final), arrays[name])
        records[final.rpartition("/")[2]] = FileSum.of(checksum)
    manifest = Manifest(entry.fingerprint, entry.decisions, records)
    write_new(begin(place.manifest), encode_manifest(manifest))
