"""Cost of packs, looked up in tables that are made when they are first needed.

Shapes: B packs, P packs in all.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from threading import Lock
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from trackbed.index.contiguous_packs import ContiguousPacks
from trackbed.index.packing import Packs
from trackbed.kernels.pack_balance import PackCosts, find_costs

_MOST_BYTES: Final = 256 << 20
"""Memory of the tables that are kept."""


class CostTables:
    """Costs of packs: the sum of 12 h n + n^2 over the documents of n places in a pack.

    Packs with the same lengths cost the same, so that a table has an entry for each pattern of lengths. Each window has
    a table of its own. Thread-safe.

    Args:
        packs: the packs.
        hidden_size: h, in `[1, 2**20]`.

    >>> from trackbed.kernels.packing import PackShape
    >>> packs = Packs(np.array([4, 9, 3, 2], dtype=np.int32), PackShape(sequence_length=8))
    >>> CostTables(packs, hidden_size=1).find(np.array([0, 1])).tolist()  # 12 * 8 + 8**2, 12 * 6 + 3**2 + 2**2 + 1
    [160, 86]
    """

    def __init__(self, packs: Packs | ContiguousPacks, *, hidden_size: int) -> None:
        self._packs = packs
        self._hidden_size = hidden_size
        self._kept: OrderedDict[int, PackCosts] = OrderedDict()
        self._lock = Lock()

    def find(self, packs: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """`[B]` costs of `[B]` packs, in `[0, P)`."""
        found = np.empty(len(packs), dtype=np.int64)
        for window, places in places_by_group(self._packs.windows_of(packs)):
            own = packs[places] - self._packs.first_pack(window)
            found[places] = find_costs(self.table(window), own.astype(np.uint64))
        return found

    def table(self, window: int) -> PackCosts:
        """Returns the costs of the packs of a window, which are numbered from 0 on."""
        with self._lock:
            kept = self._kept.get(window)
            if kept is not None:
                self._kept.move_to_end(window)
                return kept
        made = self._packs.costs_of(window, hidden_size=self._hidden_size)
        with self._lock:
            self._kept[window] = made
            while len(self._kept) > 1 and sum(one.num_bytes for one in self._kept.values()) > _MOST_BYTES:
                self._kept.popitem(last=False)
        return made


def join_tables(tables: Sequence[PackCosts], first_packs: npt.NDArray[np.int64]) -> PackCosts:
    """Returns the costs of the packs of several tables as one.

    Args:
        tables: `[K]` tables.
        first_packs: `[K]` number in the joined table of the first pack of each.
    """
    firsts = [one.first_packs + np.uint64(first) for one, first in zip(tables, first_packs.tolist(), strict=True)]
    return PackCosts(np.concatenate(firsts), np.concatenate([one.costs for one in tables]))


def places_by_group(groups: npt.NDArray[np.integer[Any]]) -> Iterator[tuple[int, Any]]:
    """Iterates over the numbers in an array, each with its places in it.

    >>> [(group, np.arange(4)[places].tolist()) for group, places in places_by_group(np.array([3, 1, 3, 1]))]
    [(1, [1, 3]), (3, [0, 2])]
    """
    if len(groups) and (groups == groups[0]).all():
        yield int(groups[0]), slice(None)
        return
    order = np.argsort(groups, kind="stable")
    in_order = groups[order]
    ends = 1 + np.flatnonzero(in_order[1:] != in_order[:-1])
    for places in np.split(order, ends) if len(groups) else []:
        yield int(groups[places[0]]), places
