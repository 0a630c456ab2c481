"""Locations of datasets' samples in mapped files and in objects, for the kernel that gathers batches.

Shapes: B samples of a batch, K datasets, M ranges of bytes.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import Condition, Lock, get_ident
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from trackbed.datasets.low_level import is_plain, trained_tokens
from trackbed.files import MAPS, Stamp, expect_random_reads, join_names, read_stamps
from trackbed.kernels import Extent, FetchedBytes, SampleSources, Sentences, Visits
from trackbed.tokens import DType, IndexedDataset, IndexedGroup, MappedSource
from trackbed.tokens.read_headers import fetch_copies
from trackbed.tokens.stored.source import StoredSource, fetch_ranges

_CHECK_SECONDS: Final = 0.05
"""Seconds between two checks of the sizes of mapped files."""


class Stretches(NamedTuple):
    """Layout of consecutive samples, one stretch of tokens each."""

    num_samples: int
    origin_byte: int
    """Byte at which the first sample begins, counted over all files of the dataset."""


class PackedDocuments(NamedTuple):
    """Layout of packs, whose pieces of documents are found on each access."""

    num_samples: int


SampleLayout = Visits | Stretches | Sentences | PackedDocuments
"""The layout of a dataset's samples in its files."""


class FileBacked(Protocol):
    """A dataset whose samples may be cut from files."""

    @property
    def dataset(self) -> Any:
        """Low-level dataset that the samples are cut from."""

    def layout(self) -> SampleLayout | None:
        """Returns the layout of its samples in its files; None if reading them needs Python."""


class _TableEntry:
    """A dataset in the tables; its maps are released together."""

    def __init__(self, sources: "Sources", number: int, first_file: int, num_files: int) -> None:
        self._sources = sources
        self.number = number
        self.first_file = first_file
        self.num_files = num_files

    def release(self) -> bool:
        """Removes its arrays from the tables, unless a call reads them. Returns True if they are removed."""
        return self._sources.release(self)


