"""Entries that are as a start left them: the next one takes them as they were, and looks at none.

Dataset constructors have a fixed signature, which third parties extend; a context is how the one who calls them says
what he knows of the entries that they will ask for.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from functools import lru_cache
from typing import Any, Final

import numpy as np

from trackbed.cache.entry import ArraySpec, Place
from trackbed.cache.opened import Arrays, OpenedArrays
from trackbed.cache.sighting import Sighting

__all__ = ["Recall", "recalled", "recalling", "record_of"]


_NUM_OWN: Final = 3
"""Folder, stem and checksum of the data, before the arrays."""


def record_of(sighting: Sighting, folder: str) -> list[Any]:
    """What was seen of an entry of the cache in `folder`, as JSON values: one flat list, as there are thousands."""
    specs = [_record(name, spec.dtype, spec.shape) for name, spec in sighting.specs.items()]
    return [sighting.place.directory.removeprefix(folder), sighting.place.stem, sighting.data_crc32, *specs]


class Recall:
    """Entries in the order in which they will be asked for.

    Args:
        folder: of the cache.
        records: what `record_of` gave. The caller vouches that the files have not changed.
        digests: name of each entry in notes, by which files are recognised when they are first read.
    """

    def __init__(self, folder: str, records: Sequence[Sequence[Any]], digests: Sequence[str]) -> None:
        self._folder = folder
        self._records = records
        self._digests = digests
        self._taken = 0

    @property
    def is_used_up(self) -> bool:
        """Whether all entries were asked for, and no more."""
        return self._taken == len(self._records)

    def take(self) -> Arrays | None:
        """The arrays of the next entry; None where there are no more."""
        self._taken += 1
        if self._taken > len(self._records):
            return None
        record = self._records[self._taken - 1]
        directory, stem, data_crc32 = record[:_NUM_OWN]
        manifest = f"{directory}/manifest.json" if directory else f"/.trackbed/{stem}.json"
        place = Place(f"{self._folder}{directory}", stem, f"{self._folder}{manifest}")
        digest = self._digests[self._taken - 1]
        return OpenedArrays(place, _RecordedSpecs(record), data_crc32=data_crc32, digest=digest)


class _RecordedSpecs(Mapping[str, ArraySpec]):
    """Types and shapes of arrays, made when they are asked for: a start recalls thousands of entries and reads few.

    Args:
        record: what `record_of` gave.
    """

    __slots__ = ("_record",)

    def __init__(self, record: Sequence[Any]) -> None:
        self._record = record

    def __getitem__(self, name: str) -> ArraySpec:
        for text in self._record[_NUM_OWN:]:
            known, dtype, *shape = text.split()
            if known == name:
                return ArraySpec(_dtype(dtype), tuple(map(int, shape)))
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        return (text.partition(" ")[0] for text in self._record[_NUM_OWN:])

    def __len__(self) -> int:
        """How many arrays there are."""
        return len(self._record) - _NUM_OWN


@lru_cache(maxsize=1 << 10)
def _record(name: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> str:
    return " ".join([name, dtype.str, *map(str, shape)])


@lru_cache(maxsize=64)
def _dtype(text: str) -> np.dtype[Any]:
    return np.dtype(text)


_RECALL: ContextVar[Recall | None] = ContextVar("recall", default=None)


@contextlib.contextmanager
def recalling(recall: Recall) -> Iterator[None]:
    """Inside the block, `recalled` gives the entries of `recall`, one after the other."""
    token = _RECALL.set(recall)
    try:
        yield
    finally:
        _RECALL.reset(token)


def recalled() -> Arrays | None:
    """The arrays of the entry that is asked for now, or None where the context does not know of it."""
    recall = _RECALL.get()
    return None if recall is None else recall.take()
