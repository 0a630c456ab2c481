"""An entry that was seen whole, and which files it was."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from trackbed.cache.entry import ArraySpec, Place
from trackbed.files import Stamp

__all__ = ["Sighting", "Stamps"]

Stamps = npt.NDArray[np.int64]
"""`[F, 3]` what files were when they were looked at, as `file_stamps` gives it: of an entry, the manifest's last."""


class Sighting(NamedTuple):
    """An entry that was seen whole."""

    place: Place
    names: tuple[str, ...]
    """Its arrays, in the order in which they are written."""
    specs: Mapping[str, ArraySpec]
    """What its arrays hold."""
    stamps: Stamps
    fingerprint: str
    """SHA-256 of what decided it."""
    data_crc32: str = ""
    """CRC-32 of the data that it was computed from; empty where its manifest does not tell."""

    @property
    def paths(self) -> list[str]:
        """`[F]` its files."""
        return self.place.paths(self.names)

    def stamp_of(self, name: str) -> Stamp:
        """The file of one of the arrays, as it was."""
        return Stamp(*self.stamps[1 + self.names.index(name)].tolist())
