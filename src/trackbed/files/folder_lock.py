"""Lock of a folder, which one job holds while it writes there."""

import contextlib
import errno
import fcntl
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Final

_NO_LOCKS: Final = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)
_locked: Final[set[tuple[str, str]]] = set()
"""Locks that this process holds: locks of one process do not exclude each other."""


class FolderLock:
    """Lock of a folder. It ends with the process.

    Where the file system has no locks, every job gets it.

    Args:
        folder: the folder, which must exist.
        name: name of the file of the lock in the folder.
        refusal: returns the error to raise, of a text that says which process holds the lock; None for this one.

    Raises:
        Exception: that of `refusal`, if another job or this process holds it.
        OSError: the file of the lock cannot be opened.
    """

    def __init__(self, folder: Path, name: str, refusal: Callable[[str | None], Exception]) -> None:
        self._file_name = name
        self._refusal = refusal
        self._key = (os.path.realpath(folder), name)
        if self._key in _locked:
            raise refusal(None)
        # A lock of `lockf` belongs to the process alone; one of `flock` would live on in forked workers.
        self._descriptor = self._open(folder)
        self._is_held = True
        _locked.add(self._key)

    def _open(self, folder: Path) -> int:
        descriptor = os.open(folder / self._file_name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        try:
            self._lock(descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def check(self, folder: Path) -> None:
        """Takes the lock again, which the process has lost if it has closed the file, or the folder was removed.

        Raises:
            Exception: that of `refusal`, if another job has taken it meanwhile.
            OSError: the file cannot be opened.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self._lock(self._descriptor)
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(self._descriptor), (folder / self._file_name).lstat()):
                return
        found = self._open(folder)
        os.close(self._descriptor)
        self._descriptor = found

    def _lock(self, descriptor: int) -> None:
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                holder = os.pread(descriptor, 256, 0).decode(errors="replace").strip() or "another process"
                raise self._refusal(holder) from None
            if error.errno not in _NO_LOCKS:
                raise
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} of {socket.gethostname()}\n".encode(), 0)

    def release(self) -> None:
        """Lets another job have the folder."""
        if self._is_held:
            self._is_held = False
            _locked.discard(self._key)
            os.close(self._descriptor)
