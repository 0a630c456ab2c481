"""A checkpoint in an object store: its marker, its files, and readers of their ranges."""

import bisect
from collections.abc import Iterable, Sequence
from typing import Final, Self

import numpy as np

from trackbed.checkpoint.format.marker import MARKER_NAME, MOST_MARKER_BYTES, Marker
from trackbed.checkpoint.io.range_reader import Bytes, RangeReader
from trackbed.errors import CheckpointError, StoreError, TrackbedError
from trackbed.files import stores
from trackbed.files.stores import Address, ObjectRange, ObjectStamp, parse_address
from trackbed.files.stores.requests import ReplacedError

_SMALL_BYTES: Final = 1 << 20
"""Bytes that the first request for a whole file asks for."""
_REQUEST_BYTES: Final = 4 << 20
_WINDOW_BYTES: Final = 64 << 20
"""Bytes that are fetched at once of a file that is read from one place on."""


class StoredFolder:
    """A folder of an object store in which a checkpoint is, or is to be.

    Args:
        address: its address, without a slash at its end.
        save_id: the save that is the checkpoint, whose files lie in a folder of its own; None for files that lie in the
            folder itself, as other programs put them there.
        is_opened: True if `save_id` says what the marker does.
    """

    def __init__(self, address: str, save_id: str | None = None, *, is_opened: bool = False) -> None:
        self.address = address.rstrip("/")
        """The address."""
        self.save_id = save_id
        """The save that is read; None for files of other programs."""
        self._is_opened = is_opened
        self._stamps: dict[str, ObjectStamp | None] = {}

    def __str__(self) -> str:
        """The address, as a path is the text of itself."""
        return self.address

    def __truediv__(self, name: str) -> "StoredFolder":
        """A folder in this one."""
        return StoredFolder(f"{self.address}/{name}")

    @property
    def name(self) -> str:
        """Last part of the address."""
        return self.address.rpartition("/")[2]

    def object_at(self, name: str) -> Address:
        """Address of a file of the checkpoint."""
        below = "" if self.save_id is None else f"{self.save_id}/"
        return parse_address(f"{self.address}/{below}{name}")

    def marker(self) -> Marker | None:
        """Reads the marker; None if there is none.

        Raises:
            CheckpointError: it is damaged.
            StoreError: the store refuses, or does not answer in time.
        """
        address = parse_address(f"{self.address}/{MARKER_NAME}")
        try:
            _, content = stores.read_object(address, most_bytes=MOST_MARKER_BYTES)
        except FileNotFoundError:
            return None
        return Marker.decode(content, address.text)

    def opened(self) -> Self:
        """The folder with the save that the marker names, or this one if it has been opened.

        Raises:
            CheckpointError: the marker is damaged.
            StoreError: the store refuses, or does not answer in time.
        """
        if self._is_opened:
            return self
        return self.opened_as(self._current())

    def opened_as(self, save_id: str | None) -> Self:
        """The folder with a save."""
        return type(self)(self.address, save_id, is_opened=True)

    def replacement(self) -> str | None:
        """Says how the checkpoint has changed since it was opened; None if it has not, or that is not known."""
        try:
            found = self._current()
        except (CheckpointError, StoreError):
            return None
        if found == self.save_id:
            return None
        return "removed" if found is None else "replaced by another save"

    def _current(self) -> str | None:
        marker = self.marker()
        return None if marker is None or marker.current is None else marker.current.save_id

    def folders(self) -> list[str]:
        """Names of the folders in this one, sorted."""
        return stores.list_folders([parse_address(self.address)])[0]

    def read(self, name: str) -> bytes | None:
        """Reads a file; None if there is none."""
        address = self.object_at(name)
        (found,) = stores.fetch_heads([address], _SMALL_BYTES)
        if isinstance(found, FileNotFoundError):
            return None
        if isinstance(found, Exception):
            raise found
        stamp, head = found
        self._stamps[name] = stamp
        if len(head) == stamp.size_bytes:
            return bytes(head)
        rest = stores.fetch(_requests(address, stamp, [(len(head), stamp.size_bytes)]))
        return b"".join([head, *rest])

    def size_of(self, name: str) -> int | None:
        """Size of a file in bytes; None if there is none."""
        stamp = self._stamp(name)
        return None if stamp is None else stamp.size_bytes

    def has(self, name: str) -> bool:
        """True if there is such a file."""
        return self._stamp(name) is not None

    def look_at(self, names: Iterable[str]) -> None:
        """Asks for the sizes of several files at once."""
        missing = [name for name in names if name not in self._stamps]
        for name, found in zip(missing, stores.stamps_of_objects(list(map(self.object_at, missing))), strict=True):
            if isinstance(found, FileNotFoundError):
                self._stamps[name] = None
            elif isinstance(found, Exception):
                raise found
            else:
                self._stamps[name] = found

    def _stamp(self, name: str) -> ObjectStamp | None:
        self.look_at([name])
        return self._stamps[name]

    def open(self, name: str) -> "ObjectReader":
        """Opens a file.

        Raises:
            CheckpointError: it is not there.
            StoreError: the store refuses, or does not answer in time.
        """
        stamp = self._stamp(name)
        if stamp is None:
            raise CheckpointError(f"{name}: must be in {self}, but there is no such object")
        return ObjectReader(self.object_at(name), name, stamp)


