"""Opening an entry, or building it where it is not there."""

import contextlib
import logging
from collections.abc import Iterator
from contextvars import ContextVar
from enum import Enum, auto
from typing import Final

from trackbed.cache.entry import ArraySpec, Entry, Place
from trackbed.cache.opened import Arrays, OpenedArrays
from trackbed.cache.survey import Expected, State, survey
from trackbed.cache.write import Build, write_entry
from trackbed.errors import CacheError

__all__ = ["Access", "access", "open_entry", "open_or_build"]

logger = logging.getLogger(__name__)

_SMALL_BYTES: Final = 256 << 10


class Access(Enum):
    """What may be done where an entry is missing."""

    build = auto()
    open_only = auto()


_ACCESS: ContextVar[tuple[Access, str]] = ContextVar("access", default=(Access.build, ""))


@contextlib.contextmanager
def access(allowed: Access, *, advice: str) -> Iterator[None]:
    """Inside the block, entries that are missing are built, or are an error that ends with `advice`.

    Dataset constructors have a fixed signature, which third parties extend; this is how the one who calls
    them says what they may do.
    """
    token = _ACCESS.set((allowed, advice))
    try:
        yield
    finally:
        _ACCESS.reset(token)


def open_or_build(entry: Entry, *, expected: Expected, build: Build) -> Arrays:
    """The arrays of an entry, read-only; built and published first where it is not there whole.

    They are mapped when they are first asked for, but for small ones that were just built.

    Args:
        entry: what is wanted.
        expected: what its arrays must look like.
        build: makes them, in arrays that it asks for.

    Raises:
        CacheError: it is not there and must not be built here, or it cannot be written.
    """
    opened, place, why = _find(entry, expected)
    if opened is not None:
        return opened
    allowed, advice = _ACCESS.get()
    if allowed is Access.open_only:
        raise _missing(entry, why, advice)
    arrays = write_entry(entry, place, build)
    if sum(array.nbytes for array in arrays.values()) > _SMALL_BYTES:
        return OpenedArrays(place, {name: ArraySpec(array.dtype, array.shape) for name, array in arrays.items()})
    for array in arrays.values():  # to map thousands of small files takes longer than to keep what is in them
        array.flags.writeable = False
    return arrays


def open_entry(entry: Entry, *, expected: Expected, advice: str) -> Arrays:
    """The arrays of an entry that must be there.

    Raises:
        CacheError: it is not; the message ends with `advice`.
    """
    opened, _, why = _find(entry, expected)
    if opened is None:
        raise _missing(entry, why, advice)
    return opened


def _find(entry: Entry, expected: Expected) -> tuple[Arrays | None, Place, str]:
    """The entry's arrays if it is there, else where it is to be built, and what was found there."""
    place = entry.shared if entry.megatron else entry.aside
    found = survey(entry, place, expected)
    if found.state is State.foreign and entry.megatron:
        place = entry.aside
        logger.warning(
            "%s: another index has this name (%s); this one lies in %s",
            entry.shared.array("*"),
            found.why,
            place.directory,
        )
        found = survey(entry, place, expected)
    if found.state is not State.whole:
        return None, place, found.why
    return OpenedArrays(place, found.specs), place, ""


def _missing(entry: Entry, why: str, advice: str) -> CacheError:
    found = f"found it damaged: {why}" if why else "found nothing"
    return CacheError(f"{entry.shared.array('*')}: the index must be there, {found}; {advice}")
