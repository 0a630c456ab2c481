"""Typed wrapper of the kernel that gathers batches.

Shapes: B samples of a batch, S tokens of a sample, N sequences of a file, V visits, R samples of a dataset.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from trackbed.cancellation import Poll, current_poll
from trackbed.errors import ArgumentError
from trackbed.kernels import _native
from trackbed.kernels.isa import available_threads, chosen_level
from trackbed.kernels.workers import workers

_FILE: Final = np.dtype(
    [
        *[("tokens", "<i8"), ("size_bytes", "<i8"), ("lengths", "<i8"), ("pointers", "<i8")],
        *[("num_sequences", "<i8"), ("first_sequence", "<i8"), ("first_byte", "<i8"), ("token_bytes", "<i8")],
    ]
)
_TRAINED: Final = np.dtype([("firsts", "<i8"), ("runs", "<i8"), ("num_documents", "<i8"), ("num_runs", "<i8")])
_SOURCE: Final = np.dtype(
    [
        *[("first_file", "<i8"), ("num_files", "<i8"), ("dtype", "<i8"), ("num_samples", "<i8")],
        *[("origin_byte", "<i8"), ("visits", "<i8"), ("num_visits", "<i8"), ("visit_bytes", "<i8")],
        *[("rows", "<i8"), ("row_bytes", "<i8"), ("shuffle", "<i8"), ("shuffle_bytes", "<i8")],
        ("may_be_short", "<i8"),
    ]
)
"""Layouts of `native/include/trackbed/sample_spans.hpp`; arrays are given by address."""

_INTEGER_TYPES: Final = frozenset({1, 2, 3, 4, 5, 8})
_TOKENS_PER_THREAD: Final = 1 << 13
"""Fewest tokens per thread: writing them takes as long as waking a thread."""


class Extent(NamedTuple):
    """Size of a file and its place in its dataset, known before the file is mapped."""

    num_sequences: int
    first_sequence: int
    """Number of sequences in the dataset's earlier files."""
    first_byte: int
    """Number of token bytes in the dataset's earlier files."""
    token_bytes: int
    """Number of token bytes in the file."""


class Visits(NamedTuple):
    """Indices that define the samples of a dataset by visits to documents."""

    documents: npt.NDArray[np.integer[Any]]
    """`[V]` document of each visit, int32 or int64."""
    rows: npt.NDArray[np.integer[Any]]
    """`[R + 1, 2]` visit and token offset in that visit at which each sample begins, int32 or int64."""
    shuffle: npt.NDArray[np.integer[Any]]
    """`[R]` row at each position, uint32 or int64."""
    may_be_short: bool = False
    """True if the sample of the last row may be shorter than the others, because the visits end."""


class Sentences(NamedTuple):
    """Index that defines the samples of a dataset as consecutive sentences."""

    rows: npt.NDArray[np.integer[Any]]
    """`[R, 3]` first sentence of each sample, the one after its last, and its length; uint32 or uint64."""


