"""The lease of a folder of an object store: one job at a time keeps checkpoints there.

A file system knows when the process that holds a lock ends. A store does not: the holder writes an object again and
again, and is taken for dead once it has not done so for a while. Each write says which version it replaces, so that two
jobs never both hold the lease; a job that has lost it commits nothing any more.
"""

import logging
import time
from threading import Event, Lock, Thread
from typing import Final, NamedTuple
from uuid import uuid4

import orjson

from trackbed.cancellation import check_cancelled
from trackbed.checkpoint.io.stored_folder import StoredFolder
from trackbed.errors import CheckpointError, StoreError
from trackbed.files import stores
from trackbed.files.publish import Writer, own_writer, state_of_writer
from trackbed.files.stores import ObjectVersion, parse_address
from trackbed.files.stores.time_limit import at_most

logger = logging.getLogger(__name__)

LEASE_NAME: Final = "trackbed.lease"
RENEW_SECONDS: Final = 10.0
LEASE_SECONDS: Final = 30.0
"""Seconds without a renewal after which the holder is taken for dead."""
_LOOK_SECONDS: Final = 1.0
_SHORT_SECONDS: Final = 5.0
_held: Final[set[str]] = set()
"""Leases of this process."""
_MOST_BYTES: Final = 1 << 16


class _Held(NamedTuple):
    """Contents of the object."""

    version: ObjectVersion
    writer: str
    """The process that holds the lease; empty if it was given back."""


class Lease:
    """The lease of a folder, which a thread renews. It ends with `release`, or some time after the process.

    Args:
        folder: the folder.

    Raises:
        CheckpointError: another job holds it. Its end is waited for if it cannot be known whether it lives.
        StoreError: the store refuses, or does not answer in time.
    """

    def __init__(self, folder: StoredFolder) -> None:
        self._folder = folder
        self._address = parse_address(f"{folder}/{LEASE_NAME}")
        self._own = f"{own_writer()}.{uuid4().hex}"
        self.previous: str | None = None
        """The process that has held it before, and is dead."""
        self._lost = ""
        self._version = self._take()
        self._ended = Event()
        self._lock = Lock()
        """Held while the object is written, and its version changes."""
        Thread(target=self._renew, daemon=True, name="trackbed lease").start()

    def check(self) -> None:
        """Checks that this job holds the lease.

        Raises:
            CheckpointError: it has lost it.
        """
        if self._lost:
            raise CheckpointError(f"{self._folder}: must be kept by this job, but {self._lost}")

    def release(self) -> None:
        """Gives the lease back."""
        if self._ended.is_set():
            return
        self._ended.set()
        _held.discard(self._own)
        if not self._lock.acquire(timeout=_LOOK_SECONDS):
            logger.warning("%s: must be given back, but the store does not answer", self._address.text)
            return
        try:
            with at_most(_SHORT_SECONDS):
                if not self._lost:
                    stores.put_if(self._address, self._content(""), self._version)
        except StoreError as error:
            logger.warning("%s: must be given back, but: %s", self._address.text, error)
        finally:
            self._lock.release()

    def _take(self) -> ObjectVersion:
        held = self._read()
        started = time.monotonic()
        while held is not None and held.writer and not self._is_dead(held):
            if time.monotonic() - started > LEASE_SECONDS:
                break  # it was not renewed
            if time.monotonic() - started < _LOOK_SECONDS:
                logger.warning(
                    "%s: was kept by %s and not given back: waiting %.0f s for a sign of life of it",
                    self._folder,
                    _name_of(held.writer),
                    LEASE_SECONDS,
                )
            self._pause()
            found = self._read()
            if found is not None and found != held and found.writer:
                raise self._refusal(_name_of(found.writer))
            held = found
        version = stores.put_if(self._address, self._content(self._own), None if held is None else held.version)
        if version is None:
            raise self._refusal("another process, which has come first,")
        _held.add(self._own)
        self.previous = None if held is None or not held.writer else held.writer.rpartition(".")[0]
        return version

    def _is_dead(self, held: _Held) -> bool:
        """True if the holder has ended on this host.

        Raises:
            CheckpointError: it is of this process.
        """
        process = held.writer.rpartition(".")[0]
        if process == own_writer():
            if held.writer in _held:
                raise self._refusal(_name_of(held.writer))
            return True  # it could not be given back
        return state_of_writer(process) is Writer.dead

    def _refusal(self, holder: str) -> CheckpointError:
        return CheckpointError(
            f"{self._folder}: must be kept by one job, but {holder} keeps checkpoints in it: end it, or choose another "
            "folder"
        )

    @staticmethod
    def _pause() -> None:
        for _ in range(10):
            check_cancelled()
            time.sleep(_LOOK_SECONDS / 10)

    def _renew(self) -> None:
        """Writes the object again and again, on a thread."""
        while not self._ended.wait(RENEW_SECONDS):
            try:
                with self._lock:
                    if self._ended.is_set():
                        return
                    version = stores.put_if(self._address, self._content(self._own), self._version)
                    # A write whose answer was lost may have made a version of which this job has not heard.
                    held = self._read() if version is None else None
                    if held is not None and held.writer == self._own:
                        version = held.version
                    if version is not None:
                        self._version = version
                        continue
                    self._lost = "another job has taken it over, as this one gave no sign of life"
            except (StoreError, CheckpointError) as error:
                logger.warning("%s: must be renewed, but: %s", self._address.text, error)
                continue
            logger.error("%s: %s", self._folder, self._lost)
            return

    def _read(self) -> _Held | None:
        try:
            version, content = stores.read_version(self._address, most_bytes=_MOST_BYTES)
        except FileNotFoundError:
            return None
        try:
            return _Held(version, str(orjson.loads(content)["writer"]))
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"{self._address.text}: must be the lease of a folder, but cannot be read: {error}"
            ) from error

    @staticmethod
    def _content(writer: str) -> bytes:
        return orjson.dumps({"writer": writer, "write_id": uuid4().hex})


def _name_of(writer: str) -> str:
    """Number and host of the process that holds a lease, for messages."""
    host, _, rest = writer.partition(".")
    return f"process {rest.partition('.')[0]} of {host.rpartition('-')[0] or host}"
