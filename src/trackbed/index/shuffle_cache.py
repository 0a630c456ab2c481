"""Cache of shuffles that several datasets need: equal seeds and lengths give equal permutations.

Shapes: N elements.
"""

from collections import OrderedDict
from dataclasses import dataclass
from threading import Lock
from typing import Final

import numpy as np
import numpy.typing as npt

from trackbed import kernels

_MOST_BYTES: Final = 256 << 20
_MOST_KEYS: Final = 1 << 16

Key = tuple[int, ...]
"""The seed, followed by the lengths of all shuffles of the stream up to this one. These determine the shuffle."""


@dataclass(frozen=True, slots=True)
class CachedShuffle:
    """A shuffle, and the state of the generator after it."""

    order: npt.NDArray[np.uint32]
    """`[N]` shuffled numbers in `[0, N)`."""
    twister: kernels.Twister


class ShuffleCache:
    """LRU cache of shuffles that were requested at least twice, bounded in bytes.

    A first request only records its key: most shuffles are requested once, and storing them costs memory and time.
    Thread-safe.
    """

    def __init__(self, most_bytes: int = _MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self._bytes = 0
        self._seen: OrderedDict[Key, None] = OrderedDict()
        self._shuffles: OrderedDict[Key, CachedShuffle] = OrderedDict()
        self._lock = Lock()

    def find(self, key: Key) -> CachedShuffle | None:
        """The shuffle of this key if it is cached, else None."""
        with self._lock:
            found = self._shuffles.get(key)
            if found is not None:
                self._shuffles.move_to_end(key)
            return found

    def is_wanted(self, key: Key) -> bool:
        """True if the shuffle of this key should be stored: it was requested before, and it fits. Records the key."""
        with self._lock:
            if key in self._seen:
                return 4 * key[-1] <= self._most_bytes
            self._seen[key] = None
            if len(self._seen) > _MOST_KEYS:
                self._seen.popitem(last=False)
            return False

    def keep(self, key: Key, shuffle: CachedShuffle) -> None:
        """Store a shuffle, evicting the least recently used ones to stay within the limit."""
        shuffle.order.flags.writeable = False
        with self._lock:
            if key in self._shuffles:
                return
            self._shuffles[key] = shuffle
            self._bytes += shuffle.order.nbytes
            while self._bytes > self._most_bytes:
                self._bytes -= self._shuffles.popitem(last=False)[1].order.nbytes

    def clear(self) -> None:
        """Removes all shuffles and recorded keys."""
        with self._lock:
            self._seen.clear()
            self._shuffles.clear()
            self._bytes = 0
