"""Line numbers of bad records, for readers that process the segments of a plan in order."""

from typing import Final

from trackbed.preprocess.input_segments import InputSegment
from trackbed.preprocess.inputs import InputFile
from trackbed.preprocess.open_input import open_input
from trackbed.preprocess.readers import BadRecord

_READ_BYTES: Final = 1 << 20


class LineCounter:
    """Counts the lines of the segments read so far.

    A segment starts anywhere in a file, so its reader cannot know the line number without reading everything before.

    Args:
        lines: lines before the next segment in its file; ignored if that segment starts the file.
    """

    def __init__(self, lines: int = 0) -> None:
        self.lines = lines

    def describe(self, segment: InputSegment, record: BadRecord) -> str:
        """Returns location and fault of a record in the next segment: `corpus.jsonl:2: ...`."""
        return f"{segment.file.name}:{self.line_of(segment, record) + 1}: {record.reason}"

    def line_of(self, segment: InputSegment, record: BadRecord) -> int:
        """Returns the line of a record in the next segment, from 0."""
        return self._before(segment) + record.line

    def advance(self, segment: InputSegment, lines: int) -> None:
        """Moves past the next segment, which has `lines` lines."""
        self.lines = self._before(segment) + lines

    def _before(self, segment: InputSegment) -> int:
        return 0 if segment.start == 0 else self.lines


def count_lines_before(file: InputFile, offset: int) -> int:
    """Returns the number of lines of a file that start in its first `offset` bytes; reads all of them.

    Args:
        file: an input that is not compressed.
        offset: at most the size of the file.
    """
    if offset == 0:
        return 0
    lines, remaining = 1, offset - 1  # a line end just before `offset` begins a line at it
    with open_input(file) as raw:
        while remaining > 0 and (data := raw.read(min(remaining, _READ_BYTES))):
            lines += data.count(b"\n")
            remaining -= len(data)
    return lines
