"""Samplers of Megatron's two orders, which assign samples to ranks.

m is the number of samples in one micro batch of all ranks: `micro_batch_size * data_parallel_size`. A global
batch is any number of those, so its size may change from one step to the next.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import torch

from trackbed.datasets.batches.reader import ReadsBatches
from trackbed.datasets.identity import DatasetFingerprint, Identity
from trackbed.errors import ArgumentError
from trackbed.index.rank_shuffle import part_of_rank
from trackbed.kernels.integers import is_integer
from trackbed.loading.position import BalancedOrder, Position, check_data
from trackbed.loading.skipped import Skipped
from trackbed.plural import number_of

_ORDER: Final = "sequential"
_SHUFFLED: Final = re.compile(rf"{_ORDER}, ranks shuffled by seed (0|[1-9][0-9]{{0,19}})")
"""Order of a position whose ranks are shuffled. It has no key of its own: states have the same keys either way."""


class Positioned(ABC):
    """A sampler whose position is saved with what its samples are computed from.

    A loader records a position for each batch, and adds the rest only when it saves one, because the checksum of the
    data may still be computing.
    """

    _identity: Identity | None = None

    def _keep_identity(self, fingerprint: str | None) -> None:
        """Store what a fingerprint stands for, and start to compute the checksum of the data in the background."""
        self._identity = fingerprint.identity if isinstance(fingerprint, DatasetFingerprint) else None
        if self._identity is not None and self._identity.data.stamps is None:  # of objects, a position may do without
            self._identity.data.start()

    @abstractmethod
    def _position_now(self, consumed_samples: int | None) -> Position:
        """Position after `consumed_samples`, or after the yielded samples if None."""

    @abstractmethod
    def resumed(self, state: Mapping[str, Any]) -> Position:
        """Returns the position of a saved state, whose data checksum is not looked at."""

    @abstractmethod
    def move_to(self, position: Position) -> None:
        """Continues at a position that `resumed` returned."""

    def position_state(self) -> dict[str, Any]:
        """Position after the yielded samples, without what the samples are computed from."""
        return self._position_now(None).state_dict()

    def data_state(self) -> dict[str, Any]:
        """The other part of a state: everything that the samples are computed from. Waits for the checksum."""
        return {} if self._identity is None else self._identity.state()

    def state_dict(self, consumed_samples: int | None = None) -> dict[str, Any]:
        """Position with the data checksum, for a checkpoint. Waits until the checksum is computed.

        Args:
            consumed_samples: samples that all ranks together have trained on. Defaults to the samples that this
                sampler has yielded, which are more if a loader prefetches.
        """
        return {**self._position_now(consumed_samples).state_dict(), **self.data_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resumes from a saved state, on any number of ranks unless the order depends on it."""
        position = self.resumed(state)
        if self._identity is not None:
            check_data(state, self._identity.data)
        self.move_to(position)


