"""Batches of a dataset's samples: gathered by one kernel call if the samples can be cut from mapped files.

Shapes: B samples of a batch, K datasets of a blend, S tokens of a sample.
"""

import os
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.utils.data

from trackbed.datasets.batches.batch import Batch, BatchSpec
from trackbed.datasets.batches.context import WHOLE, Context, slice_rows
from trackbed.datasets.batches.sources import FileBacked, Sources
from trackbed.datasets.samples import IndexArrays, SampleLocations
from trackbed.errors import ArgumentError, FormatError
from trackbed.kernels import FetchedBytes, Gathered, SampleSources
from trackbed.tokens.stored.budget import BUDGET
from trackbed.tokens.stored.source import join_ranges

Ranges = npt.NDArray[np.int64]
"""`[M, 3]` number of the file, first byte and the one after the last."""

Indices = Sequence[int] | npt.NDArray[np.integer[Any]] | torch.Tensor
_MOST_ROUNDS: Final = 8
"""Most attempts to map the files of a batch: other threads may release them again when maps are scarce."""
_NOTHING: Final = FetchedBytes()
_HIGHEST: Final = int(np.iinfo(np.int64).max)


_OF_BORDERS: Final = ("cu_seqlens", "cu_seqlens_padded", "cu_trained_tokens")


