"""Entries that are as a start left them: the next one takes them as they were, and looks at none.

Dataset constructors have a fixed signature, which third parties extend; a context is how the one who calls them says
what he knows of the entries that they will ask for.
"""

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from functools import lru_cache
from typing import Any

import numpy as np

from trackbed.cache.entry import ArraySpec, Place
from trackbed.cache.opened import Arrays, OpenedArrays
from trackbed.cache.sighting import Sighting

__all__ = ["Recall", "recalled", "recalling", "record_of"]


def record_of(sighting: Sighting, folder: str) -> list[Any]:
    """What was seen of an entry of the cache in `folder`, as JSON values."""
    specs = [_record(name, spec.dtype, spec.shape) for name, spec in sighting.specs.items()]
    return [sighting.place.directory.removeprefix(folder), sighting.place.stem, specs, sighting.data_crc32]


class Recall:
    """Entries in the order in which they will be asked for.

    Args:
        folder: of the cache.
        records: what `record_of` gave. Whoever recalls them vouches that the files have not changed.
    """

    def __init__(self, folder: str, records: Sequence[Sequence[Any]]) -> None:
        self._folder = folder
        self._records = records
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
        directory, stem, arrays, data_crc32 = self._records[self._taken - 1]
        specs = {name: ArraySpec(_dtype(dtype), tuple(shape)) for name, dtype, shape in arrays}
        return OpenedArrays(Place(f"{self._folder}{directory}", stem, ""), specs, data_crc32=data_crc32)


@lru_cache(maxsize=1 << 10)
def _record(name: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> tuple[str, str, tuple[int, ...]]:
    return name, dtype.str, shape


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
