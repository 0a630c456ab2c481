"""Layout of parameters and their gradients in one buffer: offsets, padding, buckets and what each rank owns.

The buffer holds the parameters in reverse order of definition, which is about the order in which gradients arrive. It
is cut into buckets, each communicated as one. If it is sharded, each rank owns an equal slice of every bucket,
regardless of where parameters begin, and padding makes the slices equal. Positions count elements; one layout serves
the buffer of parameters and the buffer of gradients.

The layout is that of Megatron Core 0.16.1, element for element: checkpoints of its distributed optimizer depend on it.

Shapes: P parameters, B buckets, K pieces.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from trackbed.errors import ArgumentError

Positions = npt.NDArray[np.int64]

_START_MULTIPLE: Final = 64
"""A parameter starts at a multiple of these elements, for aligned access: 128 bytes of 16-bit elements."""
_END_MULTIPLE: Final = 128
"""A bucket ends at a multiple of these elements: 256 bytes of 16-bit elements, an alignment that suits cuBLAS."""
_BANDWIDTH_MULTIPLE: Final = 1 << 16
"""Size of which NCCL needs a multiple to reach its full bandwidth on many ranks."""
_HIGHEST: Final = int(np.iinfo(np.int64).max)
_ROWS_SHOWN: Final = 40


class ParameterSpec(NamedTuple):
    """A parameter, as far as its place in the buffer depends on it."""

    name: str
    numel: int
    """Number of elements, at least 0."""
    shared_embedding: bool = False
    """True if pipeline stages share it. It then gets a bucket of its own where the buffer is sharded, so that every
    stage cuts it alike."""


class ParameterPieces(NamedTuple):
    """Parts of parameters, in the order of their position in the buffer."""

    parameters: Positions
    """`[K]` number of the parameter, in order of definition."""
    starts: Positions
    """`[K]` first element within the parameter."""
    stops: Positions
    """`[K]` element after the last one within the parameter."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Layout:
    """Places of parameters in a buffer. Intervals are half-open and count elements."""

    parameters: tuple[ParameterSpec, ...]
    """The P parameters, in order of definition."""
    data_parallel_size: int
    """Number of ranks."""
    sharded: bool
    """True if each rank owns a slice of every bucket, rather than all of it."""
    starts: Positions
    """`[P]` first element of each parameter, in order of definition, so they decrease."""
    stops: Positions
    """`[P]` element after the last one of each parameter."""
    buckets: Positions
    """`[P]` bucket of each parameter."""
    bucket_starts: Positions
    """`[B]` first element of each bucket."""
    bucket_stops: Positions
    """`[B]` element after the last one of each bucket, with its padding."""
    bucket_numel_unpadded: Positions
    """`[B]` elements of each bucket, without the padding at its end; padding between parameters counts."""

    @property
    def numel(self) -> int:
        """Number of elements of the buffer."""
        return int(self.bucket_stops[-1]) if len(self.bucket_stops) else 0

    @property
    def numel_unpadded(self) -> int:
        """Number of elements without the padding at the ends of buckets."""
        return int(self.bucket_numel_unpadded.sum())

    def pieces(self, rank: int) -> ParameterPieces:
        """Returns the parts of parameters that a rank owns. Without sharding it owns all of every parameter.

        Raises:
            ArgumentError: there is no such rank.
        """
        if not 0 <= rank < self.data_parallel_size:
            raise ArgumentError(f"rank must be in [0, {self.data_parallel_size}), but is {rank}")
        last = len(self.parameters) - 1
        starts, stops = self.starts[::-1], self.stops[::-1]  # both in ascending order
        if not self.sharded:
            return ParameterPieces(np.arange(last, -1, -1, dtype=np.int64), np.zeros_like(starts), stops - starts)
        owned = (self.bucket_stops - self.bucket_starts) // self.data_parallel_size
        owned_starts = self.bucket_starts + rank * owned
        owned_stops = owned_starts + owned
        first = np.searchsorted(stops, owned_starts, side="right")
        counts = np.maximum(np.searchsorted(starts, owned_stops, side="left") - first, 0)
        slices = np.repeat(np.arange(len(counts), dtype=np.int64), counts)
        before = np.cumsum(counts, dtype=np.int64) - counts
        found = np.arange(len(slices), dtype=np.int64) + (first - before)[slices]
        piece_starts = np.maximum(owned_starts[slices] - starts[found], 0)
        piece_stops = np.minimum(owned_stops[slices], stops[found]) - starts[found]
        some = piece_starts < piece_stops
        return ParameterPieces(last - found[some], piece_starts[some], piece_stops[some])

    def __str__(self) -> str:
        """A table of the buckets."""
        return "\n".join(_table(self))


