"""Panics of libraries in Rust.

PyO3 raises them as `pyo3_runtime.PanicException`, which each library has of its own and which is no `Exception`, so
that handlers of errors miss it.
"""

import contextlib
from collections.abc import Iterator

__all__ = ["is_panic", "panics_as_errors"]


def is_panic(error: BaseException) -> bool:
    """True for a panic of a library in Rust; False for Ctrl-C, the end of the process, and every `Exception`."""
    return any((kind.__module__, kind.__name__) == ("pyo3_runtime", "PanicException") for kind in type(error).__mro__)


@contextlib.contextmanager
def panics_as_errors() -> Iterator[None]:
    """Converts a panic of a library in Rust to a RuntimeError; other exceptions pass unchanged."""
    try:
        yield
    except BaseException as error:
        if not is_panic(error):
            raise
        msg = f"a panic of the library: {error}"
        raise RuntimeError(msg) from None
