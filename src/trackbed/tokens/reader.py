"""Reader of indexed token files.

Shapes: N sequences, D documents, T tokens of one sequence.
"""

from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from trackbed.errors import ArgumentError, FormatError
from trackbed.files import DESCRIPTORS, MAPS, MapRefusedError, Stamp, boot_id, check_stamp, stamps_of_files
from trackbed.files.stores import ObjectStamp, is_address, parse_address
from trackbed.tokens.commit import hint_for_missing_pair
from trackbed.tokens.format import IndexEnds, PairHeader, SequenceIndex, as_format_error, identity_of, open_index
from trackbed.tokens.paths import get_bin_path, get_idx_path
from trackbed.tokens.source import FileSource, MappedSource, RangeError, Source, Tokens
from trackbed.tokens.stored.budget import BUDGET
from trackbed.tokens.stored.config import ObjectStorageConfig
from trackbed.tokens.stored.index_cache import StoredIndex
from trackbed.tokens.stored.open_pairs import open_stored_pair, stored_pair_exists
from trackbed.tokens.stored.source import StoredSource, read_spans

Moded = tuple[Tokens, np.int8]


_OPENED: Final = ("index", "identity", "bin_reader")
"""Attributes that a copy in another process finds out anew."""


class IndexedDataset:
    """A `.bin`/`.idx` pair: sequences of tokens, grouped into documents.

    Opening maps the files and reads a few of their bytes, at a cost that does not depend on their size. Reads from a
    mapped pair return read-only views, which keep the map alive. The object can be pickled (a copy reopens the files)
    and used after a fork.

    Args:
        path_prefix: path without `.bin` and `.idx`.
        multimodal: True if sequences have a mode.
        mmap: True to map the `.bin`, False to read it piece by piece.
        object_storage_config: options of a pair in an object store, whose prefix is an address such as
            `s3://bucket/key`; needed for such a pair, which needs `mmap=False`. None for files.
        s3_config: the older name of `object_storage_config`.
        fast_cache_load: True to skip the checks at opening, for pairs that were checked before.
        sequences_per_dataset: (sequences, document borders) that the index must have, or None.
        dtype_code: ignored, as the header says the type; here for Megatron Core's signature.
        open_when_read: open and map each file when it is first read, so that thousands of pairs take no descriptors
            and no maps until then; and close it where too many are open, until it is read again. A file that was
            replaced meanwhile is an error.
        header: header of the pair if it was read ahead; used with `open_when_read`.

    Raises:
        ArgumentError: one of the files is missing, or the options do not fit the prefix.
        FormatError: the index is damaged, or points outside the data.
        StoreError: an object store refuses, or does not answer in time.
    """

    def __init__(
        self,
        path_prefix: str,
        multimodal: bool = False,
        mmap: bool = True,
        object_storage_config: ObjectStorageConfig | None = None,
        s3_config: ObjectStorageConfig | None = None,
        fast_cache_load: bool = False,
        sequences_per_dataset: tuple[int, int] | None = None,
        dtype_code: int | None = None,
        *,
        open_when_read: bool = False,
        header: PairHeader | None = None,
    ) -> None:
        self.open_when_read = open_when_read
        self._header = header if not multimodal and (open_when_read or is_address(path_prefix)) else None
        storage = s3_config if object_storage_config is None else object_storage_config
        self.initialize(path_prefix, multimodal, mmap, storage, fast_cache_load, sequences_per_dataset, dtype_code)

    def initialize(
        self,
        path_prefix: str,
        multimodal: bool,
        mmap: bool,
        object_storage_config: ObjectStorageConfig | None = None,
        fast_cache_load: bool = False,
        sequences_per_dataset: tuple[int, int] | None = None,
        dtype_code: int | None = None,
        *,
        s3_config: ObjectStorageConfig | None = None,
    ) -> None:
        """Opens a pair, in the place of any other one. Called by the constructor, and by a copy in another process.

        Arguments and errors as of the class; `s3_config` is an older name of `object_storage_config`.
        """
        object_storage_config = s3_config if object_storage_config is None else object_storage_config
        _check_options(path_prefix, object_storage_config, mmap=mmap)
        for name in _OPENED:
            vars(self).pop(name, None)
        self.path_prefix = path_prefix
        self.multimodal = multimodal
        self.mmap = mmap
        self.object_storage_config = object_storage_config
        self.fast_cache_load = fast_cache_load
        self.sequences_per_dataset = sequences_per_dataset
        self.dtype_code = dtype_code
        header, self._header = self._header, None
        self._open(header)

    def _open(self, header: PairHeader | None = None) -> None:
        header = header or self._read_header()
        self._check(header.ends, header.bin_stamp)
        self._bin_stamp = header.bin_stamp
        idx_path, storage = get_idx_path(self.path_prefix), self._storage
        stored = None if storage is None else StoredIndex(parse_address(idx_path), storage.path_to_idx_cache)
        self.index = SequenceIndex(idx_path, header.ends, multimodal=self.multimodal, stored=stored)
        self.index.is_releasable = self.open_when_read
        if storage is not None:
            BUDGET.lower(storage.bin_chunk_nbytes)
        elif not self.open_when_read:
            self.index.map()
            _ = self.bin_reader

    @property
    def _storage(self) -> ObjectStorageConfig | None:
        """The options of a pair in an object store; None for files."""
        return self.object_storage_config if self.is_stored else None

    @property
    def bin_stamp(self) -> Stamp | ObjectStamp:
        """Identity of the `.bin`: another one that takes its place has another stamp."""
        return self._bin_stamp

    @property
    def is_stored(self) -> bool:
        """True if the pair lies in an object store."""
        return is_address(self.path_prefix)

    def _read_header(self) -> PairHeader:
        if self._storage is not None:
            return open_stored_pair(self.path_prefix, self._storage.path_to_idx_cache, multimodal=self.multimodal)
        idx_path, bin_path = get_idx_path(self.path_prefix), get_bin_path(self.path_prefix)
        with as_format_error(self.path_prefix):
            index_stamp, bin_stamp = stamps_of_files([idx_path, bin_path])
            if index_stamp is None or bin_stamp is None:
                missing = [path for path, stamp in ((idx_path, index_stamp), (bin_path, bin_stamp)) if stamp is None]
                msg = f"{self.path_prefix}: a .bin and an .idx file must exist, missing {' and '.join(missing)}"
                msg += hint_for_missing_pair(str(self.path_prefix))
                raise ArgumentError(msg)
            return PairHeader(open_index(idx_path, multimodal=self.multimodal).ends, bin_stamp)

    def _check(self, ends: IndexEnds, bin_stamp: Stamp | ObjectStamp) -> None:
        if self.sequences_per_dataset is not None:
            _check_counts(ends, tuple(self.sequences_per_dataset), self.path_prefix)
        if not self.fast_cache_load:
            _check_ends(ends, self.path_prefix, bin_stamp.size_bytes)

    @cached_property
    def bin_reader(self) -> Source:
        """The bytes of the `.bin`."""
        path = get_bin_path(self.path_prefix)
        if isinstance(self._bin_stamp, ObjectStamp):
            return StoredSource(parse_address(path), self._bin_stamp)
        if self.open_when_read:
            check_stamp(path, self._bin_stamp)
        with as_format_error(path):
            source = _open_source(path) if self.mmap else FileSource.open(path)
        if self.open_when_read and isinstance(source, FileSource):
            DESCRIPTORS.use(self)
        self.note_use()  # after opening, which may release this object to stay within the limit
        return source

    def note_use(self) -> None:
        """Marks the files as most recently used; of too many open files, others are released first."""
        if self._storage is not None:
            MAPS.use(self)
        elif self.open_when_read:
            (MAPS if self.mmap else DESCRIPTORS).use(self)
            MAPS.use(self)

    def release(self) -> bool:
        """Closes the files until they are read again. Arrays that were read stay valid. Always returns True."""
        self.index.release()
        vars(self).pop("bin_reader", None)
        return True

    def __getstate__(self) -> dict[str, Any]:
        state = {name: value for name, value in vars(self).copy().items() if name not in _OPENED}
        if self._storage is not None:  # a copy sends no request: those for tokens are conditional
            state["_header"] = PairHeader(self.index.ends, self._bin_stamp)
        return {**state, "_opened": (boot_id(), self.index.ends.stamp, self._bin_stamp)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        boot, index_stamp, bin_stamp = state["_opened"]
        vars(self).update({name: value for name, value in state.items() if name != "_opened"})
        if (
            self.open_when_read and self._storage is None and boot and boot == boot_id()
        ):  # on another host, the same files have other inodes
            check_stamp(get_idx_path(self.path_prefix), index_stamp)
            check_stamp(get_bin_path(self.path_prefix), bin_stamp)
        options = (self.object_storage_config, self.fast_cache_load, self.sequences_per_dataset, self.dtype_code)
        self.initialize(self.path_prefix, self.multimodal, self.mmap, *options)

    @cached_property
    def identity(self) -> dict[str, Any]:
        """Identity of the files, which tells them from other files of the same name."""
        return identity_of(self.index, bin_bytes=self._bin_stamp.size_bytes)

    def __len__(self) -> int:
        """Number of sequences in the file."""
        return len(self.index)

    def __getitem__(
        self, idx: int | np.integer[Any] | slice
    ) -> Tokens | Moded | list[Tokens] | tuple[list[Tokens], npt.NDArray[np.int8]]:
        """Tokens of one sequence, or a list of them for a slice without a step; with modes if multimodal.

        Raises:
            IndexError: there is no such sequence.
            ValueError: the slice has a step.
            TypeError: `idx` is neither an integer nor a slice.
        """
        if isinstance(idx, (int, np.integer)):
            return self.get(int(idx))
        if not isinstance(idx, slice):
            raise TypeError(f"{self.path_prefix}: an index must be an integer or a slice, found {type(idx).__name__}")
        start, stop, step = idx.indices(len(self))
        if step != 1:
            raise ValueError(f"{self.path_prefix}: a slice must take every sequence, found a step of {step}")
        sequences = self._sequences(start, max(start, stop))
        modes = self.index.sequence_modes
        return sequences if modes is None else (sequences, modes[start : max(start, stop)])

    def _sequences(self, start: int, stop: int) -> list[Tokens]:
        if start == stop:
            return []
        lengths = self.index.sequence_lengths[start:stop]
        if lengths.min() < 0:
            raise FormatError(f"{self.path_prefix}: sequence lengths must be at least 0, found {lengths.min()}")
        ends = np.cumsum(lengths, dtype=np.int64)
        tokens = self._read(int(self.index.sequence_pointers[start]), int(ends[-1]))
        return [tokens[before:after] for before, after in pairwise([0, *ends.tolist()])]

    def get(
        self, idx: int | np.integer[Any], offset: int = 0, length: int | np.integer[Any] | None = None
    ) -> Tokens | Moded:
        """Tokens `[offset, offset + length)` of sequence `idx`, to its end if `length` is None.

        As in Megatron Core, the range may extend into the following sequences, but not past the end of the file.

        Raises:
            IndexError: there is no such sequence.
            RangeError: the range ends before it begins, or lies outside the `.bin`.
        """
        try:
            pointer, size, mode = self.index[idx]  # type: ignore[index]  # NumPy integers index arrays too
        except OverflowError:
            raise IndexError(f"{self.path_prefix}: an index must be below {len(self)}, found {idx}") from None
        count = int(size) - offset if length is None else int(length)
        place = int(pointer) + int(offset) * self.index.dtype_size
        if offset != 0 or length is not None:
            self._check_range(int(idx), (int(offset), count), int(size), place)
        tokens = self._read(place, count)
        return tokens if mode is None else (tokens, mode)

    def _check_range(self, idx: int, wanted: tuple[int, int], size: int, place: int) -> None:
        """Checks the offset and the number of tokens of a read, which begins at byte `place`."""
        offset, count = wanted
        num_bytes, itemsize = self._bin_stamp.size_bytes, self.index.dtype_size
        if not 0 <= place <= place + count * itemsize <= num_bytes:
            raise RangeError(
                f"{self.path_prefix}: offset and length must name tokens of the file, which has {num_bytes // itemsize}"
                f", but tokens [{offset}, {offset + count}) of sequence {idx} are asked for, which has {size}"
            )

    def get_several(
        self, sequences: Sequence[int], offsets: Sequence[int] | None = None, lengths: Sequence[int] | None = None
    ) -> list[Tokens]:
        """`get` of several sequences, without modes. From an object store, all are requested together.

        Args:
            sequences: their numbers, in `[0, len(self))`.
            offsets: first token of each range; None for the first of each sequence.
            lengths: number of tokens of each range; None for whole sequences.

        Raises:
            FormatError: a range lies outside the `.bin`.
            StoreError: the object was replaced, or the store does not give it.
        """
        chosen = np.asarray(sequences, dtype=np.int64)
        begin = self.index.sequence_pointers[chosen].tolist()
        starts = [0] * len(begin) if offsets is None else offsets
        counts = self.index.sequence_lengths[chosen].tolist() if lengths is None else lengths
        size, dtype, source = self.index.dtype_size, self.index.dtype, self.bin_reader
        places = [first + start * size for first, start in zip(begin, starts, strict=True)]
        if isinstance(source, StoredSource):
            return read_spans(dtype, [(source, count, place) for count, place in zip(counts, places, strict=True)])
        return [source.read(dtype, count, place) for count, place in zip(counts, places, strict=True)]

    def _read(self, offset: int, count: int) -> Tokens:
        return self.bin_reader.read(self.index.dtype, count, offset)

    @property
    def sequence_lengths(self) -> npt.NDArray[np.int32]:
        """`[N]` tokens in each sequence."""
        return self.index.sequence_lengths

    @property
    def document_indices(self) -> npt.NDArray[np.int64]:
        """`[D + 1]` first sequence of each document, then N."""
        return self.index.document_indices

    def get_document_indices(self) -> npt.NDArray[np.int64]:
        """`document_indices`, under its older name."""
        return self.index.document_indices

    def set_document_indices(self, document_indices: npt.NDArray[np.int64]) -> None:
        """Replace the document borders of this object; the file does not change."""
        self.index.replace_document_indices(document_indices)

    @property
    def sequence_modes(self) -> npt.NDArray[np.int8]:
        """`[N]` mode of each sequence.

        Raises:
            ArgumentError: the dataset was not opened as multimodal.
        """
        if self.index.sequence_modes is None:
            raise ArgumentError(f"{self.path_prefix}: sequence_modes needs multimodal=True, found multimodal=False")
        return self.index.sequence_modes

    @staticmethod
    def exists(path_prefix: str) -> bool:
        """True if both files exist.

        Raises:
            StoreError: an object store refuses, or does not answer in time.
        """
        if is_address(path_prefix):
            return stored_pair_exists(path_prefix)
        return Path(get_idx_path(path_prefix)).exists() and Path(get_bin_path(path_prefix)).exists()


def _open_source(path: str) -> MappedSource | FileSource:
    """Maps a file; opens it for reading where the system refuses the map."""
    try:
        return MappedSource.open(path)
    except MapRefusedError:
        return FileSource.open(path)


def _check_options(prefix: str, storage: object, *, mmap: bool) -> None:
    """Checks that the options fit the prefix."""
    if storage is not None and not isinstance(storage, ObjectStorageConfig):
        raise ArgumentError(
            f"{prefix}: object_storage_config must be an ObjectStorageConfig or None, found a {type(storage).__name__}"
        )
    if not is_address(prefix):
        return
    parse_address(prefix)  # refuses secrets without repeating them
    if mmap:
        msg = f"{prefix}: mmap must be False for a pair in an object store (in a configuration: mmap_bin_files)"
        msg += ", found True"
        raise ArgumentError(msg)
    if storage is None:
        msg = f"{prefix}: object_storage_config must be given for a pair in an object store"
        msg += " (in a configuration: object_storage_cache_path), found None"
        raise ArgumentError(msg)


def _check_counts(ends: IndexEnds, wanted: tuple[int, ...], path_prefix: str) -> None:
    found = (ends.header.sequence_count, ends.header.document_count)
    if found != wanted:
        raise FormatError(
            f"{get_idx_path(path_prefix)}: the counts of sequences and document borders must be {wanted} "
            f"as in sequences_per_dataset, found {found}"
        )


def _check_ends(ends: IndexEnds, path_prefix: str, bin_bytes: int) -> None:
    """Checks the ends of the index, without reading the arrays as `verify` does."""
    if ends.last_border != ends.header.sequence_count:
        raise FormatError(
            f"{get_idx_path(path_prefix)}: the last document border must be the sequence_count "
            f"{ends.header.sequence_count}, found {ends.last_border}"
        )
    if not 0 <= ends.data_bytes <= bin_bytes:
        raise FormatError(
            f"{get_idx_path(path_prefix)}: the last sequence ends at byte {ends.data_bytes} of "
            f"{Path(get_bin_path(path_prefix)).name}, which has {bin_bytes}"
        )
