"""Arrays of an entry that are looked up, built and mapped when they are first needed.

A start asks for thousands of entries and reads most of their arrays much later. Mapping all of them would take time,
and more maps than the system gives a process: where there are too many, the least recently used are released.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy.typing as npt

from trackbed.cache.entry import Arrays, EntryLocation, Request
from trackbed.cache.lookup import LookupResult, State, advice_on
from trackbed.cache.manifest import read_manifest
from trackbed.cache.npy import map_npy
from trackbed.errors import CacheError, FormatError
from trackbed.files import MAPS, Stamp, is_on_this_machine, stamp_of

logger = logging.getLogger(__name__)

Resolve = Callable[[Request, LookupResult | None], LookupResult]
"""Looks an entry up, or builds it; given the request and the result of the last lookup. The result is whole."""

_NOTHING: Final[Mapping[str, Any]] = {}
"""Shared by thousands of entries that are not read."""


class LazyArrays(Arrays):
    """Read-only arrays by name.

    Args:
        request: the entry; dropped, with its ingredients, once the entry has been found or built.
        find_or_build: called when the entry is needed and was neither found nor built yet.
    """

    __slots__ = ("__weakref__", "_mapped", "entry", "find_or_build", "found", "request")

    def __init__(self, request: Request, find_or_build: Resolve) -> None:
        self.request: Request | None = request
        self.entry = request.entry
        self.find_or_build = find_or_build
        self.found: LookupResult | None = None
        """Result of the last lookup; None if this process has not looked."""
        self._mapped: Arrays = _NOTHING

    @property
    def is_resolved(self) -> bool:
        """True if the entry was found or built."""
        return self.request is None

    def note(self, found: LookupResult) -> None:
        """Takes the result of a lookup or a build."""
        if found.taken and (self.found is None or not self.found.taken):
            where, aside = self.entry.shared.array("*"), self.entry.aside.directory
            logger.warning("%s: another index has this name (%s); this one lies in %s", where, found.taken, aside)
        self.found = found
        if found.state is State.whole:
            self.request = None

    def resolve(self) -> LookupResult:
        """Finds or builds the entry.

        Raises:
            CacheError: it is not there and must not be built here, or it cannot be written.
        """
        if self.request is not None:
            self.note(self.find_or_build(self.request, self.found))
        if self.found is None:
            raise CacheError("an entry without a request must be resolved")
        return self.found

    @property
    def _location(self) -> EntryLocation:
        return self.entry.location(is_aside=self.resolve().is_aside)

    def path_of(self, name: str) -> str:
        """Path of the file of one of the arrays."""
        return self._location.array(name)

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        """One of the arrays.

        Raises:
            CacheError: its file is not the one that was found.
        """
        array = self._mapped.get(name)
        if array is None or MAPS.is_tight:
            MAPS.use(self)
        if array is None:
            # All at once: a caller that reads one array reads the others, which may be removed by then.
            mapped = {one: self._map(one) for one in self.entry.arrays}
            array = mapped[name]
            self._mapped = mapped
        return array

    def several(self, names: Sequence[str]) -> list[npt.NDArray[Any]]:
        """Several of the arrays."""
        mapped = self._mapped
        if not mapped or MAPS.is_tight:
            return [self[name] for name in names]
        return [mapped[name] for name in names]

    def release(self) -> bool:
        """Drops the maps, which are made again when they are needed; arrays in use stay valid. Always True."""
        self._mapped = _NOTHING
        return True

    def _map(self, name: str) -> npt.NDArray[Any]:
        result = self.resolve()
        path, spec = self._location.array(name), result.specs[name]
        try:
            array = map_npy(path)
        except OSError as error:
            raise CacheError(f"{path}: the index cannot be read: {error.strerror}; {advice_on(error)}") from error
        except FormatError as error:
            raise CacheError(f"{error}; remove it and start again: then the index is built again") from error
        if (array.dtype, array.shape) != (spec.dtype, spec.shape):
            raise CacheError(
                f"{path}: must hold {spec.dtype} of shape {spec.shape}, found {array.dtype} of shape {array.shape}; "
                f"remove it and start again: then the index is built again"
            )
        self._check_stamp(name, path, result)
        return array

    def _check_stamp(self, name: str, path: str, result: LookupResult) -> None:
        """Refuses a file that has replaced the one that was found: it may be of other data."""
        stamp = stamp_of(path)
        wanted = Stamp(*result.stamps[1 + self.entry.arrays.index(name)].tolist())
        if stamp is None or stamp == wanted:
            return
        # On the disks of other machines, the time of a file that was just written may still change.
        is_other = stamp[:2] != wanted[:2] or is_on_this_machine(self._location.directory)
        if is_other and not self._is_same_entry(result):
            raise CacheError(
                f"{path}: must be the file that the start found, found another one in its place: start again"
            )

    def _is_same_entry(self, found: LookupResult) -> bool:
        """True if another builder of the same entry has replaced the files at the same time."""
        try:
            manifest = read_manifest(self._location.manifest)
        except (FormatError, OSError):
            return False
        return manifest is not None and manifest.identity == (self.entry.fingerprint, found.data_crc32)

    def __iter__(self) -> Iterator[str]:
        return iter(self.entry.arrays)

    def __len__(self) -> int:
        """Number of arrays."""
        return len(self.entry.arrays)


def damage(arrays: Arrays, names: Sequence[str], requirement: str, actual: str) -> CacheError:
    """Returns the error for arrays that hold wrong numbers, or contradict each other.

    >>> damage({}, ["shuffle_index"], "rows in [0, 5)", "9 at position 2")
    CacheError('shuffle_index: must hold rows in [0, 5), found 9 at position 2; `trackbed cache verify` says ...
    """
    path_of = getattr(arrays, "path_of", str)
    advice = "`trackbed cache verify` says which files are damaged; without them the index is built again"
    return CacheError(f"{', '.join(map(path_of, names))}: must hold {requirement}, found {actual}; {advice}")
