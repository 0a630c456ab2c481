"""Where an entry lies: at the shared place, or aside where another one has its name."""

import logging
import os
from collections.abc import Sequence
from typing import NamedTuple

from trackbed.cache.advice import advice_on
from trackbed.cache.entry import Entry, Place
from trackbed.cache.opened import Arrays, OpenedArrays
from trackbed.cache.sighting import Sighting, Stamps
from trackbed.cache.survey import Expected, Finding, State, survey, survey_together
from trackbed.errors import CacheError

__all__ = ["Look", "find", "look", "look_together"]

logger = logging.getLogger(__name__)


class Look(NamedTuple):
    """What one look at an entry found."""

    arrays: Arrays | None
    place: Place
    """Where it is, or is to be built."""
    why: str = ""
    """What was found at that place instead."""
    other: str = ""
    """Why the shared place is somebody else's, if it is."""
    sighting: Sighting | None = None
    """What was seen, where the entry is there."""
    is_absent: bool = False
    """Whether no file of it was there, at the place shared with Megatron Core's."""
    damaged: Stamps | None = None
    """Stamps of the files of a damaged entry at `place`, which are to be replaced."""


def look(entry: Entry, expected: Expected, *, is_vouched: bool = False) -> Look:
    """Look at the shared place, and aside where that is somebody else's. No entry is changed.

    Args:
        entry: what is wanted.
        expected: what its arrays must look like.
        is_vouched: whether a rank of this start has built the entry, or found it right.

    Raises:
        CacheError: the system refuses to look at a file.
    """
    place, other = (entry.shared if entry.megatron else entry.aside), ""
    try:
        found = survey(entry, place, expected, is_vouched=is_vouched)
        if found.state is State.foreign and entry.megatron:
            place, other = entry.aside, found.why
            found = survey(entry, place, expected, is_vouched=is_vouched)
    except OSError as error:
        where = error.filename or place.directory
        msg = f"{where}: the index {entry.stem} cannot be looked up: {error.strerror}; {advice_on(error)}"
        raise CacheError(msg) from error
    return _look_of(entry, place, found, other=other)


def _look_of(entry: Entry, place: Place, found: Finding, *, other: str = "") -> Look:
    if found.stamps is None or found.state is not State.whole:
        is_absent = found.state is State.absent and not found.why and entry.megatron and not other
        return Look(None, place, found.why, other, is_absent=is_absent, damaged=found.stamps)
    sighting = Sighting(place, entry.arrays, found.specs, found.stamps, entry.fingerprint, found.data_crc32)
    arrays = OpenedArrays(place, found.specs, data_crc32=found.data_crc32, sighting=sighting)
    return Look(arrays, place, other=other, sighting=sighting)


def find(entry: Entry, expected: Expected, *, is_vouched: bool = False) -> Look:
    """`look`, with a warning where another index has the name."""
    found = look(entry, expected, is_vouched=is_vouched)
    if found.other:
        logger.warning(
            "%s: another index has this name (%s); this one lies in %s",
            entry.shared.array("*"),
            found.other,
            found.place.directory,
        )
    return found


def look_together(entries: Sequence[Entry], vouched: Sequence[bool]) -> list[Look | None]:
    """`look` at many entries in a few calls; None of one that takes a closer look, such as one that is damaged."""
    if not any(os.path.isdir(folder) for folder in {entry.directory for entry in entries}):  # noqa: PTH112  it raises nothing
        found: list[Finding | None] = [Finding(State.absent)] * len(entries)
    else:
        found = survey_together(entries, vouched)
    return [
        None if one is None or not entry.megatron else _look_of(entry, entry.shared, one)
        for entry, one in zip(entries, found, strict=True)
    ]
