"""The instant order: a blend whose positions are computed on demand.

Shapes: K datasets, N positions.
"""

from bisect import bisect_right
from collections.abc import Sequence
from operator import index
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from trackbed import kernels
from trackbed.cancellation import Poll
from trackbed.errors import ArgumentError
from trackbed.index.instant_plan import LAST_POSITION, InstantPlan, checked_positions, plan_instant
from trackbed.index.interleaving import Weight
from trackbed.index.permutation import BlockPermutation
from trackbed.index.split_mix import split_mix
from trackbed.index.stages import BlendStage, Exhaustion, WhenExhausted


class InstantOrder:
    """A blend of datasets without an index: computes any position in well below a microsecond, with O(K) memory.

    Datasets are blended by weight: at every position of a stage, each dataset is within 2 samples of its share. Each
    dataset is repeated in epochs, and every epoch is shuffled differently. The order depends on the arguments alone,
    so every rank and worker has the same order, and a run resumes from one integer, the position.

    Args:
        sizes: `[K]` samples in one epoch of each dataset, in `[0, 2**63)`; at least 1 where the weight is above 0.
        weights: `[K]` finite numbers of at least 0, at least one of them above 0; only their proportions matter.
        seed: in `[0, 2**64)`.
        num_samples: length of the order, in `[0, 2**63)`; None for the largest length that int64 positions allow.
        max_epochs: `[K]` epochs that each dataset may be drawn for before position `num_samples`, at least 0, None for
            no limit; a fraction of an epoch is rounded to the nearest sample.
        when_exhausted: `"raise"` to raise an error if a dataset would exceed its limit; `"reweight"` to continue the
            blend without it and list it in `exhaustions`.
        block: samples in a block, which is shuffled as a unit before its samples are, in `[1, 2**63)`: see
            `BlockPermutation`. With 1 every epoch is shuffled as a whole; larger blocks are read contiguously.
        window: consecutive blocks whose samples are shuffled together, in `[1, 2**63)`; no effect with `block=1`.

    Raises:
        ArgumentError: an argument is out of range.
        PlanError: a dataset runs out, or with `"reweight"` all of them do; the message names the dataset and the
            position.

    >>> order = InstantOrder(sizes=[3, 2], weights=[0.75, 0.25], seed=1, num_samples=8)
    >>> datasets, samples = order.locate(range(8))
    >>> datasets.tolist(), order.counts_before(8).tolist()
    ([0, 1, 0, 0, 0, 1, 0, 0], [6, 2])
    """

    VERSION: ClassVar[int] = 1
    """Version of the algorithm; incremented whenever the order for given arguments changes."""
    plan: InstantPlan
    """Precomputed data from which positions are located."""

    def __init__(
        self,
        *,
        sizes: Sequence[int] | npt.NDArray[np.integer[Any]],
        weights: Sequence[Weight] | npt.NDArray[Any],
        seed: int,
        num_samples: int | None = None,
        max_epochs: Sequence[Weight | None] | None = None,
        when_exhausted: WhenExhausted = "raise",
        block: int = 1,
        window: int = 1,
    ) -> None:
        self.plan = plan_instant(
            sizes=sizes,
            stages=[BlendStage(0, tuple(weights))],
            seed=seed,
            num_samples=num_samples,
            max_epochs=max_epochs,
            when_exhausted=when_exhausted,
            block=block,
            window=window,
        )

    @classmethod
    def staged(
        cls,
        *,
        sizes: Sequence[int] | npt.NDArray[np.integer[Any]],
        stages: Sequence[BlendStage],
        seed: int,
        num_samples: int | None = None,
        max_epochs: Sequence[Weight | None] | None = None,
        when_exhausted: WhenExhausted = "raise",
        block: int = 1,
        window: int = 1,
    ) -> Self:
        """Creates an order whose weights change at given samples, while every dataset continues its epochs.

        A stage does not change the samples before it, so a run may add a stage at or after its current position.

        Args:
            sizes: as for the class.
            stages: the first starts at sample 0, and no stage starts before its predecessor. A stage that starts at
                the same sample as the next one is empty.
            seed: as for the class.
            num_samples: as for the class.
            max_epochs: as for the class.
            when_exhausted: as for the class.
            block: as for the class.
            window: as for the class.

        Raises:
            ArgumentError: an argument is out of range.
            PlanError: a dataset runs out, or with `"reweight"` all of them do.

        >>> stages = [BlendStage(0, (1, 0)), BlendStage(4, (0, 1)), BlendStage(6, (1, 1))]
        >>> order = InstantOrder.staged(sizes=[100, 100], stages=stages, seed=1)
        >>> [order.counts_before(position).tolist() for position in (4, 6, 10)]
        [[4, 0], [4, 2], [6, 4]]
        """
        order = cls.__new__(cls)
        order.plan = plan_instant(
            sizes=sizes,
            stages=stages,
            seed=seed,
            num_samples=num_samples,
            max_epochs=max_epochs,
            when_exhausted=when_exhausted,
            block=block,
            window=window,
        )
        return order

    def __len__(self) -> int:
        """`num_samples`, or 2**63 - 1 if it is None."""
        return self.plan.num_samples

    @property
    def stages(self) -> tuple[BlendStage, ...]:
        """The requested stages, plus one behind each ramp, and for each position at which datasets run out."""
        return self.plan.stages.stages

    @property
    def exhaustions(self) -> tuple[Exhaustion, ...]:
        """Datasets that run out, each listed once, in order of position."""
        return self.plan.stages.exhaustions

    def locate(
        self,
        positions: Sequence[int] | npt.NDArray[np.integer[Any]],
        *,
        num_threads: int = 1,
        poll: Poll = None,
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
        """Computes the dataset and the sample at each position.

        Args:
            positions: `[N]` in any order, in `[0, 2**63)`, also beyond `num_samples`; with `max_epochs` in
                `[0, num_samples)`.
            num_threads: at least 1; the result does not depend on it.
            poll: progress callback, called at least every 50 ms with the number of positions done; an exception that
                it raises ends the call.

        Returns:
            `[N]` dataset in `[0, K)`, and `[N]` sample of that dataset, below its size.

        Raises:
            ArgumentError: a position is out of range or not an integer.
        """
        datasets, _, samples = self._locate(positions, num_threads, poll)
        return datasets, samples

    def locate_visits(
        self, positions: Sequence[int] | npt.NDArray[np.integer[Any]]
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
        """Computes the dataset and the visit at each position: epoch x size + sample, of the dataset.

        Args:
            positions: as of `locate`.

        >>> order = InstantOrder(sizes=[3], weights=[1], seed=1)
        >>> visits = order.locate_visits(range(6))[1]
        >>> sorted(visits.tolist()), (visits % 3).tolist() == order.locate(range(6))[1].tolist()
        ([0, 1, 2, 3, 4, 5], True)
        """
        datasets, draws, samples = self._locate(positions, 1, None)
        return datasets, draws - draws % self.plan.shuffles.sizes[datasets] + samples

    def _locate(
        self, positions: Sequence[int] | npt.NDArray[np.integer[Any]], num_threads: int, poll: Poll
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Returns dataset, number of the draw from it, and sample at each position."""
        found = checked_positions(positions, stop=self.plan.num_samples if self.plan.is_limited else LAST_POSITION + 1)
        datasets = np.empty(len(found), dtype=np.int32)
        draws, samples = np.empty(len(found), dtype=np.int64), np.empty(len(found), dtype=np.int64)
        kernels.instant_locate(
            self.plan.stages.trees,
            self.plan.shuffles,
            found,
            datasets,
            draws,
            samples,
            num_threads=num_threads,
            poll=poll,
        )
        return datasets, draws, samples

    def find(self, dataset: int, sample: int) -> npt.NDArray[np.int64]:
        """Finds all positions at which a sample is drawn, one in each epoch of its dataset, in rising order.

        With `block` above 1 this computes the shuffle of each epoch, and else O(K log(num_samples)) per epoch.

        Args:
            dataset: in `[0, K)`.
            sample: number of a sample of that dataset, below its size.

        Raises:
            ArgumentError: there is no such dataset, or sample, or the order has no end.
        """
        if len(self) == LAST_POSITION:
            raise ArgumentError("an order must have num_samples for its positions to be found, found none")
        dataset, sample, shuffles = index(dataset), index(sample), self.plan.shuffles
        if not 0 <= dataset < len(shuffles.sizes) or not 0 <= sample < shuffles.sizes[dataset]:
            raise ArgumentError(f"dataset and sample must be ones of the order, found {dataset} and {sample}")
        size, num_draws = int(shuffles.sizes[dataset]), int(self.counts_before(len(self))[dataset])
        found = []
        for epoch in range(-(-num_draws // size)):
            key = split_mix(int(shuffles.keys[dataset]), epoch)
            draw = epoch * size + _place_in_epoch(sample, size, key, shuffles)
            if draw < num_draws:
                found.append(bisect_right(range(len(self)), draw, key=lambda place: self._drawn(dataset, place)) - 1)
        return np.sort(np.array(found, dtype=np.int64))

    def _drawn(self, dataset: int, position: int) -> int:
        return int(self.counts_before(position)[dataset])

    def counts_before(self, position: int) -> npt.NDArray[np.int64]:
        """`[K]` number of samples drawn from each dataset before a position, over all of its epochs; O(K).

        Args:
            position: in `[0, 2**63)`; with `max_epochs` in `[0, num_samples]`.

        Raises:
            ArgumentError: the position is out of range.
        """
        position = index(position)
        last = self.plan.num_samples if self.plan.is_limited else LAST_POSITION
        if not 0 <= position <= last:
            raise ArgumentError(f"position must be in [0, {last}], found {position}")
        return kernels.interleaving_counts(self.plan.stages.trees, position)


_STEP = 1 << 20


def _place_in_epoch(sample: int, size: int, key: int, shuffles: kernels.EpochShuffles) -> int:
    """Returns the place of a sample in the shuffle of an epoch."""
    if shuffles.block == 1:
        return kernels.find_position(sample, size=size, key=key)
    shuffle = BlockPermutation(size, seed=key, block=shuffles.block, window=shuffles.window)
    for start in range(0, size, _STEP):
        places = np.flatnonzero(shuffle(np.arange(start, min(start + _STEP, size))) == sample)
        if len(places):
            return start + int(places[0])
    raise ArgumentError(f"sample must be below {size}, found {sample}")
