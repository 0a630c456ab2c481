"""Shuffles that several datasets ask for, drawn once: equal seeds and counts give equal permutations.

Shapes: N elements.
"""

from collections import OrderedDict
from dataclasses import dataclass
from threading import Lock
from typing import Final

import numpy as np
import numpy.typing as npt

from trackbed import kernels

__all__ = ["Drawn", "SharedRuns"]

_MOST_BYTES: Final = 256 << 20
_MOST_KEYS: Final = 1 << 16

Key = tuple[int, ...]
"""The seed, and the counts of all shuffles of the stream up to this one: that is what decides it."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """A shuffle, and where it left the generator."""

    order: npt.NDArray[np.uint32]
    """`[N]` the numbers from 0, shuffled."""
    twister: kernels.Twister


class SharedRuns:
    """What was asked for twice, up to a number of bytes; the one that nobody asked for longest goes first.

    A first request is only taken note of: most shuffles are asked for once, and to keep them takes memory and time.
    Several threads may ask.
    """

    def __init__(self, most_bytes: int = _MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self._bytes = 0
        self._seen: OrderedDict[Key, None] = OrderedDict()
        self._drawn: OrderedDict[Key, Drawn] = OrderedDict()
        self._lock = Lock()

    def find(self, key: Key) -> Drawn | None:
        """The shuffle of this key, if it is kept."""
        with self._lock:
            found = self._drawn.get(key)
            if found is not None:
                self._drawn.move_to_end(key)
            return found

    def is_wanted(self, key: Key) -> bool:
        """Whether the shuffle of this key is worth keeping: whether it was asked for before, and there is room."""
        with self._lock:
            if key in self._seen:
                return 4 * key[-1] <= self._most_bytes
            self._seen[key] = None
            if len(self._seen) > _MOST_KEYS:
                self._seen.popitem(last=False)
            return False

    def keep(self, key: Key, drawn: Drawn) -> None:
        """Keep a shuffle for those who ask for its key from now on."""
        drawn.order.flags.writeable = False
        with self._lock:
            if key in self._drawn:
                return
            self._drawn[key] = drawn
            self._bytes += drawn.order.nbytes
            while self._bytes > self._most_bytes:
                self._bytes -= self._drawn.popitem(last=False)[1].order.nbytes

    def clear(self) -> None:
        """Keep nothing any more: what was asked for until now will hardly be asked for again."""
        with self._lock:
            self._seen.clear()
            self._drawn.clear()
            self._bytes = 0
