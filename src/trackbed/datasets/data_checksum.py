"""Checksums of the data that samples are computed from, as files may be replaced under the same identity."""

import os
from collections.abc import Callable, Mapping
from threading import Event, Lock, Thread
from typing import Any, Final, Protocol

__all__ = ["DataChecksum", "DatasetFingerprint"]

_STARTING: Final = Lock()


class DataChecksum:
    """Checksum of a dataset's data, computed once: in the background, or on first access.

    Args:
        compute: returns the checksum; may read all lengths.
        stamps: digest of the sizes and tags of the objects that all of the data lies in; None if some lies in files.
    """

    def __init__(self, compute: Callable[[], str], *, stamps: str | None = None) -> None:
        self._compute = compute
        self.stamps = stamps
        self._found: str | None = None
        self._error: Exception | None = None
        self._done: Event | None = None
        """Set when the background thread is done. Created with the thread: most datasets never start one."""
        self._worker = 0
        """Id of the process that runs the background thread; 0 before."""

    def start(self) -> None:
        """Starts to compute it in the background."""
        with _STARTING:
            if self._found is not None or self._worker == os.getpid():
                return
            self._done = Event()
            self._worker = os.getpid()
        Thread(target=self._work, name="trackbed-checksum", daemon=True).start()

    def state(self) -> dict[str, str]:
        """Returns the checksum, and the stamps if there are any, for a saved position. Waits as `result` does."""
        return {"data_checksum": self.result(), **({} if self.stamps is None else {"data_stamps": self.stamps})}

    def confirm(self, state: Mapping[str, Any]) -> str:
        """Returns the checksum for a comparison with that of a saved position.

        If the stamps of the position are those of the data, its checksum is, too, and nothing is read.
        """
        saved = state.get("data_checksum")
        if self.stamps is not None and state.get("data_stamps") == self.stamps and isinstance(saved, str):
            self._found = saved
        return self.result()

    def result(self) -> str:
        """Returns the checksum; waits for the background thread, or computes it.

        Raises:
            Exception: `compute` raised it.
        """
        if self._found is None and self._worker == os.getpid() and self._done is not None:
            self._done.wait()
        if self._error is not None:
            raise self._error
        if self._found is None:
            self._found = self._compute()
        return self._found

    def __reduce__(self) -> tuple[Callable[..., "DataChecksum"], tuple[str, str | None]]:
        """Pickles the checksum, which is computed first if necessary."""
        return _known, (self.result(), self.stamps)

    def _work(self) -> None:
        try:
            self._found = self._compute()
        except Exception as error:  # noqa: BLE001  `result` raises it
            self._error = error
        if self._done is not None:
            self._done.set()


def _known(found: str, stamps: str | None = None) -> DataChecksum:
    return DataChecksum(lambda: found, stamps=stamps)


class _HasData(Protocol):
    @property
    def earlier_fingerprints(self) -> tuple[str, ...]:
        """Fingerprints that earlier versions gave the dataset."""

    @property
    def data_checksum(self) -> DataChecksum:
        """Checksum of the dataset's data."""


class DatasetFingerprint(str):
    """Fingerprint of a dataset, with the checksum of its data: a sampler that receives it keeps both."""

    __slots__ = ("_dataset",)

    _dataset: _HasData

    @classmethod
    def of(cls, text: str, dataset: _HasData) -> "DatasetFingerprint":
        """Returns the fingerprint `text` of a dataset."""
        made = cls(text)
        made._dataset = dataset
        return made

    @property
    def data(self) -> DataChecksum:
        """Checksum of the data of the dataset."""
        return self._dataset.data_checksum

    def earlier(self) -> tuple[str, ...]:
        """Returns the fingerprints that earlier versions gave the dataset, which positions may have."""
        return self._dataset.earlier_fingerprints

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        """Pickles the text only."""
        return str, (str(self),)
