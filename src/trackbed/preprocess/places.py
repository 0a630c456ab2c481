"""Where records are, for whoever goes through the pieces of a plan in order."""

from trackbed.preprocess.pieces import Piece
from trackbed.preprocess.readers import BadRecord

__all__ = ["Places"]


class Places:
    """Counts the lines of the pieces that have been passed.

    A piece begins somewhere in a file, and who reads it cannot know at which line without reading all before it.
    """

    def __init__(self) -> None:
        self._lines = 0

    def describe(self, piece: Piece, record: BadRecord) -> str:
        """Where a record of the next piece is, and what is wrong with it: `corpus.jsonl:2: ...`."""
        return f"{piece.file.path}:{self._before(piece) + record.line + 1}: {record.reason}"

    def passed(self, piece: Piece, lines: int) -> None:
        """Go on behind the next piece, which has so many lines."""
        self._lines = self._before(piece) + lines

    def _before(self, piece: Piece) -> int:
        return 0 if piece.start == 0 else self._lines
