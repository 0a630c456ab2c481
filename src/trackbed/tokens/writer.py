"""Writing indexed token files.

Shapes: N sequences, D documents, T tokens.
"""

import array
import operator
import os
import weakref
from collections.abc import Iterable, Sequence
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trackbed.errors import ArgumentError
from trackbed.files import Checksum, Writeback, clear_dead_partials, flush_to_disk, new_partial, publish
from trackbed.tokens.dtype import DType
from trackbed.tokens.encode import as_numbers, encode
from trackbed.tokens.format import Header, SequenceIndex, encode_header, open_index
from trackbed.tokens.paths import get_bin_path, get_idx_path, get_seal_path
from trackbed.tokens.seal import Seal, write_seal
from trackbed.tokens.verify import verify

__all__ = ["IndexedDatasetBuilder"]

_FLUSH_BYTES = 256 << 10


class IndexedDatasetBuilder:
    """Writes a `.bin`/`.idx` pair, which appears under its final names when `finalize` returns.

    Until then the tokens go to a partial file beside the `.bin`. A pair that is there already stays until
    `finalize` replaces it by renaming, the `.idx` last; who has it open goes on reading the old one.

    Args:
        bin_path: path of the data file, ending in `.bin`.
        dtype: type of the tokens in the file.
        multimodal: whether sequences carry a mode.
    """

    def __init__(
        self,
        bin_path: str,
        dtype: type[np.number[Any]] = np.int32,
        multimodal: bool = False,  # noqa: FBT001, FBT002  Megatron Core's signature
    ) -> None:
        self.dtype = np.dtype(DType.dtype_from_code(DType.code_from_dtype(dtype)))  # of this byte order
        self.multimodal = multimodal
        self.sequence_lengths: list[int] = []
        self.document_indices: list[int] = [0]
        self.sequence_modes: list[int] | None = [] if multimodal else None
        self._bin_path = Path(bin_path)
        self._where = str(bin_path)
        clear_dead_partials(self._bin_path.parent, final_name=self._bin_path.name)
        self._partial = new_partial(self._bin_path)
        self._file = self._partial.open("xb", buffering=0)
        self._pid = os.getpid()
        self._abandoned = weakref.finalize(self, _remove, self._file, self._partial, self._pid)
        self._pending = bytearray()
        self._checksum = Checksum()
        self._writeback = Writeback(self._file.fileno())
        self._failure: BaseException | None = None

    def add_item(self, tensor: Any, mode: int = 0) -> None:
        """Append one sequence to the current document.

        Args:
            tensor: `[T]` tokens: tensor, array or list.
            mode: mode of the sequence, in `[-128, 127]`; used in multimodal files only.

        Raises:
            ArgumentError: a token does not fit the file's dtype, or the mode its byte.
        """
        self._check_modes([mode])
        self.sequence_lengths.append(self._append(as_numbers(tensor, self.dtype, where=self._where)))
        if self.sequence_modes is not None:
            self.sequence_modes.append(mode)

    def add_document(self, tensor: Any, lengths: Sequence[int], modes: Sequence[int] | None = None) -> None:
        """Append one whole document.

        Args:
            tensor: `[T]` tokens of all its sequences: tensor, array or list.
            lengths: tokens in each sequence; their sum is T.
            modes: mode of each sequence, 0 if None; used in multimodal files only.

        Raises:
            ArgumentError: a token does not fit the file's dtype, or lengths or modes do not fit the tokens.
        """
        tokens = as_numbers(tensor, self.dtype, where=self._where)
        counts = _as_counts(lengths, where=self._where)
        if sum(counts) != len(tokens) or (len(counts) > 1 and min(counts) < 0):
            msg = f"{self._bin_path}: lengths must add up to the {len(tokens)} tokens, found {counts}"
            raise ArgumentError(msg)
        if modes is not None:
            if len(modes) != len(counts):
                msg = f"{self._bin_path}: modes must be as many as {len(counts)} lengths, found {len(modes)}"
                raise ArgumentError(msg)
            self._check_modes(modes)
        self._append(tokens)
        self.sequence_lengths.extend(counts)
        self.document_indices.append(len(self.sequence_lengths))
        if self.sequence_modes is not None:
            self.sequence_modes.extend(modes if modes is not None else [0] * len(counts))

    def end_document(self) -> None:
        """End the document that `add_item` has been appending to."""
        self.document_indices.append(len(self.sequence_lengths))

    def add_index(self, path_prefix: str) -> None:
        """Append all documents of another pair.

        Args:
            path_prefix: path of that pair without `.bin` and `.idx`.

        Raises:
            ArgumentError: it has another dtype, or no modes where this file has them.
            FormatError: it is damaged, as `verify` finds.
        """
        verify(path_prefix)
        index = self._open_source(Path(get_idx_path(path_prefix)))
        if index.dtype != self.dtype:
            msg = f"{path_prefix}: the dtype must be {self.dtype} as in {self._bin_path}, found {index.dtype.__name__}"
            raise ArgumentError(msg)
        with Path(get_bin_path(path_prefix)).open("rb", buffering=0) as source:
            while data := source.read(_FLUSH_BYTES):
                self._take(data)
        offset = len(self.sequence_lengths)
        self.sequence_lengths.extend(index.sequence_lengths.tolist())
        self.document_indices.extend((offset + index.document_indices[1:]).tolist())
        if self.sequence_modes is not None and index.sequence_modes is not None:
            self.sequence_modes.extend(index.sequence_modes.tolist())

    def finalize(self, idx_path: str) -> None:
        """Write the index and let the pair appear, replacing one of that name. Closes the builder.

        Args:
            idx_path: path of the index file, ending in `.idx`.
        """
        final = Path(idx_path)
        prefix = str(final.with_suffix("")) if final.suffix == ".idx" else str(final)
        final_seal = Path(get_seal_path(prefix))
        self._check_open()
        _check_targets(self._bin_path, final, final_seal)
        self._flush()
        self._close()
        for path in (final, final_seal):
            clear_dead_partials(path.parent, final_name=path.name)
        partial_idx, partial_seal = new_partial(final), new_partial(final_seal)
        try:
            idx_checksum = _write_index(
                partial_idx, self.dtype.type, self.sequence_lengths, self.document_indices, self.sequence_modes
            )
            written, wanted = self._checksum.size_bytes, sum(self.sequence_lengths) * self.dtype.itemsize
            if written != wanted:
                msg = f"{self._bin_path}: sequences must make {written} bytes as written, found {wanted}"
                raise ArgumentError(msg)
            seal = Seal.of(
                dtype=self.dtype.type,
                sequences=len(self.sequence_lengths),
                documents=len(self.document_indices) - 1,
                data=self._checksum,
                index=idx_checksum,
            )
            write_seal(seal, partial_seal)
            for path in (self._partial, partial_idx, partial_seal):
                flush_to_disk(path)
            _publish_pair(
                {
                    self._partial: self._bin_path,
                    partial_seal: final_seal,
                    partial_idx: final,
                }
            )
        finally:
            for path in (self._partial, partial_idx, partial_seal):
                path.unlink(missing_ok=True)

    def discard(self) -> None:
        """Give up: remove what has been written so far. A pair of the final name stays as it was."""
        if os.getpid() == self._pid:  # what a forked process gives up is another's
            self._pending = bytearray()  # not cleared: where a flush was interrupted, its views are still there
            self._close()
            self._partial.unlink(missing_ok=True)

    def _check_modes(self, modes: Sequence[int]) -> None:
        if self.multimodal and len(modes) and not (min(modes) >= -128 and max(modes) <= 127):
            msg = f"{self._bin_path}: modes must be in [-128, 127], found {modes}"
            raise ArgumentError(msg)

    def _open_source(self, idx_path: Path) -> SequenceIndex:
        """The index of a pair that is known to be whole."""
        index = open_index(idx_path)
        index.map()
        bare = Header(index.dtype, index.sequence_count, index.document_count).size_bytes
        has_modes = idx_path.stat().st_size > bare
        if len(index) and has_modes != self.multimodal:
            kinds = ("with", "without") if self.multimodal else ("without", "with")
            msg = f"{idx_path}: a pair {kinds[0]} modes can be added to {self._bin_path}, found one {kinds[1]}"
            raise ArgumentError(msg)
        return open_index(idx_path, multimodal=self.multimodal)

    def _append(self, tokens: npt.NDArray[Any]) -> int:
        """Take the tokens, every one of them unchanged. Returns how many there are."""
        self._check_open()
        self._take(encode(tokens, self.dtype, where=self._where))
        return len(tokens)

    def _take(self, data: bytes | memoryview) -> None:
        self._pending += data
        if len(self._pending) >= _FLUSH_BYTES:
            self._flush()

    def _flush(self) -> None:
        """Write what is pending, while it is in the processor's cache.

        Not in a thread: two of them, meeting after every block, lose more time than checksum and copy take.
        """
        if os.getpid() != self._pid:
            msg = f"{self._bin_path}: a builder must be used in process {self._pid}, which made it, found {os.getpid()}"
            raise ArgumentError(msg)
        if isinstance(self._failure, OSError):  # nobody knows how much of that block is in the file
            raise self._failure
        if self._failure is not None:
            msg = f"{self._bin_path}: a builder takes nothing more after it was interrupted, found more"
            raise ArgumentError(msg) from self._failure
        try:
            self._checksum.update(self._pending)
            with memoryview(self._pending) as view:
                written = 0
                while written < len(view):
                    written += self._file.write(view[written:]) or 0
            self._writeback.grown(self._checksum.size_bytes)
            self._pending.clear()
        except BaseException as error:
            if isinstance(error, OSError):
                error.filename = str(self._partial)  # a full disk does not say which
            self._failure = error
            raise

    def _check_open(self) -> None:
        if self._file.closed:
            msg = f"{self._bin_path}: a builder takes nothing after finalize or discard, found more"
            raise ArgumentError(msg)

    def _close(self) -> None:
        self._file.close()
        self._abandoned.detach()


