"""The three indices of a GPT dataset: what decides them, what they must look like, how they are built.

Many small ones are built in one kernel call, large ones one by one.

Shapes: D documents in the file, R samples.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from trackbed.cache import Allocate, Arrays, ArraySpec, Kind, Request
from trackbed.datasets.gpt.visits import ARRAYS
from trackbed.datasets.low_level import check_documents, data_stamps, drop_pages, most_tokens, num_sequences
from trackbed.errors import FormatError, PlanError
from trackbed.index import ranges
from trackbed.index.documents import document_index_dtype
from trackbed.index.epochs import EpochPlan, plan_epochs, samples_in
from trackbed.index.legacy_random import LegacyShuffle
from trackbed.index.samples import sample_index_dtype
from trackbed.index.shuffle import shuffle_index, shuffle_index_dtype
from trackbed.index.visits import visit_indices
from trackbed.kernels import SmallDataset, available_threads, count_tokens, small_indices
from trackbed.tokens import IndexedDataset
from trackbed.tokens.idx_header import checksum_lengths
from trackbed.tokens.read_headers import read_lengths

MOST_VISITS: Final = 1 << 16
"""Visits and samples of a small dataset. A larger one takes several times as long as a call of its own costs."""
_ENTRY_COST: Final = 4e5
_VISIT_COST: Final = 18.0
_SAMPLE_COST: Final = 8.0
"""Nanoseconds of an entry, a visit and a sample: files and their names, shuffle and cut, shuffle and writing."""
SMALL_COST: Final = _ENTRY_COST + MOST_VISITS * _VISIT_COST
"""Highest cost of indices that are built in batches, as far as is known without reading lengths."""
_VISITS_PER_THREAD: Final = 1 << 20
"""Fewer are cut sooner than another thread starts, and other entries are built beside this one."""


@dataclass(slots=True, eq=False)
class GPTIndices:
    """The indices that these arguments decide.

    Args:
        dataset: has `sequence_lengths`: `[D]` tokens in each document of the file.
        documents: the documents of the split, or None for all of them.
        num_samples: samples to give at least, or None for one epoch.
        sequence_length: tokens from one sample's start to the next.
        seed: seed of the shuffles.
        extra_token: 1 if a sample also holds the first token of the next one, else 0.
        keep_partial: whether a last sample that is not full counts.
        where: name of the dataset and its split, for errors.

    Raises:
        ArgumentError: a document is not in the dataset.
    """

    dataset: Any
    documents: npt.NDArray[np.integer[Any]] | None
    num_samples: int | None
    sequence_length: int
    seed: int
    extra_token: int
    keep_partial: bool
    where: str = ""
    _run: tuple[int, int] | None = field(init=False, repr=False)
    _plan: EpochPlan | None = field(default=None, init=False, repr=False)
    _checksum: str = field(default="", init=False, repr=False)

    def __post_init__(self) -> None:
        count = num_sequences(self.dataset)
        self._run = (0, count) if self.documents is None else ranges.bounds_of(self.documents)
        check_documents(self.documents, self._run, count, where=self.where)

    @property
    def lengths(self) -> npt.NDArray[np.int32]:
        """`[D]` tokens in each document: where nothing is built, they are not read."""
        lengths: npt.NDArray[np.int32] = self.dataset.sequence_lengths
        return lengths

    @property
    def plan(self) -> EpochPlan:
        """Epochs and samples. Reads the lengths of the split's documents."""
        if self._plan is None:
            self._plan = self.plan_over(self._own_lengths)
        return self._plan

    @property
    def samples_per_epoch(self) -> int:
        """Samples that the split's tokens give once. Reads the lengths of its documents."""
        tokens, _ = count_tokens(np.asarray(self._own_lengths, dtype=np.int32))
        return samples_in(tokens - self.extra_token, self.sequence_length, keep_partial=self.keep_partial)

    @property
    def _own_lengths(self) -> npt.NDArray[np.int32]:
        """Tokens in each of the split's documents."""
        return self.lengths[self.run[0] : self.run[1]] if self.run else self.lengths[self._numbers]

    @property
    def checksum(self) -> str:
        """CRC-32 of the tokens in each of the split's documents. Reads them once."""
        if not self._checksum:
            self._checksum = checksum_lengths(self._own_lengths)
        return self._checksum

    def note_lengths(self, lengths: npt.NDArray[np.int32]) -> None:
        """Computes the checksum from the split's lengths, which were read for something else."""
        self._checksum = checksum_lengths(lengths)

    @property
    def stamps(self) -> str:
        """Inode, size and times of the files of the lengths, as text; empty where `decisions` holds the lengths."""
        return data_stamps(self.dataset) or ""

    def plan_over(self, lengths: npt.NDArray[np.int32]) -> EpochPlan:
        """Returns the plan for these lengths of the split's documents. Raises the same errors as `plan`."""
        total, shortest = count_tokens(np.asarray(lengths, dtype=np.int32))
        room = most_tokens(self.dataset)
        found = f"one of {shortest}" if shortest < 0 else f"{total} together"
        if shortest < 0 or (room is not None and total > room):
            most = "" if room is None else f" and {room} together at most"
            wanted = f"documents must have at least 0 tokens{most}"
            raise FormatError(f"{self.where}: {wanted}, found {found}; `trackbed verify` says where")
        try:
            return plan_epochs(
                total,
                num_samples=self.num_samples,
                sequence_length=self.sequence_length,
                extra_token=self.extra_token,
                keep_partial=self.keep_partial,
            )
        except PlanError as error:
            raise PlanError(f"{self.where}: {error}") from error

    def read_ahead(self) -> None:
        """Have the system begin to read what `build` reads of an `IndexedDataset`, before it does."""
        if self.run is not None:
            self.dataset.index.read_ahead(*self.run)

    def expected(self) -> Mapping[str, ArraySpec]:
        """Types and shapes of the three arrays."""
        visits = self._num_visits
        lengths = self.lengths
        longest = int(lengths.max()) if lengths.dtype.itemsize > np.dtype(np.int32).itemsize and len(lengths) else 0
        rows = self.plan.num_samples
        wide = document_index_dtype(self._numbers) is np.int64
        return {
            "document_index": ArraySpec(np.dtype(document_index_dtype(self._numbers)), (visits,)),
            "sample_index": ArraySpec(
                np.dtype(np.int64 if wide else sample_index_dtype(visits, longest)), (rows + 1, 2)
            ),
            "shuffle_index": ArraySpec(np.dtype(shuffle_index_dtype(rows)), (rows,)),
        }

    def build(self, allocate: Allocate) -> Arrays:
        """The three arrays."""
        shuffle = LegacyShuffle(self.seed)
        _ = self.checksum  # while the lengths are in memory
        visits, rows = visit_indices(
            self._numbers,
            self.lengths,
            self.plan,
            shuffle,
            sequence_length=self.sequence_length,
            extra_token=self.extra_token,
            num_threads=min(available_threads(), 1 + self._num_visits // _VISITS_PER_THREAD),
            allocate=allocate,
            poll=lambda done: allocate.filled(done, "sample_index"),
        )
        allocate.filled(len(visits), "document_index")
        order = shuffle_index(self.plan, shuffle, allocate=partial(allocate, "shuffle_index"))
        return dict(zip(ARRAYS, (visits, rows, order), strict=True))

    def cost(self) -> float:
        """Estimates the nanoseconds to build the arrays, from what is known without reading lengths."""
        room, documents = most_tokens(self.dataset), num_sequences(self.dataset) or 1
        visits = documents if self.documents is None else len(self.documents)
        tokens = (room or 0) * visits / documents
        epochs = max(1.0, (self.num_samples or 0) * self.sequence_length / tokens) if tokens else 1.0
        return _ENTRY_COST + epochs * (visits * _VISIT_COST + tokens / self.sequence_length * _SAMPLE_COST)

    def decisions(self) -> dict[str, Any]:
        """Returns everything that decides the bytes, besides the lengths."""
        run = self.run
        documents = list(run) if run else hashlib.sha256(np.ascontiguousarray(self._numbers).data).hexdigest()
        return {
            "order": "megatron",
            "documents": documents,
            "num_samples": None if self.num_samples is None else int(self.num_samples),
            "sequence_length": int(self.sequence_length),
            "random_seed": int(self.seed),
            "add_extra_token_to_sequence": bool(self.extra_token),
            "keep_last_partial_sequence": self.keep_partial,
        }

    @property
    def _num_visits(self) -> int:
        return self.plan.num_epochs * len(self._numbers)

    @property
    def _numbers(self) -> npt.NDArray[np.integer[Any]]:
        """Numbers of the split's documents."""
        return np.asarray(self.documents) if self.run is None else ranges.number_range(*self.run)

    @property
    def run(self) -> tuple[int, int] | None:
        """First document and the one after the last, if they are consecutive: they nearly always are."""
        return self._run


_MOST_TOGETHER: Final = 64
"""Datasets of a call. A thread seldom takes more at once: together they cost it about 20 ms."""
_HIGHEST: Final = int(np.iinfo(np.int32).max)


class GPTKind(Kind):
    """The three indices of a GPT dataset; the ingredients of a request are its `GPTIndices`."""

    def build(
        self, requests: Sequence[Request], allocate: Callable[[Request], Allocate]
    ) -> Iterator[Sequence[tuple[Request, Arrays]]]:
        """Builds small indices in batches of up to 64."""
        for is_small, alike in groupby(requests, self.is_small):
            some = list(alike)
            for first in range(0, len(some), _MOST_TOGETHER):
                batch = some[first : first + _MOST_TOGETHER]
                if is_small:
                    arrays = build_small([one.ingredients for one in batch])
                    yield [(one, made) for one, made in zip(batch, arrays, strict=True) if made is not None]
                    batch = [one for one, made in zip(batch, arrays, strict=True) if made is None]
                for one in batch:
                    indices: GPTIndices = one.ingredients
                    yield [(one, indices.build(allocate(one)))]
                    drop_pages(indices.dataset)  # most of thousands are not read for a long time

    def is_small(self, request: Request) -> bool:
        """True if they are built in batches with others."""
        indices: GPTIndices = request.ingredients
        return isinstance(indices.dataset, IndexedDataset) and indices.cost() <= SMALL_COST

    def read_ahead(self, request: Request) -> None:
        """Starts to read the lengths of the documents from the disk, where they are many."""
        indices: GPTIndices = request.ingredients
        if not self.is_small(request) and isinstance(indices.dataset, IndexedDataset):
            indices.read_ahead()


GPT_KIND: Final = GPTKind()


def build_small(indices: Sequence[GPTIndices]) -> list[Arrays | None]:
    """Returns the arrays of each; None if they are not small, or something is wrong: `GPTIndices.build` says what.

    Args:
        indices: each of an `IndexedDataset`, which is not mapped for this.
    """
    runs = [one.run if one.run is not None and one.run[1] - one.run[0] <= MOST_VISITS else (0, 0) for one in indices]
    lengths = read_lengths([one.dataset.index for one in indices], runs)
    described = [_describe(one, run, found) for one, run, found in zip(indices, runs, lengths, strict=True)]
    small = [
        (dataset, found) for dataset, found in zip(described, lengths, strict=True) if dataset and found is not None
    ]
    made = iter(small_indices([dataset for dataset, _ in small], [found for _, found in small]))
    return [dict(zip(ARRAYS, next(made), strict=True)) if dataset else None for dataset in described]


def _describe(indices: GPTIndices, run: tuple[int, int], lengths: npt.NDArray[np.int32] | None) -> SmallDataset | None:
    """Returns the input of the kernel for a dataset, or None."""
    if indices.run != run or lengths is None or max(run[1], indices.sequence_length) > _HIGHEST:
        return None
    indices.note_lengths(lengths)
    try:
        plan = indices.plan_over(lengths)
    except (PlanError, FormatError):
        return None
    if plan.num_epochs * len(lengths) + plan.num_samples > MOST_VISITS:
        return None
    return SmallDataset(
        first=run[0],
        num_documents=len(lengths),
        num_epochs=plan.num_epochs,
        num_samples=plan.num_samples,
        samples_before_last=-1 if plan.samples_before_last is None else plan.samples_before_last,
        sequence_length=indices.sequence_length,
        extra_token=indices.extra_token,
        seed=indices.seed,
    )
