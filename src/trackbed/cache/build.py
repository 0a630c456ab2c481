"""Building entries: arrays are computed, large ones in their files, and committed."""

import contextlib
import errno
import math
import mmap
import os
import threading
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from trackbed.cache.commit import CompleteFile, NewEntry, cannot_write, commit, explained
from trackbed.cache.entry import Arrays, ArraySpec, Request
from trackbed.cache.lookup import LookupResult, State, look_up
from trackbed.cache.npy import create_npy, encode_npy_header
from trackbed.cancellation import check_cancelled
from trackbed.files import (
    CHUNK_BYTES,
    BackgroundWriteback,
    FileSum,
    checksum_bytes,
    clear_dead_partials,
    crc32,
    is_on_this_machine,
    partial_name,
)

_IN_PLACE_BYTES: Final = 4 << 20
"""Size from which an array is filled in its file."""
_BACKGROUND_BYTES: Final = 256 << 20
"""Size from which a file is written to the disk while it is filled."""
_NO_MAPS: Final = (errno.ENODEV, errno.EOPNOTSUPP, errno.EINVAL)
"""Errno of file systems that cannot reserve space, or be mapped for writing: then arrays are made in memory."""


def build_batch(
    requests: Sequence[Request], lookups: Sequence[LookupResult | None] = ()
) -> Iterator[tuple[Request, LookupResult]]:
    """Builds the entries that are missing, and yields each once it is there.

    Args:
        requests: entries that are wanted.
        lookups: result of the last lookup of each, None where there was none; nothing for no lookup at all. Large
            entries are looked up again, as another job may have built them meanwhile.

    Raises:
        CacheError: an entry cannot be read, built or written. Nothing partial is left behind.
        Exception: building an entry failed.
    """
    pairs = enumerate(zip(requests, lookups, strict=False))
    known = {number: one for number, (request, one) in pairs if one is not None and request.kind.is_small(request)}
    unknown = [number for number in range(len(requests)) if number not in known]
    known.update(zip(unknown, look_up([requests[number] for number in unknown]), strict=True))
    missing: list[tuple[Request, LookupResult]] = []
    for number, request in enumerate(requests):
        if known[number].state is State.whole:
            yield request, known[number]
        else:
            missing.append((request, known[number]))
    for _, some in groupby(missing, key=lambda pair: id(pair[0].kind)):
        yield from _build(list(some))


def _build(missing: Sequence[tuple[Request, LookupResult]]) -> Iterator[tuple[Request, LookupResult]]:
    """Builds entries of one kind."""
    folders: set[str] = set()
    writers = {id(request): _EntryWriter(request, result, folders) for request, result in missing}
    try:
        requests = [request for request, _ in missing]
        for batch in requests[0].kind.build(requests, lambda request: writers[id(request)]):
            check_cancelled()
            committed = commit([writers[id(request)].complete(arrays) for request, arrays in batch])
            # Where another builder of the same entry was faster, its files stay, and this one's are gone: they are
            # looked up, as their stamps are needed.
            theirs = [request for (request, _), one in zip(batch, committed, strict=True) if one is None]
            rest = iter(look_up(theirs, is_vouched=True))
            for (request, _), one in zip(batch, committed, strict=True):
                writer = writers.pop(id(request))
                writer.close()
                result = next(rest) if one is None else one
                yield request, result._replace(taken=writer.taken)
    finally:
        for writer in writers.values():
            writer.close()


_SCRATCH: Final = threading.local()
"""Memory for small arrays until they are written, an attribute for each name.

Fresh memory costs more than the work done in it: the system clears it page by page.
"""


