"""Trained tokens of documents: `<prefix>.mask`, runs of tokens that have a loss as labels (docs/formats/mask.md).

Shapes: D documents, R runs, T tokens.
"""

import array
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from trackbed.errors import ArgumentError, FormatError
from trackbed.files import Checksum, map_readonly, open_regular, stamp_of
from trackbed.files.stores import is_address
from trackbed.tokens.paths import get_beside_path, get_seal_path
from trackbed.tokens.seal import find_beside
from trackbed.tokens.source import MappedSource

TRAINED: Final = "mask"
"""Name of the file beside a pair."""
_MAGIC: Final = b"TBMASK\0\0"
_VERSION: Final = 1
_STEP_DOCUMENTS: Final = 1 << 20  # bounds the memory of counts
_HEADER: Final = struct.Struct("<8sQQQ")

Runs = npt.NDArray[np.uint32]
"""`[R, 2]` first token of each run in its document, and number of tokens."""


class TrainedColumns:
    """Trained tokens of the documents of a pair that is being written."""

    def __init__(self) -> None:
        self.firsts = array.array("Q", [0])
        self.runs = array.array("I")

    def __len__(self) -> int:
        """Number of documents."""
        return len(self.firsts) - 1

    def add(self, counts: npt.NDArray[np.integer], runs: Runs, *, lengths: npt.NDArray[np.integer], where: str) -> None:
        """Appends the runs of documents.

        Args:
            counts: `[D]` number of runs of each document.
            runs: `[R, 2]` of all of them: rising, without overlap, each of at least one token.
            lengths: `[D]` tokens of each document.
            where: name of the data, for errors.

        Raises:
            ArgumentError: a run is empty, lies outside of its document, or begins before the end of the one before.
        """
        problem = _problem(np.asarray(counts, dtype=np.int64), np.asarray(runs, dtype=np.int64), np.asarray(lengths))
        if problem:
            raise ArgumentError(f"{where}: {problem}")
        ends = len(self.runs) // 2 + np.cumsum(counts, dtype=np.uint64)
        self.firsts.frombytes(ends.astype(np.uint64).tobytes())
        self.runs.frombytes(np.ascontiguousarray(runs, dtype=np.uint32).tobytes())

    def add_whole(self, lengths: npt.NDArray[np.integer]) -> None:
        """Appends documents all of whose tokens are trained.

        Args:
            lengths: `[D]` tokens of each document.
        """
        sizes = np.asarray(lengths, dtype=np.int64)
        runs = np.zeros((int((sizes > 0).sum()), 2), dtype=np.uint32)
        runs[:, 1] = sizes[sizes > 0]
        self.add((sizes > 0).astype(np.int64), runs, lengths=sizes, where="documents")

    def write(self, path: Path) -> Checksum:
        """Writes the new file `path`. Returns its checksum."""
        checksum = Checksum()
        with path.open("xb") as file:
            for part in self._parts():
                checksum.update(memoryview(part))
                file.write(part)
        return checksum

    def _parts(self) -> Iterator[bytes]:
        yield _HEADER.pack(_MAGIC, _VERSION, len(self), len(self.runs) // 2)
        yield np.frombuffer(self.firsts, dtype=np.uint64).astype("<u8", copy=False).tobytes()
        yield np.frombuffer(self.runs, dtype=np.uint32).astype("<u4", copy=False).tobytes() if self.runs else b""


@dataclass(frozen=True, slots=True)
class TrainedCounts:
    """Counts of the trained tokens of a pair."""

    tokens: int
    """Trained tokens."""
    first_tokens: int
    """Trained tokens that begin their document, and so are never labels."""
    untrained: int
    """Documents in which no token but the first one is trained."""


@dataclass(frozen=True, slots=True, eq=False)
class TrainedTokens:
    """Trained tokens of the documents of a pair. Arrays are mapped."""

    firsts: npt.NDArray[np.uint64]
    """`[D + 1]` number of runs before each document, and in all."""
    runs: Runs
    """`[R, 2]` first token of each run in its document, and number of tokens."""
    source: MappedSource | None = None
    """The file that they are cut from."""

    def __len__(self) -> int:
        """Number of documents."""
        return len(self.firsts) - 1

    def of(self, document: int, length: int) -> npt.NDArray[np.bool_]:
        """Returns `[T]` True for each trained token of a document.

        Args:
            document: its number.
            length: T, its tokens.

        Raises:
            IndexError: there is no such document.
            FormatError: its runs are damaged.
        """
        if not 0 <= document < len(self):
            raise IndexError(f"document must be in [0, {len(self)}), found {document}")
        first, stop = int(self.firsts[document]), int(self.firsts[document + 1])
        if not first <= stop <= len(self.runs):
            raise FormatError(f"document {document}: must have runs in [0, {len(self.runs)}], found {first} to {stop}")
        runs = np.asarray(self.runs[first:stop], dtype=np.int64)
        problem = _problem(np.array([stop - first]), runs, np.array([length]))
        if problem:
            raise FormatError(f"its mask, {problem}")
        found = np.zeros(length, dtype=np.bool_)
        for start, count in runs.tolist():
            found[start : start + count] = True
        return found

    def counts(self) -> "TrainedCounts":
        """Counts trained tokens and documents. Reads all runs."""
        first_tokens = untrained = 0
        for start in range(0, len(self), _STEP_DOCUMENTS):
            firsts, runs = self._part(start)
            documents = np.repeat(np.arange(len(firsts) - 1), np.diff(firsts))
            at_first = runs[:, 0] == 0
            labels = np.bincount(documents, weights=runs[:, 1] - at_first, minlength=len(firsts) - 1)
            first_tokens += int(at_first.sum())
            untrained += int((labels == 0).sum())
        return TrainedCounts(self.num_trained, first_tokens, untrained)

    def check(self, lengths: npt.NDArray[np.integer], *, where: str) -> None:
        """Checks all runs.

        Args:
            lengths: `[D]` tokens of each document.
            where: name of the file.

        Raises:
            FormatError: a run lies outside of its document, or in the one before, or there are runs of other documents.
        """
        if len(lengths) != len(self):
            raise FormatError(f"{where}: must have runs of {len(lengths)} documents, found {len(self)}")
        for start in range(0, len(self), _STEP_DOCUMENTS):
            firsts, runs = self._part(start, where=where)
            problem = _problem(np.diff(firsts), runs, lengths[start : start + _STEP_DOCUMENTS])
            if problem:
                raise FormatError(f"{where}: from document {start} on, {problem}")

    def _part(self, start: int, *, where: str = "its mask") -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Returns the first run of some documents from `start` on, and the runs."""
        firsts = self.firsts[start : start + _STEP_DOCUMENTS + 1].astype(np.int64)
        if firsts[0] < 0 or firsts[-1] > len(self.runs) or (np.diff(firsts) < 0).any():
            raise FormatError(f"{where}: must have rising numbers of runs up to {len(self.runs)}, found others")
        return firsts, self.runs[firsts[0] : firsts[-1]].astype(np.int64)

    @property
    def num_trained(self) -> int:
        """Number of trained tokens. Reads all runs."""
        return int(self.runs[:, 1].sum(dtype=np.int64))

    @classmethod
    def open(cls, path_prefix: str, *, idx_cache: str | None = None) -> "TrainedTokens | None":
        """Opens the trained tokens of a pair; None if its seal names none.

        Runs are read where they are used; of a pair in an object store, from a copy of the whole file on this host.

        Args:
            path_prefix: path or address of the pair without `.bin` and `.idx`.
            idx_cache: folder of copies of objects, for an address; None for `default_idx_cache()`.

        Raises:
            FormatError: the file is damaged or missing, or not the one that the seal names.
            FileNotFoundError: the object is missing.
            StoreError: an object store refuses, or does not answer in time.
        """
        named = find_beside(path_prefix, TRAINED, idx_cache=idx_cache)
        beside = get_beside_path(path_prefix, TRAINED)
        if named is None:
            if not is_address(path_prefix) and Path(beside).is_file():
                raise FormatError(
                    f"{beside}: a mask must be named by the seal of its pair, found none that names it; copy "
                    f"{get_seal_path(path_prefix)}, too, or `trackbed seal {path_prefix}` writes one"
                )
            return None
        path, wanted, num_documents = named
        try:
            found = cls.of_file(path)
        except FileNotFoundError as error:
            raise FormatError(
                f"{beside}: the mask must be beside its pair, as the seal names it, found none; copy it, too, or "
                f"`trackbed seal {path_prefix}` makes all tokens trained"
            ) from error
        size = _HEADER.size + found.firsts.nbytes + found.runs.nbytes
        if (size, len(found)) != (wanted.size_bytes, num_documents):
            raise FormatError(
                f"{path}: the seal says {wanted.size_bytes} bytes and {num_documents} documents, found {size} and "
                f"{len(found)}"
            )
        return found

    @classmethod
    def of_file(cls, path: Path) -> "TrainedTokens":
        """Opens a file of trained tokens, without a look at a seal.

        Raises:
            FormatError: it is no such file, or has another size than its header says.
            FileNotFoundError: there is none.
        """
        descriptor, size = open_regular(path)
        with open(descriptor, "rb", buffering=0) as file:  # noqa: PTH123  a descriptor
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)  # the header alone
            header = file.read(_HEADER.size)
            raw = map_readonly(descriptor, size)
        magic, version, count, num_runs = _HEADER.unpack(header) if len(header) == _HEADER.size else (b"", 0, 0, 0)
        if (magic, version) != (_MAGIC, _VERSION):
            raise FormatError(f"{path}: must begin as version {_VERSION} of trained tokens, found {header[:16]!r}")
        middle = _HEADER.size + 8 * (count + 1)
        if size != middle + 8 * num_runs:
            raise FormatError(
                f"{path}: must have {middle + 8 * num_runs} bytes for {count} documents and {num_runs} runs, "
                f"found {size}"
            )
        source = MappedSource(raw, path, stamp_of(path))
        return cls(raw[_HEADER.size : middle].view("<u8"), raw[middle:].view("<u4").reshape(-1, 2), source)


def runs_of(is_trained: npt.NDArray[np.bool_]) -> Runs:
    """Returns the runs of True.

    >>> runs_of(np.array([False, True, True, False, True])).tolist()
    [[1, 2], [4, 1]]
    """
    edges = np.flatnonzero(np.diff(np.concatenate([[False], is_trained, [False]]).astype(np.int8)))
    starts, stops = edges[::2], edges[1::2]
    return np.stack([starts, stops - starts], axis=1).astype(np.uint32)


def check_trained(trained: TrainedColumns, num_documents: int, *, where: str) -> None:
    """Checks that it is known of each document which tokens are trained.

    Raises:
        ArgumentError: they are not as many.
    """
    if len(trained) != num_documents:
        raise ArgumentError(f"{where}: each of {num_documents} documents must have a mask, found {len(trained)}")


def _problem(
    counts: npt.NDArray[np.int64], runs: npt.NDArray[np.int64], lengths: npt.NDArray[np.integer]
) -> str | None:
    """Says what is wrong with the runs of documents, if anything is."""
    if counts.shape != lengths.shape or (counts < 0).any() or runs.shape != (int(counts.sum()), 2):
        return f"runs must be [{int(counts.sum())}, 2] of {len(lengths)} documents, found {list(runs.shape)}"
    document = np.repeat(np.arange(len(counts)), counts)
    starts, stops = runs[:, 0], runs[:, 0] + runs[:, 1]
    follows = np.zeros(len(runs), dtype=np.bool_)
    follows[1:] = document[1:] == document[:-1]
    before = np.zeros(len(runs), dtype=np.int64)
    before[1:] = np.where(follows[1:], stops[:-1], 0)
    wrong = np.flatnonzero((starts < before) | (runs[:, 1] < 1) | (stops > lengths[document]))
    if not len(wrong):
        return None
    at = int(wrong[0])
    return (
        f"document {document[at]}: a run must lie in [{before[at]}, {lengths[document[at]]}), found {runs[at, 1]} "
        f"tokens from {starts[at]} on"
    )
