"""Checksums of the data that samples are computed from: files may be replaced under the same identity.

Shapes: N sequences.
"""

import os
from collections.abc import Callable
from threading import Event, Lock, Thread
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from trackbed.files import crc32
from trackbed.kernels import poll_now

__all__ = ["DataChecksum", "DatasetFingerprint", "checksum_lengths"]

_STRIDE: Final = 1 << 20
"""Lengths that are summed up between two looks at the watch."""


def checksum_lengths(lengths: npt.NDArray[Any]) -> str:
    """CRC-32 of `[N]` lengths as int32, little endian: eight hexadecimal digits.

    >>> checksum_lengths(np.array([3, 1, 2])), checksum_lengths(np.array([3, 2, 1]))
    ('6ae8dc8a', 'f6d27487')
    """
    value = 0
    for start in range(0, len(lengths), _STRIDE):
        poll_now(start)
        value = crc32(np.ascontiguousarray(lengths[start : start + _STRIDE], dtype="<i4").data, value)
    return f"{value:08x}"


_STARTING: Final = Lock()


class DataChecksum:
    """The checksum of the data behind a dataset, computed once: in the background, or when it is asked for.

    Args:
        compute: gives the checksum; may read all lengths.
    """

    def __init__(self, compute: Callable[[], str]) -> None:
        self._compute = compute
        self._found: str | None = None
        self._error: Exception | None = None
        self._done: Event | None = None
        """Set when it was computed in the background; made there, as most of thousands never are."""
        self._worker = 0
        """Number of the process that computes it in the background; 0 before."""

    def start(self) -> None:
        """Begin to compute it in the background."""
        with _STARTING:
            if self._found is not None or self._worker == os.getpid():
                return
            self._done = Event()
            self._worker = os.getpid()
        Thread(target=self._work, name="trackbed-checksum", daemon=True).start()

    def result(self) -> str:
        """The checksum; waits for it.

        Raises:
            Exception: the data cannot be read.
        """
        if self._found is None and self._worker == os.getpid() and self._done is not None:
            self._done.wait()
        if self._error is not None:
            raise self._error
        if self._found is None:
            self._found = self._compute()
        return self._found

    def __reduce__(self) -> tuple[Callable[[str], "DataChecksum"], tuple[str]]:
        """A copy knows the checksum, for which it may have to be computed now."""
        return _known, (self.result(),)

    def _work(self) -> None:
        try:
            self._found = self._compute()
        except Exception as error:  # noqa: BLE001  it is raised where the checksum is asked for
            self._error = error
        if self._done is not None:
            self._done.set()


def _known(found: str) -> DataChecksum:
    return DataChecksum(lambda: found)


class _HasData(Protocol):
    @property
    def data_checksum(self) -> DataChecksum:
        """The checksum of the data behind it."""


class DatasetFingerprint(str):
    """The fingerprint of a dataset, with the checksum of its data: a sampler that is given it keeps both."""

    __slots__ = ("_dataset",)

    _dataset: _HasData

    @classmethod
    def of(cls, text: str, dataset: _HasData) -> "DatasetFingerprint":
        """The fingerprint `text` of a dataset."""
        made = cls(text)
        made._dataset = dataset
        return made

    @property
    def data(self) -> DataChecksum:
        """The checksum of the dataset's data."""
        return self._dataset.data_checksum

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        """A copy is plain text."""
        return str, (str(self),)
