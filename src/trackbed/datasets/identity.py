"""The identity of a dataset: everything that its samples are computed from, as saved positions compare it.

It has three parts. The fingerprint is a SHA-256 of options, order and files, folders included. The content has the same
values as text, without folders: it recognises moved files, and says what differs. The checksum of the data notices
files that were replaced under the same sizes and ends.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from functools import cached_property
from threading import Lock
from typing import Any, Final, NamedTuple, Protocol

from trackbed.cache.entry import differences
from trackbed.daemon_threads import call_on_thread
from trackbed.datasets.config import COMPUTED
from trackbed.errors import ArgumentError

_OF: Final = "fingerprint"
_DIGITS: Final = 16
_SIZES: Final = {"size", "num_samples"}
_TOKENS: Final = "tokens"
_LONG: Final = (400, 32)
"""Characters up to which a value is kept, and digits of the digest of a longer one."""
_LONG_OF_PACKS: Final = (40, 16)
"""The same of packs, whose position fits into 1 KB; other orders keep what older versions have saved."""
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
        self._checksum: str | None = None
        self._future: Future[str] | None = None
        """The computation in the background; None before it was started."""
        self._process = 0
        """Id of the process that computes it in the background: a fork of it has no such thread. 0 before."""

    def start(self) -> None:
        """Starts to compute it in the background."""
        with _STARTING:
            if self._checksum is None and self._process != os.getpid():
                self._process = os.getpid()
                self._future = call_on_thread(self._compute, "trackbed-checksum")

    def state(self) -> dict[str, str]:
        """Returns the checksum, and the stamps if there are any, for a saved position. Waits as `result` does."""
        return {"data_checksum": self.result(), **({} if self.stamps is None else {"data_stamps": self.stamps})}

    def confirm(self, state: Mapping[str, Any]) -> str:
        """Returns the checksum, to be compared with the checksum in a saved position.

        If the position has the stamps of the data, it has their checksum, too, and nothing is read.
        """
        saved = state.get("data_checksum")
        if self.stamps is not None and state.get("data_stamps") == self.stamps and isinstance(saved, str):
            self._checksum = saved
        return self.result()

    def result(self) -> str:
        """Returns the checksum; waits for the background thread, or computes it.

        Raises:
            Exception: `compute` raised it.
        """
        if self._checksum is None:
            in_background = self._future if self._process == os.getpid() else None
            self._checksum = self._compute() if in_background is None else in_background.result()
        return self._checksum

    def __reduce__(self) -> tuple[Callable[..., "DataChecksum"], tuple[str, str | None]]:
        """Pickles the checksum, which is computed first if necessary."""
        return _known, (self.result(), self.stamps)


def _known(checksum: str, stamps: str | None = None) -> DataChecksum:
    return DataChecksum(lambda: checksum, stamps=stamps)


class Identified(Protocol):
    """A dataset, as its identity asks it."""

    @property
    def data_checksum(self) -> DataChecksum:
        """Checksum of the data."""

    def identity_fields(self) -> Mapping[str, Any] | None:
        """Returns everything that decides the samples, by name, without folders.

        None for a class of others, whose samples may depend on anything.
        """


class Identity:
    """Everything that the samples of a dataset are computed from, for saved positions.

    Args:
        fingerprint: SHA-256 of options, order and files, folders included.
        dataset: the dataset. It is asked when a position is saved or loaded: of thousands of datasets of a blend each
            has an identity, and none is asked.
    """

    def __init__(self, fingerprint: str, dataset: Identified) -> None:
        self.fingerprint = fingerprint
        self._dataset = dataset

    @property
    def data(self) -> DataChecksum:
        """Checksum of the data."""
        return self._dataset.data_checksum

    @cached_property
    def content(self) -> str | None:
        """The fields as JSON, in which a digest stands for a long value; None where nothing tells them.

        The text begins with a part of the fingerprint: a checkpoint that is loaded over a new state may leave the new
        content beside the old fingerprint, and is then not believed.
        """
        fields = self._dataset.identity_fields()
        if fields is None:
            return None
        limits = _LONG
        if fields.get("order") == "packed":
            limits = _LONG_OF_PACKS
            fields = {name: value for name, value in fields.items() if name not in _SIZES}
        brief = {name: _brief(value, *limits) for name, value in fields.items()}
        return json.dumps({_OF: self.fingerprint[:_DIGITS], **brief})

    def state(self) -> dict[str, str]:
        """Returns the checksum of the data and the content, for a saved position. Waits for the checksum."""
        return {**self.data.state(), **({} if self.content is None else {"content": self.content})}

    def recognises(self, state: Mapping[str, Any]) -> bool:
        """True if a position is in the samples of this dataset, under the same fingerprint or another.

        They are if all that decides them is the same: only the folders of files may be others, and in the order
        "instant" the number of samples.

        Raises:
            ArgumentError: a value that decides the samples differs; the message names all that do.
        """
        saved = _read(state.get("content"), state.get("fingerprint"))
        current = None if saved is None else _read(self.content, self.fingerprint)
        if saved is None or current is None:
            return False
        changes = _find_changes(saved, current)
        if changes:
            consumed = state.get("consumed_samples")
            raise ArgumentError(
                f"a run can resume only with the samples that it was trained on, found others: {changes}; to read the "
                f"new ones from the same place on, give a new loader consumed_samples={consumed!r}"
            )
        return True

    def __reduce__(self) -> tuple[Callable[..., "Identity"], tuple[Any, ...]]:
        """Pickles the values, which are computed first: another process has no dataset to ask."""
        return _copy_of, (self.fingerprint, self.content, self.data)


class _Known(NamedTuple):
    """What is known of a dataset of another process."""

    data_checksum: DataChecksum

    def identity_fields(self) -> None:
        """Returns nothing: the copy of the identity has its content."""


def _copy_of(fingerprint: str, content: str | None, data: DataChecksum) -> Identity:
    copy = Identity(fingerprint, _Known(data))
    copy.content = content
    return copy


class DatasetFingerprint(str):
    """Fingerprint of a dataset with its identity: a sampler that receives it saves and compares that, too."""

    __slots__ = ("identity",)

    identity: Identity

    @classmethod
    def of(cls, fingerprint: str, dataset: Identified) -> "DatasetFingerprint":
        """Returns the fingerprint of a dataset."""
        text = cls(fingerprint)
        text.identity = Identity(fingerprint, dataset)
        return text

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        """Pickles the text only."""
        return str, (str(self),)


def joined(contents: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the values of several datasets by name: one where all have the same, else a list.

    >>> joined([{"seed": 1, "num_samples": 5}, {"seed": 1, "num_samples": 6}])
    {'seed': 1, 'num_samples': [5, 6]}
    """
    columns: dict[str, list[Any]] = {}
    num_contents = 0
    for content in contents:
        num_contents += 1
        for name, value in content.items():
            columns.setdefault(name, []).append(value)
    return {name: values[0] if values.count(values[0]) == num_contents else values for name, values in columns.items()}


