"""Letting the files of an entry appear: its manifest first, as a claim on the name, then what it speaks of.

Two jobs may want different entries under one name at the same moment: other flags, or other data under the same path.
Whoever's manifest is there first has the name; the other goes aside. So no file appears under a name that is not
claimed for its fingerprint, and nobody meets files without their manifest. Whoever looks meanwhile finds an entry whose
files do not fit its manifest, that is, a damaged one: those that did not fit before appear last, so that it looks whole
only when all files are this entry's.
"""

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from trackbed.cache.entry import Entry, Place
from trackbed.cache.manifest import Manifest, read_manifest
from trackbed.errors import CacheError, FormatError
from trackbed.files import Stamp, claim, publish, remove_unless_changed, stamp_of
from trackbed.kernels import file_stamps

__all__ = ["Appeared", "Prepared", "let_appear"]

logger = logging.getLogger(__name__)

_CLAIMS: Final = 100


@dataclass(frozen=True, slots=True)
class Prepared:
    """An entry whose files are complete, under their partial names."""

    entry: Entry
    manifest: str
    """Path of the manifest's partial file."""
    files: Mapping[str, tuple[str, int]]
    """Path of each partial file and its size in bytes, by what it holds."""
    data_crc32: str | None = None
    """CRC-32 of the data that it was built from; None where the decisions hold all of it."""
    damaged: npt.NDArray[np.int64] | None = None
    """`[F, 3]` stamps of the damaged files that it replaces, the description's first and the manifest's last."""


@dataclass(frozen=True, slots=True)
class Appeared:
    """Where an entry is, now that it is there."""

    place: Place
    unused: tuple[str, ...]
    """Partial files that are of no use, as another builder of the same entry was faster."""


def let_appear(prepared: Prepared, place: Place) -> Appeared:
    """Let the entry appear at `place`, or aside where that belongs to another one by now.

    Raises:
        OSError: a file cannot be renamed.
        CacheError: manifests come and go so fast that none can be claimed.
    """
    entry = prepared.entry
    if prepared.damaged is not None:
        _remove_damaged(place, prepared.damaged)
    has_claimed = place == entry.shared and _claim(prepared, place)
    if place == entry.shared and not has_claimed and not _is_ours(prepared, place):
        logger.warning("%s: another index took this name meanwhile; this one lies in .trackbed/", place.array("*"))
        place = entry.aside
    if place == entry.aside:
        os.makedirs(place.directory, exist_ok=True)  # noqa: PTH103  see Place
        publish(prepared.manifest, place.manifest)  # the folder is named by the fingerprint: nobody else wants it
        has_claimed = True
    finals = place.files(entry.arrays)
    sizes = file_stamps(".", list(finals.values()))[:, 1].tolist()
    fits = {name: size == prepared.files[name][1] for name, size in zip(finals, sizes, strict=True)}
    if all(fits.values()) and not has_claimed:
        return Appeared(place, (prepared.manifest, *(partial for partial, _ in prepared.files.values())))
    for name in sorted(finals, key=lambda name: not fits[name]):
        publish(prepared.files[name][0], finals[name])
    return Appeared(place, () if has_claimed else (prepared.manifest,))


def _remove_damaged(place: Place, stamps: npt.NDArray[np.int64]) -> None:
    """Remove description and manifest of a damaged entry, unless another builder has replaced them.

    Files of the right size may lie there: until its own description is there, the new entry looks damaged, too.
    """
    description = place.files(())["description"]
    for path, stamp in ((description, stamps[0]), (place.manifest, stamps[-1])):
        remove_unless_changed(path, Stamp(*stamp.tolist()))


def _claim(prepared: Prepared, place: Place) -> bool:
    """Put the manifest in its place, unless there is one that can be read. Returns whether it was put there."""
    description = place.files(())["description"]
    for _ in range(_CLAIMS):
        if claim(prepared.manifest, place.manifest):
            return True
        described, found = stamp_of(description), stamp_of(place.manifest)
        try:
            if read_manifest(place.manifest) is not None:
                return False
        except FormatError:  # it speaks for nobody: a machine that lost its power leaves such files
            # What lies there may have the sizes that the new manifest says: without its description it looks damaged.
            remove_unless_changed(description, described)
            remove_unless_changed(place.manifest, found)
    msg = f"{place.manifest}: a manifest must stay where it is put, found it gone {_CLAIMS} times"
    raise CacheError(msg)


def _is_ours(prepared: Prepared, place: Place) -> bool:
    """True if the entry that has the name was built of the same decisions and data."""
    try:
        found: Manifest | None = read_manifest(place.manifest)
    except FormatError:
        return False
    if found is None or found.fingerprint != prepared.entry.fingerprint:
        return False
    return (None if found.data is None else found.data.crc32) == prepared.data_crc32
