"""Typed door to the kernel that makes batches.

Shapes: B samples of a batch, S tokens of a sample, N sequences of a file, V visits, R samples of a dataset.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from trackbed.cancellation import Poll, current_poll
from trackbed.errors import ArgumentError
from trackbed.kernels import _native
from trackbed.kernels.isa import available_threads, chosen_level
from trackbed.kernels.workers import workers

__all__ = ["BatchArrays", "Extent", "Gathered", "SampleShape", "SampleSources", "Visits", "gather"]

_FILE: Final = np.dtype(
    [
        *[("tokens", "<i8"), ("size_bytes", "<i8"), ("lengths", "<i8"), ("pointers", "<i8")],
        *[("num_sequences", "<i8"), ("first_sequence", "<i8"), ("first_byte", "<i8"), ("token_bytes", "<i8")],
    ]
)
_SOURCE: Final = np.dtype(
    [
        *[("first_file", "<i8"), ("num_files", "<i8"), ("dtype", "<i8"), ("num_samples", "<i8")],
        *[("origin_byte", "<i8"), ("visits", "<i8"), ("num_visits", "<i8"), ("visit_bytes", "<i8")],
        *[("rows", "<i8"), ("row_bytes", "<i8"), ("shuffle", "<i8"), ("shuffle_bytes", "<i8")],
        ("may_be_short", "<i8"),
    ]
)
"""As `native/include/trackbed/sample_spans.hpp` says; an array is named by its address."""

_INTEGER_TYPES: Final = frozenset({1, 2, 3, 4, 5, 8})
_TOKENS_A_THREAD: Final = 1 << 13
"""Tokens that are worth waking a thread for: it takes as long as writing so many."""


class Extent(NamedTuple):
    """What is known of a file before it is mapped."""

    num_sequences: int
    first_sequence: int
    """Sequences of all files of its dataset before it."""
    first_byte: int
    """Token bytes of all files of its dataset before it."""
    token_bytes: int
    """Its own."""


class Visits(NamedTuple):
    """How the samples of a dataset follow from visits to documents."""

    documents: npt.NDArray[np.integer[Any]]
    """`[V]` document of each visit, int32 or int64."""
    rows: npt.NDArray[np.integer[Any]]
    """`[R + 1, 2]` visit and token offset inside it at which each sample begins, int32 or int64."""
    shuffle: npt.NDArray[np.integer[Any]]
    """`[R]` row at each position, uint32 or int64."""
    may_be_short: bool = False
    """Whether the sample of the last row may end with the visits before it is full."""


class SampleSources:
    """The datasets that samples are taken from, each placed before it is first asked for. Keeps its arrays alive.

    Its methods change the tables that the kernel reads: no call of `gather` may run meanwhile.

    Args:
        num_datasets: at least 1.
    """

    def __init__(self, num_datasets: int) -> None:
        self.files: list[tuple[npt.NDArray[Any], ...] | None] = []
        """Bytes, lengths and pointers of each file that is mapped."""
        self.visits: dict[int, Visits] = {}
        self.source_table = np.zeros(num_datasets, dtype=_SOURCE)
        self._room = np.zeros(16, dtype=_FILE)
        self._words = self.source_table.view(np.uint64), self.file_table.view(np.uint64)

    @property
    def file_table(self) -> npt.NDArray[np.void]:
        """The files, as the kernel reads them."""
        return self._room[: len(self.files)]

    @property
    def words(self) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
        """What the kernel reads: the datasets, and the files."""
        return self._words

    def add_files(self, extents: Sequence[Extent]) -> int:
        """Take note of files that follow each other in one dataset; returns the number of the first of them."""
        first = len(self.files)
        self.files += [None] * len(extents)
        if len(self.files) > len(self._room):
            room = np.zeros(2 * len(self.files), dtype=_FILE)
            room[:first] = self._room[:first]
            self._room = room
        for column, name in enumerate(("num_sequences", "first_sequence", "first_byte", "token_bytes")):
            self.file_table[name][first:] = [extent[column] for extent in extents]
        self._words = self._words[0], self.file_table.view(np.uint64)
        return first

    def map_file(
        self,
        number: int,
        *,
        tokens: npt.NDArray[np.uint8],
        lengths: npt.NDArray[np.int32],
        pointers: npt.NDArray[np.int64],
    ) -> None:
        """Give the bytes of a file, and `[N]` lengths and pointers of its sequences, at any address.

        Raises:
            ArgumentError: an array is not what it must be.
        """
        entry = self.file_table[number]
        count = int(entry["num_sequences"])
        for name, array, dtype, size in (
            ("tokens", tokens, np.uint8, len(tokens)),
            ("lengths", lengths, np.int32, count),
            ("pointers", pointers, np.int64, count),
        ):
            if array.dtype != dtype or array.shape != (size,) or not array.flags.c_contiguous:
                msg = f"{name} must be {size} contiguous {np.dtype(dtype)}, found {array.dtype} {list(array.shape)}"
                raise ArgumentError(msg)
        self.files[number] = tokens, lengths, pointers
        entry["size_bytes"], entry["lengths"], entry["pointers"] = len(tokens), _address(lengths), _address(pointers)
        entry["tokens"] = _address(tokens) or 1  # an empty file is mapped, too

    def unmap_file(self, number: int) -> None:
        """Take a file's bytes back: samples that need it name it as absent."""
        self.file_table[number]["tokens"] = 0
        self.files[number] = None

    def remove_visits(self, dataset: int) -> None:
        """Take the visits of a dataset back: it has no samples until it is placed again."""
        self.source_table[dataset] = np.zeros((), dtype=_SOURCE)
        self.visits.pop(dataset, None)

    def place_visits(self, dataset: int, *, first_file: int, num_files: int, dtype: int, visits: Visits) -> None:
        """Give a dataset whose samples follow from visits to the documents of some files.

        Raises:
            ArgumentError: an argument is not what it must be.
        """
        types = {"documents": (np.int32, np.int64), "rows": (np.int32, np.int64), "shuffle": (np.uint32, np.int64)}
        for name, allowed in types.items():
            array = getattr(visits, name)
            if array.dtype not in allowed or not array.flags.c_contiguous or not array.flags.aligned:
                msg = f"{name} must be contiguous {' or '.join(t.__name__ for t in allowed)}, found {array.dtype}"
                raise ArgumentError(msg)
        if visits.rows.shape != (len(visits.shuffle) + 1, 2):
            msg = f"rows must have the shape [{len(visits.shuffle) + 1}, 2], found {list(visits.rows.shape)}"
            raise ArgumentError(msg)
        self.visits[dataset] = visits
        self._place(
            dataset,
            first_file=first_file,
            num_files=num_files,
            dtype=dtype,
            num_samples=len(visits.shuffle),
            visits=_address(visits.documents) or 1,
            num_visits=len(visits.documents),
            visit_bytes=visits.documents.itemsize,
            rows=_address(visits.rows),
            row_bytes=visits.rows.itemsize,
            shuffle=_address(visits.shuffle),
            shuffle_bytes=visits.shuffle.itemsize,
            may_be_short=int(visits.may_be_short),
        )

    def place_stretches(
        self, dataset: int, *, first_file: int, num_files: int, dtype: int, num_samples: int, origin_byte: int
    ) -> None:
        """Give a dataset whose samples stand one after the other in some files, from a byte of all of them on.

        Raises:
            ArgumentError: an argument is not what it must be.
        """
        self._place(
            dataset,
            first_file=first_file,
            num_files=num_files,
            dtype=dtype,
            num_samples=num_samples,
            origin_byte=origin_byte,
        )

    def _place(self, dataset: int, **entry: int) -> None:
        if entry["dtype"] not in _INTEGER_TYPES:
            msg = f"dtype must be the code of an integer type, found {entry['dtype']}"
            raise ArgumentError(msg)
        if entry["num_files"] < 1 or not 0 <= entry["first_file"] <= len(self.files) - entry["num_files"]:
            msg = f"files must be at least one of {len(self.files)}, found {entry['num_files']}"
            raise ArgumentError(msg)
        for name, value in entry.items():
            self.source_table[name][dataset] = value


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleShape:
    """What samples are made into.

    Raises:
        ArgumentError: a field is out of range.
    """

    length: int
    """S, at least 1."""
    extra: int
    """1 if a sample holds the token after its last, else 0."""
    pad: int
    """Id that fills up short samples and is no label."""
    eod: int
    """Id that ends documents."""
    resets_positions: bool = False
    """Whether positions begin again after each `eod`."""
    masks_eod: bool = False
    """Whether predicting from `eod` is left out of the loss."""
    words: npt.NDArray[np.uint64] = field(init=False, repr=False, compare=False)
    """What the kernel reads."""

    def __post_init__(self) -> None:
        if self.length < 1 or self.extra not in (0, 1):
            msg = f"length must be at least 1 and extra 0 or 1, found {self.length} and {self.extra}"
            raise ArgumentError(msg)
        fields = [self.length, self.extra, self.pad, self.eod, self.resets_positions, self.masks_eod]
        object.__setattr__(self, "words", np.array(fields, dtype=np.int64).view(np.uint64))


