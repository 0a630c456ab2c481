"""Whole batches of a dataset: by one call of a kernel where its samples can be cut from mapped files.

Shapes: B samples of a batch, K datasets of a blend, S tokens of a sample.
"""

import os
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt
import torch
import torch.utils.data

from trackbed.datasets.batch import Batch, BatchSpec
from trackbed.datasets.index_arrays import IndexArrays
from trackbed.datasets.samples import Draws
from trackbed.datasets.sources import Sources
from trackbed.errors import ArgumentError, FormatError
from trackbed.kernels import SampleShape, gather

if TYPE_CHECKING:
    from trackbed.datasets.gpt import GPTDataset

__all__ = ["Gatherer", "Gathering", "Indices"]

Indices = Sequence[int] | npt.NDArray[np.integer[Any]] | torch.Tensor
_MOST_ROUNDS: Final = 8
"""Rounds of mapping what a batch needs: other threads may release it again, where the system gives too few maps."""
_HIGHEST: Final = int(np.iinfo(np.int64).max)


class Gathering(ABC):
    """A dataset of samples that can be had by the batch."""

    @abstractmethod
    def __getitem__(self, idx: int) -> dict[str, Any]:
        """One sample."""

    @abstractmethod
    def __len__(self) -> int:
        """Number of samples."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """All samples, in their order. What a sample raises goes up, an IndexError included."""
        for position in range(len(self)):
            yield self[position]

    @property
    def index_paths(self) -> list[str]:
        """Paths of its index files; none where it has no index, or one in memory."""
        arrays = self._index.arrays
        path_of = getattr(arrays, "path_of", None)
        return [] if arrays is None or path_of is None else [path for path in map(path_of, arrays) if "/" in path]

    @property
    @abstractmethod
    def _index(self) -> IndexArrays:
        """The index that names the samples."""

    @abstractmethod
    def _gathered(self) -> "Gatherer | None":
        """What makes the batches of this dataset, or None where each sample must be asked for."""

    @abstractmethod
    def _draw(self, positions: npt.NDArray[np.int64]) -> Draws:
        """Which sample of which dataset stands at each of `[B]` positions.

        Raises:
            IndexError: there is no such position.
        """

    def gather(self, indices: Indices, out: Batch | None = None, *, num_threads: int | None = None) -> Batch:
        """The samples at these positions, as stacking them gives.

        One call of a kernel cuts them from the mapped files, on several threads, without Python's lock. Samples that
        take Python are asked for one by one: those of a subclass that overrides `__getitem__` or
        `_query_document_sample_shuffle_indices`, of files that are not mapped, and of other low-level datasets.

        Args:
            indices: `[B]` positions as `__getitem__` takes them.
            out: a batch that any dataset of equal keys, shapes and types returned: it is written anew and given back.
            num_threads: at least 1; None for as many as the process may run on.

        Returns:
            `[B, ...]` tensors by the keys of a sample. In a new batch, unless `out` is given.

        Raises:
            IndexError: there is no such position.
            ArgumentError: an argument is out of range, or `out` does not fit.
            CacheError: an index is damaged.
            FormatError: the files are shorter than their index says, or were cut short after they were mapped; that is
                looked for every 50 ms.
        """
        if out is not None and not isinstance(out, Batch):
            msg = f"out must be a Batch, as gather and empty_batch return it, found a {type(out).__name__}"
            raise ArgumentError(msg)
        positions = _positions(indices)
        gatherer = self._gathered()
        found = None if gatherer is None else gatherer.gather(self._draw(positions), out, num_threads=num_threads)
        return _stacked(self, positions, out) if found is None else found

    def empty_batch(self, size: int, *, pinned: bool = False) -> Batch | None:
        """Memory for a batch of so many samples, to be given as `out`; None where the samples are asked for one by one.

        Args:
            size: B, at least 0.
            pinned: whether to take page-locked memory, which a GPU copies from while the program goes on.
        """
        gatherer = self._gathered()
        return None if gatherer is None else gatherer.empty_batch(size, pinned=pinned)

    def __getitems__(self, indices: Indices) -> list[dict[str, Any]]:
        """The samples at these positions, where they can be had by the batch as views of one; for torch's loaders."""
        positions = _positions(indices)
        gatherer = self._gathered()
        if gatherer is not None:
            # A worker process is one of several that share the cores.
            num_threads = None if torch.utils.data.get_worker_info() is None else 1
            found = gatherer.gather(self._draw(positions), None, num_threads=num_threads)
            if found is not None:
                return found.samples()
        return [self[position] for position in positions.tolist()]


