"""The arrays of an entry that is there: each is mapped when it is first asked for.

Thousands of entries are opened at a start, and most of their arrays are not read for a long time: a map each would take
time, and more maps than the system gives a process. Where there are too many, those used least recently are released.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NoReturn

import numpy.typing as npt

from trackbed.cache.advice import advice_on
from trackbed.cache.entry import ArraySpec, Place
from trackbed.cache.manifest import read_manifest
from trackbed.cache.notes import entry_digest
from trackbed.cache.npy import map_npy
from trackbed.cache.sighting import Sighting
from trackbed.errors import CacheError, FormatError
from trackbed.files import MAPS, Stamp, is_on_this_machine, stamp_of
from trackbed.kernels import file_stamps

__all__ = ["Arrays", "OpenedArrays", "arrays_of", "damage", "data_crc32_of", "shape_of", "specs_of"]

Arrays = Mapping[str, npt.NDArray[Any]]

_NOTHING: Final[Mapping[str, Any]] = {}
"""One for all: thousands of entries are opened, and few are read at a start."""


class OpenedArrays(Arrays):
    """Read-only arrays by name.

    Args:
        place: where their files are.
        specs: what they were found to hold.
        data_crc32: CRC-32 of the data that they were computed from; empty where no manifest tells.
        sighting: which files were found; None where that is not known, or only their digest is.
        digest: name of the entry in notes, where there is no sighting; empty where it is not known either.
    """

    def __init__(
        self,
        place: Place,
        specs: Mapping[str, ArraySpec],
        *,
        data_crc32: str = "",
        sighting: Sighting | None = None,
        digest: str = "",
    ) -> None:
        self.specs = specs
        self.data_crc32 = data_crc32
        self._place = place
        self._sighting = sighting
        self._digest = digest
        self._seen: Mapping[str, Stamp | None] = _NOTHING
        """Files that were mapped."""
        self._mapped: Arrays = _NOTHING

    def release(self) -> bool:
        """Drop the maps, to be made again when they are needed; arrays that are held stay valid. Always True."""
        self._mapped = _NOTHING
        return True

    def path_of(self, name: str) -> str:
        """Path of the file of one of the arrays."""
        return self._place.array(name)

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        """One of the arrays.

        Raises:
            CacheError: its file is not what it was when the entry was opened.
        """
        found = self._mapped.get(name)
        if found is None or MAPS.is_tight:
            MAPS.use(self)
        if found is None:
            # All at once: who reads one reads the others, which may be removed by then.
            if self._digest and entry_digest(file_stamps(".", self._place.paths(tuple(self.specs)))) != self._digest:
                self._refuse(*map(self._place.array, self.specs))
            mapped = {one: self._map(one) for one in self.specs}
            found = mapped[name]
            self._mapped = mapped
        return found

    def together(self, names: Sequence[str]) -> list[npt.NDArray[Any]]:
        """Several of the arrays, at once."""
        mapped = self._mapped
        if not mapped or MAPS.is_tight:
            return [self[name] for name in names]
        return [mapped[name] for name in names]

    def _map(self, name: str) -> npt.NDArray[Any]:
        path, spec = self._place.array(name), self.specs[name]
        try:
            array = map_npy(path)
        except OSError as error:
            msg = f"{path}: the index cannot be read: {error.strerror}; {advice_on(error)}"
            raise CacheError(msg) from error
        except FormatError as error:
            msg = f"{error}; remove it and start again: then the index is built anew"
            raise CacheError(msg) from error
        if (array.dtype, array.shape) != (spec.dtype, spec.shape):
            msg = (
                f"{path}: must hold {spec.dtype} of shape {spec.shape}, found {array.dtype} of shape {array.shape}; "
                f"remove it and start again: then the index is built anew"
            )
            raise CacheError(msg)
        self._check_stamp(name, path)
        return array

    def _check_stamp(self, name: str, path: str) -> None:
        """Refuse a file that has taken the place of the one that was found: it may be of other data."""
        found = stamp_of(path)
        wanted = self._seen.get(name) if self._sighting is None else self._sighting.stamp_of(name)
        self._seen = {name: found, **self._seen}
        if found is None or wanted is None or found == wanted:
            return
        # On other machines' disks, the time of a file that was just written may still change.
        is_other = found[:2] != wanted[:2] or is_on_this_machine(self._place.directory)
        if is_other and not self._is_same_entry():
            self._refuse(path)

    @staticmethod
    def _refuse(*paths: str) -> NoReturn:
        found = "found another one in its place" if len(paths) == 1 else "found another one in the place of one of them"
        what = "the file" if len(paths) == 1 else "the files"
        msg = f"{', '.join(paths)}: must be {what} that the start found, {found}: start again"
        raise CacheError(msg)

    def _is_same_entry(self) -> bool:
        """True if the files are those of another builder of the same entry, who was as fast."""
        try:
            manifest = read_manifest(self._place.manifest) if self._sighting is not None else None
        except (FormatError, OSError):
            return False
        if manifest is None or self._sighting is None or manifest.fingerprint != self._sighting.fingerprint:
            return False
        return ("" if manifest.data is None else manifest.data.crc32) == self.data_crc32

    def __iter__(self) -> Iterator[str]:
        return iter(self.specs)

    def __len__(self) -> int:
        """How many arrays there are."""
        return len(self.specs)


def specs_of(arrays: Arrays) -> Mapping[str, ArraySpec]:
    """What each of the arrays holds, without mapping it."""
    specs: Mapping[str, ArraySpec] | None = getattr(arrays, "specs", None)
    if specs is not None:
        return specs
    return {name: ArraySpec(array.dtype, array.shape) for name, array in arrays.items()}


def shape_of(arrays: Arrays, name: str) -> tuple[int, ...]:
    """The shape of one of the arrays, without mapping it."""
    return specs_of(arrays)[name].shape


def arrays_of(arrays: Arrays, names: Sequence[str]) -> list[npt.NDArray[Any]]:
    """Several arrays, at once: samples ask for them one after the other."""
    found = getattr(arrays, "opened", arrays)  # of an entry that was pending
    if isinstance(found, OpenedArrays):
        return found.together(names)
    return [arrays[name] for name in names]


def data_crc32_of(arrays: Arrays) -> str:
    """CRC-32 of the data that the arrays were computed from; empty where no manifest tells."""
    found: str = getattr(arrays, "data_crc32", "")
    return found


def damage(arrays: Arrays, names: Sequence[str], wanted: str, found: str) -> CacheError:
    """The error to raise where numbers of these arrays are not what they must be, or contradict each other.

    >>> damage({}, ["shuffle_index"], "rows in [0, 5)", "9 at position 2")
    CacheError('shuffle_index: must hold rows in [0, 5), found 9 at position 2; `trackbed cache verify` says ...
    """
    path_of = getattr(arrays, "path_of", str)
    advice = "`trackbed cache verify` says which files are damaged; without them the index is built anew"
    return CacheError(f"{', '.join(map(path_of, names))}: must hold {wanted}, found {found}; {advice}")
