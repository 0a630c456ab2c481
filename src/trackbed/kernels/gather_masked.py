"""Typed wrapper of the kernel that makes batches of masked samples.

Shapes: B samples of a batch, S tokens of a sample, D tokens of T5's decoder.
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

_SAMPLES_PER_THREAD: Final = 2
"""Fewest samples per thread: each takes about as long as waking a thread."""
_MOST_LISTED: Final = 1 << 32


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MaskingTable:
    """Everything that decides masked samples, in the layout of `native/include/trackbed/masking.hpp`.

    Raises:
        ArgumentError: a field is out of range.
    """

    is_t5: bool
    """True for samples of T5, False for those of BERT."""
    length: int
    """S, at least 1."""
    decoder_length: int = 0
    """D, at least 1 for T5."""
    seed: int
    """Seed of the configuration: sample k has `(seed + k) mod 2**32`."""
    pad: int
    """Padding of short samples."""
    cls: int
    """Id of the token that begins a sample of BERT; never masked, as `sep`."""
    sep: int
    """Id of the token that ends a segment of BERT."""
    mask: int
    """Id that stands for a masked token."""
    bos: int = 0
    """Id that begins T5's decoder."""
    eos: int = 0
    """Id that ends T5's labels."""
    has_segments: bool = False
    """True if BERT's sentences are divided into two segments, which may be swapped."""
    full_words: bool
    """True if whole words are masked."""
    is_geometric: bool
    """True if numbers of words are drawn from a geometric distribution."""
    permutes: bool
    """True if other tokens are permuted."""
    probability: float
    """Share of the tokens that is masked, in (0, 1)."""
    cumulative: npt.NDArray[np.float64]
    """Cumulative probabilities of 1, 2, ... words, at least one."""
    kinds: npt.NDArray[np.uint8]
    """By token id: 0 if it begins a word, 1 if it continues one, 2 if there is no such token."""
    listed: npt.NDArray[np.int64]
    """Ids from which a random token is drawn, at least one."""
    sentinels: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """Ids that replace spans, for T5."""
    words: npt.NDArray[np.uint64] = field(init=False, repr=False)
    """The fields as an array of words for the kernel."""

    def __post_init__(self) -> None:
        lengths = (self.length, self.decoder_length if self.is_t5 else 1)
        if min(lengths) < 1 or not 0 < self.probability < 1:
            found = f"{self.length}, {self.decoder_length} and {self.probability}"
            raise ArgumentError(
                f"length and decoder_length must be at least 1 and probability in (0, 1), found {found}"
            )
        tables = {"cumulative": np.float64, "kinds": np.uint8, "listed": np.int64, "sentinels": np.int64}
        for name, dtype in tables.items():
            table = getattr(self, name)
            if table.dtype != dtype or table.ndim != 1 or not table.flags.c_contiguous:
                raise ArgumentError(f"{name} must be a contiguous vector of {np.dtype(dtype)}, found {table.dtype}")
        if not 0 < len(self.listed) < _MOST_LISTED or not len(self.cumulative):
            raise ArgumentError(
                f"listed and cumulative must not be empty, found {len(self.listed)} and {len(self.cumulative)}"
            )
        numbers: list[Any] = [
            *(self.is_t5, self.length, self.decoder_length, self.seed, self.pad, self.cls, self.sep, self.mask),
            *(self.bos, self.eos, self.has_segments, self.full_words, self.is_geometric, self.permutes),
            int(np.float64(self.probability).view(np.int64)),
            *(self.cumulative.ctypes.data, len(self.cumulative), self.kinds.ctypes.data, len(self.kinds)),
            *(self.listed.ctypes.data, len(self.listed), self.sentinels.ctypes.data, len(self.sentinels)),
        ]
        object.__setattr__(self, "words", np.array(numbers, dtype=np.int64).view(np.uint64))