def plan_layout(
    parameters: Sequence[ParameterSpec],
    *,
    data_parallel_size: int,
    bucket_size: int | None,
    sharded: bool,
    pad_for_high_bandwidth: bool = False,
) -> Layout:
    """Places parameters in a buffer, and cuts it into buckets.

    Args:
        parameters: parameters in order of definition.
        data_parallel_size: number of ranks that share the buffer, at least 1.
        bucket_size: number of elements, at least 0, from which a bucket is closed; None for one bucket, apart from
            those of shared embeddings.
        sharded: True if each rank is to own an equal slice of every bucket, which takes padding.
        pad_for_high_bandwidth: True to pad sharded buckets to a multiple of 65,536 elements as well.

    Raises:
        ArgumentError: a number is out of its range, or the buffer has more elements than int64 can count.

    >>> parameters = [ParameterSpec("weight", 600), ParameterSpec("bias", 20)]
    >>> layout = plan_layout(parameters, data_parallel_size=2, bucket_size=None, sharded=True)
    >>> layout.starts, layout.numel, layout.pieces(1).starts
    (array([64,  0]), 768, array([320]))
    """
    _check(parameters, data_parallel_size, bucket_size)
    end_multiple = math.lcm(data_parallel_size, _END_MULTIPLE, _BANDWIDTH_MULTIPLE if pad_for_high_bandwidth else 1)
    starts, buckets = [0] * len(parameters), [0] * len(parameters)
    bucket_starts, bucket_stops, unpadded = [], [], []
    bucket_start = stop = 0
    is_empty = True

    def close(end: int) -> int:
        """Ends the bucket, and returns the start of the next one."""
        bucket_starts.append(bucket_start)
        unpadded.append(end - bucket_start)
        bucket_stops.append(_round_up(end, end_multiple) if sharded else end)
        return bucket_stops[-1]

    for number in range(len(parameters) - 1, -1, -1):
        _, numel, shared_embedding = parameters[number]
        start = _round_up(stop, _START_MULTIPLE) if sharded else stop
        is_alone = sharded and shared_embedding
        if is_alone and not is_empty:
            start = bucket_start = close(start)
        starts[number], buckets[number] = start, len(bucket_stops)
        stop = start + numel
        is_empty = is_alone or (bucket_size is not None and stop - bucket_start >= bucket_size)
        if is_empty:
            stop = bucket_start = close(stop)
    if not is_empty:
        close(stop)
    if bucket_stops and bucket_stops[-1] > _HIGHEST:
        raise ArgumentError(
            f"parameters must have at most {_HIGHEST} elements with their padding, found {bucket_stops[-1]}"
        )
    first = np.array(starts, dtype=np.int64)
    return Layout(
        parameters=tuple(parameters),
        data_parallel_size=data_parallel_size,
        sharded=sharded,
        starts=first,
        stops=first + np.array([spec.numel for spec in parameters], dtype=np.int64),
        buckets=np.array(buckets, dtype=np.int64),
        bucket_starts=np.array(bucket_starts, dtype=np.int64),
        bucket_stops=np.array(bucket_stops, dtype=np.int64),
        bucket_numel_unpadded=np.array(unpadded, dtype=np.int64),
    )


def _check(parameters: Sequence[ParameterSpec], data_parallel_size: int, bucket_size: int | None) -> None:
    """Raises ArgumentError for numbers out of range."""
    if data_parallel_size < 1:
        raise ArgumentError(f"data_parallel_size must be at least 1, but is {data_parallel_size}")
    if bucket_size is not None and bucket_size < 0:
        raise ArgumentError(f"bucket_size must be at least 0, or None, but is {bucket_size}")
    for spec in parameters:
        if spec.numel < 0:
            raise ArgumentError(f"{spec.name}: the number of elements must be at least 0, but is {spec.numel}")


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _table(layout: Layout) -> Iterator[str]:
    """Lines of the table: one for each bucket, of many only the first and the last."""
    ranks = layout.data_parallel_size
    whose = f"{ranks} ranks, each with a part of every bucket" if layout.sharded else f"{ranks} ranks, each with all"
    empty = layout.numel - sum(spec.numel for spec in layout.parameters)
    count = len(layout.bucket_stops)
    yield f"{len(layout.parameters):,} parameters in {count:,} buckets, {layout.numel:,} elements ({empty:,} padding)"
    yield whose
    yield f"{'bucket':>8}{'start':>20}{'elements':>18}{'per rank':>18}  parameters, last to first"
    last = np.searchsorted(layout.buckets[::-1], np.arange(count), side="left")  # defined last, so it lies first
    first = np.searchsorted(layout.buckets[::-1], np.arange(count), side="right") - 1
    for bucket in range(count):
        if count > _ROWS_SHOWN and _ROWS_SHOWN // 2 <= bucket < count - _ROWS_SHOWN // 2:
            if bucket == _ROWS_SHOWN // 2:
                yield f"     ... {count - _ROWS_SHOWN:,} more"
            continue
        numel = int(layout.bucket_stops[bucket] - layout.bucket_starts[bucket])
        names = [layout.parameters[-1 - int(one)].name for one in (last[bucket], first[bucket])]
        held = first[bucket] - last[bucket] + 1
        named = names[0] if held == 1 else f"{held:,}: {names[0]} to {names[1]}"
        part = numel // ranks if layout.sharded else numel
        yield f"{bucket:>8}{layout.bucket_starts[bucket]:>20,}{numel:>18,}{part:>18,}  {named}"
