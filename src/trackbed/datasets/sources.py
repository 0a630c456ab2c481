"""Where the samples of datasets lie in mapped files, for the kernel that makes batches.

Shapes: B samples of a batch, K datasets.
"""

import time
from collections.abc import Sequence
from threading import Lock
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from trackbed.kernels import Extent, SampleSources, Visits
from trackbed.tokens import DType, IndexedDataset, IndexedGroup, MappedSource

__all__ = ["Cut", "Layout", "Sources", "Stretches"]

_LOOK_SECONDS: Final = 0.05


class Stretches(NamedTuple):
    """Samples that stand one after the other."""

    num_samples: int
    origin_byte: int
    """Where the first one begins, over all files of the dataset."""


Layout = Visits | Stretches


class Cut(Protocol):
    """A dataset whose samples may be cut from files."""

    @property
    def dataset(self) -> Any:
        """What its samples are made of."""

    def layout(self) -> Layout | None:
        """How its samples lie in its files; None where they take Python."""


class Sources:
    """The files of some datasets, each mapped when a sample of it is first wanted.

    Args:
        members: `[K]` the datasets.
    """

    def __init__(self, members: Sequence[Cut]) -> None:
        self.table = SampleSources(len(members))
        self._members = members
        self._pairs: list[IndexedDataset] = []
        self._mapped: list[MappedSource] = []
        self._cut: set[int] = set()
        self._others: set[int] = set()
        self._looked = time.monotonic()
        self._lock = Lock()

    def place(self, datasets: npt.NDArray[np.int32]) -> bool:
        """Take note of the datasets that `[B]` samples are drawn from; whether all of them are cut from files."""
        wanted = set(datasets.tolist())
        if wanted <= self._cut:
            return True
        with self._lock:
            for number in wanted - self._cut - self._others:
                (self._cut if self._place(number) else self._others).add(number)
        return wanted <= self._cut

    def _place(self, number: int) -> bool:
        pairs = _pairs_of(self._members[number].dataset)
        layout = self._members[number].layout() if pairs else None
        if layout is None:
            return False
        files = {
            "first_file": self.table.add_files(_extents(pairs)),
            "num_files": len(pairs),
            "dtype": DType.code_from_dtype(pairs[0].index.dtype),
        }
        self._pairs += pairs
        if isinstance(layout, Stretches):
            self.table.place_stretches(number, **files, **layout._asdict())
        else:
            self.table.place_visits(number, **files, visits=layout)
        return True

    def map_files(self, numbers: Sequence[int]) -> None:
        """Map some files.

        Raises:
            FormatError: another file has taken its place since it was opened.
        """
        with self._lock:
            for number in set(numbers):
                source = self._pairs[number].bin_reader
                if isinstance(source, MappedSource) and self.table.files[number] is None:
                    index = self._pairs[number].index
                    self.table.map_file(
                        number, tokens=source.data, lengths=index.sequence_lengths, pointers=index.sequence_pointers
                    )
                    self._mapped.append(source)
                    source.check_size()

    def look_at_sizes(self) -> None:
        """See every now and then that no file was cut short: to read beyond its end would end the process.

        Raises:
            FormatError: one was.
        """
        now = time.monotonic()
        if now - self._looked >= _LOOK_SECONDS:
            self._looked = now
            for source in self._mapped:
                source.check_size()


def _pairs_of(dataset: Any) -> list[IndexedDataset]:
    """The pairs of a dataset, if they are mapped and hold integers; else none."""
    # A subclass may read in its own way.
    pairs = [dataset] if type(dataset) is IndexedDataset else []
    pairs = list(dataset.members) if type(dataset) is IndexedGroup else pairs
    is_cut = all(type(pair) is IndexedDataset and pair.mmap and not pair.multimodal for pair in pairs)
    return pairs if is_cut and pairs and np.dtype(pairs[0].index.dtype).kind in "iu" else []


def _extents(pairs: Sequence[IndexedDataset]) -> list[Extent]:
    """What is known of files that follow each other: a pair of its own may be read to its end, as it always was."""
    size = pairs[0].index.dtype_size
    extents, sequences, first_byte = [], 0, 0
    for pair in pairs:
        whole = pair.index.data_bytes // size * size if len(pairs) > 1 else int(pair.identity["bin_bytes"])
        extents.append(Extent(len(pair), sequences, first_byte, whole))
        sequences += len(pair)
        first_byte += whole
    return extents
