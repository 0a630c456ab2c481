"""Writer of indexed token files.

Shapes: N sequences, D documents, T tokens.
"""

import array
import contextlib
import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Final

import numpy as np
import numpy.typing as npt

from trackbed.errors import ArgumentError
from trackbed.files import FileSum, clear_dead_partials, drop_pages, flush_to_disk, new_partial
from trackbed.plural import number_of
from trackbed.tokens.append_file import AppendFile
from trackbed.tokens.commit import PairFiles, check_pair_name, commit_pair
from trackbed.tokens.content import PairContent
from trackbed.tokens.document_arrays import DocumentArrays, check_documents
from trackbed.tokens.document_sources import SOURCES, DocumentSources, SourceColumns, check_sources
from trackbed.tokens.dtype import DType
from trackbed.tokens.encode import as_numbers, encode
from trackbed.tokens.format import SequenceIndex
from trackbed.tokens.paths import get_bin_path, get_seal_path
from trackbed.tokens.ragged import flat_chunks, is_ragged
from trackbed.tokens.seal import Seal, write_seal
from trackbed.tokens.trained_tokens import TRAINED, TrainedColumns, TrainedTokens, check_trained
from trackbed.tokens.verify import verify_opened
from trackbed.tokens.write_index import write_index

_STEP: Final = 1 << 18  # sequences handled at a time: a few MiB, which stay in the CPU cache
_MANY: Final = 1 << 16  # number of tokens from which they are written without a copy
_MOST_TOKENS: Final = 2**31 - 1


