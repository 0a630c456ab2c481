"""Writing indexed token files.

Shapes: N sequences, D documents, T tokens.
"""

import array
import contextlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trackbed.errors import ArgumentError, FormatError
from trackbed.files import Checksum, clear_dead_partials, flush_to_disk, new_partial, publish
from trackbed.kernels import narrow
from trackbed.tokens.dtype import DType
from trackbed.tokens.format import Header, encode_header, open_index
from trackbed.tokens.paths import get_bin_path, get_idx_path, get_seal_path
from trackbed.tokens.seal import Seal, write_seal

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
        DType.code_from_dtype(dtype)
        self.dtype = np.dtype(dtype)
        self.multimodal = multimodal
        self.sequence_lengths: list[int] = []
        self.document_indices: list[int] = [0]
        self.sequence_modes: list[int] | None = [] if multimodal else None
        self._bin_path = Path(bin_path)
        clear_dead_partials(self._bin_path.parent, final_name=self._bin_path.name)
        self._partial = new_partial(self._bin_path)
        self._file = self._partial.open("xb", buffering=0)
        self._buffer = np.empty(_FLUSH_BYTES // self.dtype.itemsize, dtype=self.dtype)
        self._filled = 0
        self._checksum = Checksum()

    def add_item(self, tensor: Any, mode: int = 0) -> None:
        """Append one sequence to the current document.

        Args:
            tensor: `[T]` tokens: tensor, array or list.
            mode: mode of the sequence, in `[-128, 127]`; used in multimodal files only.

        Raises:
            ArgumentError: a token does not fit the file's dtype.
        """
        self.sequence_lengths.append(self._append(tensor))
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
        if sum(lengths) != len(tensor) or (len(lengths) > 1 and min(lengths) < 0):
            msg = f"{self._bin_path}: lengths must be at least 0 and add up to the {len(tensor)} tokens, found {lengths}"
            raise ArgumentError(msg)
        if modes is not None and len(modes) != len(lengths):
            msg = f"{self._bin_path}: modes must be as many as the {len(lengths)} lengths, found {len(modes)}"
            raise ArgumentError(msg)
        self._append(tensor)
        self.sequence_lengths.extend(lengths)
        self.document_indices.append(len(self.sequence_lengths))
        if self.sequence_modes is not None:
            self.sequence_modes.extend(modes if modes is not None else [0] * len(lengths))

    def end_document(self) -> None:
        """End the document that `add_item` has been appending to."""
        self.document_indices.append(len(self.sequence_lengths))

    def add_index(self, path_prefix: str) -> None:
        """Append all documents of another pair.

        Args:
            path_prefix: path of that pair without `.bin` and `.idx`.

        Raises:
            ArgumentError: it has another dtype, or no modes where this file has them.
            FormatError: its `.bin` does not hold just the tokens that its `.idx` lists.
        """
        idx_path, bin_path = Path(get_idx_path(path_prefix)), Path(get_bin_path(path_prefix))
        index = open_index(idx_path, multimodal=self.multimodal)
        if index.dtype != self.dtype:
            msg = f"{path_prefix}: the dtype must be {self.dtype} as in {self._bin_path}, found {index.dtype.__name__}"
            raise ArgumentError(msg)
        data_bytes = int(index.sequence_lengths.sum(dtype=np.int64)) * index.dtype_size
        size = bin_path.stat().st_size
        if size != data_bytes:
            msg = f"{bin_path}: the sequences of {idx_path.name} have {data_bytes} bytes, this file has {size}"
            raise FormatError(msg)
        self._flush()
        with bin_path.open("rb", buffering=0) as source:
            while data := source.read(_FLUSH_BYTES):
                self._write(data)
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
        self._flush()
        self._file.close()
        final = Path(idx_path)
        clear_dead_partials(final.parent, final_name=final.name)
        partial_idx = new_partial(final)
        prefix = str(final.with_suffix("")) if final.suffix == ".idx" else str(final)
        partial_seal = new_partial(Path(get_seal_path(prefix)))
        try:
            idx_checksum = _write_index(
                partial_idx, self.dtype.type, self.sequence_lengths, self.document_indices, self.sequence_modes
            )
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
                    partial_seal: Path(get_seal_path(prefix)),
                    partial_idx: final,
                }
            )
        finally:
            partial_idx.unlink(missing_ok=True)
            partial_seal.unlink(missing_ok=True)

    def discard(self) -> None:
        """Give up: remove what has been written so far. A pair of the final name stays as it was."""
        self._file.close()
        self._partial.unlink(missing_ok=True)

    def _append(self, tensor: Any) -> int:
        """Take the tokens, every one of them unchanged, into the buffer. Returns how many there are."""
        tokens = as_numbers(tensor, self.dtype, where=str(self._bin_path))
        stop = self._filled + len(tokens)
        if stop > len(self._buffer):
            self._flush()
            stop = len(tokens)
            if stop > len(self._buffer):
                self._buffer = np.empty(stop, dtype=self.dtype)
        room = self._buffer[self._filled : stop]
        if tokens.dtype == self.dtype or self.dtype.kind == "f":
            room[:] = tokens
        else:
            try:
                narrow(tokens, room)
            except ArgumentError as error:
                msg = f"{self._bin_path}: {error}"
                raise ArgumentError(msg) from None
        self._filled = stop
        return len(tokens)

    def _flush(self) -> None:
        self._write(self._buffer[: self._filled].view(np.uint8).data)
        self._filled = 0

    def _write(self, data: bytes | memoryview) -> None:
        self._checksum.update(data)
        view = memoryview(data)
        while len(view):
            view = view[self._file.write(view) or 0 :]


def as_numbers(tensor: Any, dtype: np.dtype[Any], *, where: str) -> npt.NDArray[Any]:
    """`[T]` numbers of a tensor, array or list, of a kind that can be stored as `dtype`.

    Raises:
        ArgumentError: they are no numbers, or fractions for an integer file; the message starts with `where`.
    """
    if isinstance(tensor, (list, tuple)) and dtype.kind in "iu":
        # The quickest way from a list that looks at every number; what it refuses is looked at below.
        with contextlib.suppress(TypeError, OverflowError):
            return np.frombuffer(array.array(dtype.char, tensor), dtype=dtype)
    given = np.asarray(tensor)
    if given.ndim != 1:
        given = given.reshape(-1)
    if given.dtype == dtype:
        return given
    if given.dtype.kind == "U":  # numbers in words, as Megatron Core takes them
        given = given.astype(np.int64)
    if given.size and (given.dtype.kind not in "iuf" or (given.dtype.kind == "f" and dtype.kind != "f")):
        msg = f"{where}: tokens stored as {dtype} must be integers, found {given.dtype}"
        raise ArgumentError(msg)
    if given.dtype.kind == "f" and dtype.kind != "f":
        return np.empty(0, dtype=dtype)  # NumPy makes a float vector of an empty list
    return np.ascontiguousarray(given)


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
    flush_to_disk(idx.parent)