def _scratch_array(name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Returns an array that is valid until this thread allocates the next one of this name."""
    size = math.prod(shape) * dtype.itemsize
    buffer: npt.NDArray[np.uint8] | None = getattr(_SCRATCH, name, None)
    if buffer is None or len(buffer) < size:
        buffer = np.empty(min(2 * size, _IN_PLACE_BYTES), dtype=np.uint8)
        setattr(_SCRATCH, name, buffer)
    return buffer[:size].view(dtype).reshape(shape)


class _EntryWriter:
    """Allocates the arrays of an entry, and prepares its files.

    An array of 256 MiB or more is written to the disk, and its memory given back, while a build fills it that reports
    how far it is.

    Args:
        request: the entry.
        found: result of its lookup.
        folders: folders that were made or found for other entries of the batch; the folders of this entry are added.
    """

    def __init__(self, request: Request, found: LookupResult, folders: set[str]) -> None:
        self._entry = request.entry
        self._location = request.entry.location(is_aside=found.is_aside)
        self._damaged = found.stamps if found.state is State.damaged else None
        self.taken = found.taken
        self._partials: dict[str, str] = {}
        """Path of the partial file of each array that is filled in place."""
        self._in_place: dict[str, tuple[npt.NDArray[Any], mmap.mmap]] = {}
        self._background: dict[str, BackgroundWriteback] = {}
        self._folders = folders

    def __call__(self, name: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """Returns an array to fill."""
        array_dtype = np.dtype(dtype)
        if math.prod(shape) * array_dtype.itemsize < _IN_PLACE_BYTES:
            return _scratch_array(name, shape, array_dtype)
        self._make_folders()
        final = self._location.array(name).rpartition("/")[2]
        partial = self._partials[name] = f"{self._entry.own_folder}/partial/{partial_name(final)}"
        try:
            array, mapped = create_npy(partial, array_dtype, shape)
        except OSError as error:
            if error.errno in _NO_MAPS:
                self._drop(name)
                return np.empty(shape, dtype=array_dtype)
            raise cannot_write(self._entry, error, self._location) from error
        self._in_place[name] = array, mapped
        if array.nbytes >= _BACKGROUND_BYTES:
            self._background[name] = BackgroundWriteback(partial, mapped)
        return array

    def filled(self, count: int, *names: str) -> None:
        """Records that the first `count` elements along the first axis of these arrays are final."""
        for name in names:
            if name in self._background:
                array, mapped = self._in_place[name]
                header_bytes = len(mapped) - array.nbytes
                self._background[name].filled(header_bytes + count * array.strides[0])

    def complete(self, arrays: Arrays) -> NewEntry:
        """Completes the files of the entry."""
        self._make_folders()
        description = self._entry.description.encode()
        files = [CompleteFile([description], _sum_of(b"", 0, description))]
        specs = {}
        for name in self._entry.arrays:
            array = arrays[name]
            specs[name], header, crc32_before = _header(array.dtype, array.shape)
            if name in self._in_place and array is self._in_place[name][0]:
                with explained(self._entry, self._location):
                    files.append(CompleteFile(self._partials[name], self._sum_in_place(name)))
                continue
            self._drop(name)
            data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
            files.append(CompleteFile([header, data], _sum_of(header, crc32_before, data)))
        return NewEntry(self._entry, self._location, files, specs, self._damaged)

    def _make_folders(self) -> None:
        """Makes the folders to write to, and removes what killed writers left there."""
        partials = f"{self._entry.own_folder}/partial"
        with explained(self._entry, self._location):
            for folder in (self._location.directory, partials):
                if folder not in self._folders and not os.path.isdir(folder):
                    os.makedirs(folder, exist_ok=True)
                self._folders.add(folder)
            _clear_once(partials)

    def _sum_in_place(self, name: str) -> FileSum:
        if name in self._background:
            return FileSum.of(self._background[name].finish())
        mapped = self._in_place[name][1]
        if not is_on_this_machine(self._entry.own_folder):
            mapped.flush()  # else other hosts may read zeros until this one happens to write its pages out
        return FileSum.of(checksum_bytes(memoryview(mapped)))

    def _drop(self, name: str) -> None:
        partial = self._partials.pop(name, None)
        if partial is not None:
            with contextlib.suppress(OSError):  # for instance in a folder that cannot be written
                Path(partial).unlink(missing_ok=True)

    def close(self) -> None:
        """Removes the partial files that did not appear."""
        for name in list(self._partials):
            self._drop(name)
        for one in self._background.values():
            one.stop()


@lru_cache(maxsize=64)
def _clear_once(partials: str) -> None:
    """Removes what killed writers left; once for each folder in a process, which may write thousands of entries."""
    clear_dead_partials(Path(partials))


def _sum_of(header: bytes, header_crc32: int, data: bytes | memoryview) -> FileSum:
    """Checksums of a file that consists of header and data."""
    size = len(header) + len(data)
    if size > CHUNK_BYTES:
        return FileSum.of(checksum_bytes(header, data))
    return FileSum(size, [f"{crc32(data, header_crc32):08x}"])


@lru_cache(maxsize=1 << 8)
def _header(dtype: np.dtype[Any], shape: tuple[int, ...]) -> tuple[ArraySpec, bytes, int]:
    """Specification of an array, the bytes before the data of its `.npy` file, and their CRC-32."""
    header = encode_npy_header(dtype, shape)
    return ArraySpec(dtype, shape), header, crc32(header)
