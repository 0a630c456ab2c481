"""Opening an entry, or building it where it is not there."""

import contextlib
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from enum import Enum, auto
from typing import Any

import numpy as np
import numpy.typing as npt

from trackbed.cache.entry import ArraySpec, Entry, Place
from trackbed.cache.look import Look, find
from trackbed.cache.notes import flush_later
from trackbed.cache.opened import Arrays, OpenedArrays, data_crc32_of, specs_of
from trackbed.cache.sighting import Sighting, Stamps
from trackbed.cache.survey import Expected
from trackbed.cache.uses import note_use, noting
from trackbed.cache.visibility import await_entry
from trackbed.cache.write import Build, Recipe, write_entry
from trackbed.errors import CacheError, TrackbedError

__all__ = ["Access", "Pending", "access", "collecting", "flush_built", "open_entry", "open_or_build"]


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
        with noting():
            yield
    finally:
        _ACCESS.reset(token)


class Pending(Arrays):
    """An entry that is opened, or built, when one of its arrays is asked for, if nobody has done so before.

    Args:
        entry: what is wanted.
        expected: what its arrays must look like.
        build: makes them, in arrays that it asks for.
        cost: nanoseconds that building takes, roughly.
        is_blend: whether it is the index of a blend, which is planned first.
        recipe: how they are made with others' in one call, if they are small.
        read_ahead: has the system begin to read what building reads.
    """

    def __init__(
        self,
        entry: Entry,
        expected: Expected,
        build: Build,
        *,
        cost: float,
        is_blend: bool,
        recipe: Recipe | None,
        read_ahead: Callable[[], object] | None = None,
    ) -> None:
        self.entry = entry
        self.cost = cost
        self.is_blend = is_blend
        self.recipe = recipe
        self._read_ahead = read_ahead
        self._expected = expected
        self._build = build
        self._arrays: Arrays | None = None
        self._advice: str | None = None
        self._place: Place | None = None
        self._was_absent = False
        self._damaged: Stamps | None = None
        self._sighting: Sighting | None = None
        self._is_built = False

    def expect_others(self, advice: str | None) -> None:
        """From now on, an entry that is missing is an error that ends with `advice`; or is built, with None."""
        self._advice = advice

    @property
    def opened(self) -> Arrays | None:
        """The arrays, where they were opened or built; None before."""
        return self._arrays

    @property
    def is_vouched(self) -> bool:
        """True if another rank of this start has found the entry right, or built it."""
        return self._advice is not None

    @property
    def data_crc32(self) -> str:
        """CRC-32 of the data that it was computed from; empty where no manifest tells."""
        return data_crc32_of(self.make())

    def path_of(self, name: str) -> str:
        """Path of the file of one of the arrays; the bare name where they lie in memory."""
        return str(getattr(self.make(), "path_of", str)(name))

    @property
    def is_open(self) -> bool:
        """Whether it was opened or built."""
        return self._arrays is not None

    def find(self) -> bool:
        """Open the entry if it is there. Returns whether it is."""
        if self._arrays is None:
            self.note(find(self.entry, self._expected, is_vouched=self.is_vouched))
        return self._arrays is not None

    @property
    def was_absent(self) -> bool | None:
        """Whether this process found nothing of it, and may build it; None where it has not looked."""
        return None if self._place is None else self._was_absent and self._advice is None

    def note(self, found: Look) -> None:
        """Take note of what was found a moment ago, and open what is there."""
        self._arrays, self._place, self._sighting = found.arrays, found.place, found.sighting
        self._was_absent, self._damaged = found.is_absent, found.damaged

    def note_written(self, specs: Mapping[str, ArraySpec], stamps: npt.NDArray[np.int64]) -> None:
        """Open it, as it was just written to the place where nothing of it was.

        Args:
            specs: what its arrays hold.
            stamps: of its files, as in a `Sighting`.
        """
        place = self._place or self.entry.shared
        data_crc32 = "" if self.entry.data is None else self.entry.data.checksum
        self._sighting = Sighting(place, self.entry.arrays, specs, stamps, self.entry.fingerprint, data_crc32)
        self._arrays = OpenedArrays(place, specs, data_crc32=data_crc32, sighting=self._sighting)
        self._is_built = True

    def see(self) -> Sighting | None:
        """What this process saw when it found or built it; of what others built, what it sees now, if anything."""
        if self._sighting is None:
            self._sighting = find(self.entry, self._expected, is_vouched=self.is_vouched).sighting
        return self._sighting

    def read_ahead(self) -> None:
        """Have the system begin to read what building it reads, where that is many pages of a file."""
        if self._arrays is None and self._read_ahead is not None:
            with contextlib.suppress(OSError, TrackbedError):  # building says what is wrong
                self._read_ahead()

    def make(self) -> Arrays:
        """Open the entry, or build it where the calling context allows that.

        Raises:
            CacheError: it is not there and must not be built here, or it cannot be written.
        """
        if self._arrays is None and self._advice is not None:
            self._arrays = await_entry(self.entry, expected=self._expected, advice=self._advice)
        elif self._arrays is None:
            self._arrays = self._find_or_build()
        return self._arrays

    def _find_or_build(self) -> Arrays:
        place, damaged = self._place, self._damaged
        if place is None or os.path.exists(place.manifest):  # noqa: PTH110  else nobody has built it since the last look
            found = find(self.entry, self._expected)
            self.note(found)
            if found.arrays is not None:
                note_use(self.entry)
                return found.arrays
            _check_access(self.entry, found)
            place, damaged = found.place, found.damaged
        written = write_entry(self.entry, place, self._build, damaged=damaged)
        self._sighting = written.sighting
        self._is_built = written.sighting is not None
        return written.open()

    @property
    def built(self) -> Sighting | None:
        """What this process has written; None where it has written nothing."""
        return self._sighting if self._is_built else None

    @property
    def specs(self) -> Mapping[str, ArraySpec]:
        """What each array holds."""
        return specs_of(self.make())

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        return self.make()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.entry.arrays)

    def __len__(self) -> int:
        """How many arrays there are."""
        return len(self.entry.arrays)


