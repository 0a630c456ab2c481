"""Where records are, for whoever goes through the pieces of a plan in order."""

from trackbed.preprocess.pieces import Piece
from trackbed.preprocess.readers import BadRecord

__all__ = ["Places"]


class Places:
    """Counts the lines of the pieces that have been passed.

    A piece begins somewhere in a file, and who reads it cannot know at which line without reading all before it.

    Args:
        lines: lines before the next piece in its file, where that does not begin one.
    """

    def __init__(self, lines: int = 0) -> None:
        self.lines = lines

    def describe(self, piece: Piece, record: BadRecord) -> str:
        """Where a record of the next piece is, and what is wrong with it: `corpus.jsonl:2: ...`."""
        return f"{piece.file.path}:{self._before(piece) + record.line + 1}: {record.reason}"

    def passed(self, piece: Piece, lines: int) -> None:
        """Go on behind the next piece, which has so many lines."""
        self.lines = self._before(piece) + lines

    def _before(self, piece: Piece) -> int:
        return 0 if piece.start == 0 else self.lines
