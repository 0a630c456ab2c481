from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

_Poll = Callable[[int], object] | None
INDEX_ENDS_BYTES: int
INDEX_ENDS_WORDS: int

def read_stamps(paths: bytes, stamps: npt.NDArray[np.int64], num_threads: int, poll: _Poll, /) -> None: ...
def read_parts(
    paths: bytes,
    starts: npt.NDArray[np.int64],
    sizes: npt.NDArray[np.int64],
    content: npt.NDArray[np.uint8],
    stamps: npt.NDArray[np.int64],
    poll: _Poll,
    /,
) -> None: ...
def read_index_ends(
    paths: bytes,
    content: npt.NDArray[np.uint8],
    ends: npt.NDArray[np.int64],
    num_threads: int,
    poll: _Poll,
    /,
) -> None: ...
def commit_file_sets(
    paths: bytes,
    partials: bytes,
    num_parts: npt.NDArray[np.int64],
    parts: Sequence[bytes | memoryview | npt.NDArray[Any]],
    num_files: npt.NDArray[np.int64],
    claims: npt.NDArray[np.uint8],
    may_be_unnamed: bool,
    stamps: npt.NDArray[np.int64],
    errors: npt.NDArray[np.int32],
    poll: _Poll,
    /,
) -> None: ...
def exchange_names(path: bytes, other: bytes, /) -> int: ...