_COLLECTED: ContextVar[list[Pending] | None] = ContextVar("collected", default=None)


@contextlib.contextmanager
def collecting() -> Iterator[list[Pending]]:
    """Inside the block, entries are neither opened nor built by `open_or_build`, but collected in the list given.

    So that it can be planned who builds which of them: dataset constructors have a fixed signature (see `access`). At
    the end of the block, note is taken that they are in use (see `trackbed.cache.uses`).
    """
    collected: list[Pending] = []
    token = _COLLECTED.set(collected)
    try:
        with noting() as noted:
            yield collected
            noted += [pending.entry for pending in collected]
    finally:
        _COLLECTED.reset(token)


def flush_built(pending: Iterable[Pending]) -> None:
    """Flush in the background what this process has built of these entries, and then note that it is on the disk."""
    stamps: defaultdict[str, list[Stamps]] = defaultdict(list)
    for one in pending:
        if one.built is not None:
            stamps[one.entry.own].append(one.built.stamps)
    flush_later(stamps)


def open_or_build(
    entry: Entry,
    *,
    expected: Expected,
    build: Build,
    cost: float = 0.0,
    is_blend: bool = False,
    recipe: Recipe | None = None,
    read_ahead: Callable[[], object] | None = None,
) -> Arrays:
    """The arrays of an entry, read-only; built and published first where it is not there whole.

    They are mapped when they are first asked for.

    Args:
        entry: what is wanted.
        expected: what its arrays must look like.
        build: makes them, in arrays that it asks for.
        cost: nanoseconds that building takes, roughly.
        is_blend: whether it is the index of a blend, which is planned first.
        recipe: how the arrays are made together with those of other entries, where that is faster.
        read_ahead: has the system begin to read what building reads.

    Raises:
        CacheError: it is not there and must not be built here, or it cannot be written.
    """
    collected = _COLLECTED.get()
    if collected is None:
        return _open_or_build(entry, expected, build)
    pending = Pending(entry, expected, build, cost=cost, is_blend=is_blend, recipe=recipe, read_ahead=read_ahead)
    collected.append(pending)
    return pending


def _open_or_build(entry: Entry, expected: Expected, build: Build) -> Arrays:
    found = find(entry, expected)
    if found.arrays is not None:
        note_use(entry)
        return found.arrays
    _check_access(entry, found)
    written = write_entry(entry, found.place, build, damaged=found.damaged)
    if written.sighting is not None:
        flush_later({entry.own: [written.sighting.stamps]})
    return written.open()


def _check_access(entry: Entry, found: Look) -> None:
    allowed, advice = _ACCESS.get()
    if allowed is Access.open_only:
        raise _missing(entry, found.why, advice)


def open_entry(entry: Entry, *, expected: Expected, advice: str) -> Arrays:
    """The arrays of an entry that must be there.

    Raises:
        CacheError: it is not; the message ends with `advice`.
    """
    found = find(entry, expected)
    if found.arrays is None:
        raise _missing(entry, found.why, advice)
    note_use(entry)
    return found.arrays


def _missing(entry: Entry, why: str, advice: str) -> CacheError:
    found = f"found it damaged: {why}" if why else "found nothing"
    return CacheError(f"{entry.shared.array('*')}: the index must be there, {found}; {advice}")