class Sources:
    """Files of K datasets, each mapped when a sample of it is first read.

    Args:
        members: `[K]` datasets.
    """

    def __init__(self, members: Sequence[FileBacked]) -> None:
        self.table = SampleSources(len(members))
        self._members = members
        self._pairs: list[IndexedDataset] = []
        self._owners: list[_TableEntry] = []
        """The dataset that each file belongs to."""
        self._placed: dict[int, _TableEntry] = {}
        self._packed: set[int] = set()
        """Files of packs, whose trained tokens matter."""
        self._readable: set[int] = set()
        """Datasets that the kernel may read: the indices of others may have been released."""
        self._needs_python: set[int] = set()
        """Datasets whose samples are read in Python."""
        self._lock = TableLock()
        self._watch = _SizeWatch()

    def begin_reading(self, datasets: npt.NDArray[np.int32]) -> bool:
        """Prevents changes of the tables until `end_reading`. Returns True if all samples can be cut from files.

        Args:
            datasets: `[B]` datasets that samples are drawn from.
        """
        numbers = set(datasets.tolist())
        while True:
            # Before the lock is taken: the check may raise, and then the caller has nothing to release. A file that is
            # truncated after the check kills the process, so the sizes are looked at every 50 ms and not once.
            self._watch.check()
            self._lock.begin_reading()
            if numbers <= self._readable:
                if MAPS.is_tight:
                    self._note_use(numbers)
                return True
            if not numbers.isdisjoint(self._needs_python):
                return False
            # The tables change only while no kernel reads them, so the reader gives up its turn and begins anew: in
            # between, another thread may have placed the same datasets, or released them.
            self._lock.end_reading()
            with self._lock.writing():
                for number in numbers - self._needs_python:
                    self._place(number)

    def end_reading(self) -> None:
        """Allows changes of the tables again, if this thread prevents them."""
        self._lock.end_reading()

    def _note_use(self, numbers: set[int]) -> None:
        for number in numbers:
            MAPS.use(self._placed[number])

    def _place(self, number: int) -> None:
        if number in self._readable:
            return
        placed = self._placed.get(number)
        if not 0 <= number < len(self._members):  # a damaged index of a blend: `__getitem__` raises the error
            self._needs_python.add(number)
            return
        pairs = _pairs_of(self._members[number].dataset)
        layout = self._members[number].layout() if pairs else None
        if layout is None:
            self._needs_python.add(number)
            return
        if placed is None:
            first_file = self.table.add_files(_extents(pairs))
            placed = self._placed[number] = _TableEntry(self, number, first_file, len(pairs))
            self._pairs += pairs
            if isinstance(layout, PackedDocuments):
                self._packed.update(range(first_file, first_file + len(pairs)))
            self._owners += [placed] * len(pairs)
        files = {
            "first_file": placed.first_file,
            "num_files": placed.num_files,
            "dtype": DType.code_from_dtype(pairs[0].index.dtype),
        }
        if isinstance(layout, PackedDocuments):
            self.table.place_stretches(number, **files, num_samples=layout.num_samples, origin_byte=0)
        elif isinstance(layout, Stretches):
            self.table.place_stretches(number, **files, **layout._asdict())
        elif isinstance(layout, Sentences):
            self.table.place_sentences(number, **files, sentences=layout)
        else:
            self.table.place_visits(number, **files, visits=layout)
        self._readable.add(number)
        MAPS.use(placed)

    def map_files(self, numbers: Sequence[int]) -> None:
        """Maps files by their numbers; of objects, and of files whose map is refused, the index alone."""
        fetch_copies(self._pairs[number].index for number in set(numbers))  # first, as it takes long
        with self._lock.writing():
            for number in set(numbers):
                source, index = self._pairs[number].bin_reader, self._pairs[number].index
                if self.table.files[number] is not None:
                    continue
                tokens = source.data if isinstance(source, MappedSource) else None
                size_bytes = None if isinstance(source, MappedSource) else self._pairs[number].bin_stamp.size_bytes
                lengths, pointers = index.sequence_lengths, index.sequence_pointers
                self.table.map_file(number, tokens=tokens, lengths=lengths, pointers=pointers, size_bytes=size_bytes)
                trained = trained_tokens(self._pairs[number]) if number in self._packed else None
                beside = []
                if trained is not None:
                    self.table.set_trained(number, trained.firsts, trained.runs)
                    beside = [] if trained.source is None else [trained.source]
                if isinstance(source, MappedSource) and isinstance(index.ends.stamp, Stamp):
                    mapped = [source, MappedSource(index.mapped, index.path, index.ends.stamp), *beside]
                    self._watch.add(number, *mapped)
                    if number in self._packed:  # whose documents lie anywhere
                        for one in mapped:
                            expect_random_reads(one.data)
                MAPS.use(self._owners[number])

    def fetch(self, ranges: npt.NDArray[np.int64]) -> FetchedBytes:
        """Fetches bytes of objects, all in flight together, and reads those of files that are not mapped.

        Args:
            ranges: `[M, 3]` number of the file, first byte and the one after the last; as `join_ranges` returns them.

        Raises:
            StoreError: an object was replaced, or the store does not give it.
        """
        readers = {number: self._pairs[number].bin_reader for number in np.unique(ranges[:, 0]).tolist()}
        objects = {number: reader for number, reader in readers.items() if isinstance(reader, StoredSource)}
        is_stored = np.isin(ranges[:, 0], list(objects))
        places = np.searchsorted(list(objects), ranges[is_stored, 0])
        found = fetch_ranges(list(objects.values()), np.column_stack((places, ranges[is_stored, 1:])))
        numbers = list(objects)
        pieces = [(numbers[one.number], one.start, one.content) for one in found]
        for number, start, stop in ranges[~is_stored].tolist():  # files whose maps the system has refused
            pieces.append((number, start, readers[number].read(np.uint8, stop - start, start)))
        return FetchedBytes(pieces)

    def release(self, placed: _TableEntry) -> bool:
        """Removes a dataset's arrays from the tables, unless a call reads them. Returns True if they are removed."""
        # Never waits. The caller holds the lock of `MAPS`, which a reader takes while it holds this one (`_note_use`):
        # if both waited for the other's lock, neither would go on.
        if not self._lock.try_writing():
            return False
        try:
            for number in range(placed.first_file, placed.first_file + placed.num_files):
                self.table.unmap_file(number)
                self._watch.remove(number)
            if self.table.remove_index(placed.number):
                self._readable.discard(placed.number)
        finally:
            self._lock.end_writing()
        return True


