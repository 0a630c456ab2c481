"""Counters in shared memory, on which processes sleep until another process has counted."""

from collections.abc import Callable

from trackbed.comm import _native
from trackbed.comm.shared_memory import SharedMemory

COUNTER_BYTES = 4 * _native.COUNTER_WORDS


class SharedCounters:
    """Counters, each written by one process. They begin at 0 and wrap around at 2**32.

    Args:
        memory: shared memory of `COUNTER_BYTES` for each counter.
    """

    def __init__(self, memory: SharedMemory) -> None:
        self._words = memory.view("uint32")

    def set(self, index: int, count: int) -> None:
        """Sets a counter and wakes its waiters, which then see all that this process has written before."""
        _native.set_counter(self._words, index, count & 0xFFFFFFFF)

    def wait(self, first: int, number: int, count: int, poll: Callable[[int], object]) -> None:
        """Sleeps until each of `number` counters, from `first`, has reached `count`.

        Args:
            first: first counter.
            number: number of counters.
            count: count to wait for, less than 2**31 away from each counter.
            poll: called every 50 ms; an exception of it ends the wait.
        """
        _native.wait_for_counters(self._words, first, number, count & 0xFFFFFFFF, poll)

    def has_reached(self, index: int, count: int) -> bool:
        """True if a counter has reached `count`."""
        found = int(self._words[index * _native.COUNTER_WORDS])
        return (found - count) & 0xFFFFFFFF < 1 << 31
