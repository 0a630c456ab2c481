"""Packs of whole documents, which are computed on demand instead of stored.

Shapes: D documents, P packs, W documents of a window.
"""

from collections import OrderedDict
from collections.abc import Callable
from functools import cached_property
from threading import Lock
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from trackbed.errors import ArgumentError, PlanError
from trackbed.index.split_mix import split_mix
from trackbed.kernels.integers import check_at_least
from trackbed.kernels.pack_balance import PackCosts, costs_of_plan
from trackbed.kernels.packing import PackPlan, PackShape, count_items, find_packs, find_visits, plan_packs, sort_items

PACKING_VERSION: Final = 1
"""Version of the algorithm. The packs of some lengths and keys never change within a version."""
_SEARCHED: Final = 1 << 14  # packs at a time
_SUMMED: Final = 1 << 20  # documents at a time
_MOST_BYTES: Final = 256 << 20
"""Memory of the windows that are kept."""


class _Window(NamedTuple):
    """The packs of consecutive documents."""

    plan: PackPlan
    first_items: npt.NDArray[np.uint64]
    documents: npt.NDArray[np.uint32]
    lengths: npt.NDArray[np.int32]

    @property
    def num_bytes(self) -> int:
        """Memory, without that of the lengths."""
        return sum(one.nbytes for one in (self.plan.nodes, self.plan.leaves, self.first_items, self.documents))


Pieces = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]
"""`[pieces, 3]` document, first input and one after the last input of each; and how many there are before each pack."""


def find_by_group(groups: npt.NDArray[np.integer[Any]], find: Callable[[int, Any], Pieces]) -> Pieces:
    """Finds the pieces of packs group by group, and returns them in the order of the packs.

    Args:
        groups: `[B]` number of the group that each pack is in, such as its dataset.
        find: returns the pieces of the packs of a group, at some places in the batch.
    """
    if len(groups) and (groups == groups[0]).all():
        return find(int(groups[0]), slice(None))
    parts: list[npt.NDArray[np.int64]] = [np.empty((0, 3), dtype=np.int64)] * len(groups)
    for group in np.unique(groups).tolist():
        places = np.flatnonzero(groups == group)
        pieces, firsts = find(group, places)
        for place, part in zip(places.tolist(), np.split(pieces, firsts[1:-1]), strict=True):
            parts[place] = part
    firsts = np.cumsum([0, *map(len, parts)], dtype=np.int64)
    return np.concatenate([np.empty((0, 3), dtype=np.int64), *parts]), firsts


class PackingSummary(NamedTuple):
    """Fill of packs, and counts of long documents."""

    packs: int
    places: int
    """Places with a token, of `packs` times S."""
    longer: int
    """Documents with more than S places, which are split, cut or left out."""
    lost_tokens: int
    """Tokens of those that are cut or left out."""
    empty: int
    """Documents of fewer than two tokens, which are in no pack."""


