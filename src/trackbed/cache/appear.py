"""Letting the files of an entry appear: its manifest first, as a claim on the name, then what it speaks of.

Two jobs may want different entries under one name at the same moment: other flags, or other data under the same path.
Whoever's manifest is there first has the name; the other goes aside. So no file appears under a name that is not
claimed for its fingerprint, and nobody meets files without their manifest. Whoever looks meanwhile finds an entry whose
files do not fit its manifest, that is, a damaged one: those that did not fit before appear last, so that it looks whole
only when all files are this entry's.
"""

import contextlib
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from trackbed.cache.entry import Entry, Place
from trackbed.cache.manifest import Manifest, read_manifest
from trackbed.errors import CacheError, FormatError
from trackbed.files import Stamp, claim, partial_name, publish, remove_unless_changed, stamp_of
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
    has_claimed = _replace_damaged(prepared, place) or (place == entry.shared and _claim(prepared, place))
    if place == entry.shared and not has_claimed and not _is_ours(prepared, place):
        logger.warning("%s: another index took this name meanwhile; this one lies in .trackbed/", place.array("*"))
        place = entry.aside
    if place == entry.aside and not has_claimed:
        os.makedirs(place.directory, exist_ok=True)  # noqa: PTH103  see Place
        publish(prepared.manifest, place.manifest)  # the folder is named by the fingerprint: no other entry wants it
        has_claimed = True
    finals = place.files(entry.arrays)
    sizes = file_stamps(".", list(finals.values()))[:, 1].tolist()
    fits = {name: size == prepared.files[name][1] for name, size in zip(finals, sizes, strict=True)}
    if all(fits.values()) and not has_claimed:
        return Appeared(place, (prepared.manifest, *(partial for partial, _ in prepared.files.values())))
    for name in sorted(finals, key=lambda name: not fits[name]):
        publish(prepared.files[name][0], finals[name])
    if place == entry.shared and not _is_ours(prepared, place):
        # Whoever has the name now must not look whole with files of this entry.
        Path(finals["description"]).unlink(missing_ok=True)
    return Appeared(place, () if has_claimed else (prepared.manifest,))


def _replace_damaged(prepared: Prepared, place: Place) -> bool:
    """Replace the manifest of a damaged entry of this fingerprint. Returns whether it was replaced.

    It is replaced and not removed: were the name free for a moment, another entry could take it while a builder that
    claimed it before still renames its files.
    """
    if prepared.damaged is None:
        return False
    described, claimed = (Stamp(*prepared.damaged[row].tolist()) for row in (0, -1))
    # Files of the right size may lie there: until its own description is there, the new entry looks damaged, too.
    remove_unless_changed(place.files(())["description"], described)
    try:
        found = read_manifest(place.manifest)
    except FormatError:
        return False
    is_own = found is not None and found.fingerprint == prepared.entry.fingerprint
    if not is_own or stamp_of(place.manifest) != claimed:
        return False
    publish(prepared.manifest, place.manifest)
    return True


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
            partials = prepared.manifest.rpartition("/")[0]
            _discard(place.manifest, found, f"{partials}/{partial_name(place.manifest.rpartition('/')[2])}")
    msg = f"{place.manifest}: a manifest must stay where it is put, found it gone {_CLAIMS} times"
    raise CacheError(msg)


def _discard(path: str, wanted: Stamp | None, aside: str) -> None:
    """Remove the manifest that was found unreadable, but no other one that has taken its place meanwhile."""
    with contextlib.suppress(FileNotFoundError):
        publish(path, aside)
        if stamp_of(aside) == wanted or not claim(aside, path):
            Path(aside).unlink(missing_ok=True)


def _is_ours(prepared: Prepared, place: Place) -> bool:
    """True if the entry that has the name was built of the same decisions and data."""
    try:
        found: Manifest | None = read_manifest(place.manifest)
    except FormatError:
        return False
    if found is None or found.fingerprint != prepared.entry.fingerprint:
        return False
    return (None if found.data is None else found.data.crc32) == prepared.data_crc32