class Gatherer:
    """Makes batches of the samples of some datasets.

    Args:
        members: `[K]` the datasets, of one configuration.
        dataset_id: type of the dataset's number in a batch, or None for none.
    """

    def __init__(self, members: "Sequence[GPTDataset]", dataset_id: torch.dtype | None) -> None:
        config = members[0].config
        eod = config.tokenizer.eod  # type: ignore[union-attr]
        has_eod = isinstance(eod, (int, np.integer))
        self._members = members
        self._sources = Sources(members)
        _GATHERERS.add(self)
        self._shape = SampleShape(
            length=config.sequence_length,
            extra=int(config.add_extra_token_to_sequence),
            pad=members[0].padding,
            eod=int(eod) if has_eod else 0,
            resets_positions=bool(config.reset_position_ids) and has_eod,
            masks_eod=bool(config.eod_mask_loss) and has_eod,
        )
        self._spec = BatchSpec(
            length=self._shape.length,
            dataset_id=dataset_id,
            has_mask=config.create_attention_mask,
            shares_mask=not (config.reset_attention_mask and has_eod),
            has_borders=config.create_cu_seqlens,
        )

    def forget(self) -> None:
        """Begin anew, with nothing mapped: a process may be forked while another thread changes the tables."""
        self._sources = Sources(self._members)

    @cached_property
    def _causal_mask(self) -> torch.Tensor | None:
        return self._members[0].causal_mask if self._spec.has_mask and self._spec.shares_mask else None

    def gather(self, draws: Draws, out: Batch | None, *, num_threads: int | None) -> Batch | None:
        """The batch; None where a sample of it cannot be cut from mapped files, or not as its index says."""
        datasets, positions = draws
        batch = self._memory(len(positions), out)
        if batch.arrays is None:
            return None
        sources = self._sources
        for _ in range(_MOST_ROUNDS):
            try:  # an interrupt may come at any moment from here on
                if not sources.begin_reading(datasets):
                    return None
                found = gather(sources.table, datasets, positions, batch.arrays, self._shape, num_threads=num_threads)
            finally:
                sources.end_reading()
            if not found.absent:
                break
            sources.map_files(found.absent)
        if found.refused is not None or found.absent:
            return None
        if self._spec.dataset_id is not None:
            batch["dataset_id"].copy_(torch.from_numpy(datasets))
        return batch

    def empty_batch(self, size: int, *, pinned: bool) -> Batch:
        """Memory for a batch."""
        return Batch.empty(self._spec, size, shared_mask=self._causal_mask, pinned=pinned)

    def _memory(self, size: int, out: Batch | None) -> Batch:
        """`out`, made to be written to; or a new batch."""
        if out is None:
            return self.empty_batch(size, pinned=False)
        if out.is_made_after(self._spec, size):
            return out
        out.check_fits(self._spec.tensors(size))
        wants_shared = self._spec.has_mask and self._spec.shares_mask
        wants_own = self._spec.has_mask and not self._spec.shares_mask
        has_own = out.arrays is not None and "attention_mask" in out.arrays.arrays
        if out.arrays is None or ("attention_mask" in out.shared, has_own) != (wants_shared, wants_own):
            out.take(self.empty_batch(size, pinned=False))
        return out


_GATHERERS: Final["weakref.WeakSet[Gatherer]"] = weakref.WeakSet()


def _forget_all() -> None:
    for gatherer in list(_GATHERERS):
        gatherer.forget()


os.register_at_fork(after_in_child=_forget_all)


def _positions(indices: Indices) -> npt.NDArray[np.int64]:
    found = np.asarray(indices)
    if found.ndim != 1 or (found.dtype.kind not in "iu" and len(found)):
        msg = f"indices must be a vector of integers, found {found.dtype} of shape {list(found.shape)}"
        raise ArgumentError(msg)
    if found.dtype.kind == "u" and len(found) and int(found.max()) > _HIGHEST:
        msg = f"a sample must be below 2**63, found {int(found.max())}"
        raise IndexError(msg)
    return np.ascontiguousarray(found, dtype=np.int64)


def _stacked(dataset: Gathering, positions: npt.NDArray[np.int64], out: Batch | None) -> Batch:
    """The batch, sample by sample."""
    if len(positions) == 0:
        msg = "indices must name at least one sample of a dataset whose samples are asked for one by one, found none"
        raise ArgumentError(msg)
    samples = [dataset[position] for position in positions.tolist()]
    try:
        tensors: dict[str, torch.Tensor] = torch.utils.data.default_collate(samples)
    except (RuntimeError, TypeError, KeyError) as error:
        msg = f"the samples at {positions.tolist()} must have tensors of the same names and shapes: {error}"
        raise FormatError(msg) from error
    if out is None:
        return Batch(tensors)
    out.check_fits({name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()})
    out.copy(tensors)
    return out
