"""Sampler that gives every rank packs of equal cost: `trackbed.BalancedSampler`.

Shapes: G samples of a global batch, R ranks, K datasets.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any
from zlib import crc32

import numpy as np
import numpy.typing as npt

from trackbed.datasets import BlendedDataset, GPTDataset
from trackbed.datasets.batches.reader import ReadsBatches, check_split
from trackbed.datasets.blend.dataset import SplitDataset
from trackbed.datasets.gpt.packed import PackedSamples
from trackbed.errors import ArgumentError
from trackbed.index import InstantOrder
from trackbed.index.pack_costs import CostTables, join_tables, places_by_group
from trackbed.index.rank_shuffle import part_of_rank
from trackbed.kernels.integers import check_at_least
from trackbed.kernels.pack_balance import MOST_HIDDEN, PackCosts, deal_packs, find_costs
from trackbed.loading.position import BalancedOrder, Position
from trackbed.loading.samplers import Passes, is_sequential


class BalancedSampler(Passes):
    """Batch sampler of packs that gives all ranks the same work in each global batch.

    A pack costs n + n^2 / (12 h) for each document of n places, where h is the hidden size: the work of a transformer
    on it. Inside one global batch, packs are sorted by cost, those of one cost by position, and dealt R at a time: of
    each R neighbours the heaviest goes to the rank with the least so far. So each rank has as many packs, and the r-th
    micro-batch costs about the same on all ranks. Which rank has which part is drawn for each global batch by the
    dataset's seed. Every rank computes the same assignment from the lengths of the documents, without communication.

    A global batch has the samples that it would have without balance. So losses that are weighted by the trained tokens
    of the global batch give the same gradients, apart from rounding.

    An iteration ends with the last whole global batch, and the next one begins with the first sample. A saved state
    resumes on any number of ranks and with any micro-batch that continue the global batch which has begun; with another
    global batch or hidden size, and with a sampler that does not balance, between two global batches.

    Args:
        dataset: dataset in the order "packed".
        global_batch_size: G, samples of a global batch, a multiple of `micro_batch_size * num_ranks`.
        micro_batch_size: samples of a rank's batch, at least 1.
        rank: number of this process among those that read different samples, in `[0, num_ranks)`.
        num_ranks: R, number of these processes.
        hidden_size: h, width of the model, in `[1, 2**20]`.
        consumed_samples: number of samples that all ranks together have trained on, in `[0, len(dataset))`. A global
            batch begins there.
        skip: pairs of a first and a last position in the dataset to leave out.

    Raises:
        ArgumentError: an argument is out of range, or the dataset is not in the order "packed".
    """

    def __init__(
        self,
        dataset: SplitDataset,
        *,
        global_batch_size: int,
        micro_batch_size: int,
        rank: int,
        num_ranks: int,
        hidden_size: int,
        consumed_samples: int = 0,
        skip: Iterable[Sequence[int]] = (),
    ) -> None:
        check_split(dataset)
        check_at_least(1, global_batch_size=global_batch_size, micro_batch_size=micro_batch_size, num_ranks=num_ranks)
        check_at_least(1, hidden_size=hidden_size)
        if hidden_size > MOST_HIDDEN:
            raise ArgumentError(f"hidden_size must be at most 2**20, found {hidden_size}")
        if global_batch_size % (micro_batch_size * num_ranks):
            raise ArgumentError(
                f"global_batch_size must be a multiple of {micro_batch_size * num_ranks}, micro_batch_size "
                f"{micro_batch_size} times num_ranks {num_ranks}, found {global_batch_size}"
            )
        super().__init__(
            len(dataset),
            consumed_samples,
            micro_batch_size,
            rank,
            num_ranks,
            fingerprint=getattr(dataset, "fingerprint", None),
            rank_seed=int(getattr(dataset.config, "random_seed", 0)),
            skip=skip,
        )
        self.global_batch_size = int(global_batch_size)
        self.hidden_size = int(hidden_size)
        self._costs = StepCosts(dataset, hidden_size=self.hidden_size)
        self._begun: tuple[int, int] | None = None
        """First position of the global batch in which the next iteration begins, and the one after its last."""
        self._inside: tuple[int, int] | None = None
        """The same of the batch that was yielded last."""

    def __iter__(self) -> Iterator[list[int]]:
        """Iterates over the batches of this rank, from the position to the last whole global batch."""
        first = self.consumed_samples if self._begun is None else self._begun[0]
        if self._begun is None and len(self._global_batch(first)) < self.global_batch_size:
            first = self.consumed_samples = 0
        step, read = self.micro_batch_times_data_parallel_size, self._num_read(first, self.consumed_samples)
        while len(positions := self._global_batch(first)) == self.global_batch_size:
            own = self._own(positions)
            stop = positions[-1] + 1
            for number in range(read // step, len(positions) // step):
                count = (number + 1) * step
                self._yielded = positions[count - 1] + 1
                self._inside = (first, stop) if count < len(positions) else None
                yield own[number * self.micro_batch_size : (number + 1) * self.micro_batch_size]
            first, read = stop, 0
        self.consumed_samples, self._begun = self._yielded, None

    def _global_batch(self, first: int) -> Sequence[int]:
        return self.skipped.next_positions(first, self.global_batch_size, total=self.total_samples)

    def _num_read(self, first: int, position: int) -> int:
        """Number of samples of the global batch that begins at `first` which are read at a position."""
        return self.skipped.num_kept(position) - self.skipped.num_kept(first)

    def _own(self, positions: Sequence[int]) -> list[int]:
        """Returns the samples of this rank in a global batch, turn by turn."""
        is_range = isinstance(positions, range)  # which NumPy would convert number by number
        places = np.arange(positions[0], positions[-1] + 1) if is_range else np.asarray(positions, dtype=np.int64)
        dealt = deal_packs(self._costs.find(places), self.data_parallel_size)
        part = part_of_rank(
            self.data_parallel_rank, self.data_parallel_size, seed=self.rank_seed, position=positions[0]
        )
        own: list[int] = places[dealt[:, part]].tolist()
        return own

    def read_from(self, dataset: ReadsBatches) -> None:
        """Goes on in another dataset, whose samples up to the position are those of the one before.

        Raises:
            ArgumentError: it has fewer samples than were consumed, or a global batch has begun.
        """
        if self._begun is not None:
            raise ArgumentError(
                f"the data can be changed between two global batches, found the position {self.consumed_samples} "
                f"inside [{self._begun[0]}, {self._begun[1]})"
            )
        costs = StepCosts(dataset, hidden_size=self.hidden_size)
        super().read_from(dataset)
        self._costs = costs

    def _position_now(self, consumed_samples: int | None) -> Position:
        if consumed_samples is None or consumed_samples == self._yielded:
            return self._position_inside(self._yielded, self._inside)
        return self._position_inside(consumed_samples, self._around(consumed_samples))

    def _around(self, position: int) -> tuple[int, int] | None:
        """Returns the global batch that has begun at a position, counted from those that are known."""
        known = self._yielded if self._inside is None else self._inside[0]
        num_read = self._num_read(known, position) % self.global_batch_size
        if not num_read:
            return None
        wanted = self.skipped.num_kept(position) - num_read
        positions = self._global_batch(bisect_left(range(position), wanted, key=self.skipped.num_kept))
        return positions[0], positions[-1] + 1

    def _position_inside(self, consumed_samples: int, inside: tuple[int, int] | None) -> Position:
        return replace(self._position(consumed_samples), order=str(self._order(inside)))

    def _order(self, inside: tuple[int, int] | None) -> BalancedOrder:
        sizes = {"global_batch_size": self.global_batch_size, "hidden_size": self.hidden_size}
        return BalancedOrder(**sizes, inside=inside, left_out=None if inside is None else self._left_out(*inside))

    def _left_out(self, first: int, stop: int) -> str | None:
        """Checksum of the positions in `[first, stop)` that are left out; None without any."""
        ranges = [[max(one, first), min(last, stop - 1)] for one, last in self.skipped.ranges()]
        inside = [one for one in ranges if one[0] <= one[1]]
        return f"{crc32(repr(inside).encode()):08x}" if inside else None

    def resumed(self, state: Mapping[str, Any]) -> Position:
        """Returns the position of a saved state, whose data checksum is not looked at."""
        position = super().resumed(state)
        saved = BalancedOrder.parse(position.order)
        if saved is not None and saved.inside is not None:
            self._check_inside(position.consumed_samples, saved.inside)
        return position

    def _can_follow(self, order: BalancedOrder | None) -> bool:
        if order is not None and order.inside is not None and order != (own := self._order(order.inside)):
            raise ArgumentError(
                f"a run can resume inside a global batch only with the saved order {str(order)!r}, found {str(own)!r}"
            )
        return order is not None

    def _check_inside(self, position: int, inside: tuple[int, int]) -> None:
        """Raises an ArgumentError unless this sampler can go on at a position inside a global batch."""
        first, stop = inside
        positions = self._global_batch(first)
        if len(positions) < self.global_batch_size or positions[-1] + 1 != stop or not first < position < stop:
            raise ArgumentError(
                f"a run can resume inside a global batch only with the same samples in it, up to position {stop - 1} "
                f"from {first} on, found {len(positions)} up to {positions[-1] if positions else first - 1}"
            )
        num_read, step = self._num_read(first, position), self.micro_batch_times_data_parallel_size
        if num_read % step:
            raise ArgumentError(
                f"a run can resume behind {num_read} samples of a global batch only where they are a multiple of "
                f"micro_batch_size * num_ranks, found {self.micro_batch_size} * {self.data_parallel_size}"
            )

    def move_to(self, position: Position) -> None:
        """Continues at a position that `resumed` returned."""
        self.consumed_samples = self._yielded = position.consumed_samples
        saved = BalancedOrder.parse(position.order)
        self._begun = self._inside = None if saved is None or is_sequential(position.order) else saved.inside


class StepCosts:
    """Costs of the packs of a dataset by position.

    Args:
        dataset: dataset of a split, in the order "packed".
        hidden_size: h, in `[1, 2**20]`.

    Raises:
        ArgumentError: the dataset has another order.
    """

    def __init__(self, dataset: Any, *, hidden_size: int) -> None:
        order = getattr(getattr(dataset, "config", None), "order", None)
        if order != "packed" or not isinstance(dataset, (GPTDataset, BlendedDataset)):
            raise ArgumentError(f"balance needs a dataset in the order 'packed', found {order!r}: {dataset!r}")
        self._dataset = dataset
        members = list(dataset.datasets) if isinstance(dataset, BlendedDataset) else [dataset]
        samples = [one.opened_samples for one in members if isinstance(one, GPTDataset)]
        self._members = [one for one in samples if isinstance(one, PackedSamples)]
        if len(self._members) < len(members):
            raise ArgumentError(f"balance needs datasets of packs alone, found others in {dataset!r}")
        self._tables = [CostTables(one.packs, hidden_size=hidden_size) for one in self._members]
        self._sizes = np.array([max(one.samples_per_epoch, 1) for one in self._members], dtype=np.int64)
        self._first_packs = np.cumsum(self._sizes) - self._sizes
        self._has_windows = any(one.pack_window is not None for one in self._members)

    def find(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """`[N]` costs of the packs at `[N]` positions, times 12 h."""
        order = self._dataset.order if isinstance(self._dataset, BlendedDataset) else self._members[0].order
        if not isinstance(order, InstantOrder):
            raise ArgumentError(f"balance needs samples, found none in {self._dataset!r}")
        datasets, visits = order.locate_visits(positions)
        packs = visits % self._sizes[datasets]
        if not self._has_windows:
            return find_costs(self._joined, (packs + self._first_packs[datasets]).astype(np.uint64))
        costs = np.empty(len(positions), dtype=np.int64)
        for number, places in places_by_group(datasets):
            costs[places] = self._tables[number].find(packs[places])
        return costs

    @cached_property
    def _joined(self) -> PackCosts:
        """Costs of the packs of all datasets, which are not packed in windows."""
        return join_tables([one.table(0) for one in self._tables], self._first_packs)
