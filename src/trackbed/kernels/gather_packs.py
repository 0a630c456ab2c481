"""Typed wrapper of the kernel that gathers batches of packs.

Shapes: B packs of a batch, S places of a pack that are written, M entries of a row of borders.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt

from trackbed.cancellation import Poll, current_poll
from trackbed.errors import ArgumentError
from trackbed.kernels import _native
from trackbed.kernels.gather import FetchedBytes, Gathered, SampleSources, output_addresses, useful_threads
from trackbed.kernels.isa import chosen_level
from trackbed.kernels.workers import workers

_PLACES_PER_THREAD: Final = 1 << 13
_NOTHING: Final = FetchedBytes()
_NO_ROWS: Final = np.zeros(11, dtype=np.uint64)


@dataclass(frozen=True, slots=True)
class PackedShape:
    """Shape of the packs of a batch.

    Raises:
        ArgumentError: a field is out of range.
    """

    length: int
    """S, at least 1."""
    multiple: int
    """Each piece is padded to a multiple of this number of places, which divides S."""
    num_borders: int
    """M, at least two more than the pieces of a pack."""
    context_rank: int = 0
    """Number of this rank among those that share a pack."""
    context_size: int = 1
    """Number of these ranks. Where it is above 1, `multiple` is a multiple of twice of it."""
    words: npt.NDArray[np.uint64] = field(init=False, repr=False, compare=False)
    """The fields as an array of words for the kernel."""

    @property
    def own_length(self) -> int:
        """Places of a pack that are written."""
        return self.length // self.context_size

    def __post_init__(self) -> None:
        if self.length < 1 or self.multiple < 1 or self.length % self.multiple or self.num_borders < 2:
            raise ArgumentError(
                f"length must be a multiple of multiple, and num_borders at least 2, found {self.length}, "
                f"{self.multiple} and {self.num_borders}"
            )
        if not 0 <= self.context_rank < self.context_size or (
            self.context_size > 1 and self.multiple % (2 * self.context_size)
        ):
            raise ArgumentError(
                f"context_rank must be below context_size, and multiple one of 2 * context_size, found "
                f"{self.context_rank}, {self.context_size} and {self.multiple}"
            )
        values = (self.length, self.multiple, self.num_borders, self.context_rank, self.context_size)
        fields = np.array(values, dtype=np.uint64)
        object.__setattr__(self, "words", fields)


class PackedBatchArrays:
    """Output arrays of a batch of packs, checked once.

    Args:
        arrays: `tokens`, `labels` and `position_ids`, `[B, S]` int64; `loss_mask`, `[B, S]` float32; `padding_mask`,
            `[B, S]` bool; `cu_seqlens`, `cu_seqlens_padded` and `cu_trained_tokens`, `[B, M]` int32; `max_seqlen`,
            `[B]` int32; `num_trained_tokens` and `num_documents`, `[B]` int64.

    Raises:
        ArgumentError: an array is missing, has another type or shape, or is not writable and contiguous.
    """

    def __init__(self, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        self.arrays = dict(arrays)
        self.size: int = arrays["tokens"].shape[0]
        self.length: int = arrays["tokens"].shape[1]
        self.num_borders: int = arrays["cu_seqlens"].shape[1]
        ids, borders = (np.int64, self.length), (np.int32, self.num_borders)
        wanted: dict[str, tuple[Any, ...]] = {
            "tokens": ids,
            "labels": ids,
            "loss_mask": (np.float32, self.length),
            "position_ids": ids,
            "padding_mask": (np.bool_, self.length),
            "cu_seqlens": borders,
            "cu_seqlens_padded": borders,
            "max_seqlen": (np.int32,),
            "cu_trained_tokens": borders,
            "num_trained_tokens": (np.int64,),
            "num_documents": (np.int64,),
        }
        self.words = np.array(output_addresses(arrays, self.size, wanted), dtype=np.uint64)

    def part(self, samples: slice) -> Self:
        """Returns the arrays of some of the packs, as views."""
        return type(self)({name: array[samples] for name, array in self.arrays.items()})


def gather_packs(
    sources: SampleSources,
    datasets: npt.NDArray[np.int32],
    pieces: npt.NDArray[np.int64],
    firsts: npt.NDArray[np.int64],
    batch: PackedBatchArrays | None,
    shape: PackedShape,
    *,
    fetched: FetchedBytes | None = None,
    num_threads: int | None = None,
    poll: Poll = None,
) -> Gathered:
    """Gathers a batch of packs. Unless the result is whole, the contents of `batch` are undefined.

    All reads are checked to lie inside the bytes of the files, also if the files are damaged.

    Args:
        sources: the datasets.
        datasets: `[B]` dataset of each pack.
        pieces: `[pieces, 3]` document, first input and one after the last input, of all packs one after the other.
        firsts: `[B + 1]` how many pieces there are before each pack, and in all; a pack before which there are more
            than before the next one is refused.
        batch: output arrays; None to find out what is missing, and write nothing.
        shape: shape of the packs, that of `batch`.
        fetched: bytes of files that are not mapped.
        num_threads: at least 1; None for the number of CPUs available to the process.
        poll: progress callback, called with 0.

    Raises:
        ArgumentError: an argument is out of range.
    """
    size = len(datasets)
    given = (size, shape.own_length, shape.num_borders)
    found = given if batch is None else (batch.size, batch.length, batch.num_borders)
    if found != given:
        raise ArgumentError(f"batch must have {given} packs, places and borders, found {found}")
    if len(firsts) != size + 1 or firsts[0] != 0 or firsts[-1] != len(pieces) or pieces.shape != (len(pieces), 3):
        raise ArgumentError(f"firsts must lead from 0 to {len(pieces)} pieces in {size} packs, found {firsts!r}")
    outcome = _native.gather_packs(
        workers(),
        *sources.words,
        (fetched or _NOTHING).words,
        sources.trained_words,
        datasets,
        np.ascontiguousarray(pieces).reshape(-1),
        firsts,
        shape.words,
        _NO_ROWS if batch is None else batch.words,
        chosen_level(),
        useful_threads(size * shape.own_length // _PLACES_PER_THREAD, num_threads),
        current_poll(poll),
    )
    return Gathered.of(size, *outcome)
