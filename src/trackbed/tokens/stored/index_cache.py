"""Copies of `.idx` objects in a folder of the host, each fetched once.

Below the folder, `.trackbed/<scheme>/<endpoint>/<bucket>/<key>/` holds the copies of one object: for each version of it
`<version>.idx`, and `<version>.json`, the side file, with address, size, tag, checksums and the boot in which it was
written. A copy without a fitting side file counts for nothing.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import quote

import numpy as np
import numpy.typing as npt

from trackbed.cancellation import check_cancelled
from trackbed.errors import ArgumentError, FormatError
from trackbed.files import (
    BackgroundFlush,
    FileSum,
    boot_id,
    checksum_file,
    is_partial_name,
    new_partial,
    publish,
    read_regular,
    remove_partial,
    stores,
    write_new,
)
from trackbed.files.stores import Address, ObjectStamp
from trackbed.files.stores.waiting import call_all
from trackbed.tokens.idx_header import HEADER_BYTES, checksum_lengths, decode_header

_FORMAT: Final = "trackbed-idx-copy"
_VERSION: Final = 1
_NOT_ON_DISK: Final = re.compile(rb'"is_on_disk":\s*(?P<word>false)')
_LONGEST_NAME: Final = 200
_POLL_SECONDS: Final = 0.02
_AT_ONCE: Final = 16
"""Copies that are fetched together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Side:
    """Content of a side file."""

    address: str
    endpoint: str
    tag: str
    idx: FileSum
    lengths_crc32: str
    """CRC-32 of the lengths, in eight hexadecimal digits."""
    boot: str
    is_on_disk: bool
    """True once the copy is known to survive a loss of power."""

    @property
    def stamp(self) -> ObjectStamp:
        """Identity of the object that was copied."""
        return ObjectStamp(self.idx.size_bytes, self.tag)

    def encode(self) -> bytes:
        """Returns the side file."""
        return (json.dumps({"format": _FORMAT, "version": _VERSION, **asdict(self)}, indent=1) + "\n").encode()

    @classmethod
    def read(cls, path: Path) -> "_Side | None":
        """Returns the content of a side file; None if there is none, or none that can be used."""
        try:
            return cls.parse(read_regular(path))
        except (OSError, FormatError):
            return None

    @classmethod
    def parse(cls, raw: bytes) -> "_Side | None":
        """Returns the content of a side file with these bytes; None if it cannot be used."""
        try:
            record = json.loads(raw)
            if (record.pop("format"), record.pop("version")) != (_FORMAT, _VERSION):
                return None
            found = cls(**{**record, "idx": FileSum.from_json(record["idx"])})
        except (FormatError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return None
        texts = (found.address, found.endpoint, found.tag, found.lengths_crc32, found.boot)
        return found if all(type(text) is str for text in texts) and type(found.is_on_disk) is bool else None


class _Copy(NamedTuple):
    """Paths of one version of an object."""

    idx: Path
    side: Path


class StoredIndex:
    """An `.idx` object, and its copies on this host.

    Args:
        address: the object.
        folder: folder of the copies.
    """

    def __init__(self, address: Address, folder: str) -> None:
        self.address = address
        self.folder = folder
        self._place = place_of(address, folder)

    def copied_stamps(self) -> Iterator[ObjectStamp]:
        """Yields the stamps of the versions of the object that there are copies of."""
        for path in sorted(self._place.glob("*.json")):
            side = self._fitting(_Side.read(path))
            if side is not None:
                yield side.stamp

    def find(self, stamp: ObjectStamp) -> Path | None:
        """Returns the path of the copy of a version of the object; None if there is none that can be trusted."""
        copied = self._copy(stamp)
        side = self._fitting(_Side.read(copied.side))
        if side is None or side.stamp != stamp or _size_of(copied.idx) != stamp.size_bytes:
            return None
        if not side.is_on_disk and side.boot != boot_id():  # a loss of power leaves zeros
            try:
                if FileSum.of(checksum_file(copied.idx)) != side.idx:
                    return None
            except (OSError, FormatError):
                return None
            with contextlib.suppress(OSError):
                _mark(copied.side, side)
        return copied.idx

    def fetch(self, stamp: ObjectStamp) -> Path:
        """Returns the path of a copy of a version of the object; fetches it unless another process of the host does.

        Raises:
            ArgumentError: the folder cannot be written to.
            StoreError: the object was replaced, or the store does not give it.
            FormatError: the object does not begin as an `.idx` does.
        """
        found = self.find(stamp)
        if found is not None:
            return found
        try:
            self._place.mkdir(parents=True, exist_ok=True)
            with self._locked():
                # Once more under the lock: the process that held it may have fetched this object.
                return self.find(stamp) or self._fetch(stamp)
        except OSError as error:
            if isinstance(error, FileNotFoundError) and error.filename == self.address.text:
                raise
            raise ArgumentError(
                f"{self.folder}: path_to_idx_cache must be a folder with space for copies of .idx files, found: {error}"
            ) from error

    def _fetch(self, stamp: ObjectStamp) -> Path:
        copied = self._copy(stamp)
        for name in os.listdir(self._place):  # noqa: PTH208  names are all that is wanted
            if is_partial_name(name):  # its writer held the lock, so it is dead
                remove_partial(self._place / name)
        partial = new_partial(copied.idx)
        try:
            descriptor = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            try:
                stores.fetch_to_file(self.address, stamp, descriptor)
            finally:
                os.close(descriptor)
            sums = FileSum.of(checksum_file(partial))
            lengths_crc32 = checksum_lengths(_lengths_in(partial, self.address.text))
            # Without a side file no process uses the copy. Killed between the two calls, a process that removed it
            # later would leave it beside another copy than the one that it describes.
            copied.side.unlink(missing_ok=True)
            publish(partial, copied.idx)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
        side = _Side(
            address=self.address.text,
            endpoint=stores.endpoint_of(self.address),
            tag=stamp.tag,
            idx=sums,
            lengths_crc32=lengths_crc32,
            boot=boot_id(),
            is_on_disk=False,
        )
        self._write_side(copied, side)
        self._remove_others(copied)
        _MARKS.add([(os.fspath(self._place), (self, stamp))])
        return copied.idx

    def checksum_lengths(self, stamp: ObjectStamp) -> str:
        """Returns the CRC-32 of all lengths of a version of the object, which is copied first if there is no copy.

        Raises:
            FormatError: the copy was removed meanwhile.
            Exception: as `fetch`.
        """
        path = self.fetch(stamp)
        side = self._fitting(_Side.read(self._copy(stamp).side))
        return checksum_lengths(_lengths_in(path, self.address.text)) if side is None else side.lengths_crc32

    def mark(self, stamp: ObjectStamp) -> None:
        """Records that a copy is on the disk, unless somebody has removed it."""
        copied = self._copy(stamp)
        side = _Side.read(copied.side)
        if side is not None and side.stamp == stamp and not side.is_on_disk:
            _mark(copied.side, side)

    def _write_side(self, copied: _Copy, side: _Side) -> None:
        partial = new_partial(copied.side)
        try:
            write_new(partial, side.encode())
            publish(partial, copied.side)
        finally:
            partial.unlink(missing_ok=True)

    def _remove_others(self, copied: _Copy) -> None:
        """Removes the copies of other versions. A process that has mapped one keeps it."""
        for path in self._place.glob("*.json"):
            if path != copied.side:
                path.unlink(missing_ok=True)
                path.with_suffix(".idx").unlink(missing_ok=True)

    def _copy(self, stamp: ObjectStamp) -> _Copy:
        name = hashlib.sha256(f"{stamp.size_bytes} {stamp.tag}".encode()).hexdigest()[:16]
        return _Copy(self._place / f"{name}.idx", self._place / f"{name}.json")

    def _fitting(self, side: _Side | None) -> _Side | None:
        """Returns a side file if it is that of this object, and not of one with the same name elsewhere."""
        is_ours = side is not None and (side.address, side.endpoint) == (
            self.address.text,
            stores.endpoint_of(self.address),
        )
        return side if is_ours else None

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Holds the lock of the object, which falls with the process. Where files cannot be locked, fetches anyway."""
        descriptor = os.open(self._place / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            while True:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    check_cancelled()
                    time.sleep(_POLL_SECONDS)
                except OSError:
                    break
            yield
        finally:
            os.close(descriptor)


def fetch_indexes(wanted: Sequence[tuple[StoredIndex, ObjectStamp]]) -> list[Path]:
    """Returns the paths of copies of many objects, several of which are fetched together."""
    if len(wanted) < 2:
        return [index.fetch(stamp) for index, stamp in wanted]
    return call_all([partial(index.fetch, stamp) for index, stamp in wanted], num_threads=_AT_ONCE)


def _mark(path: Path, side: _Side) -> None:
    """Sets `is_on_disk` in a side file, in place: no name appears or goes, as the folder may be removed meanwhile.

    A reader that finds half of the word takes the copy for none, waits for the lock, and reads the side file again.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        raw = os.read(descriptor, os.fstat(descriptor).st_size)
        found = list(_NOT_ON_DISK.finditer(raw))
        if found and _Side.parse(raw) == side:
            os.pwrite(descriptor, b"true ", found[-1].start("word"))  # as long as the other word
    finally:
        os.close(descriptor)


def _note_marks(_folder: str, items: list[tuple[StoredIndex, ObjectStamp]]) -> None:
    for index, stamp in items:
        with contextlib.suppress(OSError):
            index.mark(stamp)


_MARKS: Final[BackgroundFlush[tuple[StoredIndex, ObjectStamp]]] = BackgroundFlush(_note_marks)
await_marks: Final = _MARKS.join
"""Returns when all copies that this process has fetched are on the disk, and marked."""


def place_of(address: Address, folder: str) -> Path:
    """Returns the folder of the copies of an object, which no other object has."""
    return Path(folder, ".trackbed", *_names(address))


def _names(address: Address) -> list[str]:
    """Returns names of folders for an object, which no other object has, on this store or another."""
    parts = [address.scheme, stores.endpoint_of(address) or "-", address.bucket or "-", *address.key.split("/")]
    return [_as_name(part) for part in parts]


def _as_name(part: str) -> str:
    """Returns a file name for a part of an address.

    >>> _as_name("corpus_text_document.idx"), _as_name(".."), _as_name("")
    ('corpus_text_document.idx', '%2E%2E', '%')
    """
    name = quote(part, safe="") or "%"
    if not name.strip("."):
        name = name.replace(".", "%2E")
    if len(name) > _LONGEST_NAME:
        name = f"{name[: _LONGEST_NAME - 17]}-{hashlib.sha256(part.encode()).hexdigest()[:16]}"
    return name


def _lengths_in(path: Path, where: str) -> npt.NDArray[np.int32]:
    """Returns the lengths in a copy, mapped; `where` is named in errors."""
    with path.open("rb") as file:
        header = decode_header(file.read(HEADER_BYTES), path=where)
    if header.pointers_at > path.stat().st_size:
        raise FormatError(
            f"{where}: {header.sequence_count} lengths must end in the file, found {path.stat().st_size} bytes"
        )
    if not header.sequence_count:
        return np.empty(0, dtype="<i4")
    return np.memmap(path, dtype="<i4", mode="r", offset=HEADER_BYTES, shape=(header.sequence_count,))


def _size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return -1