class IndexedDatasetBuilder:
    """Writes a `.bin`/`.idx` pair, which appears under its final names when `finalize` returns.

    Until then the tokens go to a partial file beside the `.bin`. `finalize` replaces an existing pair by renaming, the
    `.idx` last; readers that have the old pair open keep reading it. If the process is killed in `finalize`, either the
    old pair or the new one exists, or `finish_pair` completes the new one. Builders of the same name do not interfere:
    the pair of the last one to be finalized stays.

    Args:
        bin_path: path of the data file, ending in `.bin`.
        dtype: type of the tokens in the file.
        multimodal: True if sequences have a mode.
    """

    clears_partials: ClassVar = True
    """True to remove the partial files that killed writers of the same name have left, which lists the folder."""

    def __init__(
        self,
        bin_path: str,
        dtype: type[np.number[Any]] = np.int32,
        multimodal: bool = False,
    ) -> None:
        self.dtype = np.dtype(DType.dtype_from_code(DType.code_from_dtype(dtype)))  # in native byte order
        self.multimodal = multimodal
        # Arrays, because a list takes five times as much memory per document.
        self.sequence_lengths = array.array("i")
        self.document_indices = array.array("q", [0])
        self.sequence_modes = array.array("b") if multimodal else None
        self.sources: SourceColumns | None = None
        """Sources of the documents, one for each when the pair is finalized; None to write none."""
        self.trained: TrainedColumns | None = None
        """Trained tokens of the documents, of all of them when the pair is finalized; None to write none."""
        self._bin_path = Path(bin_path)
        self._where = str(bin_path)
        check_pair_name(self._where.removesuffix(get_bin_path("")))
        self._clear_dead_partials(self._bin_path)
        self._data = AppendFile.create(self._bin_path)

    @classmethod
    def reopen(
        cls,
        bin_path: str,
        dtype: type[np.number[Any]],
        *,
        partial: Path,
        written: FileSum,
        lengths: npt.NDArray[Any],
        counts: npt.NDArray[Any] | None = None,
        modes: npt.NDArray[Any] | None = None,
    ) -> "IndexedDatasetBuilder":
        """Creates a builder that resumes from the data that another builder, maybe of a dead process, has kept.

        Args:
            bin_path: path of the data file, as for that builder.
            dtype: type of the tokens in the file, as for that builder.
            partial: path of the kept data.
            written: result of `keep`.
            lengths: `[N]` tokens in each kept sequence.
            counts: `[D]` sequences in each kept document, as for `add_documents`.
            modes: `[N]` mode of each kept sequence; None for a file without modes.

        Raises:
            FormatError: the kept data do not begin with the written bytes.
            ArgumentError: lengths, counts and modes do not match the data.
        """
        builder = cls(bin_path, dtype, modes is not None)
        builder._data.discard()
        num_tokens = written.size_bytes // builder.dtype.itemsize
        arrays = check_documents(lengths, num_tokens, counts=counts, modes=modes, where=bin_path)
        builder._data = AppendFile.reopen(Path(bin_path), partial, written)
        builder._append_documents(arrays)
        return builder

    def add_item(self, tensor: Any, mode: int = 0) -> None:
        """Appends one sequence to the current document.

        Args:
            tensor: `[T]` tokens: tensor, array or list.
            mode: mode of the sequence, in `[-128, 127]`; used in multimodal files only.

        Raises:
            ArgumentError: a token does not fit the file's dtype, or `mode` is out of range.
        """
        self._check_modes([mode])
        tokens = as_numbers(tensor, self.dtype, where=self._where)
        self._check_lengths([len(tokens)])
        self.sequence_lengths.append(self._append(tokens))
        if self.sequence_modes is not None:
            self.sequence_modes.append(mode)

    def add_document(self, tensor: Any, lengths: Sequence[int], modes: Sequence[int] | None = None) -> None:
        """Appends one whole document.

        Args:
            tensor: `[T]` tokens of all its sequences: tensor, array or list.
            lengths: tokens in each sequence; their sum is T.
            modes: mode of each sequence, 0 if None; used in multimodal files only.

        Raises:
            ArgumentError: a token does not fit the file's dtype, or lengths or modes do not match the tokens.
        """
        tokens = as_numbers(tensor, self.dtype, where=self._where)
        counts = _as_counts(lengths, where=self._where)
        if sum(counts) != len(tokens) or (len(counts) > 1 and min(counts) < 0):
            raise ArgumentError(
                f"{self._bin_path}: lengths must add up to the {number_of(len(tokens), 'token')}, found {counts}"
            )
        if len(tokens) > _MOST_TOKENS:  # else no sequence can be too long
            self._check_lengths(counts)
        if modes is not None:
            if len(modes) != len(counts):
                raise ArgumentError(
                    f"{self._bin_path}: there must be one mode for each of {len(counts)} lengths, found {len(modes)}"
                )
            self._check_modes(modes)
        self._append(tokens)
        self.sequence_lengths.extend(counts)
        self.document_indices.append(len(self.sequence_lengths))
        if self.sequence_modes is not None:
            self.sequence_modes.extend(modes if modes is not None else [0] * len(counts))

    def end_document(self) -> None:
        """Ends the current document."""
        self.document_indices.append(len(self.sequence_lengths))

    def add_documents(
        self,
        tensor: Any,
        lengths: Any = None,
        eod_token: int | None = None,
        chunk_size: int | None = None,
        *,
        counts: Any = None,
        modes: Any = None,
    ) -> None:
        """Appends many documents, at disk speed.

        Tokens of the file's dtype are written without a copy; others are converted, which takes as much memory as they
        take in the file.

        The call of newer Megatron Core is understood as well: a ragged array of the package awkward, `[D, ...]` tokens
        of each document, then the mode of each, the token that ends each, and the number to write at a time.

        Args:
            tensor: `[T]` concatenated tokens of all documents: tensor, array or list. Or a ragged array.
            lengths: `[N]` tokens in each sequence, each in `[0, 2**31)`: tensor, array or list; their sum is T. Of a
                ragged array, modes.
            eod_token: of a ragged array, token to append to each document; None for none.
            chunk_size: of a ragged array, number of documents to write at a time; None for a million.
            counts: `[D]` sequences in each document, each at least 0: tensor, array or list; their sum is N. None if
                each document has one sequence.
            modes: `[N]` mode of each sequence, in `[-128, 127]`: tensor, array or list; 0 if None. Used in multimodal
                files only.

        Raises:
            ArgumentError: a token does not fit the file's dtype, or lengths, counts or modes do not match the tokens.
                Nothing is appended in this case.
        """
        if is_ragged(tensor):
            if counts is not None:
                raise ArgumentError(f"{self._bin_path}: counts must be None for a ragged array, found {counts!r}")
            given = lengths if modes is None else modes
            options = (tensor, given, eod_token, chunk_size, self.dtype, self._where)
            for tokens, sizes, of_chunk in flat_chunks(*options):  # all are checked before the first is written
                check_documents(sizes, len(tokens), modes=of_chunk if self.multimodal else None, where=self._where)
            for tokens, sizes, of_chunk in flat_chunks(*options):
                self.add_documents(tokens, sizes, modes=of_chunk)
            return
        if lengths is None or eod_token is not None or chunk_size is not None:
            raise ArgumentError(
                f"{self._bin_path}: add_documents needs lengths, and eod_token and chunk_size only of a ragged array, "
                f"found {type(tensor).__name__}"
            )
        tokens = as_numbers(tensor, self.dtype, where=self._where)
        given = modes if self.multimodal else None
        arrays = check_documents(lengths, len(tokens), counts=counts, modes=given, where=self._where)
        self._append(tokens)
        self._append_documents(arrays)

    def add_index(self, path_prefix: str, *, idx_cache: str | None = None) -> int:
        """Appends all documents of another pair.

        Args:
            path_prefix: path or address of that pair without `.bin` and `.idx`.
            idx_cache: folder of copies of `.idx` objects, for an address; None for `default_idx_cache()`.

        Returns:
            Size of its `.bin` in bytes.

        Raises:
            ArgumentError: the pair has another dtype, or only one of the two files has modes.
            FormatError: `verify` found the pair damaged.
        """
        content = PairContent.open(path_prefix, idx_cache=idx_cache)
        verify_opened(content)
        index = self._source_of(content.index)
        if index.dtype != self.dtype:
            raise ArgumentError(
                f"{path_prefix}: the dtype must be {self.dtype} as in {self._bin_path}, found {index.dtype.__name__}"
            )
        self._data.check_open()
        with contextlib.closing(content.read_bin()) as pieces:
            for piece in pieces:
                self._data.append(piece)
        num_before = len(self.document_indices) - 1
        self._append_index(index)
        num_documents = len(self.document_indices) - 1
        self._append_sources(DocumentSources.open(path_prefix), num_before, num_documents)
        self._append_trained(TrainedTokens.open(path_prefix), num_before, num_documents)
        return content.bin_bytes

    def _append_sources(self, found: DocumentSources | None, num_before: int, num_documents: int) -> None:
        """Appends the sources of another pair, unknown ones where one of the two has none."""
        if self.sources is None and found is not None:
            self.sources = SourceColumns(num_before)
        if self.sources is not None and found is not None:
            self.sources.add(found.files, found.numbers, found.places)
        elif self.sources is not None:
            self.sources.add_unknown(num_documents - num_before)

    def _append_trained(self, found: TrainedTokens | None, num_before: int, num_documents: int) -> None:
        """Appends the trained tokens of another pair, all of them where one of the two has no mask."""
        if self.trained is None and found is None:
            return
        borders = np.frombuffer(self.document_indices, dtype=np.int64)
        ends = np.cumsum(np.concatenate([[0], np.frombuffer(self.sequence_lengths, dtype=np.int32)]), dtype=np.int64)
        lengths = np.diff(ends[borders])
        if self.trained is None:
            self.trained = TrainedColumns()
            self.trained.add_whole(lengths[:num_before])
        own = lengths[num_before:num_documents]
        if found is None:
            self.trained.add_whole(own)
        else:
            self.trained.add(np.diff(found.firsts).astype(np.int64), found.runs, lengths=own, where=self._where)

    def finalize(self, idx_path: str) -> None:
        """Writes the index and publishes the pair, replacing an older one of that name. Closes the builder.

        Args:
            idx_path: path of the index file, ending in `.idx`.
        """
        self.finalize_by(commit_pair, idx_path)

    def finalize_by(
        self,
        commit: Callable[[PairFiles, PairFiles], None],
        idx_path: str,
        *,
        sign: Callable[[Seal], Seal] | None = None,
    ) -> None:
        """Writes the index and has the pair published. Closes the builder.

        Args:
            commit: called with the complete files, which are flushed to disk, and their final paths; files that it
                leaves where they are are removed.
            idx_path: path of the index file, ending in `.idx`.
            sign: returns the seal to write in place of the one given; None to write that.
        """
        if self.sources is not None:
            check_sources(self.sources, len(self.document_indices) - 1, where=self._where)
        if self.trained is not None:
            check_trained(self.trained, len(self.document_indices) - 1, where=self._where)
        final = Path(idx_path)
        prefix = str(final.with_suffix("")) if final.suffix == ".idx" else str(final)
        final_seal = Path(get_seal_path(prefix))
        self._data.check_open()
        _check_targets(self._bin_path, final, final_seal)
        self._data.flush()
        self._data.close()
        finals = PairFiles(self._bin_path, final_seal, final, PairFiles.of(prefix).beside)
        _check_targets(*finals.beside.values())
        self._clear_dead_partials(final, final_seal, *finals.beside.values())
        partial_idx, partial_seal = new_partial(final), new_partial(final_seal)
        columns = {SOURCES: self.sources, TRAINED: self.trained}
        written_beside = {name: one for name, one in columns.items() if one is not None}
        beside = {name: new_partial(finals.beside[name]) for name in written_beside}
        try:
            lengths = np.frombuffer(self.sequence_lengths, dtype=np.int32)
            borders = np.frombuffer(self.document_indices, dtype=np.int64)
            modes = None if self.sequence_modes is None else np.frombuffer(self.sequence_modes, dtype=np.int8)
            idx_checksum = write_index(partial_idx, self.dtype.type, lengths, borders, modes)
            written = self._data.checksum.size_bytes
            wanted = int(lengths.sum(dtype=np.int64)) * self.dtype.itemsize
            if written != wanted:
                raise ArgumentError(
                    f"{self._bin_path}: the sequences must have the {written} bytes written, found {wanted}"
                )
            seal = Seal.of(
                dtype=self.dtype.type,
                sequences=len(lengths),
                documents=len(borders) - 1,
                data=self._data.checksum,
                index=idx_checksum,
            )
            if written_beside:
                sums = {name: FileSum.of(one.write(beside[name])) for name, one in written_beside.items()}
                seal = replace(seal, beside=sums)
            write_seal(seal if sign is None else sign(seal), partial_seal)
            for path in (self._data.partial, partial_idx, partial_seal, *beside.values()):
                flush_to_disk(path)
            commit(PairFiles(self._data.partial, partial_seal, partial_idx, beside), finals)
        finally:
            for path in (
                partial_idx,
                partial_seal,
                *beside.values(),
                *(() if self._data.is_kept else (self._data.partial,)),
            ):
                path.unlink(missing_ok=True)

    def keep(self, partial: Path) -> FileSum:
        """Writes all tokens appended so far to a file that stays at `partial` even if this process ends.

        The caller must store the lengths of the documents, which `reopen` needs too.

        Args:
            partial: a path on the file system of the pair, the same at every call.

        Returns:
            Size and checksum of the written bytes.
        """
        self._data.check_open()
        return self._data.keep(partial)

    def leave(self) -> None:
        """Closes the builder without removing kept data."""
        self._data.close()

    def discard(self) -> None:
        """Closes the builder and removes its partial file. An existing pair of the final name is not changed."""
        self._data.discard()

    def _clear_dead_partials(self, *finals: Path) -> None:
        for path in finals if self.clears_partials else ():
            clear_dead_partials(path.parent, final_name=path.name)

    def _check_lengths(self, counts: Sequence[int]) -> None:
        longest = max(counts, default=0)
        if longest > _MOST_TOKENS:
            raise ArgumentError(f"{self._bin_path}: a sequence must have fewer than 2**31 tokens, found {longest}")

    def _check_modes(self, modes: Sequence[int]) -> None:
        if self.multimodal and len(modes) and not (min(modes) >= -128 and max(modes) <= 127):
            raise ArgumentError(f"{self._bin_path}: modes must be in [-128, 127], found {modes}")

    def _source_of(self, index: SequenceIndex) -> SequenceIndex:
        """Returns the index of a verified pair, with modes if this pair has them."""
        has_modes = index.ends.size_bytes > index.ends.header.size_bytes
        if len(index) and has_modes != self.multimodal:
            kinds = ("with", "without") if self.multimodal else ("without", "with")
            raise ArgumentError(
                f"{index.path}: only a pair {kinds[0]} modes can be added to {self._bin_path}, found one {kinds[1]}"
            )
        return index.reopened(multimodal=self.multimodal)

    def _append_documents(self, arrays: DocumentArrays) -> None:
        """Appends lengths, borders and modes of documents. Their tokens have been appended."""
        first, added = len(self.sequence_lengths), len(arrays.lengths)
        self.sequence_lengths.frombytes(arrays.lengths.data.cast("B"))
        num_documents = added if arrays.counts is None else len(arrays.counts)
        last = first
        for start in range(0, num_documents, _STEP):
            stop = min(start + _STEP, num_documents)
            if arrays.counts is None:
                borders = np.arange(first + start + 1, first + stop + 1, dtype=np.int64)
            else:
                borders = last + np.cumsum(arrays.counts[start:stop], dtype=np.int64)
            last = int(borders[-1])
            self.document_indices.frombytes(borders.data.cast("B"))
        if self.sequence_modes is not None:
            self.sequence_modes.frombytes(bytes(added) if arrays.modes is None else arrays.modes.data.cast("B"))

    def _append_index(self, index: SequenceIndex) -> None:
        """Appends the sequences and documents of another pair. Its tokens have been appended."""
        offset = len(self.sequence_lengths)
        for start in range(0, len(index), _STEP):
            lengths = index.sequence_lengths[start : start + _STEP]
            self.sequence_lengths.frombytes(np.ascontiguousarray(lengths, dtype=np.int32).data.cast("B"))
            drop_pages(lengths)
        for start in range(1, index.document_count, _STEP):
            borders = index.document_indices[start : start + _STEP]
            self.document_indices.frombytes((borders + offset).data.cast("B"))
            drop_pages(borders)
        if self.sequence_modes is not None and index.sequence_modes is not None:
            self.sequence_modes.frombytes(index.sequence_modes.data.cast("B"))

    def _append(self, tokens: npt.NDArray[Any]) -> int:
        """Appends tokens without changing any value. Returns their number."""
        self._data.check_open()
        if len(tokens) >= _MANY and tokens.dtype == self.dtype:
            self._data.append(np.ascontiguousarray(tokens).data)
        else:
            self._data.append(encode(tokens, self.dtype, where=self._where))
        return len(tokens)


def _check_targets(*paths: Path) -> None:
    """Reject paths that cannot become files, while the builder can still be finalized under others."""
    for path in paths:
        if not path.parent.is_dir() or path.is_dir():
            raise ArgumentError(f"{path}: must be a file in an existing folder")


def _as_counts(lengths: Sequence[int], *, where: str) -> list[int]:
    try:
        if len(lengths) == 1:
            return [operator.index(lengths[0])]
        return array.array("q", lengths).tolist()
    except (TypeError, OverflowError) as error:
        raise ArgumentError(f"{where}: lengths must be integers, found {lengths}: {error}") from None
