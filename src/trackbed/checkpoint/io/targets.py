"""Targets of what a rank writes: a file of a folder, or objects of a store. They can be pickled."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TypeAlias

import torch

from trackbed.checkpoint.format.extents import FileChecksum
from trackbed.checkpoint.io.file_writer import write_items
from trackbed.checkpoint.io.object_writer import write_objects
from trackbed.checkpoint.io.written_files import WrittenFiles
from trackbed.files.stores import Address, parse_address

Values: TypeAlias = Iterable[torch.Tensor | bytes]


def data_name(rank: int, number: int = 0) -> str:
    """Name of a file with items of a rank."""
    return f"__{rank}_{number}.distcp"


@dataclass(frozen=True, slots=True)
class FileTarget:
    """One file of a folder."""

    folder: Path
    name: str

    def __str__(self) -> str:
        """Path of the file."""
        return str(self.folder / self.name)

    def write(
        self, values: Values, poll: Callable[[], None] = lambda: None, *, direct: bool = True, in_place: bool = False
    ) -> WrittenFiles:
        """Writes values, and returns once they are on the disk.

        Args:
            values: tensors, and bytes of objects.
            poll: called again and again; may raise to end the work.
            direct: True to write past the page cache where the file system allows it.
            in_place: see `FileWriter`.

        Raises:
            OSError: the file cannot be written.
        """
        written = write_items(self.folder / self.name, values, direct=direct, in_place=in_place, poll=poll)
        files = {self.name: FileChecksum(written.num_bytes, written.crc)}
        return WrittenFiles.make(files, [(self.name, item) for item in written.items])


@dataclass(frozen=True, slots=True)
class ObjectsTarget:
    """Objects of a rank in a folder of a store."""

    address: str
    rank: int
    first: int
    """Number of the first object."""
    cuts: bool = True
    """True to cut large tensors."""
    in_flight: int = 4
    """Objects that are written at the same time."""

    def __str__(self) -> str:
        """Address of the first object."""
        return f"{self.address}/{data_name(self.rank, self.first)}"

    def write(
        self, values: Values, poll: Callable[[], None] = lambda: None, *, direct: bool = True, in_place: bool = False
    ) -> WrittenFiles:
        """Writes values, of which nothing may change meanwhile; see `FileTarget`.

        Raises:
            StoreError: the store refuses, or does not answer in time.
        """
        del direct, in_place
        names = (data_name(self.rank, number) for number in count(self.first))

        def address_of(name: str) -> Address:
            return parse_address(f"{self.address}/{name}")

        return write_objects(values, address_of, names, poll, cuts=self.cuts, in_flight=self.in_flight)


Target: TypeAlias = FileTarget | ObjectsTarget
