"""Line numbers of bad records, for readers that process the segments of a plan in order."""

from trackbed.preprocess.input_segments import InputSegment
from trackbed.preprocess.readers import BadRecord

__all__ = ["LineCounter"]


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
        return f"{segment.file.path}:{self._before(segment) + record.line + 1}: {record.reason}"

    def advance(self, segment: InputSegment, lines: int) -> None:
        """Moves past the next segment, which has `lines` lines."""
        self.lines = self._before(segment) + lines

    def _before(self, segment: InputSegment) -> int:
        return 0 if segment.start == 0 else self.lines
