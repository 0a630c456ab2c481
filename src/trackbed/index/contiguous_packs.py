"""Packs of consecutive documents, for text in a blend of packs: each begins where the one before it ends.

Shapes: D documents, P packs, B packs of a call.
"""

from collections.abc import Iterator
from functools import cached_property
from typing import Final

import numpy as np
import numpy.typing as npt

from trackbed.errors import ArgumentError, PlanError
from trackbed.index.packing import PackingSummary, Pieces
from trackbed.kernels.integers import check_at_least
from trackbed.kernels.pack_balance import MOST_HIDDEN, PackCosts
from trackbed.kernels.packing import PackShape

CONTIGUOUS_VERSION: Final = 1
"""Version of the algorithm. The packs of some lengths never change within a version."""
_BLOCK: Final = 256  # documents whose first places are added up at each access
_STEP: Final = 1 << 20  # documents at a time, a multiple of `_BLOCK`

Numbers = npt.NDArray[np.int64]


class ContiguousPacks:
    """Packs of documents in the order of the file, of which the last alone may have room.

    A document of n tokens takes n - 1 places, padded to a multiple. It is cut where a pack is full, and goes on in the
    next one as a piece of its own; documents are kept apart as in `Packs`. A document of fewer than two tokens is in no
    pack. Each epoch has the same packs.

    Args:
        lengths: `[D]` tokens of each document, int32.
        shape: length of a pack; what it says of long documents does not matter.

    Raises:
        PlanError: a length is negative.

    >>> packs = ContiguousPacks(np.array([4, 9, 3], dtype=np.int32), PackShape(sequence_length=8))
    >>> pieces, firsts = packs.find([0, 1], keys=[0, 0])
    >>> pieces.tolist(), firsts.tolist()
    ([[0, 0, 3], [1, 0, 5], [1, 5, 8], [2, 0, 2]], [0, 2, 4])
    """

    def __init__(self, lengths: npt.NDArray[np.int32], shape: PackShape) -> None:
        if len(lengths) and int(lengths.min()) < 0:
            raise PlanError(f"document {int(lengths.argmin())}: a length must be at least 0, found {lengths.min()}")
        self.lengths, self.shape = lengths, shape

    def _units(self, start: int, stop: int) -> Numbers:
        """Places of documents, in multiples."""
        places = np.maximum(self.lengths[start:stop].astype(np.int64) - 1, 0)
        return -(-places // self.shape.multiple)

    @cached_property
    def _before_blocks(self) -> Numbers:
        """Units before each block of documents, and in all."""
        sums = [np.zeros(1, dtype=np.int64)]
        for start in range(0, len(self.lengths), _STEP):
            units = self._units(start, min(start + _STEP, len(self.lengths)))
            sums.append(np.add.reduceat(units, np.arange(0, len(units), _BLOCK)))
        return np.cumsum(np.concatenate(sums))

    def __len__(self) -> int:
        """P, number of packs."""
        capacity = self.shape.capacity
        return (int(self._before_blocks[-1]) + capacity - 1) // capacity

    @cached_property
    def most_pieces(self) -> int:
        """Number of pieces of the pack that has most of them."""
        most = carried = 0
        last = -1  # the pack that the documents so far end in, which has `carried` of them
        for base, first, stop in self._spans():
            counts = np.zeros(int(stop.max()) - base + 1, dtype=np.int64)
            np.add.at(counts, first - base, 1)
            np.add.at(counts, stop - base, -1)
            counts = np.cumsum(counts[:-1])
            counts[0] += carried if base == last else 0
            most = max(most, int(counts.max()))
            last, carried = base + len(counts) - 1, int(counts[-1])
        return most

    def _spans(self) -> Iterator[tuple[int, Numbers, Numbers]]:
        """Yields for some documents the first pack of all, and of each its first pack and the one behind its last."""
        for _, _, begins, ends in self._parts():
            first, stop = begins // self.shape.capacity, (ends - 1) // self.shape.capacity + 1
            yield int(first[0]), first, stop

    def _parts(self) -> Iterator[tuple[Numbers, Numbers, Numbers, Numbers]]:
        """Yields numbers of documents that have places, those places, and the units at which they begin and end."""
        for start in range(0, len(self.lengths), _STEP):
            stop = min(start + _STEP, len(self.lengths))
            units = self._units(start, stop)
            ends = self._before_blocks[start // _BLOCK] + np.cumsum(units)
            kept = np.flatnonzero(units)
            if len(kept):
                places = self.lengths[start:stop][kept].astype(np.int64) - 1
                yield start + kept, places, (ends - units)[kept], ends[kept]

    def summary(self) -> PackingSummary:
        """Returns how full the packs are. Reads the lengths."""
        places, with_places = 0, 0
        for documents, found, _, _ in self._parts():
            places, with_places = places + int(found.sum()), with_places + len(documents)
        return PackingSummary(len(self), places, 0, 0, len(self.lengths) - with_places)

    def holding(self, document: int, *, key: int) -> Numbers:
        """Returns the numbers of the packs that have a piece of a document, in rising order.

        Args:
            document: its number, in `[0, D)`.
            key: not used, as each epoch has the same packs.
        """
        first = document // _BLOCK * _BLOCK
        units = self._units(first, document + 1)
        stop = int(self._before_blocks[first // _BLOCK]) + int(units.sum())
        capacity = self.shape.capacity
        if not units[-1]:
            return np.empty(0, dtype=np.int64)
        return np.arange((stop - int(units[-1])) // capacity, (stop - 1) // capacity + 1)

    def find(self, packs: npt.ArrayLike, *, keys: npt.ArrayLike) -> Pieces:
        """Finds the pieces of documents in some packs: see `Packs.find`.

        Args:
            packs: `[B]` numbers of packs, in `[0, P)`.
            keys: not used, as each epoch has the same packs.

        Raises:
            ArgumentError: a number is out of range.
        """
        numbers = np.asarray(packs, dtype=np.int64).reshape(-1)
        if len(numbers) and not (int(numbers.min()) >= 0 and int(numbers.max()) < len(self)):
            raise ArgumentError(f"packs must be in [0, {len(self)}), found {numbers.min()} to {numbers.max()}")
        parts = [self._pieces(number) for number in numbers.tolist()]
        firsts = np.cumsum([0, *map(len, parts)], dtype=np.int64)
        return np.concatenate([np.empty((0, 3), dtype=np.int64), *parts]), firsts

    def find_visits(self, visits: Numbers, *, seed: int) -> Pieces:
        """Finds the pieces of documents in some packs: see `Packs.find_visits`."""
        return self.find(visits % max(len(self), 1), keys=visits)

    def _pieces(self, pack: int) -> Numbers:
        """Returns the `[pieces, 3]` pieces of one pack."""
        low = pack * self.shape.capacity
        high = low + self.shape.capacity
        first = int(np.searchsorted(self._before_blocks, low, side="right")) - 1
        stop = min(int(np.searchsorted(self._before_blocks, high, side="left")), len(self._before_blocks) - 1)
        start = first * _BLOCK
        units = self._units(start, stop * _BLOCK)
        ends = int(self._before_blocks[first]) + np.cumsum(units)
        begins = ends - units
        inside = np.flatnonzero((ends > low) & (begins < high) & (units > 0))
        begins, places = begins[inside], self.lengths[start + inside].astype(np.int64) - 1
        from_place = np.maximum(low - begins, 0) * self.shape.multiple
        to_place = np.minimum((high - begins) * self.shape.multiple, places)
        return np.stack([start + inside, from_place, to_place], axis=1)

    def windows_of(self, packs: Numbers) -> Numbers:
        """`[B]` window of each pack: all are in one."""
        return np.zeros(len(packs), dtype=np.int64)

    def first_pack(self, window: int) -> int:
        """First pack of the window."""
        return 0

    def costs_of(self, window: int, *, hidden_size: int) -> PackCosts:
        """Returns the cost of each pack: see `Packs.costs_of`. Reads the lengths, and takes 16 bytes for each pack."""
        check_at_least(1, hidden_size=hidden_size)
        if hidden_size > MOST_HIDDEN:
            raise ArgumentError(f"hidden_size must be at most 2**20, found {hidden_size}")
        costs = np.zeros(len(self), dtype=np.int64)
        capacity, multiple = self.shape.capacity, self.shape.multiple
        for _, _, begins, ends in self._parts():
            first, stop = begins // capacity, (ends - 1) // capacity + 1
            document = np.repeat(np.arange(len(first)), stop - first)
            pack = np.arange(len(document)) - np.repeat(np.cumsum(stop - first) - (stop - first) - first, stop - first)
            low = np.maximum(pack * capacity, begins[document])
            places = (np.minimum((pack + 1) * capacity, ends[document]) - low) * multiple
            np.add.at(costs, pack, 12 * hidden_size * places + places * places)
        return PackCosts(np.arange(len(self), dtype=np.uint64), costs)
