"""Loader that prefetches batches without worker processes.

Shapes: B samples of a batch, K datasets of a blend.
"""

import contextlib
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from trackbed.cancellation import Flag
from trackbed.datasets import Batch, BlendedDataset
from trackbed.datasets.batches.context import WHOLE, Context
from trackbed.datasets.batches.reader import ReadsBatches
from trackbed.datasets.blend.dataset import SplitDataset
from trackbed.datasets.config import COMPUTED
from trackbed.datasets.identity import DataChecksum
from trackbed.datasets.low_level import reads_objects
from trackbed.errors import ArgumentError
from trackbed.files.stores.waiting import ends_with
from trackbed.kernels import FetchedBytes
from trackbed.kernels.integers import check_at_least
from trackbed.loading.device import DeviceBatch, DeviceCopies, on_device, with_index
from trackbed.loading.pack_layouts import LayoutName, check_context, check_layout, layout_of
from trackbed.loading.position import BatchSampler, CountedBatches, check_data, check_mapping
from trackbed.loading.read_ahead import ReadAhead, fetch_ahead
from trackbed.loading.ring import Ring
from trackbed.loading.sample_hashes import SampleHashes, digests_of
from trackbed.loading.samplers import MegatronPretrainingSampler, Positioned


@dataclass(slots=True)
class LoaderCounters:
    """Totals since the loader was created."""

    batches: int = 0
    """Batches returned."""
    samples: int = 0
    """Samples in the returned batches."""
    stall_seconds: float = 0.0
    """Total time spent waiting for batches."""
    last_stall_seconds: float = 0.0
    """Time spent waiting for the last batch."""
    tokens: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(1, dtype=np.int64))
    """`[K]` returned tokens of each dataset of a blend, or of the single dataset. Includes padding."""


_TEXTS: Final = ("tokens", "text", "text_enc")
"""Names of a sample's tokens: of GPT, BERT and T5."""


_BLOCKS: Final = 4
"""Blocks whose samples are fetched together: of the first and the last one only some."""
_Job = tuple[Sequence[int], dict[str, Any]]
"""Indices of a batch, and the sampler's position after it."""


class _PreparedBatch(NamedTuple):
    """A batch that is ready to be returned."""

    batch: Batch | DeviceBatch
    num_samples: int
    tokens: Any
    """`[K]` tokens of each dataset."""
    state: dict[str, Any]
    """The sampler's position after the batch."""
    hashes: SampleHashes | None = None
    """Digests of the samples, where they are taken."""