def _check_targets(*paths: Path) -> None:
    """Refuse names that cannot become files, while the builder can still be finalized under others."""
    for path in paths:
        if not path.parent.is_dir() or path.is_dir():
            msg = f"{path}: must be a file in a folder that is there"
            raise ArgumentError(msg)


def _remove(file: FileIO, partial: Path, pid: int) -> None:
    """What is left to do for a builder that nobody finalized; a forked process leaves it to the one that wrote it."""
    file.close()
    if os.getpid() == pid:
        partial.unlink(missing_ok=True)


def _as_counts(lengths: Sequence[int], *, where: str) -> list[int]:
    try:
        if len(lengths) == 1:
            return [operator.index(lengths[0])]
        return array.array("q", lengths).tolist()
    except (TypeError, OverflowError) as error:
        msg = f"{where}: lengths must be integers, found {lengths}: {error}"
        raise ArgumentError(msg) from None


def _write_index(
    path: Path,
    dtype: type[np.number[Any]],
    lengths: Iterable[int],
    borders: Iterable[int],
    modes: Iterable[int] | None,
) -> Checksum:
    wide = np.asarray(lengths, dtype=np.int64)
    if len(wide) and wide.max() > np.iinfo(np.int32).max:
        msg = f"{path}: a sequence must have fewer than 2**31 tokens, found {wide.max()}"
        raise ArgumentError(msg)
    documents = np.asarray(borders, dtype=np.int64)
    pointers = np.zeros(len(wide), dtype=np.int64)
    np.cumsum(wide[:-1] * np.dtype(dtype).itemsize, out=pointers[1:])
    checksum = Checksum()
    with path.open("xb") as file:
        parts = [wide.astype("<i4"), pointers.astype("<i8"), documents.astype("<i8")]
        if modes is not None:
            parts.append(np.asarray(modes, dtype=np.int8))
        for part in [encode_header(Header(dtype, len(wide), len(documents))), *(p.tobytes() for p in parts)]:
            file.write(part)
            checksum.update(part)
    return checksum


def _publish_pair(finals: dict[Path, Path]) -> None:
    """Rename in the order given, the `.idx` last: a pair is there when its `.idx` is."""
    *first, (partial_idx, idx) = finals.items()
    idx.unlink(missing_ok=True)
    for partial, final in first:
        publish(partial, final)
    publish(partial_idx, idx)
    for directory in {final.parent for final in finals.values()}:
        flush_to_disk(directory)
