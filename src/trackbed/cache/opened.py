"""The arrays of an entry that is there: each is mapped when it is first asked for.

Thousands of entries are opened at a start, and most of their arrays are not read for a long time: a map each would take
time, and more maps than the system gives a process.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy.typing as npt

from trackbed.cache.advice import advice_on
from trackbed.cache.entry import ArraySpec, Place
from trackbed.cache.npy import map_npy
from trackbed.errors import CacheError, FormatError

__all__ = ["Arrays", "OpenedArrays", "damage", "data_crc32_of", "shape_of", "specs_of"]

Arrays = Mapping[str, npt.NDArray[Any]]


class OpenedArrays(Arrays):
    """Read-only arrays by name.

    Args:
        place: where their files are.
        specs: what they were found to hold.
        data_crc32: CRC-32 of the data that they were computed from; empty where no manifest tells.
    """

    def __init__(self, place: Place, specs: Mapping[str, ArraySpec], *, data_crc32: str = "") -> None:
        self.specs = specs
        self.data_crc32 = data_crc32
        self._place = place
        self._mapped: dict[str, npt.NDArray[Any]] = {}

    def path_of(self, name: str) -> str:
        """Path of the file of one of the arrays."""
        return self._place.array(name)

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        """One of the arrays.

        Raises:
            CacheError: its file is not what it was when the entry was opened.
        """
        if name not in self._mapped:
            self._mapped[name] = self._map(name)
        return self._mapped[name]

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
        return array

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