class BatchStream:
    """Batches named by a sampler, prefetched on a background thread that releases the GIL while it gathers.

    A batch stays valid while a reference to it, to one of its tensors, or to a view of one exists; its memory is
    reused only after that. A loop that holds one batch at a time needs memory for `ahead` + 2 batches; a loop that
    holds more needs more.

    Iteration continues after the last batch that was returned. Once the sampler is exhausted, the next iteration
    starts where the sampler starts. If an iteration is left early, prefetched batches are discarded and the sampler is
    reset to the last returned batch. Only one iteration is active: a new one ends the previous one. The number of
    batches per step, and so the global batch size, may change from step to step; so may the size of each batch.

    Args:
        dataset: dataset of the samples; its `gather` makes the batches.
        batch_sampler: yields the indices of each batch: a sampler of this package, or any iterable of lists.
        ahead: number of batches to prefetch, at least 1. From an object store, the bytes of
            more of them are fetched ahead.
        num_threads: threads that gather a batch, at least 1; None for the number of CPUs available to the process.
        pinned: True to allocate batches in page-locked memory, which needs an accelerator.
        device: CUDA device to which batches are copied from pinned memory, on a separate stream; None for no copy.
        layout: of a dataset in the order "packed", how packs are laid out: "thd", "torch" or "bridge", see
            `trackbed.loading.pack_layouts`; None for rows `[B, S]`.
        pad_borders: True for as many borders of documents in each batch, as CUDA graphs need them.
        context_rank: of a dataset in the order "packed", number of this rank among those that share each pack by
            context parallelism, in `[0, context_size)`. It gathers its places alone, those of `slice_for_context`.
        context_size: number of these ranks.

    Raises:
        ArgumentError: an argument is out of range.
    """

    def __init__(
        self,
        dataset: ReadsBatches,
        batch_sampler: Iterable[Sequence[int]],
        *,
        ahead: int = 2,
        num_threads: int | None = None,
        pinned: bool = False,
        device: torch.device | str | None = None,
        layout: LayoutName | None = None,
        pad_borders: bool = False,
        context_rank: int = 0,
        context_size: int = 1,
    ) -> None:
        _check(dataset, ahead=ahead, num_threads=num_threads, pinned=pinned, device=device)
        check_layout(dataset, layout)
        context = Context(context_rank, context_size)
        check_context(dataset, context)
        self._part: dict[str, Any] = {} if context == WHOLE else {"context": context}
        self._layout = None if layout is None else layout_of(layout, pads_borders=pad_borders)
        self.dataset = dataset
        self.sampler = batch_sampler if isinstance(batch_sampler, BatchSampler) else CountedBatches(batch_sampler)
        num_datasets = len(dataset.datasets) if isinstance(dataset, BlendedDataset) else 1
        self._counters = LoaderCounters(tokens=np.zeros(num_datasets, dtype=np.int64))
        self._ahead = ahead
        self._num_threads = num_threads
        self._device = None if device is None else torch.device(device)
        self._pinned = pinned or device is not None
        self._ring = Ring(ahead + 2)
        # The program may have queued copies of pinned memory, which torch's allocator waits for, and a ring does not.
        self._is_reused = not pinned or device is not None
        self._copies: dict[torch.device, DeviceCopies] = {}
        """Copies to each device that has been used. They outlive an iteration, and so does the ring."""
        self._state: dict[str, Any] | None = None
        self._run: ReadAhead[_PreparedBatch] | None = None
        self._hashed: list[SampleHashes] | None = None
        """Digests of the batches that were returned since the last call of `pop_hashes`; None to take none."""
        self._changed: ReadAhead[_PreparedBatch] | None = None
        """The iteration that goes on in other data."""
        self._take_data()

    def __iter__(self) -> Iterator[Batch]:
        """Iterates over the batches from the current position on.

        Raises:
            Exception: an error of the sampler or of `gather`, raised in place of the batch that it affects.
        """
        self.close()
        if self._data is not None:
            self._data.start()
        self._state = self._position()
        run: ReadAhead[_PreparedBatch] | None = None
        try:
            run = self._run = self._read_ahead()
            while (batch := self._next(run)) is not None or self._changed is run:
                if batch is None:
                    self._changed = None
                    run = self._run = self._read_ahead()
                    continue
                yield batch
                del batch
        finally:
            if run is not None:
                self._leave(run)

    def _read_ahead(self) -> ReadAhead[_PreparedBatch]:
        ended = Flag()
        # The device of this thread: the prefetch thread has one of its own.
        device = torch.cuda.current_device() if self._pinned else None
        return ReadAhead(partial(self._make, ended, device), self._ahead, on_end=ended.set)

    def change_data(self, dataset: SplitDataset) -> None:
        """Goes on in another dataset behind the last returned batch. Batches that were read ahead are dropped.

        An iteration in progress goes on, too. The sampler must be one of a dataset's order.

        Args:
            dataset: its samples up to the position are those of the dataset before, which is not checked here.

        Raises:
            ArgumentError: it has fewer samples than the position.
        """
        run = self._run if self._run is not None else self._changed  # there may be several changes behind one batch
        self.close()
        if not isinstance(self.sampler, MegatronPretrainingSampler):
            raise ArgumentError(f"the data of a {type(self.sampler).__name__} cannot be changed")
        self.sampler.read_from(dataset)
        self.dataset = dataset
        num_datasets = len(dataset.datasets) if isinstance(dataset, BlendedDataset) else 1
        tokens = np.zeros(max(num_datasets, len(self._counters.tokens)), dtype=np.int64)
        tokens[: len(self._counters.tokens)] = self._counters.tokens
        self._counters.tokens = tokens
        self._ring = Ring(self._ahead + 2)  # batches of other data may have other tensors
        self._take_data()
        self._state, self._changed = self._position(), run

    def _take_data(self) -> None:
        """Notes what is known of the data, and starts to compute their checksum."""
        self._is_stored = reads_objects(self.dataset)
        data = getattr(self.dataset, "data_checksum", None)
        self._data = data if isinstance(data, DataChecksum) else None
        if self._data is not None and self._data.stamps is None:
            self._data.start()

    def _next(self, run: ReadAhead[_PreparedBatch]) -> Batch | None:
        """The next batch, or None at the end. Updates the counters."""
        started = time.perf_counter()
        prepared = next(run, None)
        stall = time.perf_counter() - started
        if prepared is None:
            self._run = None if self._run is run else self._run  # the sampler keeps its position
            return None
        counters = self.counters
        counters.batches += 1
        counters.samples += prepared.num_samples
        counters.last_stall_seconds = stall
        counters.stall_seconds += stall
        counters.tokens += prepared.tokens
        self._state = prepared.state
        if self._hashed is not None and prepared.hashes is not None:
            self._hashed.append(prepared.hashes)
        return prepared.batch.wait() if isinstance(prepared.batch, DeviceBatch) else prepared.batch

    def _leave(self, run: ReadAhead[_PreparedBatch]) -> None:
        """Ends an iteration, and resets the sampler to the last returned batch.

        The iterator may be garbage-collected on the prefetch thread, where the sampler is in use. The reset is then
        left to the next use of the loader.
        """
        try:
            has_ended = run.close()
        finally:
            run.end()  # also after Ctrl-C
        if has_ended and self._run is run:
            self._run = None
            if self._state is not None:
                self._restore(self._state)

    def close(self) -> None:
        """Ends the active iteration, if any, and its thread."""
        if self._run is not None:
            self._leave(self._run)

    def hash_samples(self) -> None:
        """Takes the SHA-256 of each sample of further iterations, where batches are read ahead.

        Raises:
            ArgumentError: the loader gathers parts of samples.
        """
        if self._part:
            raise ArgumentError(
                "hashes are of whole samples, found context_size above 1; slice_for_context cuts batches"
            )
        self.close()
        self._hashed = []

    @property
    def hashes(self) -> list[SampleHashes]:
        """Digests of the batches that were returned since the last call of `pop_hashes`."""
        return list(self._hashed or [])

    def pop_hashes(self) -> list[SampleHashes]:
        """Returns the digests of the batches that were returned since the last call. Needs `hash_samples` first."""
        found, self._hashed = self._hashed or [], []
        return found

    @property
    def counters(self) -> LoaderCounters:
        """Batches, samples, tokens of each dataset, and the seconds that the loop has waited."""
        return self._counters

    def state_dict(self) -> dict[str, Any]:
        """Returns the position after the last returned batch: the state of the sampler, and the checksum of the data.

        The values are plain, so `torch.distributed.checkpoint` and torch's stateful loaders can save them. In the order
        "instant" the first call may wait until the lengths of all documents have been read.
        """
        state = self._position() if self._run is None else dict(self._state or {})
        data = {} if self._data is None else self._data.state()
        return {**state, **data, **(self.sampler.data_state() if isinstance(self.sampler, Positioned) else {})}

    @cached_property
    def _position(self) -> Callable[[], dict[str, Any]]:
        """Function that returns the sampler's position; of a `Positioned` sampler without its `data_state`."""
        return self.sampler.position_state if isinstance(self.sampler, Positioned) else self.sampler.state_dict

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resumes from a state that a loader or a sampler has saved, on any number of ranks.

        Raises:
            ArgumentError: `state` is not a state of a loader, it was saved with other data, or the sampler refuses it.
        """
        check_mapping(state)
        position = self.sampler.resumed(state) if isinstance(self.sampler, Positioned) else None
        if self._data is not None:
            check_data(state, self._data)
        self.close()
        if position is not None and isinstance(self.sampler, Positioned):
            self.sampler.move_to(position)
        else:
            own = {name: value for name, value in state.items() if name not in ("data_checksum", "data_stamps")}
            self.sampler.load_state_dict(own)

    def _restore(self, state: Mapping[str, Any]) -> None:
        """Sets the sampler to a position whose data checksum was checked."""
        if isinstance(self.sampler, Positioned):
            self.sampler.move_to(self.sampler.resumed(state))
        else:
            self.sampler.load_state_dict(state)

    def _make(self, ended: Flag, device: int | None) -> Iterator[_PreparedBatch]:
        """Gathers the batches, usually on the prefetch thread, until `ended` is set.

        Args:
            ended: set when the iteration is left.
            device: current CUDA device of the thread that iterates; None if no device is used.
        """
        copies = None if self._device is None else self._copies_to(with_index(self._device, device))
        jobs = ((indices, self._position()) for indices in self.sampler)
        with contextlib.closing(self._with_bytes(jobs, ended)) as ready:
            for job, fetched in ready:
                yield self._prepared(job, fetched, ended, device, copies)

    def _copies_to(self, device: torch.device) -> DeviceCopies:
        if device not in self._copies:
            self._copies[device] = DeviceCopies(device)
        return self._copies[device]

    def _prepared(
        self, job: _Job, fetched: FetchedBytes | None, ended: Flag, device: int | None, copies: DeviceCopies | None
    ) -> _PreparedBatch:
        indices, state = job
        with on_device(device):
            batch = self._gather(indices, fetched, ended)
            tokens = self._tokens(batch)
            hashes = None if self._hashed is None else self._hashes(indices, batch)
            lent = self._handed_out(batch)
            return _PreparedBatch(lent if copies is None else copies.begin(lent), len(indices), tokens, state, hashes)

    def _handed_out(self, batch: Batch) -> Batch:
        """Returns a batch as the program gets it, with memory that comes back if a kernel has filled it."""
        layout = self._layout
        if self._is_reused and batch.arrays is not None:
            return self._ring.lend(batch, None if layout is None else layout.arrays(batch))
        return batch if layout is None else layout.join(batch)

    def _hashes(self, indices: Sequence[int], batch: Batch) -> SampleHashes:
        texts = _texts(batch)
        datasets = batch["dataset_id"].tolist() if "dataset_id" in batch else [0] * len(indices)
        return SampleHashes(list(indices), digests_of(texts), datasets, texts.shape[1])

    def _gather(self, indices: Sequence[int], fetched: FetchedBytes | None, ended: Flag) -> Batch:
        memory = self._memory(len(indices))
        if fetched is None:
            return self.dataset.gather(indices, memory, num_threads=self._num_threads, **self._part)
        with ends_with(ended):
            return self.dataset.gather(indices, memory, num_threads=self._num_threads, fetched=fetched, **self._part)

    def _with_bytes(self, jobs: Iterable[_Job], ended: Flag) -> Generator[tuple[_Job, FetchedBytes | None], None, None]:
        """Yields batches to gather, each with bytes if there are pairs in object stores."""
        if not self._is_stored:
            for job in jobs:
                yield job, None
            return
        yield from fetch_ahead(jobs, self.dataset, ended, indices_of=lambda job: job[0], together=self._together)

    def _together(self, job: _Job) -> int:
        """Number of batches that have samples of the same blocks, in orders without an index."""
        config = getattr(self.dataset, "config", None)
        if getattr(config, "order", "") not in COMPUTED or not len(job[0]):
            return 1
        samples = _BLOCKS * config.shuffle_block * config.shuffle_window * len(self.counters.tokens)  # type: ignore[union-attr]
        return max(1, -(-samples // len(job[0]))) if config.shuffle_block > 1 else 1  # type: ignore[union-attr]

    def _memory(self, size: int) -> Batch | None:
        """Memory to gather a batch into, or None if `gather` is to allocate it."""
        free = self._ring.take(size) if self._is_reused else None
        return free if free is not None else self.dataset.empty_batch(size, pinned=self._pinned, **self._part)

    def _tokens(self, batch: Batch) -> Any:
        """`[K]` number of tokens of each dataset in a batch; of T5, tokens of the encoder."""
        tokens = _texts(batch)
        if len(self.counters.tokens) == 1 or "dataset_id" not in batch:
            return tokens.numel()
        per_sample = tokens.shape[1:].numel()  # of a batch of no samples too
        return np.bincount(batch["dataset_id"].numpy(), minlength=len(self.counters.tokens)) * per_sample


def _texts(batch: Batch) -> torch.Tensor:
    """The tokens of a batch, `[B, ...]`; of T5, those of the encoder."""
    found = next((batch[name] for name in _TEXTS if isinstance(batch.get(name), torch.Tensor)), None)
    return torch.empty((batch.size, 0)) if found is None else found


def _is_cuda(device: torch.device | str) -> bool:
    try:
        return torch.device(device).type == "cuda"
    except (RuntimeError, TypeError):  # no name of a device
        return False


def _check(
    dataset: object, *, ahead: int, num_threads: int | None, pinned: bool, device: torch.device | str | None
) -> None:
    if not isinstance(dataset, ReadsBatches):
        raise ArgumentError(f"dataset must support gather, as GPTDataset does, found a {type(dataset).__name__}")
    check_at_least(1, ahead=ahead, num_threads=1 if num_threads is None else num_threads)
    if device is not None and not _is_cuda(device):
        raise ArgumentError(f"device must be a CUDA device, or None for batches in the host's memory, found {device}")
    if (pinned or device is not None) and not torch.cuda.is_available():
        what = "pinned" if device is None else f"device {device}"
        raise ArgumentError(f"{what}: must have a GPU that torch can use, found none")
