"""Writing indexed token files.

Shapes: N sequences, D documents, T tokens.
"""

import array
import operator
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from trackbed.errors import ArgumentError
from trackbed.files import FileSum, clear_dead_partials, flush_to_disk, let_go, new_partial
from trackbed.tokens.append_file import GrowingData
from trackbed.tokens.commit import PairFiles, commit_pair
from trackbed.tokens.dtype import DType
from trackbed.tokens.encode import as_numbers, encode
from trackbed.tokens.format import Header, SequenceIndex, open_index
from trackbed.tokens.paths import get_bin_path, get_idx_path, get_seal_path
from trackbed.tokens.seal import Seal, write_seal
from trackbed.tokens.verify import verify
from trackbed.tokens.write_index import write_index

__all__ = ["IndexedDatasetBuilder"]

_COPY_BYTES: Final = 4 << 20
_STEP: Final = 1 << 18  # sequences looked at together: a few MiB, which stay in the processor's cache
_MANY: Final = 1 << 16  # tokens that are not copied before they are written
_MOST_TOKENS: Final = 2**31 - 1


class IndexedDatasetBuilder:
    """Writes a `.bin`/`.idx` pair, which appears under its final names when `finalize` returns.

    Until then the tokens go to a partial file beside the `.bin`. A pair that is there already stays until
    `finalize` replaces it by renaming, the `.idx` last; who has it open goes on reading the old one. If the process is
    killed meanwhile, the old pair or the new one is there, or `finish_pair` completes the new one. Several builders of
    one name do not mix: the pair of the one that is finalized last stays.

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
        # Arrays, as a list takes five times as much memory for each document.
        self.sequence_lengths = array.array("i")
        self.document_indices = array.array("q", [0])
        self.sequence_modes = array.array("b") if multimodal else None
        self._bin_path = Path(bin_path)
        self._where = str(bin_path)
        self._data = GrowingData.create(self._bin_path)

    @classmethod
    def reopen(
        cls, bin_path: str, dtype: type[np.number[Any]], *, partial: Path, written: FileSum, lengths: npt.NDArray[Any]
    ) -> "IndexedDatasetBuilder":
        """A builder that goes on where another one, maybe of a process that is gone, has kept its work.

        Args:
            bin_path: path of the data file, as that one had it.
            dtype: type of the tokens in the file, as that one had it.
            partial: where it kept its data.
            written: what `keep` returned.
            lengths: `[D]` tokens in each of its documents then, of one sequence each.

        Raises:
            FormatError: the data do not begin with what was written.
            ArgumentError: the lengths do not fit them.
        """
        builder = cls(bin_path, dtype)
        builder._data.discard()
        counts = _as_count_array(lengths, written.size_bytes // builder.dtype.itemsize, where=bin_path)
        builder._data = GrowingData.reopen(Path(bin_path), partial, written)
        builder._note(counts)
        return builder

    def add_item(self, tensor: Any, mode: int = 0) -> None:
        """Append one sequence to the current document.

        Args:
            tensor: `[T]` tokens: tensor, array or list.
            mode: mode of the sequence, in `[-128, 127]`; used in multimodal files only.

        Raises:
            ArgumentError: a token does not fit the file's dtype, or the mode its byte.
        """
        self._check_modes([mode])
        tokens = as_numbers(tensor, self.dtype, where=self._where)
        self._check_lengths([len(tokens)])
        self.sequence_lengths.append(self._append(tokens))
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
        if len(tokens) > _MOST_TOKENS:  # else none of its sequences can be too long
            self._check_lengths(counts)
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

    def add_documents(self, tensor: Any, lengths: Any) -> None:
        """Append many documents of one sequence each, at the speed of the disk.

        Tokens of the file's own type are written from where they are; others take as much memory as they take in
        the file. In a multimodal file the mode of the sequences is 0.

        Args:
            tensor: `[T]` tokens of all documents, one behind the other: tensor, array or list.
            lengths: `[D]` tokens in each document, each in `[0, 2**31)`: tensor, array or list; their sum is T.

        Raises:
            ArgumentError: a token does not fit the file's dtype, or the lengths do not fit the tokens. Nothing has
                been taken then.
        """
        tokens = as_numbers(tensor, self.dtype, where=self._where)
        counts = _as_count_array(lengths, len(tokens), where=self._where)
        self._append(tokens)
        self._note(counts)

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
        self._data.check_open()
        buffer = bytearray(_COPY_BYTES)
        with Path(get_bin_path(path_prefix)).open("rb", buffering=0) as source, memoryview(buffer) as view:
            while count := source.readinto(view):
                self._data.append(view[:count])
        self._take_over(index)

    def finalize(self, idx_path: str) -> None:
        """Write the index and let the pair appear, replacing one of that name. Closes the builder.

        Args:
            idx_path: path of the index file, ending in `.idx`.
        """
        final = Path(idx_path)
        prefix = str(final.with_suffix("")) if final.suffix == ".idx" else str(final)
        final_seal = Path(get_seal_path(prefix))
        self._data.check_open()
        _check_targets(self._bin_path, final, final_seal)
        self._data.flush()
        self._data.close()
        for path in (final, final_seal):
            clear_dead_partials(path.parent, final_name=path.name)
        partial_idx, partial_seal = new_partial(final), new_partial(final_seal)
        try:
            lengths = np.frombuffer(self.sequence_lengths, dtype=np.int32)
            borders = np.frombuffer(self.document_indices, dtype=np.int64)
            modes = None if self.sequence_modes is None else np.frombuffer(self.sequence_modes, dtype=np.int8)
            idx_checksum = write_index(partial_idx, self.dtype.type, lengths, borders, modes)
            written = self._data.checksum.size_bytes
            wanted = int(lengths.sum(dtype=np.int64)) * self.dtype.itemsize
            if written != wanted:
                msg = f"{self._bin_path}: sequences must make {written} bytes as written, found {wanted}"
                raise ArgumentError(msg)
            seal = Seal.of(
                dtype=self.dtype.type,
                sequences=len(lengths),
                documents=len(borders) - 1,
                data=self._data.checksum,
                index=idx_checksum,
            )
            write_seal(seal, partial_seal)
            for path in (self._data.partial, partial_idx, partial_seal):
                flush_to_disk(path)
            commit_pair(
                PairFiles(self._data.partial, partial_seal, partial_idx), PairFiles(self._bin_path, final_seal, final)
            )
        finally:
            for path in (partial_idx, partial_seal, *(() if self._data.is_kept else (self._data.partial,))):
                path.unlink(missing_ok=True)

    def keep(self, partial: Path) -> FileSum:
        """Write all tokens taken so far to a file that stays at `partial` whatever becomes of this process.

        The lengths are the caller's to keep: `reopen` asks for both.

        Args:
            partial: a name on the file system of the pair; the same at every call.

        Returns:
            What has been written.
        """
        self._data.check_open()
        return self._data.keep(partial)

    def leave(self) -> None:
        """Close the builder. What was kept stays where it is."""
        self._data.close()

    def discard(self) -> None:
        """Give up: remove what has been written so far. A pair of the final name stays as it was."""
        self._data.discard()

    def _check_lengths(self, counts: Sequence[int]) -> None:
        longest = max(counts, default=0)
        if longest > _MOST_TOKENS:
            msg = f"{self._bin_path}: a sequence must have fewer than 2**31 tokens, found {longest}"
            raise ArgumentError(msg)

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

    def _note(self, counts: npt.NDArray[np.int32]) -> None:
        """Take note of documents of one sequence each, whose tokens have been taken."""
        first = len(self.sequence_lengths)
        self.sequence_lengths.frombytes(counts.data.cast("B"))
        for start in range(0, len(counts), _STEP):
            stop = min(start + _STEP, len(counts))
            borders = np.arange(first + start + 1, first + stop + 1, dtype=np.int64)
            self.document_indices.frombytes(borders.data.cast("B"))
        if self.sequence_modes is not None:
            self.sequence_modes.frombytes(bytes(len(counts)))

    def _take_over(self, index: SequenceIndex) -> None:
        """Append the sequences and documents of another pair, whose tokens have been."""
        offset = len(self.sequence_lengths)
        for start in range(0, len(index), _STEP):
            lengths = index.sequence_lengths[start : start + _STEP]
            self.sequence_lengths.frombytes(np.ascontiguousarray(lengths, dtype=np.int32).data.cast("B"))
            let_go(lengths)
        for start in range(1, index.document_count, _STEP):
            borders = index.document_indices[start : start + _STEP]
            self.document_indices.frombytes((borders + offset).data.cast("B"))
            let_go(borders)
        if self.sequence_modes is not None and index.sequence_modes is not None:
            self.sequence_modes.frombytes(index.sequence_modes.data.cast("B"))

    def _append(self, tokens: npt.NDArray[Any]) -> int:
        """Take the tokens, every one of them unchanged. Returns how many there are."""
        self._data.check_open()
        if len(tokens) >= _MANY and tokens.dtype == self.dtype:
            self._data.append(np.ascontiguousarray(tokens).data)
        else:
            self._data.append(encode(tokens, self.dtype, where=self._where))
        return len(tokens)


def _check_targets(*paths: Path) -> None:
    """Refuse names that cannot become files, while the builder can still be finalized under others."""
    for path in paths:
        if not path.parent.is_dir() or path.is_dir():
            msg = f"{path}: must be a file in a folder that is there"
            raise ArgumentError(msg)


def _as_counts(lengths: Sequence[int], *, where: str) -> list[int]:
    try:
        if len(lengths) == 1:
            return [operator.index(lengths[0])]
        return array.array("q", lengths).tolist()
    except (TypeError, OverflowError) as error:
        msg = f"{where}: lengths must be integers, found {lengths}: {error}"
        raise ArgumentError(msg) from None


def _as_count_array(lengths: Any, num_tokens: int, *, where: str) -> npt.NDArray[np.int32]:
    """`[D]` tokens in each document."""
    given = np.asarray(lengths)
    if given.ndim != 1 or (given.dtype.kind not in "iu" and given.size):
        msg = f"{where}: lengths must be integers in one dimension, found {given.dtype}{list(given.shape)}"
        raise ArgumentError(msg)
    if given.size and not (given.min() >= 0 and given.max() <= _MOST_TOKENS):
        wrong = int(np.flatnonzero((given < 0) | (given > _MOST_TOKENS))[0])
        msg = f"{where}: the length of document {wrong} must be in [0, 2**31), found {given[wrong]}"
        raise ArgumentError(msg)
    total = given.sum(dtype=np.int64)
    if total != num_tokens:
        msg = f"{where}: lengths must add up to the {num_tokens} tokens, found {total}"
        raise ArgumentError(msg)
    return given.astype(np.int32)
