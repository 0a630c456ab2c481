"""Memory that processes of one host share, without a name in any file system, and counters there."""

import contextlib
import mmap
import os
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt

from trackbed.comm import _native

_PREFIX: Final = "trackbed-"


class SharedMemory:
    """Memory of a memfd, mapped into this process. It lives as long as any process maps it.

    A memfd needs no /dev/shm, whose size containers limit, and leaves nothing behind when its processes die. Pages are
    zero, and take no memory, until they are written.

    Args:
        mapping: mapped bytes.
        descriptor: file descriptor of the memfd, which this object closes.
        name: name of the memfd, which no other has.
    """

    def __init__(self, mapping: mmap.mmap, descriptor: int, name: str) -> None:
        self.mapping = mapping
        self._descriptor = descriptor
        self._name = name

    @classmethod
    def create(cls, num_bytes: int) -> Self:
        """Creates memory of `num_bytes` zeros, at least 1.

        Raises:
            OSError: the system refuses it.
        """
        name = f"{_PREFIX}{uuid.uuid4().hex}"
        descriptor = os.memfd_create(name, os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, num_bytes)
            return cls(_map(descriptor, num_bytes), descriptor, name)
        except BaseException:
            os.close(descriptor)
            raise

    def __len__(self) -> int:
        """Number of bytes."""
        return len(self.mapping)

    # Its names are bound, as those of modules are gone at the end of the interpreter.
    def __del__(self, close: Callable[[int], None] = os.close, suppress: Any = contextlib.suppress) -> None:
        with suppress(OSError):
            close(self._descriptor)

    def offer(self) -> list[Any]:
        """Describes the memory, in JSON, so that another process can attach to it as long as this object lives."""
        return [os.getpid(), self._descriptor, self._name, len(self)]

    @classmethod
    def attach(cls, offer: list[Any]) -> Self:
        """Maps the memory that another process, or thread, offers.

        Raises:
            OSError: this process may not, or cannot: the other is on another host, has another user, or has ended.
        """
        process, number, name, num_bytes = offer
        path = Path(f"/proc/{process}/fd/{number}")
        # On another host, a process of this number may have a file of this number.
        if not str(path.readlink()).startswith(f"/memfd:{name}"):
            raise FileNotFoundError(f"{path} must be the memory {name}, but is another file")
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            return cls(_map(descriptor, num_bytes), descriptor, name)
        except BaseException:
            os.close(descriptor)
            raise

    def view(self, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """`[N]` the memory as an array, which keeps the mapping alive."""
        return np.frombuffer(self.mapping, dtype=dtype)

    def release_pages(self) -> None:
        """Gives the pages back to the system, in all processes: the memory is zero then."""
        self.mapping.madvise(mmap.MADV_REMOVE)


def _map(descriptor: int, num_bytes: int) -> mmap.mmap:
    mapping = mmap.mmap(descriptor, num_bytes)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return mapping


COUNTER_BYTES = 4 * _native.COUNTER_WORDS


class SharedCounters:
    """Counters, each written by one process, on which others sleep until it has counted.

    They begin at 0 and wrap around at 2**32.

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
