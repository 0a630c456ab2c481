"""Flush of whole file systems to their disks, at once or in the background."""

import ctypes
import errno
import logging
import os
from collections import defaultdict
from collections.abc import Callable, Iterable
from threading import Event, Lock, Thread
from typing import Generic, TypeVar

logger = logging.getLogger(__name__)

_Item = TypeVar("_Item")

_syncfs = getattr(ctypes.CDLL(None, use_errno=True), "syncfs", None)


def flush_file_system(folder: str) -> None:
    """Returns once all data written to the file system of `folder` is on the disk. Releases the GIL meanwhile."""
    if _syncfs is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), folder)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if _syncfs(descriptor) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), folder)
    finally:
        os.close(descriptor)


class BackgroundFlush(Generic[_Item]):
    """Thread that flushes the file systems of folders, and then calls a function with what was written there.

    Args:
        flushed: called with a folder and its items, once they are on the disk.
    """

    def __init__(self, flushed: Callable[[str, list[_Item]], None]) -> None:
        self._flushed = flushed
        self._reset()
        os.register_at_fork(after_in_child=self._reset)  # the parent process flushes

    def _reset(self) -> None:
        self._lock = Lock()
        self._waiting: defaultdict[str, list[_Item]] = defaultdict(list)
        self._idle = Event()
        self._idle.set()

    def add(self, items: Iterable[tuple[str, _Item]]) -> None:
        """Has items flushed, each given with its folder; returns at once."""
        with self._lock:
            for folder, item in items:
                self._waiting[folder].append(item)
            if not self._waiting or not self._idle.is_set():
                return
            self._idle.clear()
        Thread(target=self._work, name="trackbed-flush", daemon=True).start()

    def join(self) -> None:
        """Returns when nothing is left to be flushed."""
        self._idle.wait()

    def _work(self) -> None:
        while True:
            with self._lock:
                waiting, self._waiting = self._waiting, defaultdict(list)
                if not waiting:
                    self._idle.set()
                    return
            is_flushed: dict[int, bool] = {}  # by device
            for folder, items in waiting.items():
                try:
                    device = os.stat(folder).st_dev
                    if device not in is_flushed:
                        is_flushed[device] = False
                        flush_file_system(folder)
                        is_flushed[device] = True
                    if is_flushed[device]:
                        self._flushed(folder, items)
                except OSError as error:
                    logger.debug("%s: its files are not known to be on the disk: %s", folder, error)
                except BaseException:  # a caller that joins must not wait for ever
                    logger.exception("%s: its files are not known to be on the disk", folder)