class MegatronPretrainingSampler(Positioned):
    """Batch sampler in the order of the dataset; each rank takes a contiguous part of every m samples.

    m is `micro_batch_size * data_parallel_size`. For torch's DataLoader. Each iteration starts at `consumed_samples`.

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
        rank_seed: seed in `[0, 2**64)` of the permutation that says, for each m samples, which rank takes which part;
            None for the parts in the order of the ranks, as in Megatron. A position that is resumed replaces it.
        skip: pairs of a first and a last sample to leave out. Those behind them fill the batches.

    Raises:
        ArgumentError: an argument is out of range.

    >>> list(MegatronPretrainingSampler(10, 4, 1, 1, 2)), list(MegatronPretrainingSampler(10, 4, 1, 1, 2, rank_seed=1))
    ([[5], [7], [9]], [[4], [7], [9]])
    """

    def __init__(
        self,
        total_samples: int,
        consumed_samples: int,
        micro_batch_size: int,
        data_parallel_rank: int,
        data_parallel_size: int,
        drop_last: bool = True,
        *,
        fingerprint: str | None = None,
        rank_seed: int | None = None,
        skip: Iterable[Sequence[int]] = (),
    ) -> None:
        _check_ranks(total_samples, micro_batch_size, data_parallel_rank, data_parallel_size)
        self.skipped = Skipped(skip)
        if rank_seed is not None and not (is_integer(rank_seed) and 0 <= rank_seed < 1 << 64):
            raise ArgumentError(f"rank_seed must be None, or an integer in [0, 2**64), found {rank_seed!r}")
        if not 0 <= consumed_samples < total_samples:
            raise ArgumentError(
                f"consumed_samples must be in [0, total_samples = {total_samples}), found {consumed_samples}"
            )
        self.total_samples = total_samples
        self.consumed_samples = consumed_samples
        self.micro_batch_size = micro_batch_size
        self.data_parallel_rank = data_parallel_rank
        self.data_parallel_size = data_parallel_size
        self.micro_batch_times_data_parallel_size = micro_batch_size * data_parallel_size
        self.drop_last = drop_last
        self.rank_seed = rank_seed
        self._fingerprint = None if fingerprint is None else str(fingerprint)
        self._yielded = consumed_samples
        self._keep_identity(fingerprint)

    def __len__(self) -> int:
        """Samples of the dataset, as in Megatron."""
        return self.total_samples

    def __iter__(self) -> Iterator[list[int]]:
        """Iterates over the micro batches of this rank."""
        step, first = self.micro_batch_times_data_parallel_size, self.consumed_samples
        while samples := self.skipped.next_positions(first, step, total=self.total_samples):
            if len(samples) < step and self.drop_last:
                return
            part = part_of_rank(
                self.data_parallel_rank, self.data_parallel_size, seed=self.rank_seed, position=samples[0]
            )
            first = self._yielded = samples[-1] + 1
            yield list(samples[part * self.micro_batch_size : (part + 1) * self.micro_batch_size])

    def read_from(self, dataset: ReadsBatches) -> None:
        """Goes on in another dataset, whose samples up to the position are those of the one before.

        Raises:
            ArgumentError: it has fewer samples than were consumed.
        """
        total_samples, fingerprint = len(dataset), getattr(dataset, "fingerprint", None)
        if total_samples < self._yielded:
            raise ArgumentError(f"total_samples must be at least {self._yielded}, the position, found {total_samples}")
        self.total_samples = total_samples
        self._fingerprint = None if fingerprint is None else str(fingerprint)
        self._keep_identity(fingerprint)

    def _position_now(self, consumed_samples: int | None) -> Position:
        return self._position(self._yielded if consumed_samples is None else consumed_samples)

    def resumed(self, state: Mapping[str, Any]) -> Position:
        """Returns the position of a saved state, whose data checksum is not looked at."""
        own = self._position(0)
        order = state.get("order") if isinstance(state, Mapping) else None
        if is_sequential(order) or self._can_follow(BalancedOrder.parse(order)):
            own = replace(own, order=str(order))  # of any kind: the loader follows it
        position = own.resumed(state, identity=self._identity)
        if position.consumed_samples > self.total_samples:
            raise ArgumentError(
                f"consumed_samples must be in [0, {self.total_samples}], found {position.consumed_samples}"
            )
        return position

    def _can_follow(self, order: BalancedOrder | None) -> bool:
        """True for an order of balanced steps, between two of them.

        Raises:
            ArgumentError: a position inside a step: the samples before it are not all of those that were read.
        """
        if order is not None and order.inside is not None:
            raise ArgumentError(
                f"a run can resume inside a global batch only with the saved order {str(order)!r}, found a sampler "
                "that does not balance"
            )
        return order is not None

    def move_to(self, position: Position) -> None:
        """Continues at a position that `resumed` returned."""
        self.consumed_samples = self._yielded = position.consumed_samples
        if is_sequential(position.order):
            self.rank_seed = _seed_of(position.order)

    def _position(self, consumed_samples: int) -> Position:
        return Position(
            consumed_samples=consumed_samples,
            total_samples=self.total_samples,
            order=_ORDER if self.rank_seed is None else f"{_ORDER}, ranks shuffled by seed {self.rank_seed}",
            fingerprint=self._fingerprint,
        )


def sampler_of_positions(dataset: ReadsBatches) -> MegatronPretrainingSampler:
    """Returns a sampler of one rank, for a program that reads by itself: its state is a position in the dataset."""
    fingerprint = getattr(dataset, "fingerprint", None)
    return MegatronPretrainingSampler(len(dataset), 0, 1, 0, 1, fingerprint=fingerprint)


class Passes(MegatronPretrainingSampler):
    """Sampler of passes over the dataset: after one that has ended, wherever it began, the next one is whole."""

    def __iter__(self) -> Iterator[list[int]]:
        """Iterates over the micro batches of this rank, from the position to the end of the pass."""
        least = self.micro_batch_times_data_parallel_size if self.drop_last else 1
        if len(self.skipped.next_positions(self.consumed_samples, least, total=self.total_samples)) < least:
            self.consumed_samples = 0
        yield from super().__iter__()
        self.consumed_samples = self._yielded


def is_sequential(order: object) -> bool:
    """True for the name of an order in which each step has the samples that follow."""
    return order == _ORDER or (isinstance(order, str) and _seed_of(order) is not None)


def _seed_of(order: str) -> int | None:
    """Seed of the shuffle of the ranks that an order names; None if it names none."""
    found = _SHUFFLED.fullmatch(order)
    seed = None if found is None else int(found[1])
    return seed if seed is not None and seed < 1 << 64 else None


