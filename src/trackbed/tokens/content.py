"""The whole content of a pair, on a disk or in an object store: for checks, seals and copies."""

import contextlib
import errno
import os
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Final

import numpy as np

from trackbed.files import Checksum, checksum_file, open_regular
from trackbed.files.stores import ObjectStamp, is_address, parse_address
from trackbed.tokens.commit import hint_for_missing_pair, interruption
from trackbed.tokens.format import SequenceIndex, open_index
from trackbed.tokens.paths import get_bin_path, get_idx_path
from trackbed.tokens.stored.config import default_idx_cache
from trackbed.tokens.stored.index_cache import StoredIndex
from trackbed.tokens.stored.open_pairs import open_stored_pair
from trackbed.tokens.stored.source import StoredSource, fetch_ranges

_READ_BYTES: Final = 4 << 20
_FETCH_BYTES: Final = 32 << 20


class PairContent:
    """The content of a pair.

    Args:
        index: its index.
        bin_path: path or address of its `.bin`.
        bin_bytes: size of its `.bin`.
        source: the `.bin`, if it is an object.
    """

    def __init__(self, index: SequenceIndex, bin_path: str, bin_bytes: int, source: StoredSource | None) -> None:
        self.index = index
        self.bin_path = bin_path
        self.bin_bytes = bin_bytes
        self._source = source

    @classmethod
    def open(cls, path_prefix: str, *, multimodal: bool = False, idx_cache: str | None = None) -> "PairContent":
        """Opens a pair.

        Args:
            path_prefix: path or address of the pair without `.bin` and `.idx`.
            multimodal: True to require modes.
            idx_cache: folder of copies of `.idx` objects; None for `default_idx_cache()`.

        Raises:
            FormatError: the index is damaged.
            FileNotFoundError: one of the files is missing.
            ArgumentError: one of the objects is missing.
            StoreError: an object store refuses, or does not answer in time.
        """
        idx_path, bin_path = get_idx_path(path_prefix), get_bin_path(path_prefix)
        if not is_address(path_prefix):
            if interruption(path_prefix):
                open_index(idx_path)  # raises an error that says how to finish the pair
            missing = [path for path in (idx_path, bin_path) if not os.path.lexists(path)]
            if missing:
                text = f"a .bin and an .idx file must exist, missing {' and '.join(missing)}"
                raise FileNotFoundError(errno.ENOENT, text + hint_for_missing_pair(path_prefix), path_prefix)
            bin_bytes = Path(bin_path).stat().st_size
            return cls(open_index(idx_path, multimodal=multimodal), bin_path, bin_bytes, None)
        folder = idx_cache or default_idx_cache()
        header = open_stored_pair(path_prefix, folder, multimodal=multimodal)
        stored = StoredIndex(parse_address(idx_path), folder)
        index = SequenceIndex(idx_path, header.ends, multimodal=multimodal, stored=stored)
        stamp = header.bin_stamp
        source = StoredSource(parse_address(bin_path), stamp) if isinstance(stamp, ObjectStamp) else None
        return cls(index, bin_path, stamp.size_bytes, source)

    def checksum_idx(self, progress: Callable[[int], None] | None = None) -> Checksum:
        """Computes the checksums of the `.idx`."""
        return checksum_file(Path(self.index.local_path()), progress=progress)

    def checksum_bin(self, progress: Callable[[int], None] | None = None) -> Checksum:
        """Computes the checksums of the `.bin`."""
        if self._source is None:
            return checksum_file(Path(self.bin_path), progress=progress)
        checksum = Checksum()
        with contextlib.closing(self.read_bin()) as pieces:
            for piece in pieces:
                checksum.update(piece)
                if progress is not None:
                    progress(len(piece))
        return checksum

    def read_bin(self) -> Generator[memoryview, None, None]:
        """Yields the bytes of the `.bin` in order, in pieces that are valid until the next one."""
        if self._source is None:
            buffer = bytearray(_READ_BYTES)
            with open(open_regular(self.bin_path)[0], "rb", buffering=0) as file:  # noqa: PTH123  a descriptor
                while count := file.readinto(buffer):
                    yield memoryview(buffer)[:count]
            return
        for start in range(0, self.bin_bytes, _FETCH_BYTES):
            part = np.array([[0, start, min(start + _FETCH_BYTES, self.bin_bytes)]], dtype=np.int64)
            (found,) = fetch_ranges([self._source], part)
            yield found.content.data
