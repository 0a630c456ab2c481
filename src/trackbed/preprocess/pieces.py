"""Pieces of input files: where a worker finds its records."""

import os
from dataclasses import dataclass
from typing import BinaryIO

from trackbed.errors import FormatError
from trackbed.preprocess.inputs import InputFile

__all__ = ["Block", "LongRecord", "Piece", "RowGroup", "check_size"]


@dataclass(frozen=True, slots=True)
class Piece:
    """The lines of a file that begin in its bytes `[start, stop)`; of a plain text, the whole file.

    Nobody has to look for line ends to make such ranges: whoever reads a piece goes on to the end of its last
    line, and begins behind the first line end that is not before `start - 1`.
    """

    file: InputFile
    start: int
    stop: int

    @property
    def text_bytes(self) -> int:
        """About how much there is to do."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Block(Piece):
    """Whole lines of a packed file, or all of its text. `[start, stop)` are the packed bytes read meanwhile."""

    text: bytes

    @property
    def text_bytes(self) -> int:
        """Bytes of the text."""
        return len(self.text)


@dataclass(frozen=True, slots=True)
class LongRecord(Piece):
    """A line or plain text of a packed file that has more bytes than a record may have. Its text was passed over."""

    @property
    def text_bytes(self) -> int:
        """Nothing is left to do."""
        return 0


@dataclass(frozen=True, slots=True)
class RowGroup(Piece):
    """Rows of a Parquet file. `[start, stop)` is a part of its size, shared out by what the groups take."""

    number: int
    """Which of the file's row groups it is."""
    unpacked_bytes: int
    """What all columns of the group take when they are unpacked."""

    @property
    def text_bytes(self) -> int:
        """Bytes of all columns; those that are wanted may be fewer."""
        return self.unpacked_bytes


def check_size(file: BinaryIO, planned: InputFile) -> None:
    """Refuse a file that has changed since the work was planned.

    Raises:
        FormatError: its size is another.
    """
    size = os.fstat(file.fileno()).st_size
    if size != planned.size_bytes:
        msg = f"{planned.path}: a file must keep its {planned.size_bytes} bytes while it is read, found {size}"
        raise FormatError(msg)
