"""Where an entry lies: at the shared place, or aside where another one has its name."""

import logging
import os
from collections.abc import Sequence
from typing import NamedTuple

from trackbed.cache.entry import Entry, Place
from trackbed.cache.opened import Arrays, OpenedArrays
from trackbed.cache.survey import Expected, Finding, Sighting, State, survey, survey_together

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


def look(entry: Entry, expected: Expected) -> Look:
    """Look at the shared place, and aside where that is somebody else's. Nothing is changed."""
    place, other = (entry.shared if entry.megatron else entry.aside), ""
    found = survey(entry, place, expected)
    if found.state is State.foreign and entry.megatron:
        place, other = entry.aside, found.why
        found = survey(entry, place, expected)
    return _look_of(entry, place, found, other=other)


def _look_of(entry: Entry, place: Place, found: Finding, *, other: str = "") -> Look:
    if found.stamps is None:
        is_absent = found.state is State.absent and not found.why and entry.megatron and not other
        return Look(None, place, found.why, other, is_absent=is_absent)
    sighting = Sighting(place, entry.arrays, found.specs, found.stamps)
    return Look(OpenedArrays(place, found.specs), place, other=other, sighting=sighting)


def find(entry: Entry, expected: Expected) -> Look:
    """`look`, with a warning where another index has the name."""
    found = look(entry, expected)
    if found.other:
        logger.warning(
            "%s: another index has this name (%s); this one lies in %s",
            entry.shared.array("*"),
            found.other,
            found.place.directory,
        )
    return found


def look_together(entries: Sequence[Entry]) -> list[Look | None]:
    """`look` at many entries in a few calls; None of one that takes a closer look, such as one that is damaged."""
    if not any(os.path.isdir(folder) for folder in {entry.directory for entry in entries}):  # noqa: PTH112  it raises nothing
        found: list[Finding | None] = [Finding(State.absent)] * len(entries)
    else:
        found = survey_together(entries)
    return [
        None if one is None or not entry.megatron else _look_of(entry, entry.shared, one)
        for entry, one in zip(entries, found, strict=True)
    ]