class Packs:
    """Packs of at most `shape.sequence_length` places, by best-fit decreasing on the histogram of lengths.

    A document of n tokens takes n - 1 places: its inputs are its tokens but the last, and its labels its tokens but the
    first. A document of fewer than two tokens is in no pack.

    Args:
        lengths: `[D]` tokens of each document, int32.
        shape: length of a pack, and what becomes of longer documents.
        most_documents: most documents in a pack, at least 1; None for any number.
        window: W, at least 1: documents are packed with others of their window only, which are read near each other;
            None to pack all together.

    Raises:
        ArgumentError: an argument is out of range.
        PlanError: a length is negative.

    >>> packs = Packs(np.array([4, 9, 3, 2], dtype=np.int32), PackShape(sequence_length=8))
    >>> len(packs)
    2
    >>> pieces, firsts = packs.find([0, 1], keys=[1, 1])
    >>> pieces.tolist(), firsts.tolist()
    ([[1, 0, 8], [0, 0, 3], [2, 0, 2], [3, 0, 1]], [0, 1, 4])
    """

    def __init__(
        self,
        lengths: npt.NDArray[np.int32],
        shape: PackShape,
        *,
        most_documents: int | None = None,
        window: int | None = None,
    ) -> None:
        check_at_least(1, window=1 if window is None else window, most_documents=most_documents or 1)
        if most_documents == 0:
            raise ArgumentError("most_documents must be a whole number of at least 1, found 0")
        if len(lengths) and int(lengths.min()) < 0:
            raise PlanError(f"document {int(lengths.argmin())}: a length must be at least 0, found {lengths.min()}")
        self.lengths, self.shape = lengths, shape
        self.most_documents, self.window = most_documents, window
        self._kept: OrderedDict[int, _Window] = OrderedDict()
        self._lock = Lock()

    @property
    def _width(self) -> int:
        """Documents of a window."""
        return max(len(self.lengths) if self.window is None else self.window, 1)

    @cached_property
    def _measured(self) -> tuple[npt.NDArray[np.int64], int]:
        """First pack of each window, and the number of packs; and the most pieces of a pack."""
        starts = range(0, len(self.lengths), self._width)
        if len(starts) == 1:
            plans = iter([self._window(0).plan])
        else:
            parts = (self.lengths[start : start + self._width] for start in starts)
            plans = (plan_packs(count_items(part, self.shape), self.most_documents) for part in parts)
        found = [(plan.num_packs, plan.most_items) for plan in plans]
        firsts = np.cumsum([0, *(num_packs for num_packs, _ in found)], dtype=np.int64)
        return firsts, max((most for _, most in found), default=0)

    @property
    def _first_packs(self) -> npt.NDArray[np.int64]:
        return self._measured[0]

    @property
    def most_pieces(self) -> int:
        """Number of pieces of the pack that has most of them."""
        return self._measured[1]

    def summary(self) -> PackingSummary:
        """Returns how full the packs are, and what became of long documents. Reads the lengths."""
        length, longer, empty, places, lost = self.shape.sequence_length, 0, 0, 0, 0
        for start in range(0, len(self.lengths), _SUMMED):
            wanted = np.maximum(self.lengths[start : start + _SUMMED].astype(np.int64) - 1, 0)
            is_long = wanted > length
            longer += int(np.count_nonzero(is_long))
            empty += int(np.count_nonzero(wanted == 0))
            placed = wanted
            if self.shape.long_documents == "cut":
                placed = np.minimum(wanted, length)
            elif self.shape.long_documents == "drop":
                placed = np.where(is_long, 0, wanted)
            places += int(placed.sum())
            lost += int((wanted - placed).sum())
        return PackingSummary(len(self), places, longer, lost, empty)

    def __len__(self) -> int:
        """P, number of packs."""
        return int(self._first_packs[-1])

    def holding(self, document: int, *, key: int) -> npt.NDArray[np.int64]:
        """Returns the numbers of the packs that have a piece of a document, in rising order.

        Looks through all packs of its window: about 0.2 us for each document of that.

        Args:
            document: its number, in `[0, D)`.
            key: key of the packs, as in `find`.
        """
        window = document // self._width
        first, stop = self._first_packs[window : window + 2].tolist()
        found = [np.empty(0, dtype=np.int64)]
        for start in range(first, stop, _SEARCHED):
            packs = np.arange(start, min(start + _SEARCHED, stop))
            pieces, firsts = self.find(packs, keys=np.full(len(packs), key, dtype=np.uint64))
            places = np.flatnonzero(pieces[:, 0] == document)
            found.append(packs[np.searchsorted(firsts, places, side="right") - 1])
        return np.unique(np.concatenate(found))

    def find(self, packs: npt.ArrayLike, *, keys: npt.ArrayLike) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Finds the pieces of documents in some packs.

        Args:
            packs: `[B]` numbers of packs, in `[0, P)`.
            keys: `[B]` each in `[0, 2**64)`. The packs of one key have each piece of each document once; under another
                key documents meet others.

        Returns:
            `[pieces, 3]` document, first input and one after the last input, of all packs one after the other, those of
            a pack in falling order of length; and `[B + 1]` how many pieces there are before each pack, and in all.

        Raises:
            ArgumentError: a number is out of range.
        """
        numbers = np.asarray(packs, dtype=np.int64).reshape(-1)
        secrets = np.asarray(keys, dtype=np.uint64).reshape(-1)
        if len(numbers) and not (int(numbers.min()) >= 0 and int(numbers.max()) < len(self)):
            raise ArgumentError(f"packs must be in [0, {len(self)}), found {numbers.min()} to {numbers.max()}")
        return find_by_group(
            self.windows_of(numbers), lambda one, places: self._find_in(one, numbers[places], secrets[places])
        )

    def find_visits(self, visits: npt.NDArray[np.int64], *, seed: int) -> Pieces:
        """Finds the pieces of documents in some packs, each in its epoch.

        Args:
            visits: `[B]` epoch x P + pack, each at least 0.
            seed: start of the stream whose words are the keys of the epochs, in `[0, 2**64)`: see `split_mix`.
        """
        if self.window is None or self.window >= len(self.lengths):
            return find_visits(*self._window(0), self.shape, visits, seed=seed)
        epochs, packs = np.divmod(visits, max(len(self), 1))
        keys = {epoch: split_mix(seed, epoch) for epoch in set(epochs.tolist())}
        return self.find(packs, keys=np.array([keys[epoch] for epoch in epochs.tolist()], dtype=np.uint64))

    def windows_of(self, packs: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """`[B]` window of each of `[B]` packs in `[0, P)`."""
        return np.searchsorted(self._first_packs, packs, side="right") - 1

    def first_pack(self, window: int) -> int:
        """First pack of a window."""
        return int(self._first_packs[window])

    def costs_of(self, window: int, *, hidden_size: int) -> PackCosts:
        """Returns the costs of the packs of a window, numbered from 0 on: see `costs_of_plan`."""
        return costs_of_plan(self._plan_of(window), self.shape, hidden_size=hidden_size)

    def _plan_of(self, window: int) -> PackPlan:
        with self._lock:
            kept = self._kept.get(window)
        if kept is not None:
            return kept.plan
        lengths = self.lengths[window * self._width : (window + 1) * self._width]
        return plan_packs(count_items(lengths, self.shape), self.most_documents)

    def _find_in(
        self, number: int, packs: npt.NDArray[np.int64], keys: npt.NDArray[np.uint64]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Finds the pieces of packs of one window."""
        plan, first_items, documents, lengths = self._window(number)
        own = (packs - self._first_packs[number] if number else packs).astype(np.uint64)
        pieces, firsts = find_packs(plan, first_items, documents, lengths, self.shape, own, keys)
        if number:
            pieces[:, 0] += number * self._width
        return pieces, firsts

    def _window(self, number: int) -> _Window:
        """Returns the packs of a window, which are kept for a while."""
        with self._lock:
            kept = self._kept.get(number)
            if kept is not None:
                self._kept.move_to_end(number)
                return kept
        lengths = self.lengths[number * self._width : (number + 1) * self._width]
        counts = count_items(lengths, self.shape)
        plan = plan_packs(counts, self.most_documents)
        first_items = np.concatenate([np.zeros(1, dtype=np.uint64), np.cumsum(counts, dtype=np.uint64)])
        made = _Window(plan, first_items, sort_items(lengths, self.shape, counts), lengths)
        with self._lock:
            self._kept[number] = made
            while len(self._kept) > 1 and sum(one.num_bytes for one in self._kept.values()) > _MOST_BYTES:
                self._kept.popitem(last=False)
        return made
