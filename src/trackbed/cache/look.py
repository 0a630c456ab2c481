"""Where an entry lies: at the shared place, or aside where another one has its name."""

import logging
import os
from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np

from trackbed.cache.entry import Entry, Place
from trackbed.cache.opened import Arrays, OpenedArrays
from trackbed.cache.survey import Expected, Sighting, State, survey
from trackbed.kernels import file_stamps

__all__ = ["Look", "are_absent", "find", "look"]

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


def look(entry: Entry, expected: Expected) -> Look:
    """Look at the shared place, and aside where that is somebody else's. Nothing is changed."""
    place, other = (entry.shared if entry.megatron else entry.aside), ""
    found = survey(entry, place, expected)
    if found.state is State.foreign and entry.megatron:
        place, other = entry.aside, found.why
        found = survey(entry, place, expected)
    if found.state is not State.whole:
        return Look(None, place, found.why, other)
    sighting = Sighting.of(entry, place, found.specs, found.stamps)
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


def are_absent(entries: Sequence[Entry]) -> list[bool]:
    """Whether no file of an entry is there, at the place shared with Megatron Core's; of each of them, in one call."""
    if not any(os.path.isdir(folder) for folder in {entry.directory for entry in entries}):  # noqa: PTH112  it raises nothing
        return [True] * len(entries)
    paths = [entry.shared.paths(entry.arrays) for entry in entries]
    stamps = file_stamps(".", list(chain.from_iterable(paths)))
    first = np.cumsum([0, *map(len, paths)])[:-1]
    absent: list[bool] = (np.maximum.reduceat(stamps[:, 0], first) < 0).tolist() if paths else []
    return absent