class SampleSources:
    """The datasets from which samples are gathered. Keeps their arrays alive.

    A dataset must be placed before its samples are gathered. The methods modify the tables that the kernel reads, so
    they must not be called while `gather` runs.

    Args:
        num_datasets: at least 1.
    """

    def __init__(self, num_datasets: int) -> None:
        self.files: list[tuple[npt.NDArray[Any], ...] | None] = []
        """Bytes, lengths and pointers of each open file; None for files that are absent."""
        self.visits: dict[int, Visits] = {}
        self.sentences: dict[int, Sentences] = {}
        self.source_table = np.zeros(num_datasets, dtype=_SOURCE)
        self.trained: dict[int, tuple[npt.NDArray[Any], ...]] = {}
        """Runs of trained tokens of open files; none for a file all of whose tokens are trained."""
        self._file_buffer = np.zeros(16, dtype=_FILE)
        self._trained_buffer = np.zeros(16, dtype=_TRAINED)
        self._words = self.source_table.view(np.uint64), self.file_table.view(np.uint64)

    @property
    def file_table(self) -> npt.NDArray[np.void]:
        """The table of files that the kernel reads."""
        return self._file_buffer[: len(self.files)]

    @property
    def words(self) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
        """The tables of datasets and files as arrays of words for the kernel."""
        return self._words

    def add_files(self, extents: Sequence[Extent]) -> int:
        """Register consecutive files of one dataset. Returns the number of the first one."""
        first = len(self.files)
        self.files += [None] * len(extents)
        if len(self.files) > len(self._file_buffer):
            larger = np.zeros(2 * len(self.files), dtype=_FILE)
            larger[:first] = self._file_buffer[:first]
            self._file_buffer = larger
            self._trained_buffer = np.resize(self._trained_buffer, len(larger))
            self._trained_buffer[first:] = 0
        for column, name in enumerate(("num_sequences", "first_sequence", "first_byte", "token_bytes")):
            self.file_table[name][first:] = [extent[column] for extent in extents]
        self._words = self._words[0], self.file_table.view(np.uint64)
        return first

    def map_file(
        self,
        number: int,
        *,
        tokens: npt.NDArray[np.uint8] | None,
        lengths: npt.NDArray[np.int32],
        pointers: npt.NDArray[np.int64],
        size_bytes: int | None = None,
    ) -> None:
        """Sets the bytes of a file, and `[N]` lengths and pointers of its sequences, which may be unaligned.

        With `tokens` None, a file of `size_bytes` whose bytes are passed to `gather` as they are fetched.

        Raises:
            ArgumentError: an array has another type or shape, or is not contiguous.
        """
        entry = self.file_table[number]
        count = int(entry["num_sequences"])
        wanted: list[tuple[str, npt.NDArray[Any], type, int]] = [
            ("lengths", lengths, np.int32, count),
            ("pointers", pointers, np.int64, count),
        ]
        if tokens is not None:
            wanted.append(("tokens", tokens, np.uint8, len(tokens)))
        for name, array, dtype, size in wanted:
            if array.dtype != dtype or array.shape != (size,) or not array.flags.c_contiguous:
                raise ArgumentError(
                    f"{name} must be {size} contiguous {np.dtype(dtype)}, found {array.dtype} {list(array.shape)}"
                )
        self.files[number] = (lengths, pointers) if tokens is None else (tokens, lengths, pointers)
        entry["size_bytes"] = (size_bytes or 0) if tokens is None else len(tokens)
        # Nonzero, because 0 means not mapped, and absent.
        entry["tokens"] = 0 if tokens is None else _address(tokens) or 1
        entry["pointers"] = _address(pointers)
        entry["lengths"] = _address(lengths) or 1

    @property
    def trained_words(self) -> npt.NDArray[np.uint64]:
        """The table of trained tokens as an array of words for the kernel."""
        return self._trained_buffer[: len(self.files)].view(np.uint64)

    def set_trained(self, number: int, firsts: npt.NDArray[np.uint64], runs: npt.NDArray[np.uint32]) -> None:
        """Sets which tokens of a file's documents are trained.

        Args:
            number: that of the file.
            firsts: `[D + 1]` runs before each document, and in all.
            runs: `[R, 2]` first token of each run in its document, and number of tokens.
        """
        for name, array, dtype in (("firsts", firsts, np.uint64), ("runs", runs, np.uint32)):
            if array.dtype != dtype or not (array.flags.c_contiguous and array.flags.aligned) or not len(firsts):
                raise ArgumentError(f"{name} must be contiguous, aligned {np.dtype(dtype)}, found {array.dtype}")
        self.trained[number] = (firsts, runs)
        self._trained_buffer[number] = (_address(firsts), _address(runs), len(firsts) - 1, len(runs))

    def unmap_file(self, number: int) -> None:
        """Removes a file's bytes; `gather` then lists it as absent for samples that need it."""
        if self.trained.pop(number, None) is not None:
            self._trained_buffer[number] = 0
        self.file_table[number]["lengths"] = self.file_table[number]["tokens"] = 0
        self.files[number] = None

    def remove_index(self, dataset: int) -> bool:
        """Removes the arrays of a dataset, which then has no samples until it is placed again.

        Returns:
            False if it has none, as its samples are stretches.
        """
        if self.visits.pop(dataset, None) is None and self.sentences.pop(dataset, None) is None:
            return False
        self.source_table[dataset] = np.zeros((), dtype=_SOURCE)
        return True

    def place_visits(self, dataset: int, *, first_file: int, num_files: int, dtype: int, visits: Visits) -> None:
        """Place a dataset whose samples are defined by visits to the documents of its files.

        Raises:
            ArgumentError: an array has another type or shape, or another argument is out of range.
        """
        types = {"documents": (np.int32, np.int64), "rows": (np.int32, np.int64), "shuffle": (np.uint32, np.int64)}
        for name, allowed in types.items():
            array = getattr(visits, name)
            if array.dtype not in allowed or not array.flags.c_contiguous or not array.flags.aligned:
                raise ArgumentError(
                    f"{name} must be contiguous {' or '.join(t.__name__ for t in allowed)}, found {array.dtype}"
                )
        if visits.rows.shape != (len(visits.shuffle) + 1, 2):
            raise ArgumentError(
                f"rows must have the shape [{len(visits.shuffle) + 1}, 2], found {list(visits.rows.shape)}"
            )
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

    def place_sentences(
        self, dataset: int, *, first_file: int, num_files: int, dtype: int, sentences: Sentences
    ) -> None:
        """Place a dataset whose samples are consecutive sequences of its files.

        Raises:
            ArgumentError: an array has another type or shape, or another argument is out of range.
        """
        rows = sentences.rows
        is_plain = rows.dtype in (np.uint32, np.uint64) and rows.flags.c_contiguous and rows.flags.aligned
        if not is_plain or rows.shape != (len(rows), 3):
            raise ArgumentError(
                f"rows must be contiguous uint32 or uint64 of shape [R, 3], found {rows.dtype} {list(rows.shape)}"
            )
        self.sentences[dataset] = sentences
        self._place(
            dataset,
            first_file=first_file,
            num_files=num_files,
            dtype=dtype,
            num_samples=len(rows),
            rows=_address(rows) or 1,
            row_bytes=rows.itemsize,
        )

    def place_stretches(
        self, dataset: int, *, first_file: int, num_files: int, dtype: int, num_samples: int, origin_byte: int
    ) -> None:
        """Place a dataset whose samples are consecutive stretches of its files' tokens.

        The first sample starts at byte `origin_byte` of the concatenated files.

        Raises:
            ArgumentError: an argument is out of range.
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
            raise ArgumentError(f"dtype must be the code of an integer type, found {entry['dtype']}")
        if entry["num_files"] < 1 or not 0 <= entry["first_file"] <= len(self.files) - entry["num_files"]:
            raise ArgumentError(f"files must be at least one of {len(self.files)}, found {entry['num_files']}")
        for name, value in entry.items():
            self.source_table[name][dataset] = value


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleShape:
    """Shape and contents of the samples of a batch.

    Raises:
        ArgumentError: a field is out of range.
    """

    length: int
    """S, at least 1."""
    extra: int
    """1 if a sample also holds the first token of the next one, else 0."""
    pad: int
    """Padding token of short samples, excluded from the loss as a label."""
    eod: int
    """End-of-document token."""
    resets_positions: bool = False
    """True if positions restart after each `eod`."""
    masks_eod: bool = False
    """True if predictions from `eod` are excluded from the loss."""
    keeps_documents_apart: bool = False
    """True if positions restart at the borders of `cu_seqlens`, which then has one for each empty document, as in
    Megatron Core."""
    masks_borders: bool = False
    """True if labels that are the first token of another sequence are excluded from the loss."""
    words: npt.NDArray[np.uint64] = field(init=False, repr=False, compare=False)
    """The fields as an array of words for the kernel."""

    def __post_init__(self) -> None:
        if self.length < 1 or self.extra not in (0, 1):
            raise ArgumentError(f"length must be at least 1 and extra 0 or 1, found {self.length} and {self.extra}")
        flags = [self.resets_positions, self.masks_eod, self.keeps_documents_apart, self.masks_borders]
        fields = [self.length, self.extra, self.pad, self.eod, *flags]
        object.__setattr__(self, "words", np.array(fields, dtype=np.int64).view(np.uint64))


_OPTIONAL: Final = ("attention_mask", "cu_seqlens", "max_seqlen")


class BatchArrays:
    """Output arrays of a batch, checked once.

    Args:
        arrays: `tokens`, `labels` and `position_ids`, `[B, S]` int64; `loss_mask`, `[B, S]` float32; optionally
            `attention_mask`, `[B, S, S]` bool; optionally `cu_seqlens`, `[B, S + 1]` int32, with `max_seqlen`, `[B]`
            int32.

    Raises:
        ArgumentError: an array is missing, has another type or shape, or is not writable and contiguous.
    """

    def __init__(self, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        self.arrays = dict(arrays)
        self.size: int = arrays["tokens"].shape[0]
        self.length: int = arrays["tokens"].shape[1]
        addresses = output_addresses(arrays, self.size, self._wanted(), optional=_OPTIONAL)
        if ("cu_seqlens" in arrays) != ("max_seqlen" in arrays):
            raise ArgumentError("cu_seqlens and max_seqlen must come together, found one of them")
        self.words = np.array(addresses, dtype=np.uint64)
        self.work: int = self.size * self.length * (self.length if "attention_mask" in arrays else 1)
        """Approximate number of elements to write."""

    def part(self, samples: slice) -> Self:
        """Returns the arrays of some of the samples, as views."""
        return type(self)({name: array[samples] for name, array in self.arrays.items()})

    def _wanted(self) -> Mapping[str, tuple[Any, ...]]:
        """Type, and shape after `[B]`, of each array in the kernel's order."""
        return {
            "tokens": (np.int64, self.length),
            "labels": (np.int64, self.length),
            "loss_mask": (np.float32, self.length),
            "position_ids": (np.int64, self.length),
            "attention_mask": (np.bool_, self.length, self.length),
            "cu_seqlens": (np.int32, self.length + 1),
            "max_seqlen": (np.int32,),
        }


