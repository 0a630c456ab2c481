"""GPT samples in the order "instant": stretches of the split's part of the file, located without an index.

Shapes: R samples in one epoch, S tokens of a sample.
"""

from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, NoReturn

import numpy as np
import numpy.typing as npt

from trackbed.datasets.batches.sources import SampleLayout, Stretches
from trackbed.datasets.gpt.computed import ComputedSamples
from trackbed.datasets.gpt.visits import VisitArrays, VisitedSamples
from trackbed.datasets.samples import SamplePieces
from trackbed.errors import FormatError, PlanError
from trackbed.index import PERMUTATION_VERSION, InstantOrder
from trackbed.index.epochs import stretches_per_epoch
from trackbed.kernels import Visits
from trackbed.plural import number_of
from trackbed.tokens import IndexedGroup, get_idx_path


@dataclass(frozen=True, kw_only=True)
class InstantSamples(ComputedSamples):
    """Samples without an index: sample m has tokens `[m * S, m * S + S + X)` of the split, in file order.

    A split with fewer than S + X tokens has one sample, which repeats them until it is full. Each repeat counts as
    separate documents, as at the start of a new epoch.

    Args:
        sequence_length: S.
        extra_token: X, 1 if a sample also holds the first token of the next one, else 0.

    Raises:
        ArgumentError: the dataset is not an indexed file, or the documents are not consecutive.
        PlanError: samples are requested, and there are no tokens.
    """

    sequence_length: int
    extra_token: int
    _ORDER: ClassVar[str] = "instant"

    def __post_init__(self) -> None:
        """Checks the documents, and that there are tokens if samples are requested."""
        super().__post_init__()
        if self.num_samples and not self.samples_per_epoch:
            raise PlanError(
                f"{self.where}: must have tokens for one sample to give {self.num_samples}, found {self.num_tokens}"
            )

    @cached_property
    def num_tokens(self) -> int:
        """Number of tokens in the split, computed from the pointers of its first and last sequences."""
        start, stop = self.run
        if start == stop:
            return 0
        begin = self._end_of(start - 1) if start else 0
        last = self._end_of(stop - 2) if stop > 1 else 0
        self._check_start(start, begin)
        self._check_start(stop - 1, last)
        end = self._end_of(stop - 1)
        if not begin <= last <= end:
            self._refuse(stop - 1, f"{last} to {end}")
        return (end - begin) // int(self.dataset.index.dtype_size)

    def _end_of(self, sequence: int) -> int:
        """Returns the byte at which a sequence ends."""
        index = self.dataset.index
        return int(index.sequence_pointers[sequence]) + int(index.sequence_lengths[sequence]) * int(index.dtype_size)

    def _check_start(self, sequence: int, wanted: int) -> None:
        """Raises FormatError unless a sequence begins where the one before it ends."""
        found = int(self.dataset.index.sequence_pointers[sequence])
        if found != wanted:
            self._refuse(sequence, f"one at {found} after one that ends at {wanted}")

    def _refuse(self, sequence: int, problem: str) -> NoReturn:
        where = self.dataset.path_prefix
        if isinstance(self.dataset, IndexedGroup):
            member, sequence = self.dataset.find(sequence)
            where = self.dataset.members[member].path_prefix
        raise FormatError(
            f"{get_idx_path(where)}: sequences must lie one after the other, found sequence {sequence} damaged: "
            f"{problem}; `trackbed verify` says what else is wrong"
        )

    @property
    def samples_per_epoch(self) -> int:
        """R, number of samples in one epoch of the split."""
        return stretches_per_epoch(self.num_tokens, sequence_length=self.sequence_length, extra_token=self.extra_token)

    @property
    def repeats(self) -> bool:
        """True if the split has tokens, but too few for one sample, so that its only sample repeats them."""
        return 0 < self.num_tokens < self._length

    @property
    def _length(self) -> int:
        """Tokens of a sample, the extra one included."""
        return self.sequence_length + self.extra_token

    @cached_property
    def repeated(self) -> Visits:
        """The only sample of a split that repeats its tokens, as repeated visits to its documents."""
        start, stop = self.run
        once = np.asarray(self.dataset.index.sequence_lengths[start:stop], dtype=np.int64)
        documents = np.flatnonzero(once)  # empty ones, of which there may be millions, add nothing
        if (once < 0).any() or int(once.sum()) != self.num_tokens:
            self._refuse(
                start, f"{number_of(self.num_tokens, 'token')} in the split, and lengths that make {int(once.sum()):,}"
            )
        rounds = -(-self._length // self.num_tokens)
        lengths = np.tile(once[documents], rounds)
        ends = np.cumsum(lengths)
        last = int(np.searchsorted(ends, self._length))  # the visit in which the sample ends
        offset = self._length - int(ends[last] - lengths[last]) - self.extra_token
        return Visits(
            np.tile(start + documents, rounds)[: last + 1],
            np.array([[0, 0], [last, offset]], dtype=np.int64),
            np.zeros(1, dtype=np.int64),
        )

    @cached_property
    def _visited(self) -> VisitedSamples:
        return VisitedSamples(self.dataset, length=self._length, extra_token=self.extra_token, may_be_short=False)

    @property
    def _repeated_visits(self) -> VisitArrays:
        return VisitArrays(self.repeated.documents, self.repeated.rows, self.repeated.shuffle, {})

    @cached_property
    def order(self) -> InstantOrder:
        """Order of the samples."""
        if not self.samples_per_epoch:
            raise PlanError(f"{number_of(self.num_tokens, 'token')} must hold a sample of {self._length:,}")
        return super().order

    def decisions(self) -> dict[str, Any]:
        """Returns everything that decides the samples, besides the file."""
        return {
            **super().decisions(),
            "version": [InstantOrder.VERSION, PERMUTATION_VERSION],
            "sequence_length": int(self.sequence_length),
            "add_extra_token_to_sequence": bool(self.extra_token),
        }

    @property
    def origin_byte(self) -> int:
        """Byte at which the split begins in the file."""
        start, stop = self.run
        return int(self.dataset.index.sequence_pointers[start]) if start < stop else 0

    def layout(self) -> SampleLayout:
        """Returns the stretches of the files; visits if the split repeats its tokens."""
        return self.repeated if self.repeats else Stretches(self.samples_per_epoch, self.origin_byte)

    def read(self, position: int, *, padding: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Returns the tokens of the sample at a position, and the documents of its pieces."""
        start = self.stored(position) * self.sequence_length
        if self.repeats:
            return self._visited.read(self._repeated_visits, 0, padding=0)
        # The documents are contiguous, so reading may go on beyond the end of the first.
        tokens = self.dataset.get(self.run[0], offset=start, length=self._length)
        first, last = self._documents(start, self._length)
        return tokens.astype(np.int64), np.arange(first, last, dtype=np.int64)

    def pieces(self, position: int) -> SamplePieces:
        """Returns the pieces of the sample at a position."""
        start = self.stored(position) * self.sequence_length
        if self.repeats:
            return self._visited.pieces(self._repeated_visits, 0)
        first, last = self._documents(start, self._length)
        pointers, size = self.dataset.index.sequence_pointers, self.dataset.index.dtype_size
        borders = [int(pointer) // size for pointer in pointers[first:last]]
        begin = int(pointers[self.run[0]]) // size + start
        starts = [max(begin - border, 0) for border in borders]
        stops = [stop - border for border, stop in zip(borders, [*borders[1:], begin + self._length], strict=True)]
        return SamplePieces(list(range(first, last)), starts, stops)

    def _documents(self, start: int, length: int) -> tuple[int, int]:
        """Returns the first document with tokens in `[start, start + length)` of the split, and one after the last."""
        pointers, size = self.dataset.index.sequence_pointers, self.dataset.index.dtype_size
        begin = self.origin_byte + start * size
        end = begin + length * size
        first = bisect_right(pointers, begin, 0, len(pointers)) - 1
        if first < 0:
            self._refuse(0, f"none at byte {begin}")
        last, here = first, begin
        while here < end:
            if last == len(pointers):
                self._refuse(last - 1, f"it ends at {here}, before {end}")
            if last > first:
                self._check_start(last, here)
            here = self._end_of(last)
            if here <= begin:
                self._refuse(last, f"it ends at {here}, and byte {begin} lies behind that")
            last += 1
        return first, last
