"""Segments of input files, the units that workers read records from."""

from dataclasses import dataclass

from trackbed.preprocess.inputs import InputFile


@dataclass(frozen=True, slots=True)
class InputSegment:
    """The lines that start in bytes `[start, stop)` of a file; for a plain text, the whole file.

    Planning such ranges needs no search for line ends: the reader of a segment starts after the first line end at or
    after `start - 1`, and continues to the end of its last line.
    """

    file: InputFile
    start: int
    stop: int

    @property
    def text_bytes(self) -> int:
        """Estimate of the work, in bytes of text."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Block(InputSegment):
    """Whole lines of a compressed file, or all of its text. `[start, stop)` are the compressed bytes that it covers."""

    text: bytes

    @property
    def text_bytes(self) -> int:
        """Bytes of the text."""
        return len(self.text)


@dataclass(frozen=True, slots=True)
class LongRecord(InputSegment):
    """A line or plain text of a compressed file that exceeds the record limit. Its text was skipped."""

    @property
    def text_bytes(self) -> int:
        """Always 0, as there is nothing to tokenise."""
        return 0


@dataclass(frozen=True, slots=True)
class RowGroup(InputSegment):
    """Rows of a Parquet file. `[start, stop)` is a share of the file size, proportional to the size of the group."""

    number: int
    """Index of the row group in its file."""
    uncompressed_bytes: int
    """Uncompressed size of all columns of the group."""

    @property
    def text_bytes(self) -> int:
        """Bytes of all columns, an upper bound on those of the requested ones."""
        return self.uncompressed_bytes
