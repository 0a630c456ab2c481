"""Restriction of tokenizer libraries to one core."""

import contextlib
import os
from collections.abc import Iterator
from typing import Final

__all__ = ["one_core"]

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
