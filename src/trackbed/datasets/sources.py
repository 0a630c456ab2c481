"""Where the samples of datasets lie in mapped files, for the kernel that makes batches.

Shapes: B samples of a batch, K datasets.
"""

import time
from collections.abc import Sequence
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from trackbed.datasets.table_lock import TableLock
from trackbed.files import MAPS, Stamp, join_names, read_stamps
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


class _Placed:
    """A dataset that was placed: what it has mapped is released together."""

    def __init__(self, sources: "Sources", number: int, first_file: int, num_files: int) -> None:
        self._sources = sources
        self.number = number
        self.first_file = first_file
        self.num_files = num_files

    def release(self) -> bool:
        """Take its arrays out of the tables, unless a call reads them. True if they are out."""
        return self._sources.release(self)


class Sources:
    """The files of some datasets, each mapped when a sample of it is first wanted.

    Args:
        members: `[K]` the datasets.
    """

    def __init__(self, members: Sequence[Cut]) -> None:
        self.table = SampleSources(len(members))
        self._members = members
        self._pairs: list[IndexedDataset] = []
        self._owners: list[_Placed] = []
        """The dataset that each file belongs to."""
        self._placed: dict[int, _Placed] = {}
        self._whole: set[int] = set()
        """Datasets that the kernel may read: visits of others may have been released."""
        self._others: set[int] = set()
        """Datasets whose samples take Python."""
        self._lock = TableLock()
        self._watch = _SizeWatch()

    def begin_reading(self, datasets: npt.NDArray[np.int32]) -> bool:
        """Keep the tables as they are until `end_reading`. Returns whether all samples can be cut from files.

        Args:
            datasets: `[B]` datasets that samples are drawn from.

        Raises:
            FormatError: a file was cut short since it was mapped. Then nothing has begun.
        """
        wanted = set(datasets.tolist())
        while True:
            self._watch.look()
            self._lock.begin_reading()
            if wanted <= self._whole:
                if MAPS.is_tight:
                    self._note_use(wanted)
                return True
            if not wanted.isdisjoint(self._others):
                return False
            self._lock.end_reading()
            with self._lock.writing():
                for number in wanted - self._others:
                    self._place(number)

    def end_reading(self) -> None:
        """Let the tables change again, if this thread keeps them."""
        self._lock.end_reading()

    def _note_use(self, numbers: set[int]) -> None:
        for number in numbers:
            MAPS.use(self._placed[number])

    def _place(self, number: int) -> None:
        if number in self._whole:
            return
        placed = self._placed.get(number)
        if not 0 <= number < len(self._members):  # a damaged index of a blend: asking for the sample says so
            self._others.add(number)
            return
        pairs = _pairs_of(self._members[number].dataset)
        layout = self._members[number].layout() if pairs else None
        if layout is None:
            self._others.add(number)
            return
        if placed is None:
            first_file = self.table.add_files(_extents(pairs))
            placed = self._placed[number] = _Placed(self, number, first_file, len(pairs))
            self._pairs += pairs
            self._owners += [placed] * len(pairs)
        files = {
            "first_file": placed.first_file,
            "num_files": placed.num_files,
            "dtype": DType.code_from_dtype(pairs[0].index.dtype),
        }
        if isinstance(layout, Stretches):
            self.table.place_stretches(number, **files, **layout._asdict())
        else:
            self.table.place_visits(number, **files, visits=layout)
        self._whole.add(number)
        MAPS.use(placed)

    def map_files(self, numbers: Sequence[int]) -> None:
        """Map some files.

        Raises:
            FormatError: another file has taken its place since it was opened.
        """
        with self._lock.writing():
            for number in set(numbers):
                source = self._pairs[number].bin_reader
                if isinstance(source, MappedSource) and self.table.files[number] is None:
                    index = self._pairs[number].index
                    self.table.map_file(
                        number, tokens=source.data, lengths=index.sequence_lengths, pointers=index.sequence_pointers
                    )
                    self._watch.add(number, source)
                    MAPS.use(self._owners[number])

    def release(self, placed: _Placed) -> bool:
        """Take the arrays of a dataset out of the tables, unless a call reads them. True if they are out."""
        if not self._lock.try_writing():
            return False
        try:
            for number in range(placed.first_file, placed.first_file + placed.num_files):
                self.table.unmap_file(number)
                self._watch.remove(number)
            if placed.number in self.table.visits:
                self.table.remove_visits(placed.number)
                self._whole.discard(placed.number)
        finally:
            self._lock.end_writing()
        return True


class _SizeWatch:
    """Sees every now and then that no mapped file was cut short: to read beyond its end would end the process.

    One call without Python's lock looks at all of them.
    """

    def __init__(self) -> None:
        self._sources: dict[int, MappedSource] = {}
        self._watched: tuple[list[MappedSource], list[str], bytes, npt.NDArray[np.int64]] | None = None
        """The files, their names, and the bytes of each that are mapped."""
        self._looked = time.monotonic()

    def add(self, number: int, source: MappedSource) -> None:
        """Watch a file from now on, which is looked at soon."""
        self._sources[number] = source
        self._watched = None
        self._looked = -1.0

    def remove(self, number: int) -> None:
        """Watch a file no longer."""
        if self._sources.pop(number, None) is not None:
            self._watched = None

    def look(self) -> None:
        """Look at all files, if none was looked at in the last 50 ms.

        Raises:
            FormatError: one was cut short.
        """
        now = time.monotonic()
        if now - self._looked < _LOOK_SECONDS or not self._sources:
            return
        self._looked = now
        if self._watched is None:
            sources = list(self._sources.values())
            paths = [str(source.path) for source in sources]
            self._watched = sources, paths, join_names(paths), np.array([len(source.data) for source in sources])
        sources, paths, joined, sizes = self._watched
        found = read_stamps(paths, joined=joined)
        for number in np.flatnonzero(found[:, 1] < sizes).tolist():
            stamp = Stamp(*found[number].tolist())
            sources[number].check_size(stamp if stamp.size_bytes >= 0 else None)


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
