"""Entries of the cache, and requests for them: what decides an index, and how it is built if it is missing."""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

_CANONICAL: Final = json.JSONEncoder(sort_keys=True, separators=(",", ":"), allow_nan=False).encode

Decisions = Mapping[str, Any]
"""Everything that decides the bytes of an entry, as JSON values by name."""

_WORDS: Final = {
    "data": "other files, as of a corpus that was made again",
    "datasets": "other ones, or of other data",
}
"""Descriptions of decisions whose values are checksums and counts of bytes."""


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """dtype and shape of an array of an entry."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    """Lengths of the axes; -1 for one that is known only when the array was built."""
    least_rows: int = 0
    """Fewest rows of a whole array."""

    def fits(self, dtype: np.dtype[Any], shape: tuple[int, ...]) -> bool:
        """True for an array of this dtype and shape."""
        is_alike = dtype == self.dtype and len(shape) == len(self.shape)
        return is_alike and all(one in (-1, other) for one, other in zip(self.shape, shape, strict=True))


class DataPart(Protocol):
    """The part of the data that an index is computed from: its files may be replaced under the same identity."""

    @property
    def stamps(self) -> str:
        """Inode, size and time of the files when they were opened, as text."""

    @property
    def checksum(self) -> str:
        """CRC-32 of that part in eight hexadecimal digits. May read all of it."""


class Entry(NamedTuple):
    """One index, whether it is in the cache or not.

    Its files are `<directory>/<stem>-description.txt` and `<directory>/<stem>-<array>.npy`, with Megatron
    Core's names; what is Trackbed's own lies in `<directory>/.trackbed/`.
    """

    directory: Path
    stem: str
    """md5 of the description, class and split, as Megatron Core joins them."""
    description: str
    """Text of `description.txt`."""
    arrays: tuple[str, ...]
    """Names of the arrays, in the order in which they are written."""
    decisions: Decisions
    """Everything that decides the bytes."""
    megatron: bool = True
    """True if Megatron Core can read it; otherwise it lies under its fingerprint."""
    known_fingerprint: str | None = None
    """Fingerprint of the decisions if the caller has computed it, else None."""
    data: DataPart | None = None
    """The part of the data that the arrays are computed from; None where the decisions hold all of it."""

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the decisions."""
        return self.known_fingerprint or fingerprint(self.decisions)

    @property
    def own_folder(self) -> str:
        """The folder that is Trackbed's."""
        return f"{self.directory}/.trackbed"

    @property
    def shared(self) -> "EntryLocation":
        """The location where Megatron Core looks for it."""
        return EntryLocation(f"{self.directory}", self.stem, f"{self.directory}/.trackbed/{self.stem}.json")

    def location(self, *, is_aside: bool) -> "EntryLocation":
        """Returns one of its two locations."""
        return self.aside if is_aside else self.shared

    @property
    def aside(self) -> "EntryLocation":
        """Its location if the shared one holds another entry."""
        folder = f"{self.directory}/.trackbed/{self.fingerprint}"
        return EntryLocation(folder, self.stem, f"{folder}/manifest.json")


class EntryLocation(NamedTuple):
    """Folder and names of the files of an entry, as text: thousands of entries are looked up."""

    directory: str
    stem: str
    manifest: str

    def array(self, name: str) -> str:
        """Path of one of the arrays."""
        return f"{self.directory}/{self.stem}-{name}.npy"

    def names(self, arrays: tuple[str, ...]) -> list[str]:
        """File names of description and arrays."""
        return [f"{self.stem}-description.txt", *[f"{self.stem}-{name}.npy" for name in arrays]]

    def paths(self, arrays: tuple[str, ...]) -> list[str]:
        """All paths, the manifest's last."""
        start = f"{self.directory}/{self.stem}-"
        return [f"{start}description.txt", *[f"{start}{name}.npy" for name in arrays], self.manifest]


def canonical(decisions: Decisions) -> str:
    """Returns the JSON text of decisions, the same for equal ones: keys sorted, no spaces, doubles in full.

    >>> canonical({"b": 0.1, "a": [1, None]})
    '{"a":[1,null],"b":0.1}'
    """
    return _CANONICAL(decisions)


def fingerprint(decisions: Decisions) -> str:
    """Returns 64 hexadecimal digits, which differ where the decisions do.

    >>> fingerprint({"seed": 1})[:8], fingerprint({"seed": 2})[:8]
    ('fbe47f6d', 'a61e75dc')
    """
    return hashlib.sha256(canonical(decisions).encode()).hexdigest()


def differences(old: Decisions, new: Decisions) -> str:
    """Returns a description of each difference: `name: old, now new`.

    >>> differences({"seed": 1, "size": 5}, {"seed": 2, "size": 5})
    'seed: 1, now 2'
    """
    names = sorted({*old, *new})
    return "; ".join(
        f"{name}: {_WORDS.get(name) or f'{shortened(old.get(name))}, now {shortened(new.get(name))}'}"
        for name in names
        if old.get(name) != new.get(name)
    )


def shortened(value: Any) -> str:
    """Returns the JSON text of a value, cut to 80 characters."""
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


Arrays = Mapping[str, npt.NDArray[Any]]
"""Arrays of an entry by name."""


class Allocate(Protocol):
    """Allocates the arrays that a build fills: large ones in their files."""

    def __call__(self, name: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """Returns an array to fill."""
        ...

    def filled(self, count: int, *names: str) -> None:
        """Records that the first `count` elements along the first axis of these arrays are final."""
        ...


class Ingredients(Protocol):
    """Everything that decides the arrays of an entry."""

    def build(self, allocate: Allocate) -> Arrays:
        """Builds the arrays, valid until the next ones are allocated."""
        ...

    def expected(self) -> Mapping[str, ArraySpec]:
        """Returns dtypes and shapes of the arrays. May read the data; called only where no manifest tells."""
        ...

    def cost(self) -> float:
        """Estimates the nanoseconds of one thread to build the arrays, without reading the data."""
        ...


class Kind:
    """Builds entries of one kind: one at a time, unless a subclass builds many at once.

    Args:
        is_blend: True for the index of a blend, which one thread builds, and which is scheduled first.
    """

    def __init__(self, *, is_blend: bool = False) -> None:
        self.is_blend = is_blend

    def build(
        self, requests: "Sequence[Request]", allocate: "Callable[[Request], Allocate]"
    ) -> "Iterator[Sequence[tuple[Request, Arrays]]]":
        """Builds the arrays of each request, and yields them in batches that are committed at once."""
        for request in requests:
            yield [(request, request.ingredients.build(allocate(request)))]

    def is_small(self, request: "Request") -> bool:
        """True if the entry is built in batches with others, in less time than its files take."""
        return False

    def read_ahead(self, request: "Request") -> None:
        """Starts to read the data of a request from the disk."""


class Request(NamedTuple):
    """An entry that is wanted."""

    entry: Entry
    kind: Kind
    ingredients: Any
    """`Ingredients`, of the type that `kind` builds."""


class _InMemory:
    def __call__(self, name: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        return np.empty(shape, dtype=dtype)

    def filled(self, count: int, *names: str) -> None:
        pass


in_memory: Allocate = _InMemory()
"""Allocates arrays that are kept in no cache."""