class MegatronPretrainingRandomSampler(Positioned):
    """Batch sampler in a random order that is redrawn for each epoch.

    For torch's DataLoader. An iteration runs to the end of the current epoch and advances `consumed_samples`, so the
    next iteration starts the next epoch. An epoch has A samples: `total_samples` without the remainder that does not
    fill up m.

    If m does not divide `total_samples`, some ranks have one more micro batch than others at the end of an epoch, as in
    Megatron. From then on the ranks are in different epochs: a global batch may have a sample twice, and a resumed run
    has other batches than one that was not interrupted. `drop_last` leaves the same samples out on all ranks.

    Args:
        dataset: the dataset. Its `fingerprint`, if any, is checked when resuming, and its `set_epoch`, if any, is
            called with the epoch.
        total_samples: samples of the dataset, at least m.
        consumed_samples: samples that all ranks together have trained on, a multiple of m within an epoch.
        micro_batch_size: samples per micro batch of a rank, at least 1.
        data_parallel_rank: this rank, in `[0, data_parallel_size)`.
        data_parallel_size: number of ranks, at least 1.
        data_sharding: True to restrict each rank to its own part of the dataset.
        drop_last: True to end an epoch of every rank after A samples of all ranks; each epoch leaves out others. False
            to give some ranks the micro batches that the rest still fills, as Megatron does. With `data_sharding`, or
            if m divides `total_samples`, both are the same.

    Raises:
        ArgumentError: an argument is out of range.

    >>> [list(MegatronPretrainingRandomSampler(None, 5, 0, 1, rank, 2, False, drop_last=True)) for rank in range(2)]
    [[[4], [1]], [[0], [3]]]
    """

    def __init__(
        self,
        dataset: Any,
        total_samples: int,
        consumed_samples: int,
        micro_batch_size: int,
        data_parallel_rank: int,
        data_parallel_size: int,
        data_sharding: bool,
        *,
        drop_last: bool = False,
    ) -> None:
        if not isinstance(drop_last, bool):
            raise ArgumentError(f"drop_last must be True or False, found {drop_last!r}")
        _check_ranks(total_samples, micro_batch_size, data_parallel_rank, data_parallel_size)
        self.dataset = dataset
        self.total_samples = total_samples
        self.micro_batch_size = micro_batch_size
        self.data_parallel_rank = data_parallel_rank
        self.data_parallel_size = data_parallel_size
        self.data_sharding = data_sharding
        self.drop_last = drop_last
        self.micro_batch_times_data_parallel_size = micro_batch_size * data_parallel_size
        self.last_batch_size = total_samples % self.micro_batch_times_data_parallel_size
        self.consumed_samples = self._checked(consumed_samples)
        self._keep_identity(getattr(dataset, "fingerprint", None))

    @property
    def _samples_per_epoch(self) -> int:
        return self.total_samples - self.last_batch_size

    def _checked(self, consumed_samples: int) -> int:
        step, epoch = self.micro_batch_times_data_parallel_size, self._samples_per_epoch
        if epoch == 0:
            raise ArgumentError(
                f"total_samples must be at least {step:,}, one micro batch of every rank, found {self.total_samples:,}"
            )
        if consumed_samples < 0 or consumed_samples % epoch % step:
            raise ArgumentError(
                f"consumed_samples must be a multiple of {step:,} within an epoch of {number_of(epoch, 'sample')}, "
                f"found {consumed_samples:,}"
            )
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
        stop = self._samples_per_epoch if self.drop_last else None
        return permutation[place:stop][self.data_parallel_rank :: self.data_parallel_size]

    @property
    def _permuted(self) -> int:
        """Size of an epoch's permutation: the samples of one rank if sharded, else of all ranks."""
        step = self.micro_batch_times_data_parallel_size if self.data_sharding else self.micro_batch_size
        return self.total_samples // step * self.micro_batch_size

    def _position_now(self, consumed_samples: int | None) -> Position:
        return self._position(self.consumed_samples if consumed_samples is None else consumed_samples)

    def resumed(self, state: Mapping[str, Any]) -> Position:
        """Returns the position of a saved state, whose data checksum is not looked at."""
        position = self._position(0).resumed(state, identity=self._identity)
        self._checked(position.consumed_samples)
        return position

    def move_to(self, position: Position) -> None:
        """Continues at a position that `resumed` returned."""
        self.consumed_samples = position.consumed_samples

    def _order_name(self) -> str:
        if self.data_sharding:
            return "random, sharded"
        is_cut = self.drop_last and self._permuted > self._samples_per_epoch
        return "random, drop_last" if is_cut else "random"

    def _position(self, consumed_samples: int) -> Position:
        fingerprint = getattr(self.dataset, "fingerprint", None)
        return Position(
            consumed_samples=consumed_samples,
            total_samples=self.total_samples,
            order=self._order_name(),
            fingerprint=None if fingerprint is None else str(fingerprint),
            samples_per_epoch=self._samples_per_epoch,
            permuted=self._permuted,
            data_parallel_size=self.data_parallel_size if self.data_sharding else None,
        )


def _check_ranks(total_samples: int, micro_batch_size: int, data_parallel_rank: int, data_parallel_size: int) -> None:
    if total_samples < 1 or micro_batch_size < 1 or data_parallel_size < 1:
        raise ArgumentError(
            "total_samples, micro_batch_size and data_parallel_size must be at least 1, "
            f"found {total_samples}, {micro_batch_size} and {data_parallel_size}"
        )
    if not 0 <= data_parallel_rank < data_parallel_size:
        raise ArgumentError(f"data_parallel_rank must be in [0, {data_parallel_size}), found {data_parallel_rank}")
