"""Thread pool of short kernels, kept between calls."""

import os

from trackbed.kernels import _native


class _Kept:
    """The thread pool of this process; a forked child creates its own."""

    threads: object | None = None


def _forget() -> None:
    _Kept.threads = None


os.register_at_fork(after_in_child=_forget)


def workers() -> object:
    """The thread pool, created on first use. Its threads start when a kernel first needs them."""
    if _Kept.threads is None:
        _Kept.threads = _native.new_workers()
    return _Kept.threads