class FetchedBytes:
    """Bytes of files that are not mapped. Keeps the arrays alive.

    Args:
        pieces: number of the file, its first byte, and the bytes from there on; those of a file do not overlap.
    """

    def __init__(self, pieces: Sequence[tuple[int, int, npt.NDArray[np.uint8]]] = ()) -> None:
        self.pieces = sorted(pieces, key=lambda piece: piece[:2])
        rows = [(file, start, start + len(found), _address(found)) for file, start, found in self.pieces]
        self.words = np.array(rows, dtype=np.uint64).reshape(-1)
        """The pieces as an array of words for the kernel."""

    def __bool__(self) -> bool:
        return bool(self.pieces)

    def joined(self, other: "FetchedBytes") -> "FetchedBytes":
        """Returns the bytes of both, of which no piece lies inside another."""
        return FetchedBytes([*self.pieces, *other.pieces]) if self.pieces else other


_NOTHING: Final = FetchedBytes()
_NO_ROWS: Final = np.zeros(7, dtype=np.uint64)


class Gathered(NamedTuple):
    """Result of `gather`: the batch is complete if no sample was refused, no file is absent and nothing is missing."""

    refused: int | None
    """Number in the batch of the first invalid sample: it does not exist, lies outside the mapped files, or its
    documents do not have its length. None if there is none."""
    absent: list[int]
    """Numbers of files that must be mapped first."""
    missing: npt.NDArray[np.int64]
    """`[M, 3]` file, first byte and the one after the last that must be fetched first, in the order of the samples.
    Those of files that are absent are not included."""

    @property
    def is_whole(self) -> bool:
        """True if the batch is complete."""
        return self.refused is None and not self.absent and not len(self.missing)

    @classmethod
    def of(cls, size: int, refused: int, absent: list[int], missing: list[int]) -> "Gathered":
        """Returns the result of the kernel for a batch of `size` samples."""
        table = np.array(missing, dtype=np.int64).reshape(-1, 3)
        return cls(None if refused == size else refused, absent, table)


