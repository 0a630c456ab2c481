"""The samples of a dataset in one order: their interface, and the index arrays that define them.

Shapes: B positions, R samples, S tokens of a sample, X 1 if a sample has an extra token, else 0.
"""

from collections.abc import Callable
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from trackbed.cache import Allocate, Arrays, LazyArrays, Request, in_memory
from trackbed.datasets.batches.sources import SampleLayout
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


SampleLocations = tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]
"""`[B]` dataset of each sample, and `[B]` its number in that dataset."""


class SamplePieces(NamedTuple):
    """The pieces of a sample in order, as columns: documents, and half-open ranges of their tokens."""

    documents: list[int]
    starts: list[int]
    stops: list[int]


class Samples(Protocol):
    """The samples of one dataset in one order."""

    @property
    def index(self) -> IndexArrays:
        """The index that defines the samples; it has no arrays if the order needs none."""
        ...

    def __len__(self) -> int:
        """R, samples in the order: at least as many as were requested."""
        ...

    def can_give(self, num_samples: int) -> bool:
        """True if there are at least `num_samples` samples. Does not need an index that is not built yet."""
        ...

    @property
    def samples_per_epoch(self) -> int:
        """Number of samples in one epoch of the split."""
        ...

    def decisions(self) -> dict[str, Any]:
        """Returns everything that decides the samples, besides the files."""
        ...

    def checksum(self) -> str:
        """Returns the CRC-32 of the split's document lengths. May read them."""
        ...

    def layout(self) -> SampleLayout:
        """Returns the layout of the samples in their files, for the kernel that gathers batches."""
        ...

    def locate(self, positions: npt.NDArray[np.int64]) -> SampleLocations:
        """Returns dataset 0 and the number in `layout` of the sample at each of `[B]` positions in `[-R, R)`.

        Raises:
            IndexError: a position is out of range; the kernel raises it for layouts of visits.
        """
        ...

    def pieces(self, position: int) -> SamplePieces:
        """Returns the pieces of the sample at a position in `[-R, R)`, empty documents included.

        Raises:
            IndexError: the position is out of range.
            CacheError: an index is damaged.
        """
        ...

    def read(self, position: int, *, padding: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Returns `[S + X]` tokens of the sample at a position, padded if short, and the documents of its pieces.

        Raises:
            IndexError: the position is out of range.
            CacheError: an index is damaged.
            FormatError: the files are shorter than their index says.
        """
        ...