def _read(text: object, fingerprint: object) -> dict[str, Any] | None:
    """Returns the values of a text of `Identity.content`; None if it is none, or belongs to another fingerprint."""
    try:
        values = json.loads(text) if isinstance(text, str) else None
    except (ValueError, RecursionError):
        return None
    is_content = (
        isinstance(values, dict) and isinstance(fingerprint, str) and values.pop(_OF, "") == fingerprint[:_DIGITS]
    )
    return values if is_content else None


def _find_changes(saved: Mapping[str, Any], current: Mapping[str, Any]) -> str:
    """Returns what differs between two contents, as `name: saved, now current`; nothing if nothing does.

    The number of samples may differ in orders without an index, where it does not change the first ones.
    """
    ignored = _SIZES if saved.get("order") == current.get("order") in COMPUTED else set()
    if not (saved.get(_TOKENS) and current.get(_TOKENS)):
        ignored = {*ignored, _TOKENS}  # of objects in stores, which have tags instead
    old, new = ({name: value for name, value in one.items() if name not in ignored} for one in (saved, current))
    return differences(old, new)


def plain(value: Any) -> Any:
    """Converts a value that JSON lacks: numbers of NumPy, tokenizers, and other objects to the name of their class."""
    if hasattr(value, "item"):
        return value.item()
    identifiers = getattr(value, "unique_identifiers", None)
    return dict(identifiers) if identifiers is not None else type(value).__name__


def _brief(value: Any, most_characters: int, digits: int) -> Any:
    text = json.dumps(value, default=plain)
    if len(text) <= most_characters:
        return json.loads(text)
    return f"SHA-256 {hashlib.sha256(text.encode()).hexdigest()[:digits]}"
