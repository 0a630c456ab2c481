"""Libraries in Rust: their panics as errors, and their restriction to one core.

PyO3 raises panics as `pyo3_runtime.PanicException`, which each library has of its own and which is no `Exception`, so
that handlers of errors miss it.
"""

import contextlib
import os
from collections.abc import Iterator
from typing import Final


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
        raise RuntimeError(f"a panic of the library: {error}") from None


_SETTINGS: Final = {
    "TOKENIZERS_PARALLELISM": "false",
    "RAYON_NUM_THREADS": "1",
    "FASTOKENS_BPE_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}


@contextlib.contextmanager
def one_core() -> Iterator[None]:
    """Keeps libraries from starting threads inside the block, as other processes use the other cores.

    fastokens reads the setting at its first call only, and OpenBLAS when it is loaded: it then holds for the process.
    """
    before = {name: os.environ.get(name) for name in _SETTINGS}
    os.environ.update(_SETTINGS)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
