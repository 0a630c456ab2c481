"""Samplers of Megatron's two orders, which assign samples to ranks.

m is the number of samples in one micro batch of all ranks: `micro_batch_size * data_parallel_size`. A global
batch is any number of those, so its size may change from one step to the next.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from trackbed.datasets.data_checksum import DataChecksum, DatasetFingerprint
from trackbed.errors import ArgumentError
from trackbed.loading.position import Position, check_data, check_mapping
from trackbed.plural import number_of

__all__ = ["MegatronPretrainingRandomSampler", "MegatronPretrainingSampler", "Positioned"]


class Positioned(ABC):
    """A sampler whose position is saved with the checksum of its data.

    A loader records a position for each batch, and adds the checksum only when it saves one, because the checksum may
    still be computing.
    """

    _data: DataChecksum | None = None

    def _keep_data(self, data: DataChecksum | None) -> None:
        """Store the checksum of the data, and start to compute it in the background."""
        self._data = data
        if data is not None and data.stamps is None:  # of objects, a position may do without
            data.start()

    @abstractmethod
    def _position_now(self, consumed_samples: int | None) -> Position:
        """Position after `consumed_samples`, or after the yielded samples if None."""

    @abstractmethod
    def load_position(self, state: Mapping[str, Any]) -> None:
        """Load a state without checking the data checksum."""

    def position_state(self) -> dict[str, Any]:
        """Position after the yielded samples, without the data checksum."""
        return self._position_now(None).state_dict()

    def state_dict(self, consumed_samples: int | None = None) -> dict[str, Any]:
        """Position with the data checksum, for a checkpoint. Waits until the checksum is computed.

        Args:
            consumed_samples: samples that all ranks together have trained on. Defaults to the samples that this
                sampler has yielded, which are more if a loader prefetches.
        """
        state = self._position_now(consumed_samples).state_dict()
        return state if self._data is None else {**state, **self._data.state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a saved state, on any number of ranks unless the order depends on it.

        Raises:
            ArgumentError: `state` has another version, other data or another order; the message contains both
                values.
        """
        check_mapping(state)
        if self._data is not None:
            check_data(state, self._data)
        self.load_position(state)


class MegatronPretrainingSampler(Positioned):
    """Batch sampler in the order of the dataset; each rank takes its contiguous part of every m samples.

    For torch's DataLoader. Each iteration starts at `consumed_samples`.

    Args:
        total_samples: samples of the dataset, at least 1.
        consumed_samples: samples that all ranks together have trained on, in `[0, total_samples)`.
        micro_batch_size: samples per micro batch of a rank, at least 1.
        data_parallel_rank: this rank, in `[0, data_parallel_size)`.
        data_parallel_size: number of ranks, at least 1.
        drop_last: True to drop samples at the end that do not fill up m. If False, each rank gets its part of them,
            which may be empty.
        fingerprint: fingerprint of the dataset, checked when resuming. With the `fingerprint` of a Trackbed dataset,
            the position also contains the checksum of its data.

    Raises:
        ArgumentError: an argument is out of range.

    >>> list(MegatronPretrainingSampler(10, 4, 1, 1, 2))
    [[5], [7], [9]]
    """

    def __init__(
        self,
        total_samples: int,
        consumed_samples: int,
        micro_batch_size: int,
        data_parallel_rank: int,
        data_parallel_size: int,
        drop_last: bool = True,  # noqa: FBT001, FBT002  Megatron's signature
        *,
        fingerprint: str | None = None,
    ) -> None:
        _check_ranks(total_samples, micro_batch_size, data_parallel_rank, data_parallel_size)
        if not 0 <= consumed_samples < total_samples:
            msg = f"consumed_samples must be in [0, total_samples = {total_samples}), found {consumed_samples}"
            raise ArgumentError(msg)
        self.total_samples = total_samples
        self.consumed_samples = consumed_samples
        self.micro_batch_size = micro_batch_size
        self.data_parallel_rank = data_parallel_rank
        self.micro_batch_times_data_parallel_size = micro_batch_size * data_parallel_size
        self.drop_last = drop_last
        self._fingerprint = None if fingerprint is None else str(fingerprint)
        self._given = fingerprint
        self._yielded = consumed_samples
        self._keep_data(fingerprint.data if isinstance(fingerprint, DatasetFingerprint) else None)

    def __len__(self) -> int:
        """Samples of the dataset, as in Megatron."""
        return self.total_samples

    def __iter__(self) -> Iterator[list[int]]:
        """Iterates over the micro batches of this rank."""
        step = self.micro_batch_times_data_parallel_size
        start = self.data_parallel_rank * self.micro_batch_size
        for first in range(self.consumed_samples, self.total_samples, step):
            last = min(first + step, self.total_samples)
            if last - first < step and self.drop_last:
                return
            self._yielded = last
            yield list(range(min(first + start, last), min(first + start + self.micro_batch_size, last)))

    def _position_now(self, consumed_samples: int | None) -> Position:
        return self._position(self._yielded if consumed_samples is None else consumed_samples)

    def load_position(self, state: Mapping[str, Any]) -> None:
        """Load a state without checking the data checksum."""
        consumed = self._position(0).resumed(state, earlier=_earlier(self._given)).consumed_samples
        if consumed > self.total_samples:
            msg = f"consumed_samples must be in [0, {self.total_samples}], found {consumed}"
            raise ArgumentError(msg)
        self.consumed_samples = consumed
        self._yielded = self.consumed_samples

    def _position(self, consumed_samples: int) -> Position:
        return Position(
            consumed_samples=consumed_samples,
            total_samples=self.total_samples,
            order="sequential",
            fingerprint=self._fingerprint,
        )


