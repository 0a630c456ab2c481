"""Building an entry: every file complete under a partial name, before any of them appears."""

import contextlib
import errno
import math
import mmap
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from trackbed.cache.advice import advice_on
from trackbed.cache.appear import Prepared, let_appear
from trackbed.cache.entry import ArraySpec, Entry, Place
from trackbed.cache.manifest import encode_manifest, manifest_of
from trackbed.cache.npy import create_npy, npy_parts
from trackbed.cache.opened import Arrays, OpenedArrays, specs_of
from trackbed.cache.sighting import Sighting, Stamps
from trackbed.errors import CacheError
from trackbed.files import (
    BackgroundWriteback,
    Checksum,
    FileSum,
    checksum_bytes,
    clear_dead_partials,
    is_on_this_machine,
    partial_name,
)
from trackbed.kernels import file_stamps, write_files

__all__ = ["Allocate", "Build", "Recipe", "Written", "in_memory", "make_folders", "write_entry"]


class Allocate(Protocol):
    """Gives the arrays that a build fills: large ones in their files."""

    def __call__(self, name: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """An array to be filled."""
        ...

    def filled(self, count: int, *names: str) -> None:
        """Take note that the first `count` elements along the first axis of these arrays are final."""
        ...


Build = Callable[[Allocate], Arrays]


@dataclass(frozen=True, slots=True)
class Recipe:
    """How the arrays of a small entry are made in one call with those of others."""

    build: Callable[[Sequence[Any]], Sequence[Arrays | None]]
    """From the ingredients of several entries, the arrays of each; None of one that is not small."""
    ingredients: Any


_IN_PLACE_BYTES: Final = 4 << 20
_BEHIND_BYTES: Final = 256 << 20
_NO_MAPS: Final = (errno.ENODEV, errno.EOPNOTSUPP, errno.EINVAL)
"""What file systems say that take no room ahead, or cannot be mapped for writing: then arrays are made in memory."""


@dataclass(frozen=True, slots=True)
class Written:
    """An entry that was built."""

    place: Place
    """Where it lies."""
    specs: Mapping[str, ArraySpec]
    """What its arrays hold."""
    sighting: Sighting | None
    """What was written, unless another builder of the same entry was faster."""
    data_crc32: str
    """CRC-32 of the data that it was built from; empty where the decisions hold all of it."""

    def open(self) -> OpenedArrays:
        """Its arrays, each of which is mapped when it is first read."""
        return OpenedArrays(self.place, self.specs, data_crc32=self.data_crc32, sighting=self.sighting)


def write_entry(entry: Entry, place: Place, build: Build, *, damaged: Stamps | None = None) -> Written:
    """Build the arrays of an entry and write description, arrays and manifest to `place`.

    Large arrays are filled in their files, so that they are in memory once. Those of 256 MiB and more are written out
    and given back behind a build that says how far it is. Partial files lie in `.trackbed/partial/`, where this removes
    those that a killed writer left.

    Returns:
        Where it lies: aside, if another entry took the name meanwhile.

    Raises:
        CacheError: the folder cannot be written, or the disk is full; nothing partial is left behind.
    """
    writing = _Writing(entry, place)
    try:
        with writing.explained():
            make_folders(entry, place)
        arrays = build(writing)
        with writing.explained():
            return writing.publish(arrays, damaged)
    finally:
        writing.clear()


def make_folders(entry: Entry, place: Place) -> None:
    """See that there are folders to write to, without what killed writers left there.

    Raises:
        OSError: they cannot be made.
    """
    for folder in (place.directory, f"{entry.own}/partial"):
        if not os.path.isdir(folder):  # noqa: PTH112  see Place
            os.makedirs(folder, exist_ok=True)  # noqa: PTH103  see Place
    _clear_once(f"{entry.own}/partial")


class _Scratch(threading.local):
    """Memory for arrays that are forgotten once they are written, one for each name and thread.

    Fresh memory costs more than what is done with it: the system clears it page by page.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, npt.NDArray[np.uint8]] = {}

    def array(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        """An array that is valid until the next one of this name is asked for."""
        size = math.prod(shape) * dtype.itemsize
        buffer = self._buffers.get(name)
        if buffer is None or len(buffer) < size:
            buffer = self._buffers[name] = np.empty(min(2 * size, _IN_PLACE_BYTES), dtype=np.uint8)
        return buffer[:size].view(dtype).reshape(shape)


_SCRATCH: Final = _Scratch()


class _InMemory:
    def __call__(self, name: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:  # noqa: ARG002  Allocate's signature
        return np.empty(shape, dtype=dtype)

    def filled(self, count: int, *names: str) -> None:
        """Nobody waits for it."""


in_memory: Final = _InMemory()
"""Allocates for what is kept in no cache."""


class _Writing:
    """The files of an entry that are being written."""

    def __init__(self, entry: Entry, place: Place) -> None:
        self._entry = entry
        self._place = place
        self._partials: dict[str, str] = {}
        """Path of each partial file, by what it holds."""
        self._in_place: dict[str, tuple[npt.NDArray[Any], mmap.mmap]] = {}
        self._behind: dict[str, BackgroundWriteback] = {}

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Errors of the system, in words that say what to do."""
        try:
            yield
        except OSError as error:
            where = error.filename or self._place.directory
            msg = f"{where}: the index {self._entry.stem} cannot be written: {error.strerror}; "
            msg += advice_on(error, is_writing=True)
            raise CacheError(msg) from error

    def __call__(self, name: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """An array to be filled."""
        wanted = np.dtype(dtype)
        if math.prod(shape) * wanted.itemsize < _IN_PLACE_BYTES:
            return _SCRATCH.array(name, shape, wanted)
        try:
            with self.explained():
                array, mapped, descriptor = create_npy(self._begin(name), wanted, shape)
        except CacheError as error:
            if getattr(error.__cause__, "errno", None) not in _NO_MAPS:
                raise
            self.clear(name)
            return np.empty(shape, dtype=wanted)
        self._in_place[name] = array, mapped
        if array.nbytes < _BEHIND_BYTES:
            os.close(descriptor)
            return array
        try:
            self._behind[name] = BackgroundWriteback(descriptor, mapped)
        except BaseException:
            os.close(descriptor)
            raise
        return array

    def filled(self, count: int, *names: str) -> None:
        """Take note that the first `count` elements along the first axis of these arrays are final."""
        for name in names:
            if name in self._behind:
                array, mapped = self._in_place[name]
                header_bytes = len(mapped) - array.nbytes
                self._behind[name].filled(header_bytes + count * array.strides[0])

    def publish(self, arrays: Arrays, damaged: Stamps | None) -> Written:
        """Write what is not in its file yet, and let all files appear."""
        names = ("description", *self._entry.arrays)
        left = {name: parts for name in names if (parts := self._left_of(name, arrays))}
        sums = {name: FileSum.of(self._sum_of(name, left)) for name in names}
        records = {self._final_name(name): record for name, record in sums.items()}
        manifest = manifest_of(self._entry, records, specs_of(arrays))
        data_crc32 = None if manifest.data is None else manifest.data.crc32
        left["manifest"] = [encode_manifest(manifest)]
        write_files({self._begin(name): parts for name, parts in left.items()})
        files = {name: (self._partials[name], sums[name].size_bytes) for name in names}
        stamps = file_stamps(".", [self._partials[name] for name in (*names, "manifest")])  # renaming keeps them
        prepared = Prepared(self._entry, self._partials["manifest"], files, data_crc32, damaged)
        appeared = let_appear(prepared, self._place)
        self._partials = {name: path for name, path in self._partials.items() if path in appeared.unused}
        place, crc32 = appeared.place, data_crc32 or ""
        if appeared.unused:
            return Written(place, manifest.arrays, None, crc32)
        sighting = Sighting(place, self._entry.arrays, manifest.arrays, stamps, manifest.fingerprint, crc32)
        return Written(place, manifest.arrays, sighting, crc32)

    def _left_of(self, name: str, arrays: Arrays) -> list[bytes | memoryview]:
        """The bytes of a file that is not there yet; nothing of one that was filled in place."""
        if name == "description":
            return [self._entry.description.encode()]
        if name in self._in_place and arrays[name] is self._in_place[name][0]:
            return []
        self.clear(name)
        return npy_parts(arrays[name])

    def _sum_of(self, name: str, left: Mapping[str, Sequence[bytes | memoryview]]) -> Checksum:
        """The checksums of a file, which is complete if it was filled in place."""
        if name in left:
            return checksum_bytes(*left[name])
        if name in self._behind:
            return self._behind[name].finish()
        mapped = self._in_place[name][1]
        if not is_on_this_machine(self._entry.own):
            mapped.flush()  # else other hosts may read zeros until this one happens to write its pages out
        return checksum_bytes(memoryview(mapped))

    def clear(self, *names: str) -> None:
        """Remove the partial files of these, or of all that did not appear."""
        for name in names or list(self._partials):
            if name in self._partials:
                with contextlib.suppress(OSError):  # of a folder that cannot be written to, where there is none
                    Path(self._partials.pop(name)).unlink(missing_ok=True)
        if not names:
            for behind in self._behind.values():
                behind.stop()

    def _begin(self, name: str) -> str:
        self._partials[name] = f"{self._entry.own}/partial/{partial_name(self._final_name(name))}"
        return self._partials[name]

    def _final_name(self, name: str) -> str:
        if name == "manifest":
            return self._place.manifest.rpartition("/")[2]
        return f"{self._entry.stem}-{'description.txt' if name == 'description' else f'{name}.npy'}"


@lru_cache(maxsize=64)
def _clear_once(partials: str) -> None:
    """Remove what killed writers left; once for each folder in a process, which may write thousands of entries."""
    clear_dead_partials(Path(partials))