class _SizeWatch:
    """Periodic check that no mapped file was truncated: reading beyond its end would kill the process.

    One call without the GIL checks all files.
    """

    def __init__(self) -> None:
        self._sources: dict[int, tuple[MappedSource, ...]] = {}
        self._num_changes = 0
        self._watched: _Watched | None = None
        self._checked = time.monotonic()

    def add(self, number: int, *sources: MappedSource) -> None:
        """Adds the files of a pair, which the next call of `check` includes."""
        self._sources[number] = sources
        self._num_changes += 1
        self._checked = -1.0

    def remove(self, number: int) -> None:
        """Removes the files of a pair."""
        if self._sources.pop(number, None) is not None:
            self._num_changes += 1

    def check(self) -> None:
        """Checks all files, unless the last check was less than 50 ms ago."""
        now = time.monotonic()
        if now - self._checked < _CHECK_SECONDS or not self._sources:
            return
        # Without a lock: other threads may add files meanwhile, which the next check finds by the number of changes.
        num_changes, watched = self._num_changes, self._watched
        if watched is None or watched.num_changes != num_changes:
            sources = [source for pair in list(self._sources.values()) for source in pair]
            paths = [str(source.path) for source in sources]
            sizes = np.array([len(source.data) for source in sources])
            watched = self._watched = _Watched(num_changes, sources, paths, join_names(paths), sizes)
        found = read_stamps(watched.paths, joined=watched.joined)
        for number in np.flatnonzero(found[:, 1] < watched.sizes).tolist():
            stamp = Stamp(*found[number].tolist())
            watched.sources[number].check_size(stamp if stamp.size_bytes >= 0 else None)
        self._checked = now  # last: a file that was truncated is found again by the next call


class _Watched(NamedTuple):
    """Files of one check."""

    num_changes: int
    """Number of changes before it."""
    sources: list[MappedSource]
    paths: list[str]
    joined: bytes
    """The paths joined."""
    sizes: npt.NDArray[np.int64]
    """Mapped bytes of each."""


def _pairs_of(dataset: Any) -> list[IndexedDataset]:
    """Returns the pairs of a dataset if they are mapped or stored, and contain integers, else none."""
    # A subclass may override how it reads.
    pairs = [dataset] if is_plain(dataset) else []
    pairs = list(dataset.members) if type(dataset) is IndexedGroup else pairs
    is_cut = all(is_plain(pair) and (pair.mmap or pair.is_stored) and not pair.multimodal for pair in pairs)
    return pairs if is_cut and pairs and np.dtype(pairs[0].index.dtype).kind in "iu" else []


def _extents(pairs: Sequence[IndexedDataset]) -> list[Extent]:
    """Returns the extents of consecutive files. A single pair may be read to the end of its file."""
    size = pairs[0].index.dtype_size
    extents, sequences, first_byte = [], 0, 0
    for pair in pairs:
        whole = pair.index.data_bytes // size * size if len(pairs) > 1 else int(pair.identity["bin_bytes"])
        extents.append(Extent(len(pair), sequences, first_byte, whole))
        sequences += len(pair)
        first_byte += whole
    return extents


class TableLock:
    """Readers-writer lock for tables that kernels read without the GIL. A reader must not acquire it again."""

    def __init__(self) -> None:
        self._mutex = Lock()
        self._changed = Condition(self._mutex)
        self._readers: set[int] = set()
        """Ids of the threads that read."""
        self._waiting = 0
        self._writer = 0
        """Id of the thread that writes; 0 for none."""
        self._depth = 0

    def begin_reading(self) -> None:
        """Acquires the lock for reading, until `end_reading`. Waits for a writer."""
        # Ctrl-C between `try_writing` and `end_writing` leaves this thread as the writer, which no other thread may
        # change: it would wait here for itself.
        me = get_ident()
        with self._mutex:
            if self._writer == me:
                self._writer = self._depth = 0
            while self._writer:
                self._wait()
            self._readers.add(me)

    def end_reading(self) -> None:
        """Releases the lock for reading, if this thread holds it."""
        with self._mutex:
            self._readers.discard(get_ident())
            self._notify()

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Holds the lock for writing inside the block. Waits for readers and for another writer."""
        me = get_ident()
        try:
            with self._mutex:
                # As above: a reader that was interrupted before `end_reading` would wait for itself below.
                self._readers.discard(me)
                while self._readers or self._writer not in (0, me):
                    self._wait()
                self._writer, self._depth = me, 1
            yield
        finally:
            # Ctrl-C may also arrive while this thread still waits: then another thread may be the writer.
            if self._writer == me:
                self.end_writing()

    def try_writing(self) -> bool:
        """Acquires the lock for writing, until `end_writing`, without waiting. Returns True if it was acquired.

        A thread that holds the lock for writing may acquire it again.
        """
        me = get_ident()
        with self._mutex:
            if self._readers or self._writer not in (0, me):
                return False
            self._writer = me
            self._depth += 1
            return True

    def end_writing(self) -> None:
        """Releases the lock for writing."""
        with self._mutex:
            self._depth -= 1
            if self._depth <= 0:
                self._writer = self._depth = 0
                self._notify()

    def _wait(self) -> None:
        self._waiting += 1
        try:
            self._changed.wait()
        finally:
            self._waiting -= 1

    def _notify(self) -> None:
        # Nobody waits in nearly all batches, and then `notify_all` would cost more than the lock. The count is read
        # under the mutex, under which threads begin to wait, so that none is missed.
        if self._waiting:
            self._changed.notify_all()
