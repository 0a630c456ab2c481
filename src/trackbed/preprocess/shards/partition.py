"""Partition of the input into shards: arithmetic on sizes, without I/O.

The stored bytes of all files, in their order, are one stream, which is cut at every multiple of the shard size. A file
that can be cut anywhere is divided there; any other file belongs to the shard of its first byte, as a whole.

Shapes: F input files.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from trackbed.errors import ArgumentError
from trackbed.preprocess.inputs import Compression, InputFile, InputFormat

MAX_SHARDS: Final = 1_000_000
"""Maximum number of shards: file systems and stores list this many names in acceptable time."""


class FileRange(NamedTuple):
    """The lines that start in bytes `[start, stop)` of a file, or the whole file."""

    file: int
    """Position of the file in the input."""
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """Shards of an input. Holds a few bytes for each file; the ranges of a shard are computed on demand."""

    starts: npt.NDArray[np.int64]
    """`[F + 1]` offset of each file in the stream, then the size of the stream."""
    cut_anywhere: npt.NDArray[np.bool_]
    """`[F]` True for files that are divided among shards."""
    shard_bytes: int

    def __len__(self) -> int:
        return max(1, -(-self.total_bytes // self.shard_bytes))

    @property
    def total_bytes(self) -> int:
        """Size of the stream."""
        return int(self.starts[-1])

    def size_bytes(self, shard: int) -> int:
        """Bytes of the stream in a shard."""
        return min(self.shard_bytes, self.total_bytes - shard * self.shard_bytes)

    def ranges(self, shard: int) -> list[FileRange]:
        """Returns the ranges of a shard, in the order of the input; empty if no file has a byte in it.

        Args:
            shard: number of the shard, in `[0, len(self))`.
        """
        begin, end = shard * self.shard_bytes, (shard + 1) * self.shard_bytes
        is_last = shard == len(self) - 1
        # Files that end after `begin` or start at it, up to those that start before `end`.
        first = int(np.searchsorted(self.starts[1:], begin, side="left"))
        last = len(self.cut_anywhere) if is_last else int(np.searchsorted(self.starts[:-1], end, side="left"))
        pieces = []
        for file in range(first, last):
            start, stop = int(self.starts[file]), int(self.starts[file + 1])
            if self.cut_anywhere[file]:
                low, high = max(start, begin), min(stop, end)
                if low < high:
                    pieces.append(FileRange(file, low - start, high - start))
            elif start >= begin:
                pieces.append(FileRange(file, 0, stop - start))
        return pieces


def plan_shards(sizes: Sequence[int], cut_anywhere: Sequence[bool], *, shard_bytes: int) -> ShardPlan:
    """Plans the shards of files with given sizes.

    Args:
        sizes: `[F]` size of each file in bytes, each at least 0.
        cut_anywhere: `[F]` True for files that may be divided among shards.
        shard_bytes: bytes of the stream in each shard but the last, at least 1.

    >>> plan = plan_shards([25, 10, 8], [True, False, True], shard_bytes=20)
    >>> [plan.ranges(shard) for shard in range(len(plan))]
    [[FileRange(file=0, start=0, stop=20)],
     [FileRange(file=0, start=20, stop=25), FileRange(file=1, start=0, stop=10), FileRange(file=2, start=0, stop=5)],
     [FileRange(file=2, start=5, stop=8)]]
    """
    starts = np.zeros(len(sizes) + 1, dtype=np.int64)
    np.cumsum(np.asarray(sizes, dtype=np.int64), out=starts[1:])
    plan = ShardPlan(starts, np.asarray(cut_anywhere, dtype=np.bool_), shard_bytes)
    if len(plan) > MAX_SHARDS:
        least = -(-plan.total_bytes // MAX_SHARDS)
        raise ArgumentError(
            f"shard_bytes must be at least {least:,} for {plan.total_bytes:,} bytes of input, found {shard_bytes:,}"
        )
    return plan


def is_cut_anywhere(file: InputFile) -> bool:
    """True for a file that is divided among shards: JSON lines that are not compressed."""
    return file.format is InputFormat.JSON_LINES and file.compression is Compression.NONE
