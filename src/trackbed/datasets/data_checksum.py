"""Checksums of the data that samples are computed from, as files may be replaced under the same identity."""

import os
from collections.abc import Callable, Mapping
from threading import Event, Lock, Thread
from typing import Any, Final, NamedTuple, Protocol

from trackbed.datasets.sample_content import find_changes, read_content
from trackbed.errors import ArgumentError

__all__ = ["DataChecksum", "DatasetFingerprint", "SampleIdentity"]

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


class _HasIdentity(Protocol):
    @property
    def earlier_fingerprints(self) -> tuple[str, ...]:
        """Fingerprints that earlier versions gave the dataset."""

    @property
    def data_checksum(self) -> DataChecksum:
        """Checksum of the dataset's data."""

    @property
    def sample_content(self) -> str | None:
        """Text that is equal for two datasets with the same samples; None if classes of others decide them."""


class _Known(NamedTuple):
    """Identity of a dataset that is elsewhere."""

    data_checksum: DataChecksum
    sample_content: str | None
    earlier_fingerprints: tuple[str, ...]


class SampleIdentity:
    """Everything that the samples of a dataset are computed from, for saved positions.

    Args:
        dataset: the dataset; asked when it is needed.
    """

    def __init__(self, dataset: _HasIdentity) -> None:
        self._dataset = dataset

    @property
    def data(self) -> DataChecksum:
        """Checksum of the data."""
        return self._dataset.data_checksum

    def state(self) -> dict[str, str]:
        """Returns the checksum of the data and what decides the samples, for a saved position."""
        content = self._dataset.sample_content
        return {**self.data.state(), **({} if content is None else {"content": content})}

    def recognises(self, state: Mapping[str, Any], fingerprint: str | None) -> bool:
        """True if the samples of a position are those of this dataset, under the same fingerprint or another.

        They are if all that decides them is the same: only the folders of files may be others, and in the order
        "instant" the number of samples.

        Args:
            state: the position.
            fingerprint: that of this dataset.

        Raises:
            ArgumentError: a value that decides the samples differs; the message names all that do.
        """
        saved = read_content(state.get("content"), fingerprint=state.get("fingerprint"))
        text = None if saved is None else self._dataset.sample_content
        found = None if text is None else read_content(text, fingerprint=fingerprint)
        if saved is None or found is None:
            return False
        changes = find_changes(saved, found)
        if changes:
            place = state.get("consumed_samples")
            msg = (
                f"a run can resume only with the samples that it was trained on, found others: {changes}; to read the "
                f"new ones from the same place on, give a new loader consumed_samples={place!r}"
            )
            raise ArgumentError(msg)
        return True

    def was(self, fingerprint: object) -> bool:
        """True if an earlier version gave this fingerprint to the dataset."""
        return fingerprint in self._dataset.earlier_fingerprints

    def __reduce__(self) -> "tuple[type[SampleIdentity], tuple[_Known]]":
        """Pickles what is known of the dataset; computes it first."""
        return SampleIdentity, (_Known(self.data, self._dataset.sample_content, self._dataset.earlier_fingerprints),)


class DatasetFingerprint(str):
    """Fingerprint of a dataset, with what it stands for: a sampler that receives it saves and compares these, too."""

    __slots__ = ("identity",)

    identity: SampleIdentity
    """Everything that the samples are computed from."""

    @classmethod
    def of(cls, text: str, dataset: _HasIdentity) -> "DatasetFingerprint":
        """Returns the fingerprint `text` of a dataset."""
        made = cls(text)
        made.identity = SampleIdentity(dataset)
        return made

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        """Pickles the text only."""
        return str, (str(self),)
