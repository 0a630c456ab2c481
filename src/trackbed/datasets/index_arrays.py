"""Index arrays as attributes of a dataset: they may be opened late, released and mapped again, or replaced."""

from collections.abc import Callable
from typing import Any, Final

import numpy.typing as npt

from trackbed.cache import Allocate, Arrays, LazyArrays, Request, in_memory
from trackbed.datasets.config import BlendedMegatronDatasetConfig
from trackbed.datasets.start import open_index

_DEFERRED: Final = (
    "build it once without defer_npy_index_mmap, and see that path_to_cache leads to the same folder in every process"
)
_COPIED: Final = (
    "a copy of a dataset in another process builds nothing: see that path_to_cache leads to the same folder in every "
    "process, and that nothing is removed from it while the job runs"
)


class IndexArrays:
    """The arrays of an index by name, each None until the index is opened.

    A copy in another process opens an index of the cache again.

    Args:
        names: names of the arrays; none in an order without an index.
    """

    def __init__(self, *names: str) -> None:
        self.names = names
        self.arrays: Arrays | None = None
        """The arrays that were opened or built; None before."""
        self._replaced: dict[str, Any] = {}

    @property
    def is_missing(self) -> bool:
        """True if the index must be opened before a sample is read."""
        return self.arrays is None and any(name not in self._replaced for name in self.names)

    def __getitem__(self, name: str) -> Any:
        """One of the arrays, mapped when it is first read; None before the index is opened."""
        if name in self._replaced:
            return self._replaced[name]
        return None if self.arrays is None else self.arrays[name]

    def __setitem__(self, name: str, array: npt.NDArray[Any] | None) -> None:
        """Replaces one of the arrays, also in copies; None drops the replacement, and has the index opened again."""
        if array is None:
            self._replaced.pop(name, None)
            self.arrays = None
        else:
            self._replaced[name] = array

    def replacement(self, name: str) -> Any:
        """The array that has replaced one of the index; None if none has."""
        return self._replaced.get(name)

    def several(self) -> list[Any]:
        """All arrays, in the order of their names."""
        if isinstance(self.arrays, LazyArrays) and not self._replaced:
            return self.arrays.several(self.names)
        return [self[name] for name in self.names]

    def open(self, request: Request | None, build: Callable[[Allocate], Arrays]) -> None:
        """Opens the index, and builds it first where it is missing.

        Args:
            request: the request for it; None if it is kept in memory.
            build: builds it in memory.
        """
        self.arrays = build(in_memory) if request is None else open_index(request)

    def open_late(
        self, request: Request | None, build: Callable[[Allocate], Arrays], config: BlendedMegatronDatasetConfig
    ) -> None:
        """Opens the index at the first sample, in this process or in a copy in another one.

        Args:
            request: the request for it; None if it is kept in memory.
            build: builds it in memory.
            config: configuration of the dataset: with `defer_npy_index_mmap` nothing was opened before.
        """
        advice = _DEFERRED if config.defer_npy_index_mmap else _COPIED
        self.arrays = build(in_memory) if request is None else open_index(request, advice=advice)

    def __getstate__(self) -> dict[str, Any]:
        """Arrays of the cache are left out."""
        arrays = None if isinstance(self.arrays, LazyArrays) else self.arrays
        return {"names": self.names, "arrays": arrays, "_replaced": self._replaced.copy()}


NO_INDEX: Final = IndexArrays()
"""The arrays of an order without an index."""


class IndexArray:
    """Attribute of a dataset for one of its index arrays, which has the attribute's name."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, dataset: Any, owner: type | None = None) -> Any:
        """The array; None before the index is opened."""
        return self if dataset is None else self._index_of(dataset)[self._name]

    def __set__(self, dataset: Any, array: npt.NDArray[Any] | None) -> None:
        """Replaces the array."""
        self._index_of(dataset)[self._name] = array
        dataset.reset_readers()

    def _index_of(self, dataset: Any) -> IndexArrays:
        index: IndexArrays = dataset._index  # noqa: SLF001  its owner
        if self._name not in index.names:
            raise AttributeError(
                f"{self._name} needs order='megatron' or 'balanced', found 'instant', which has no index"
            )
        return index