class ReadsBatches(ABC):
    """Base of datasets whose samples can be gathered in batches."""

    @abstractmethod
    def __getitem__(self, idx: int) -> dict[str, Any]:
        """Returns one sample."""

    @abstractmethod
    def __len__(self) -> int:
        """Number of samples."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Iterates over all samples in order. An error of a sample propagates, an IndexError included."""
        for position in range(len(self)):
            yield self[position]

    @property
    def index_paths(self) -> list[str]:
        """Paths of the index files; empty without an index, or with one in memory."""
        arrays = self._index.arrays
        path_of = getattr(arrays, "path_of", None)
        return [] if arrays is None or path_of is None else [path for path in map(path_of, arrays) if "/" in path]

    @property
    @abstractmethod
    def _index(self) -> IndexArrays:
        """The index that defines the samples."""

    @staticmethod
    def reset_readers() -> None:
        """Has all readers of this process read layouts anew, as index arrays were replaced."""
        _reset_all()

    @abstractmethod
    def _batch_reader(self) -> "BatchReader | None":
        """Returns the reader of this dataset; None if each sample must be read by `__getitem__`."""

    @abstractmethod
    def _draw(self, positions: npt.NDArray[np.int64]) -> SampleLocations:
        """Returns dataset and sample at each of `[B]` positions."""

    def missing_ranges(self, indices: Indices) -> Ranges | None:
        """Returns the bytes of objects that samples need, for `fetch`; None if samples are read one by one.

        Args:
            indices: `[B]` positions as `__getitem__` takes them.

        Returns:
            `[M, 3]` number of the file, first byte and the one after the last.

        Raises:
            IndexError: a position is out of range.
            StoreError: an object was replaced, or a store does not answer in time.
        """
        reader = self._batch_reader()
        return None if reader is None else reader.missing_ranges(self._draw(_positions(indices)))

    def fetch(self, ranges: Ranges) -> FetchedBytes:
        """Fetches bytes of objects, all in flight together, for `gather`.

        Args:
            ranges: `[M, 3]` from `missing_ranges`.

        Raises:
            StoreError: an object was replaced, or a store does not answer in time.
        """
        reader = self._batch_reader()
        return FetchedBytes() if reader is None else reader.fetch(ranges)

    def gather(
        self,
        indices: Indices,
        out: Batch | None = None,
        *,
        num_threads: int | None = None,
        fetched: FetchedBytes | None = None,
        context: Context = WHOLE,
    ) -> Batch:
        """Returns the samples at these positions, stacked.

        One kernel call cuts them from the mapped files, on several threads, without the GIL. Samples that need Python
        are read one by one: samples of a subclass that overrides `__getitem__` or
        `_query_document_sample_shuffle_indices`, of files that are not mapped, and of other low-level datasets.

        Args:
            indices: `[B]` positions as `__getitem__` takes them.
            out: batch to overwrite and return, from any dataset with equal keys, shapes and dtypes; None for a new one.
            num_threads: at least 1; None for the number of cores that the process may run on.
            fetched: bytes of objects that were fetched before; others are fetched.
            context: rank among those that share each sample, whose part is returned; in the order "packed" alone.

        Returns:
            `[B, ...]` tensors by the keys of a sample.

        Raises:
            IndexError: a position is out of range.
            ArgumentError: an argument is out of range, or `out` does not fit.
            CacheError: an index is damaged.
            FormatError: the files are shorter than their index says, or were truncated after they were mapped, which is
                checked every 50 ms.
        """
        if out is not None and not isinstance(out, Batch):
            raise ArgumentError(
                f"out must be a Batch, as gather and empty_batch return it, found a {type(out).__name__}"
            )
        positions = _positions(indices)
        reader = self._reader_in(context)
        found = None
        if reader is not None:
            found = reader.gather(self._draw(positions), out, num_threads=num_threads, fetched=fetched)
        if found is not None:
            return found
        if context == WHOLE:
            return _stacked(self, positions, out)
        whole = _stacked(self, positions, None)
        return Batch(slice_rows(whole, whole["cu_seqlens_padded"], context))

    def _reader_in(self, context: Context) -> "BatchReader | None":
        """Returns the reader of a rank's part of the samples."""
        reader = self._batch_reader()
        return reader if reader is None or context == WHOLE else reader.in_context(context)

    def empty_batch(self, size: int, *, pinned: bool = False, context: Context = WHOLE) -> Batch | None:
        """Allocates a batch to be passed as `out`. Returns None if samples are read one by one.

        Args:
            size: B, at least 0.
            pinned: True for page-locked memory, from which copies to a GPU are asynchronous.
            context: as in `gather`.
        """
        if size < 0:
            raise ArgumentError(f"size must be at least 0, found {size}")
        reader = self._reader_in(context)
        return None if reader is None else reader.empty_batch(size, pinned=pinned)

    def __getitems__(self, indices: Indices) -> list[dict[str, Any]]:
        """Returns the samples at these positions, as views of one batch if possible. Called by torch's DataLoader."""
        positions = _positions(indices)
        reader = self._batch_reader()
        if reader is not None:
            # Worker processes share the cores.
            num_threads = None if torch.utils.data.get_worker_info() is None else 1
            found = reader.gather(self._draw(positions), None, num_threads=num_threads)
            if found is not None:
                return found.samples()
        return [self[position] for position in positions.tolist()]


def check_split(dataset: object) -> None:
    """Raises an `ArgumentError` for anything else than the dataset of a split."""
    if not isinstance(dataset, ReadsBatches):
        raise ArgumentError(f"dataset must be that of a split, such as splits.train, found a {type(dataset).__name__}")


class GatherKernel(Protocol):
    """A kernel with what all batches of one configuration have in common."""

    def __call__(
        self,
        sources: SampleSources,
        datasets: npt.NDArray[np.int32],
        positions: npt.NDArray[np.int64],
        batch: Any,
        *,
        fetched: FetchedBytes,
        num_threads: int | None,
    ) -> Gathered:
        """Fills a batch.

        Args:
            sources: the datasets' files.
            datasets: `[B]` dataset of each sample.
            positions: `[B]` position in that dataset.
            batch: memory of the batch, from `spec.memory`; None to find out which bytes are missing.
            fetched: bytes of files that are not mapped.
            num_threads: at least 1; None for the number of CPUs available to the process.
        """