class MegatronPretrainingRandomSampler(Positioned):
    """Batch sampler in a random order that is redrawn for each epoch.

    For torch's DataLoader. An iteration runs to the end of the current epoch and advances `consumed_samples`, so the
    next iteration starts the next epoch. An epoch has A samples: `total_samples` without the remainder that does not
    fill up m.

    Args:
        dataset: the dataset. Its `fingerprint`, if any, is checked when resuming, and its `set_epoch`, if any, is
            called with the epoch.
        total_samples: samples of the dataset, at least m.
        consumed_samples: samples that all ranks together have trained on, a multiple of m within an epoch.
        micro_batch_size: samples per micro batch of a rank, at least 1.
        data_parallel_rank: this rank, in `[0, data_parallel_size)`.
        data_parallel_size: number of ranks, at least 1.
        data_sharding: True to restrict each rank to its own part of the dataset.

    Raises:
        ArgumentError: an argument is out of range.
    """

    def __init__(
        self,
        dataset: Any,
        total_samples: int,
        consumed_samples: int,
        micro_batch_size: int,
        data_parallel_rank: int,
        data_parallel_size: int,
        data_sharding: bool,  # noqa: FBT001  Megatron's signature
    ) -> None:
        _check_ranks(total_samples, micro_batch_size, data_parallel_rank, data_parallel_size)
        self.dataset = dataset
        self.total_samples = total_samples
        self.micro_batch_size = micro_batch_size
        self.data_parallel_rank = data_parallel_rank
        self.data_parallel_size = data_parallel_size
        self.data_sharding = data_sharding
        self.micro_batch_times_data_parallel_size = micro_batch_size * data_parallel_size
        self.last_batch_size = total_samples % self.micro_batch_times_data_parallel_size
        self.consumed_samples = self._checked(consumed_samples)
        data = getattr(dataset, "data_checksum", None)
        self._keep_data(data if isinstance(data, DataChecksum) else None)

    @property
    def _samples_per_epoch(self) -> int:
        return self.total_samples - self.last_batch_size

    def _checked(self, consumed_samples: int) -> int:
        step, epoch = self.micro_batch_times_data_parallel_size, self._samples_per_epoch
        if epoch == 0:
            msg = (
                f"total_samples must be at least {step:,}, one micro batch of every rank, found {self.total_samples:,}"
            )
            raise ArgumentError(msg)
        if consumed_samples < 0 or consumed_samples % epoch % step:
            msg = (
                f"consumed_samples must be a multiple of {step:,} within an epoch of {number_of(epoch, 'sample')}, "
                f"found {consumed_samples:,}"
            )
            raise ArgumentError(msg)
        return consumed_samples

    def __len__(self) -> int:
        """Samples of the dataset, as in Megatron."""
        return self.total_samples

    def __iter__(self) -> Iterator[list[int]]:
        """Iterates over the micro batches of this rank, to the end of the epoch."""
        epoch, place = divmod(self._checked(self.consumed_samples), self._samples_per_epoch)
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)
        generator = torch.Generator()
        generator.manual_seed(epoch)
        order = self._order(place, generator)
        for first in range(0, len(order) - self.micro_batch_size + 1, self.micro_batch_size):
            self.consumed_samples += self.micro_batch_times_data_parallel_size
            yield order[first : first + self.micro_batch_size].tolist()

    def _order(self, place: int, generator: torch.Generator) -> torch.Tensor:
        """Remaining samples of the epoch for this rank from sample `place` on."""
        permutation = torch.randperm(self._permuted, generator=generator)
        if self.data_sharding:
            return permutation[place // self.data_parallel_size :] + self.data_parallel_rank * self._permuted
        return permutation[place:][self.data_parallel_rank :: self.data_parallel_size]

    @property
    def _permuted(self) -> int:
        """Size of an epoch's permutation: the samples of one rank if sharded, else of all ranks."""
        step = self.micro_batch_times_data_parallel_size if self.data_sharding else self.micro_batch_size
        return self.total_samples // step * self.micro_batch_size

    def _position_now(self, consumed_samples: int | None) -> Position:
        return self._position(self.consumed_samples if consumed_samples is None else consumed_samples)

    def load_position(self, state: Mapping[str, Any]) -> None:
        """Load a state without checking the data checksum."""
        earlier = _earlier(getattr(self.dataset, "fingerprint", None))
        self.consumed_samples = self._checked(self._position(0).resumed(state, earlier=earlier).consumed_samples)

    def _position(self, consumed_samples: int) -> Position:
        fingerprint = getattr(self.dataset, "fingerprint", None)
        return Position(
            consumed_samples=consumed_samples,
            total_samples=self.total_samples,
            order="random, sharded" if self.data_sharding else "random",
            fingerprint=None if fingerprint is None else str(fingerprint),
            samples_per_epoch=self._samples_per_epoch,
            permuted=self._permuted,
            data_parallel_size=self.data_parallel_size if self.data_sharding else None,
        )


def _earlier(fingerprint: str | None) -> Callable[[], tuple[str, ...]]:
    """Returns the function that returns the fingerprints that earlier versions gave a dataset."""
    return fingerprint.earlier if isinstance(fingerprint, DatasetFingerprint) else tuple


def _check_ranks(total_samples: int, micro_batch_size: int, data_parallel_rank: int, data_parallel_size: int) -> None:
    if total_samples < 1 or micro_batch_size < 1 or data_parallel_size < 1:
        msg = (
            "total_samples, micro_batch_size and data_parallel_size must be at least 1, "
            f"found {total_samples}, {micro_batch_size} and {data_parallel_size}"
        )
        raise ArgumentError(msg)
    if not 0 <= data_parallel_rank < data_parallel_size:
        msg = f"data_parallel_rank must be in [0, {data_parallel_size}), found {data_parallel_rank}"
        raise ArgumentError(msg)
