"""Threads that stay for the next call of a kernel that is short."""

import os

from trackbed.kernels import _native

__all__ = ["workers"]


class _Kept:
    """The threads of this process; a forked child makes its own."""

    threads: object | None = None


def _forget() -> None:
    _Kept.threads = None


os.register_at_fork(after_in_child=_forget)


def workers() -> object:
    """What kernels that keep their threads are given. It costs nothing until one of them is."""
    if _Kept.threads is None:
        _Kept.threads = _native.new_workers()
    return _Kept.threads
