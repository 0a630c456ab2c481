"""Batches ahead of the training step, without worker processes.

Shapes: B samples of a batch, K datasets of a blend.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch

from trackbed.datasets import Batch, BlendedDataset
from trackbed.datasets.data_checksum import DataChecksum
from trackbed.datasets.gathering import Gathering
from trackbed.errors import ArgumentError
from trackbed.loading.counted import BatchSampler, CountedBatches
from trackbed.loading.counters import LoaderCounters
from trackbed.loading.device import DeviceBatch, DeviceCopies
from trackbed.loading.position import check_data_checksum, check_mapping
from trackbed.loading.read_ahead import ReadAhead
from trackbed.loading.ring import Ring
from trackbed.loading.samplers import Positioned

__all__ = ["BatchLoader"]


class _Made(NamedTuple):
    """A batch that may be handed out."""

    batch: Batch | DeviceBatch
    num_samples: int
    tokens: Any
    """`[K]` of each dataset."""
    state: dict[str, Any]
    """The sampler's position after it."""


class BatchLoader:
    """The batches that a sampler names, gathered ahead on a thread that does not hold Python's lock.

    A batch is valid as long as anybody holds it, a tensor of it, or a view of one: its memory is written again only
    after that. A loop that holds one batch at a time needs memory for `ahead` + 2; whoever holds more takes more.

    Iterating goes on after the last batch that was handed out, or, once the sampler has come to its end, begins as the
    sampler does. Where it is left early, what was read ahead is thrown away, and the sampler put back. One iteration
    at a time: a new one ends the one before. The number of batches that a step takes, and so the global batch, may
    change from step to step; so may the size of each batch.

    Args:
        dataset: whose samples; `gather` makes the batches.
        batch_sampler: gives the indices of each batch: one of ours, or any iterable of lists.
        ahead: batches that are made before they are asked for, at least 1.
        num_threads: threads that gather a batch, at least 1; None for as many as the process may run on.
        pinned: whether batches lie in page-locked memory, which needs an accelerator.
        device: a CUDA device that batches are copied to on a stream of its own, from pinned memory; None for none.

    Raises:
        ArgumentError: an argument is out of range.
    """

    def __init__(
        self,
        dataset: Gathering,
        batch_sampler: Iterable[Sequence[int]],
        *,
        ahead: int = 2,
        num_threads: int | None = None,
        pinned: bool = False,
        device: torch.device | str | None = None,
    ) -> None:
        _check(dataset, ahead=ahead, num_threads=num_threads, pinned=pinned, device=device)
        self.dataset = dataset
        self.sampler = batch_sampler if isinstance(batch_sampler, BatchSampler) else CountedBatches(batch_sampler)
        num_datasets = len(dataset.datasets) if isinstance(dataset, BlendedDataset) else 1
        self.counters = LoaderCounters(tokens=np.zeros(num_datasets, dtype=np.int64))
        self._ahead = ahead
        self._num_threads = num_threads
        self._device = None if device is None else torch.device(device)
        self._pinned = pinned or device is not None
        self._ring = Ring(ahead + 2)
        self._state: dict[str, Any] | None = None
        self._run: ReadAhead[_Made] | None = None
        data = getattr(dataset, "data_checksum", None)
        self._data = data if isinstance(data, DataChecksum) else None
        if self._data is not None:
            self._data.start()

    def __iter__(self) -> Iterator[Batch]:
        """The batches from the position on.

        Raises:
            Exception: what the sampler or `gather` raised, where the batch would have been handed out.
        """
        self.close()
        self._state = self._position()
        run: ReadAhead[_Made] | None = None
        try:
            run = self._run = ReadAhead(self._make, self._ahead)
            while (batch := self._next(run)) is not None:
                yield batch
                del batch
        finally:
            if run is not None:
                self._leave(run)

    def _next(self, run: ReadAhead[_Made]) -> Batch | None:
        """The next batch, counted; None at the end."""
        started = time.perf_counter()
        made = next(run, None)
        stall = time.perf_counter() - started
        if made is None:
            self._run = None if self._run is run else self._run  # the sampler stays where it is
            return None
        counters = self.counters
        counters.batches += 1
        counters.samples += made.num_samples
        counters.last_stall_seconds = stall
        counters.stall_seconds += stall
        counters.tokens += made.tokens
        self._state = made.state
        return made.batch.wait() if isinstance(made.batch, DeviceBatch) else made.batch

    def _leave(self, run: ReadAhead[_Made]) -> None:
        """End an iteration, and put the sampler back to what was handed out.

        On the thread that reads ahead, which may be the one to collect an iterator, the sampler is in use: then whoever
        uses the loader next does it.
        """
        try:
            has_ended = run.close()
        finally:
            run.end()  # also if Ctrl-C came first
        if has_ended and self._run is run:
            self._run = None
            if self._state is not None:
                self._restore(self._state)

    def close(self) -> None:
        """End the iteration that is under way, if any, and its thread."""
        if self._run is not None:
            self._leave(self._run)

    def state_dict(self) -> dict[str, Any]:
        """The position after the last batch that was handed out: the sampler's state, and the checksum of the data.

        Plain values, so that `torch.distributed.checkpoint` and torch's stateful loaders keep it. In the order
        "instant" the first call may wait until the lengths of all documents were read.
        """
        state = self._position() if self._run is None else dict(self._state or {})
        return state if self._data is None else {**state, "data_checksum": self._data.result()}

    @cached_property
    def _position(self) -> Callable[[], dict[str, Any]]:
        """Gives the sampler's position, without the checksum of the data where the sampler leaves it out."""
        return self.sampler.position_state if isinstance(self.sampler, Positioned) else self.sampler.state_dict

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken, by a loader or by a sampler, on any number of ranks.

        Raises:
            ArgumentError: it is no state, its data had other contents, or the sampler refuses it.
        """
        check_mapping(state)
        if self._data is not None:
            check_data_checksum(state, self._data.result())
        self.close()
        self._restore({name: value for name, value in state.items() if name != "data_checksum"})

    def _restore(self, state: Mapping[str, Any]) -> None:
        """Put the sampler to a position whose data were looked at."""
        if isinstance(self.sampler, Positioned):
            self.sampler.load_position(state)
        else:
            self.sampler.load_state_dict(state)

    def _make(self) -> Iterator[_Made]:
        """The batches, on the thread that reads ahead."""
        copies = None if self._device is None else DeviceCopies(self._device)
        for indices in self.sampler:
            state = self._position()
            batch = self.dataset.gather(indices, self._memory(len(indices)), num_threads=self._num_threads)
            tokens = self._tokens(batch)
            lent = self._ring.lend(batch)
            yield _Made(lent if copies is None else copies.begin(lent), len(indices), tokens, state)
            del batch, lent

    def _memory(self, size: int) -> Batch | None:
        """Memory that a batch is gathered into; None where `gather` makes it."""
        free = self._ring.take(size)
        return free if free is not None else self.dataset.empty_batch(size, pinned=self._pinned)

    def _tokens(self, batch: Batch) -> Any:
        """`[K]` tokens of each dataset."""
        tokens = batch["tokens"]
        if len(self.counters.tokens) == 1 or "dataset_id" not in batch:
            return tokens.numel()
        return np.bincount(batch["dataset_id"].numpy(), minlength=len(self.counters.tokens)) * tokens[0].numel()


def _check(
    dataset: object, *, ahead: int, num_threads: int | None, pinned: bool, device: torch.device | str | None
) -> None:
    if not isinstance(dataset, Gathering):
        msg = f"dataset must be one that gathers batches, as GPTDataset does, found a {type(dataset).__name__}"
        raise ArgumentError(msg)
    if ahead < 1 or (num_threads is not None and num_threads < 1):
        msg = f"ahead and num_threads must be at least 1, found {ahead} and {num_threads}"
        raise ArgumentError(msg)
    if device is not None and torch.device(device).type != "cuda":
        msg = f"device must be a CUDA device, or None for batches in the host's memory, found {device}"
        raise ArgumentError(msg)
    if (pinned or device is not None) and not torch.cuda.is_available():
        msg = f"pinned memory needs an accelerator, found none (pinned {pinned}, device {device})"
        raise ArgumentError(msg)