class BatchForm(ABC):
    """Form of the batches of datasets of one configuration: their tensors, and the kernel that fills them."""

    spec: BatchSpec
    """The tensors."""
    gather: GatherKernel
    """The kernel."""

    @property
    @abstractmethod
    def shared(self) -> Mapping[str, torch.Tensor]:
        """Tensors that all samples share, by name."""

    def in_context(self, context: Context) -> "BatchForm":
        """Returns the form of a rank's part of these batches.

        Raises:
            ArgumentError: these batches are not divided while they are gathered.
        """
        raise ArgumentError(f"context must be {WHOLE} but for samples in the order 'packed', found {context}")


class BatchReader:
    """Gathers batches from the samples of K datasets.

    Args:
        members: `[K]` datasets, of one configuration.
        form: form of their batches.
    """

    def __init__(self, members: Sequence[FileBacked], form: BatchForm) -> None:
        self._members = members
        self._sources = Sources(members)
        _READERS.add(self)
        self._form = form
        self._in_contexts: dict[Context, BatchReader] = {}

    def in_context(self, context: Context) -> "BatchReader":
        """Returns the reader of a rank's part of the same samples."""
        if context not in self._in_contexts:
            self._in_contexts[context] = BatchReader(self._members, self._form.in_context(context))
        return self._in_contexts[context]

    def reset(self) -> None:
        """Unmaps everything: a process may be forked while another thread changes the tables."""
        self._sources = Sources(self._members)

    def missing_ranges(self, located: SampleLocations) -> Ranges | None:
        """Returns the bytes of objects that samples need; None if the kernel cannot make one of them."""
        found = self._try(*located, None, _NOTHING, None)
        return None if found is None else join_ranges(found.missing)

    def fetch(self, ranges: Ranges) -> FetchedBytes:
        """Fetches bytes of objects."""
        return self._sources.fetch(ranges)

    def gather(
        self,
        located: SampleLocations,
        out: Batch | None,
        *,
        num_threads: int | None,
        fetched: FetchedBytes | None = None,
    ) -> Batch | None:
        """Returns the batch; None if the kernel cannot make one of its samples from mapped files, or refuses it."""
        datasets, positions = located
        batch = self._memory(len(positions), out)
        ready = fetched or _NOTHING
        if batch.arrays is None or not self._fill(datasets, positions, batch.arrays, num_threads, ready):
            return None
        if self._form.spec.dataset_id is not None:
            batch["dataset_id"].copy_(torch.from_numpy(datasets))
        return batch

    def _fill(
        self,
        datasets: npt.NDArray[np.int32],
        positions: npt.NDArray[np.int64],
        arrays: Any,
        num_threads: int | None,
        fetched: FetchedBytes,
    ) -> bool:
        """Fills the memory of a batch; in parts, if it needs more bytes of objects than may be in flight.

        Returns:
            True if the kernel made all samples.
        """
        gathered = self._try(datasets, positions, arrays, fetched, num_threads)
        if gathered is None or not len(gathered.missing):
            return gathered is not None and gathered.is_whole
        ranges = join_ranges(gathered.missing)
        size_bytes = int((ranges[:, 2] - ranges[:, 1]).sum())
        size = len(positions)
        if size_bytes > BUDGET.half and size > 1:
            halves = slice(0, size // 2), slice(size // 2, size)
            return all(
                self._fill(datasets[half], positions[half], arrays.part(half), num_threads, fetched) for half in halves
            )
        with BUDGET.held(size_bytes):
            more = fetched.joined(self._sources.fetch(ranges))
            gathered = self._try(datasets, positions, arrays, more, num_threads)
        return gathered is not None and gathered.is_whole

    def _try(
        self,
        datasets: npt.NDArray[np.int32],
        positions: npt.NDArray[np.int64],
        arrays: Any,
        fetched: FetchedBytes,
        num_threads: int | None,
    ) -> Gathered | None:
        """Fills the memory of a batch if no bytes are missing; None if a sample needs Python."""
        # The kernel reads files that are mapped, and names the others in `absent`. They are mapped after the lock for
        # reading is released, because mapping takes it for writing: a thread that held both would wait for itself.
        # Until the next attempt another thread may release them again, if maps are scarce; hence several attempts.
        sources = self._sources
        for _ in range(_MOST_ROUNDS):
            try:  # KeyboardInterrupt may be raised anywhere from here on
                if not sources.begin_reading(datasets):
                    return None
                gathered = self._form.gather(
                    sources.table, datasets, positions, arrays, fetched=fetched, num_threads=num_threads
                )
            finally:
                sources.end_reading()
            if not gathered.absent:
                return None if gathered.refused is not None else gathered
            sources.map_files(gathered.absent)
        return None

    def empty_batch(self, size: int, *, pinned: bool) -> Batch:
        """Allocates a batch."""
        return Batch.empty(self._form.spec, size, shared=self._form.shared, pinned=pinned)

    def _memory(self, size: int, out: Batch | None) -> Batch:
        """Returns `out`, with memory that the kernel may write to, or a new batch."""
        if out is None:
            return self.empty_batch(size, pinned=False)
        spec, shared = self._form.spec, self._form.shared
        if out.is_allocated_for(spec, size):
            return out
        wanted = spec.tensors(size)
        out.check_fits(wanted)
        own = {name for name in wanted if name not in shared and name != "dataset_id"}
        if out.arrays is None or out.shared != frozenset(shared) or out.arrays.arrays.keys() != own:
            out.take(self.empty_batch(size, pinned=False))
        return out


_READERS: Final["weakref.WeakSet[BatchReader]"] = weakref.WeakSet()


def _reset_all() -> None:
    for reader in list(_READERS):
        reader.reset()


os.register_at_fork(after_in_child=_reset_all)


def _positions(indices: Indices) -> npt.NDArray[np.int64]:
    numbers = np.asarray(indices)
    if numbers.dtype == object and len(numbers) and all(isinstance(one, int) for one in numbers.flat):
        raise IndexError(f"a sample must be in [-2**63, 2**63), found {max(numbers.flat, key=abs)}")
    if numbers.ndim != 1 or (numbers.dtype.kind not in "iu" and len(numbers)):
        raise ArgumentError(
            f"indices must be a vector of integers, found {numbers.dtype} of shape {list(numbers.shape)}"
        )
    if numbers.dtype.kind == "u" and len(numbers) and int(numbers.max()) > _HIGHEST:
        raise IndexError(f"a sample must be below 2**63, found {int(numbers.max())}")
    return np.ascontiguousarray(numbers, dtype=np.int64)


def _with_equal_borders(samples: list[dict[str, Any]], least: int) -> list[dict[str, Any]]:
    """Returns packs with as many borders, at least `least`, of which the last one is repeated."""
    names = [name for name in _OF_BORDERS if name in samples[0]]
    size = max(least, *(len(one["cu_seqlens_padded"]) for one in samples))
    return [
        {**one, **{name: torch.cat([one[name], one[name][-1:].expand(size - len(one[name]))]) for name in names}}
        for one in samples
    ]


def _stacked(dataset: ReadsBatches, positions: npt.NDArray[np.int64], out: Batch | None) -> Batch:
    """Returns the batch, stacked from single samples."""
    if len(positions) == 0:
        raise ArgumentError(
            "indices must name at least one sample of a dataset whose samples are read one by one, found none"
        )
    samples = [dataset[position] for position in positions.tolist()]
    if all(isinstance(one, dict) and "cu_seqlens_padded" in one for one in samples):
        size = 0 if out is None else out["cu_seqlens_padded"].shape[-1]
        samples = _with_equal_borders(samples, size)
        if len(samples[0]["cu_seqlens_padded"]) > size:  # of an earlier batch with fewer documents
            out = None
    try:
        tensors: dict[str, torch.Tensor] = torch.utils.data.default_collate(samples)
    except (RuntimeError, TypeError, KeyError) as error:
        raise FormatError(
            f"the samples at {positions.tolist()} must have tensors of the same names and shapes: {error}"
        ) from error
    if out is None:
        return Batch(tensors)
    out.check_fits({name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()})
    out.copy(tensors)
    return out