class BatchArrays:
    """Arrays that a batch is written to, checked once.

    Args:
        arrays: `tokens`, `labels` and `position_ids`, `[B, S]` int64; `loss_mask`, `[B, S]` float32; and where they are
            wanted `attention_mask`, `[B, S, S]` bool, and `cu_seqlens`, `[B, S + 1]`, with `max_seqlen`, `[B]`, int32.

    Raises:
        ArgumentError: an array is missing, or not what it must be.
    """

    def __init__(self, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        self.arrays = dict(arrays)
        self.size: int = arrays["tokens"].shape[0]
        self.length: int = arrays["tokens"].shape[1]
        addresses = []
        for name, (dtype, *tail) in self._wanted().items():
            array = arrays.get(name)
            is_optional = name in ("attention_mask", "cu_seqlens", "max_seqlen")
            if array is None and is_optional:
                addresses.append(0)
                continue
            shape = (self.size, *tail)
            if array is None or array.dtype != dtype or array.shape != shape or not array.flags.carray:
                found = "none" if array is None else f"{array.dtype} {list(array.shape)}"
                msg = f"{name} must be writable, contiguous {np.dtype(dtype)} of shape {list(shape)}, found {found}"
                raise ArgumentError(msg)
            addresses.append(_address(array))
        if ("cu_seqlens" in arrays) != ("max_seqlen" in arrays):
            msg = "cu_seqlens and max_seqlen must come together, found one of them"
            raise ArgumentError(msg)
        self.words = np.array(addresses, dtype=np.uint64)
        self.work: int = self.size * self.length * (self.length if "attention_mask" in arrays else 1)
        """Elements to write, roughly."""

    def _wanted(self) -> Mapping[str, tuple[Any, ...]]:
        """Type and shape after `[B]`, in the order in which the kernel wants them."""
        return {
            "tokens": (np.int64, self.length),
            "labels": (np.int64, self.length),
            "loss_mask": (np.float32, self.length),
            "position_ids": (np.int64, self.length),
            "attention_mask": (np.bool_, self.length, self.length),
            "cu_seqlens": (np.int32, self.length + 1),
            "max_seqlen": (np.int32,),
        }


class Gathered(NamedTuple):
    """How far a batch came: it is whole if no sample was refused and no file absent."""

    refused: int | None
    """The first sample that is not there, not inside the mapped files, or not made up by its documents."""
    absent: list[int]
    """Files that must be mapped first."""


def gather(
    sources: SampleSources,
    datasets: npt.NDArray[np.int32],
    positions: npt.NDArray[np.int64],
    batch: BatchArrays,
    shape: SampleShape,
    *,
    num_threads: int | None = None,
    poll: Poll = None,
) -> Gathered:
    """Write the samples of a batch, if all of them can be: else what stands in the arrays means nothing.

    No span is read that does not lie inside the bytes that are mapped, whatever the files say.

    Args:
        sources: the datasets.
        datasets: `[B]` dataset of each sample; one that was not placed has none.
        positions: `[B]` its position there in `[-R, R)`, or its number in the files where they hold stretches.
        batch: where it is written.
        shape: what samples are made into; of the batch's length.
        num_threads: at least 1; None for as many as the process may run on.
        poll: looks in while it runs, with 0.

    Raises:
        ArgumentError: an argument is out of range.
    """
    if num_threads is not None and num_threads < 1:
        msg = f"num_threads must be at least 1, found {num_threads}"
        raise ArgumentError(msg)
    if batch.length != shape.length or len(datasets) != batch.size or len(positions) != batch.size:
        found = f"{len(datasets)} and {len(positions)} for {batch.size}, and {shape.length} for {batch.length}"
        msg = f"datasets, positions and batch must have one size, shape and batch one length, found {found}"
        raise ArgumentError(msg)
    refused, absent = _native.gather(
        workers(),
        *sources.words,
        datasets,
        positions,
        shape.words,
        batch.words,
        chosen_level(),
        _threads(batch, num_threads),
        current_poll(poll),
    )
    return Gathered(None if refused == batch.size else refused, absent)


def _threads(batch: BatchArrays, wanted: int | None) -> int:
    """Threads that a batch is worth."""
    if wanted == 1:
        return 1
    return min(available_threads() if wanted is None else wanted, max(1, batch.work // _TOKENS_A_THREAD))


def _address(array: npt.NDArray[Any]) -> int:
    address: int = array.ctypes.data
    return address
