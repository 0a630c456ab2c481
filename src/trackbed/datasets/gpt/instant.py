"""GPT samples in the order "instant": stretches of the split's part of the file, located without an index.

Shapes: R samples in one epoch, S tokens of a sample.
"""

from bisect import bisect_right
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, ClassVar, NoReturn

import numpy as np
import numpy.typing as npt

from trackbed.datasets.batches.sources import SampleLayout, Stretches
from trackbed.datasets.gpt.consecutive import consecutive_run
from trackbed.datasets.gpt.visits import VisitArrays, VisitedSamples
from trackbed.datasets.samples import NO_INDEX, IndexArrays, SampleLocations, SamplePieces
from trackbed.errors import FormatError, PlanError
from trackbed.index import PERMUTATION_VERSION, InstantOrder
from trackbed.index.epochs import stretches_per_epoch
from trackbed.index.prefetch import PrefetchedOrder
from trackbed.kernels import Visits
from trackbed.plural import number_of
from trackbed.tokens import IndexedDataset, IndexedGroup, get_idx_path
from trackbed.tokens.idx_header import checksum_lengths


class StoredSample(int):
    """Number of a sample in the file, as opposed to its position in a shuffled order.

    A blend in the order "instant" computes which sample of a dataset it draws, and passes its number in this type.
    """


@dataclass(frozen=True)
class InstantSamples:
    """Samples without an index: sample m has tokens `[m * S, m * S + S + X)` of the split, in file order.

    A split with fewer than S + X tokens has one sample, which repeats them until it is full. Each repeat counts as
    separate documents, as at the start of a new epoch.

    Args:
        dataset: the file.
        documents: consecutive documents of the split, or None for all of them.
        num_samples: length of the order, or None for one epoch.
        sequence_length: S.
        extra_token: X, 1 if a sample also holds the first token of the next one, else 0.
        seed: seed of the shuffles.
        block: consecutive samples that are moved as one block.
        window: consecutive blocks whose samples are shuffled together.
        where: name of the dataset and its split, for errors.

    Raises:
        ArgumentError: the dataset is not an indexed file, or the documents are not consecutive.
        PlanError: samples are requested, and there are no tokens.
    """

    dataset: Any
    documents: npt.NDArray[np.integer[Any]] | None
    num_samples: int | None
    sequence_length: int
    extra_token: int
    seed: int
    block: int = 1
    window: int = 1
    where: str = ""
    index: ClassVar[IndexArrays] = NO_INDEX

    def __post_init__(self) -> None:
        """Checks that the split is a contiguous part of an indexed file, and has tokens if samples are requested."""
        consecutive_run(self.dataset, self.documents, order="instant", where=self.where)
        if self.num_samples and not self.samples_per_epoch:
            raise PlanError(
                f"{self.where}: must have tokens for one sample to give {self.num_samples}, found {self.num_tokens}"
            )

    @property
    def run(self) -> tuple[int, int]:
        """First document of the split, and one after the last."""
        if self.documents is None:
            return 0, len(self.dataset.sequence_lengths)
        return (int(self.documents[0]), int(self.documents[-1]) + 1) if len(self.documents) else (0, 0)

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
        size = self.samples_per_epoch
        if size == 0:
            raise PlanError(f"{number_of(self.num_tokens, 'token')} must hold a sample of {self._length:,}")
        return InstantOrder(
            sizes=[size], weights=[1], seed=self.seed, num_samples=len(self), block=self.block, window=self.window
        )

    def decisions(self) -> dict[str, Any]:
        """Returns everything that decides the samples, besides the file."""
        return {
            "order": "instant",
            "version": [InstantOrder.VERSION, PERMUTATION_VERSION],
            "documents": list(self.run),
            "num_samples": None if self.num_samples is None else int(self.num_samples),
            "sequence_length": int(self.sequence_length),
            "random_seed": int(self.seed),
            "locality": [int(self.block), int(self.window)],
            "add_extra_token_to_sequence": bool(self.extra_token),
        }

    def checksum(self) -> str:
        """Returns the CRC-32 of the split's document lengths. Reads them."""
        start, stop = self.run
        if isinstance(self.dataset, IndexedDataset) and (start, stop) == (0, self.dataset.index.sequence_count):
            return self.dataset.index.checksum_lengths()
        return checksum_lengths(self.dataset.sequence_lengths[start:stop])

    def __getstate__(self) -> dict[str, Any]:
        """State with the arguments only; a copy computes the rest again."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def __len__(self) -> int:
        """Samples in the order."""
        return self.samples_per_epoch if self.num_samples is None else self.num_samples

    def stored(self, position: int) -> int:
        """Returns the number in the file of the sample at a position in `[-len, len)`.

        A `StoredSample` is returned as it is.
        """
        if isinstance(position, StoredSample):
            if not 0 <= position < self.samples_per_epoch:
                raise IndexError(f"a stored sample must be in [0, {self.samples_per_epoch}), found {int(position)}")
            return int(position)
        wanted = position + len(self) if position < 0 else position
        if not 0 <= wanted < len(self):
            raise IndexError(f"a sample must be in [-{len(self)}, {len(self)}), found {position}")
        return int(self.order.locate([wanted])[1][0])

    @cached_property
    def prefetched(self) -> PrefetchedOrder:
        """The order, with prefetch for sequential access."""
        return PrefetchedOrder(self.order)

    @property
    def origin_byte(self) -> int:
        """Byte at which the split begins in the file."""
        start, stop = self.run
        return int(self.dataset.index.sequence_pointers[start]) if start < stop else 0

    def can_give(self, num_samples: int) -> bool:
        """True if there are at least `num_samples` samples."""
        return num_samples <= len(self)

    def layout(self) -> SampleLayout:
        """Returns the stretches of the files; visits if the split repeats its tokens."""
        return self.repeated if self.repeats else Stretches(self.samples_per_epoch, self.origin_byte)

    def locate(self, positions: npt.NDArray[np.int64]) -> SampleLocations:
        """Returns dataset 0 and the number in the file of the sample at each position."""
        return self.prefetched.locate(positions) if len(positions) else (np.zeros(0, dtype=np.int32), positions)

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