def read_markers(folders: Sequence[StoredFolder]) -> list[Marker | TrackbedError | None]:
    """Reads the markers of several folders at once; None for a folder without, or the error in its place."""
    addresses = [parse_address(f"{folder}/{MARKER_NAME}") for folder in folders]
    found: list[Marker | TrackbedError | None] = []
    for folder, address, answer in zip(folders, addresses, stores.fetch_heads(addresses, _SMALL_BYTES), strict=True):
        try:
            if isinstance(answer, FileNotFoundError):
                found.append(None)
            elif isinstance(answer, Exception):
                raise answer
            elif len(answer[1]) < answer[0].size_bytes:
                found.append(folder.marker())
            else:
                found.append(Marker.decode(bytes(answer[1]), address.text))
        except TrackbedError as error:
            found.append(error)
    return found


class ObjectReader(RangeReader):
    """Reads ranges of an object, all of one version.

    Args:
        address: its address.
        name: name of the file, for errors.
        stamp: its version.
    """

    def __init__(self, address: Address, name: str, stamp: ObjectStamp) -> None:
        super().__init__(name, stamp.size_bytes)
        self._address = address
        self._stamp = stamp
        self._starts: list[int] = []
        self._held: list[memoryview] = []
        """Bytes that were fetched, in the order of the file, and where they start."""
        self._end = 0

    def announce(self, end: int) -> None:
        """Says that reads follow each other up to a byte of the file."""
        self._end = end

    def hold(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Fetches what is read next."""
        self._starts.clear()
        self._held.clear()
        for start, stop in ranges:
            self.require(start, stop - start, "a range")
        requests = _requests(self._address, self._stamp, ranges)
        try:
            self._held = stores.fetch(requests)
        except FileNotFoundError as error:
            raise CheckpointError(f"{self._address.text}: must stay while it is read, but was removed") from error
        except ReplacedError as error:
            raise CheckpointError(str(error)) from error
        self._starts = [one.start for one in requests]

    def read_into(self, target: Bytes, start: int, what: str) -> None:
        """Fills an array from a place of the object on."""
        self.require(start, len(target), what)
        done = 0
        while done < len(target):
            number = bisect.bisect_right(self._starts, start + done) - 1
            inside = start + done - self._starts[number] if number >= 0 else 0
            if number < 0 or inside >= len(self._held[number]):
                is_announced = start + done < self._end
                end = max(start + len(target), min(self._end if is_announced else 0, self._num_bytes))
                self.hold([(start + done, min(end, start + done + _WINDOW_BYTES))])
                continue
            piece = self._held[number][inside : inside + len(target) - done]
            target[done : done + len(piece)] = np.frombuffer(piece, dtype=np.uint8)
            done += len(piece)
        if start + done >= self._end:
            self._end = 0  # what was announced has been read


def _requests(address: Address, stamp: ObjectStamp, ranges: Iterable[tuple[int, int]]) -> list[ObjectRange]:
    """Requests for ranges, none of which is long."""
    return [
        ObjectRange(address, stamp, low, min(low + _REQUEST_BYTES, stop))
        for start, stop in ranges
        for low in range(start, stop, _REQUEST_BYTES)
    ]