def gather(
    sources: SampleSources,
    datasets: npt.NDArray[np.int32],
    positions: npt.NDArray[np.int64],
    batch: BatchArrays | None,
    shape: SampleShape,
    *,
    fetched: FetchedBytes | None = None,
    num_threads: int | None = None,
    poll: Poll = None,
) -> Gathered:
    """Gathers the samples of a batch. Unless the result is whole, the contents of `batch` are undefined.

    All reads are checked to lie inside the bytes of the files, also if the files are damaged.

    Args:
        sources: the datasets.
        datasets: `[B]` dataset of each sample; a dataset that was not placed has no samples.
        positions: `[B]` position in that dataset, in `[-R, R)`; for a dataset of stretches, number of the sample in
            its files.
        batch: output arrays; None to find out what is missing, and write nothing.
        shape: shape of the samples; its length must be that of `batch`.
        fetched: bytes of files that are not mapped.
        num_threads: at least 1; None for the number of CPUs available to the process.
        poll: progress callback, called with 0.

    Raises:
        ArgumentError: an argument is out of range.
    """
    size, length = (len(positions), shape.length) if batch is None else (batch.size, batch.length)
    if length != shape.length or len(datasets) != size or len(positions) != size:
        found = f"{len(datasets)} and {len(positions)} for {size}, and {shape.length} for {length}"
        raise ArgumentError(
            f"datasets, positions and batch must have one size, shape and batch one length, found {found}"
        )
    if shape.keeps_documents_apart and batch is not None and "cu_seqlens" not in batch.arrays:
        raise ArgumentError("batch must have cu_seqlens with keeps_documents_apart, found none")
    outcome = _native.gather(
        workers(),
        *sources.words,
        (fetched or _NOTHING).words,
        datasets,
        positions,
        shape.words,
        _NO_ROWS if batch is None else batch.words,
        chosen_level(),
        useful_threads((size if batch is None else batch.work) // _TOKENS_PER_THREAD, num_threads),
        current_poll(poll),
    )
    return Gathered.of(size, *outcome)


def useful_threads(most: int, wanted: int | None) -> int:
    """Number of threads that speed up a batch.

    Args:
        most: threads that have enough to do.
        wanted: at least 1; None for the number of CPUs available to the process.
    """
    if wanted is not None and wanted < 1:
        raise ArgumentError(f"num_threads must be at least 1, found {wanted}")
    if wanted == 1:
        return 1
    return min(available_threads() if wanted is None else wanted, max(1, most))


def output_addresses(
    arrays: Mapping[str, npt.NDArray[Any]],
    size: int,
    wanted: Mapping[str, tuple[Any, ...]],
    *,
    optional: Collection[str] = (),
) -> list[int]:
    """Returns the address of each output array of a batch, 0 for one that is left out.

    Args:
        arrays: by name.
        size: B.
        wanted: type, and shape after `[B]`, of each array in the kernel's order.
        optional: names of arrays that may be left out.
    """
    addresses = []
    for name, (dtype, *tail) in wanted.items():
        array = arrays.get(name)
        if array is None and name in optional:
            addresses.append(0)
            continue
        shape = (size, *tail)
        if array is None or array.dtype != dtype or array.shape != shape or not array.flags.carray:
            found = "none" if array is None else f"{array.dtype} {list(array.shape)}"
            raise ArgumentError(
                f"{name} must be writable, contiguous {np.dtype(dtype)} of shape {list(shape)}, found {found}"
            )
        addresses.append(_address(array))
    return addresses


def _address(array: npt.NDArray[Any]) -> int:
    address: int = array.ctypes.data
    return address
