"""An entry of the cache: the arrays of one index, their names, dtypes and shapes."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from trackbed.cache.fingerprint import Decisions, fingerprint

__all__ = ["ArraySpec", "DataPart", "Entry"]


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """dtype and shape of an array of an entry."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]


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
    def own(self) -> str:
        """The folder that is Trackbed's."""
        return f"{self.directory}/.trackbed"

    @property
    def shared(self) -> "Place":
        """The place where Megatron Core looks for it."""
        return Place(f"{self.directory}", self.stem, f"{self.directory}/.trackbed/{self.stem}.json")

    def place(self, *, is_aside: bool) -> "Place":
        """Returns one of its two places."""
        return self.aside if is_aside else self.shared

    @property
    def aside(self) -> "Place":
        """Its place if the shared one holds another entry."""
        folder = f"{self.directory}/.trackbed/{self.fingerprint}"
        return Place(folder, self.stem, f"{folder}/manifest.json")


class Place(NamedTuple):
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
