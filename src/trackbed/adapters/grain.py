"""Batches for Grain: records that are whole micro-batches, and an iterator whose state says what they are made of."""

import weakref
from typing import Any

import grain
import numpy as np
import numpy.typing as npt
from grain import experimental

from trackbed.datasets.batches.reader import ReadsBatches, check_split
from trackbed.errors import ArgumentError
from trackbed.kernels.integers import check_at_least
from trackbed.loading.ring import Ring
from trackbed.loading.samplers import sampler_of_positions

Arrays = dict[str, npt.NDArray[Any]]


class MicroBatches:
    """Random-access source of Grain whose records are whole micro-batches, in the order of a dataset.

    Args:
        dataset: dataset of a split, such as `trackbed.open_blend(path).train`.
        micro_batch_size: b, samples of a record, at least 1.
        num_threads: threads that gather a record, at least 1.
    """

    def __init__(self, dataset: ReadsBatches, micro_batch_size: int, *, num_threads: int = 1) -> None:
        check_split(dataset)
        check_at_least(1, micro_batch_size=micro_batch_size, num_threads=num_threads)
        self.dataset = dataset
        self.micro_batch_size = micro_batch_size
        self._num_threads, self._ring = num_threads, Ring(most_free=4)

    def __len__(self) -> int:
        return len(self.dataset) // self.micro_batch_size

    def __getitem__(self, record_key: int) -> Arrays:
        """Returns a record of b samples: arrays by the keys of a sample, each `[b, ...]`."""
        if not 0 <= record_key < len(self):
            raise IndexError(f"a record must be in [0, {len(self)}), found {record_key}")
        return self.batch_of(np.array([record_key]))

    def batch_of(self, keys: npt.NDArray[np.int64]) -> Arrays:
        """Returns `[k]` records as one batch: arrays by the keys of a sample, each `[k b, ...]`."""
        positions = np.add.outer(keys * self.micro_batch_size, range(self.micro_batch_size)).ravel()
        memory = self._ring.take(len(positions)) or self.dataset.empty_batch(len(positions))
        batch = self.dataset.gather(positions, memory, num_threads=self._num_threads)
        lent = batch if batch.arrays is None else self._ring.lend(batch)
        return {name: tensor.numpy() for name, tensor in lent.items()}

    def __repr__(self) -> str:
        return f"<MicroBatches: {len(self):,} of {self.micro_batch_size} samples, {self.dataset!r}>"


def batch_iterator(
    source: MicroBatches, *, micro_batches_per_step: int, rank: int, num_ranks: int, ahead: int = 2
) -> grain.DatasetIterator[Arrays]:
    """Returns an iterator over this rank's batches, whose state resumes on any number of ranks.

    Each step reads records that follow one another, of which rank r gets the records r, r + num_ranks, and so on, as
    one batch of B samples: arrays `[B, ...]` by their keys. All ranks stop together where no whole step is left.
    The state is that of a `trackbed.BatchLoader`, and either loads that of the other: plain values, which say after how
    many samples to go on, and in which data. `set_state` raises an `ArgumentError` for other data.

    Args:
        source: the records.
        micro_batches_per_step: records of all ranks together in one step, a multiple of `num_ranks`.
        rank: number of this process among those that read different samples, in `[0, num_ranks)`.
        num_ranks: number of these processes, at least 1.
        ahead: steps to read ahead on a thread, at least 1.

    Raises:
        ArgumentError: an argument is of another kind or out of range, or the source has fewer records than a step.
    """
    check_at_least(1, micro_batches_per_step=micro_batches_per_step, num_ranks=num_ranks, ahead=ahead)
    check_at_least(0, rank=rank)
    if rank >= num_ranks or micro_batches_per_step % num_ranks:
        found = f"rank {rank}, num_ranks {num_ranks} and micro_batches_per_step {micro_batches_per_step}"
        raise ArgumentError(f"num_ranks must be above rank, and divide micro_batches_per_step, found {found}")
    if not isinstance(source, MicroBatches) or micro_batches_per_step > len(source):
        raise ArgumentError(f"source must be MicroBatches, {micro_batches_per_step} of them or more, found {source!r}")
    shard = grain.sharding.ShardOptions(rank, num_ranks)
    keys, reads = grain.MapDataset.range(len(source)), grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    elastic = experimental.ElasticIterator(keys, micro_batches_per_step, shard, read_options=reads)
    batches = iter(elastic.map(source.batch_of))  # one gather for a batch, which Grain would copy if it stacked records
    return _Batches(experimental.ThreadPrefetchDatasetIterator(batches, ahead), source, micro_batches_per_step)


class _Batches(grain.DatasetIterator[Arrays]):
    """Batches of Grain's elastic iterator, with the state of a sampler."""

    def __init__(self, batches: grain.DatasetIterator[Arrays], source: MicroBatches, micro_batches: int) -> None:
        super().__init__(batches)
        self._parents = [batches]
        # At the end of the program, too: ends the thread, and frees what Grain has while its modules are there.
        self.close = weakref.finalize(self, lambda parents: parents.pop().close(), self._parents)
        self._micro_batch_size, self._step = source.micro_batch_size, micro_batches * source.micro_batch_size
        self._sampler = sampler_of_positions(source.dataset)

    def __next__(self) -> Arrays:
        if not self._parents:
            raise ArgumentError("the iterator must be open, found it is closed")
        if self._consumed + self._step > self._sampler.total_samples:
            raise StopIteration
        return next(self._parent)

    @property
    def _consumed(self) -> int:
        return int(self._parent.get_state()["global_next_index"]) * self._micro_batch_size

    def get_state(self) -> dict[str, Any]:
        return self._sampler.state_dict(consumed_samples=self._consumed)

    def set_state(self, state: dict[str, Any]) -> None:
        self._sampler.load_state_dict(state)
        consumed, size = self._sampler.consumed_samples, self._micro_batch_size
        if consumed % size:
            raise ArgumentError(f"consumed_samples must be a multiple of micro_batch_size {size}, found {consumed}")
        self._parent.set_state({"global_next_index": consumed // size})