class MaskedBatchArrays:
    """Output arrays of a batch of masked samples, checked once.

    Args:
        arrays: int64 arrays by name. BERT: `text`, `types`, `labels`, `padding_mask` and `loss_mask`, `[B, S]`, and
            `is_random` and `truncated`, `[B]`. T5: `text_enc` and `enc_mask`, `[B, S]`, `text_dec`, `labels`,
            `loss_mask` and `dec_mask`, `[B, D]`, and `truncated`, `[B]`.

    Raises:
        ArgumentError: an array is missing, has another type or shape, or is not writable and contiguous.
    """

    def __init__(self, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        self.arrays = dict(arrays)
        self.is_t5 = "text_enc" in arrays
        text = arrays["text_enc" if self.is_t5 else "text"]
        self.size: int = text.shape[0]
        self.length: int = text.shape[1]
        self.decoder_length: int = arrays["text_dec"].shape[1] if self.is_t5 else 0
        wanted = self._wanted()
        found = dict(zip(wanted, output_addresses(arrays, self.size, wanted), strict=True))
        found["text"] = found.get("text_enc", found.get("text", 0))
        order = ("text", "labels", "loss_mask", "truncated", "types", "padding_mask", "is_random")
        addresses = [found.get(name, 0) for name in (*order, "enc_mask", "text_dec", "dec_mask")]
        self.words = np.array(addresses, dtype=np.uint64)

    def part(self, samples: slice) -> Self:
        """Returns the arrays of some of the samples, as views."""
        return type(self)({name: array[samples] for name, array in self.arrays.items()})

    def _wanted(self) -> dict[str, tuple[Any, ...]]:
        """Type, and shape after `[B]`, of each array."""
        if self.is_t5:
            encoder = dict.fromkeys(("text_enc", "enc_mask"), (np.int64, self.length))
            decoder = dict.fromkeys(("text_dec", "labels", "loss_mask", "dec_mask"), (np.int64, self.decoder_length))
            return {**encoder, **decoder, "truncated": (np.int64,)}
        names = ("text", "types", "labels", "padding_mask", "loss_mask")
        return {
            **dict.fromkeys(names, (np.int64, self.length)),
            **dict.fromkeys(("is_random", "truncated"), (np.int64,)),
        }


_NO_ROWS: Final = np.zeros(10, dtype=np.uint64)


def gather_masked(
    sources: SampleSources,
    datasets: npt.NDArray[np.int32],
    positions: npt.NDArray[np.int64],
    batch: MaskedBatchArrays | None,
    table: MaskingTable,
    *,
    fetched: FetchedBytes | None = None,
    num_threads: int | None = None,
    poll: Poll = None,
) -> Gathered:
    """Makes the samples of a batch. Unless the result is whole, the contents of `batch` are undefined.

    All reads are checked to lie inside the bytes of the files, also if the files are damaged. A sample is refused, too,
    if a token is unknown, or if T5 has too few sentinels or too short a decoder for it.

    Args:
        sources: the datasets, each placed by `place_sentences`.
        datasets: `[B]` dataset of each sample; a dataset that was not placed has no samples.
        positions: `[B]` position in that dataset, in `[-R, R)`.
        batch: output arrays; None to find out what is missing, and write nothing.
        table: what decides the samples.
        fetched: bytes of files that are not mapped.
        num_threads: at least 1; None for the number of CPUs available to the process.
        poll: progress callback, called with 0.

    Raises:
        ArgumentError: an argument is out of range.
    """
    size = len(positions) if batch is None else batch.size
    wanted = table.is_t5, table.length, table.decoder_length
    given = wanted if batch is None else (batch.is_t5, batch.length, batch.decoder_length)
    if given != wanted or not len(datasets) == len(positions) == size:
        found = f"{given} and {wanted}, and {len(datasets)} and {len(positions)} for {size}"
        raise ArgumentError(
            f"batch and table must have one model and length, datasets, positions and batch one size, found {found}"
        )
    outcome = _native.gather_masked(
        workers(),
        *sources.words,
        (fetched or FetchedBytes()).words,
        datasets,
        positions,
        table.words,
        _NO_ROWS if batch is None else batch.words,
        chosen_level(),
        useful_threads(size // _SAMPLES_PER_THREAD, num_threads),
        current_poll(poll),
    )
    return Gathered.of(size, *outcome)
