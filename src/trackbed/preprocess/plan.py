"""Cutting the input into chunks that workers take one at a time. Pure: sizes in, byte ranges out."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from trackbed.preprocess.inputs import InputFile, Layout

__all__ = ["Chunk", "Piece", "plan_chunks"]


@dataclass(frozen=True, slots=True)
class Piece:
    """The lines of a file that begin in its bytes `[start, stop)`; of a plain text, the whole file.

    Nobody has to look for line ends to make such ranges: whoever reads a piece goes on to the end of its last
    line, and begins behind the first line end that is not before `start - 1`.
    """

    file: InputFile
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """What a worker tokenises at a time: at least one piece, in the order of the input."""

    pieces: tuple[Piece, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of input that are done with when this chunk is."""
        return sum(piece.stop - piece.start for piece in self.pieces)

    def __str__(self) -> str:
        first, last = self.pieces[0], self.pieces[-1]
        if len(self.pieces) == 1:
            return f"{first.file.path}: bytes [{first.start}, {first.stop})"
        return f"{first.file.path} to {last.file.path} ({len(self.pieces)} pieces)"


def plan_chunks(files: Iterable[InputFile], *, chunk_bytes: int) -> list[Chunk]:
    """Chunks that cover the files in order: parts of large files, and small files together.

    Args:
        files: what is to be read.
        chunk_bytes: size that a chunk exceeds only where a single plain text does, at least 1.
    """
    chunks: list[Chunk] = []
    pieces: list[Piece] = []
    filled = 0
    for piece in _cut(files, chunk_bytes):
        size = piece.stop - piece.start
        if pieces and filled + size > chunk_bytes:
            chunks.append(Chunk(tuple(pieces)))
            pieces, filled = [], 0
        pieces.append(piece)
        filled += size
    return [*chunks, Chunk(tuple(pieces))] if pieces else chunks


def _cut(files: Iterable[InputFile], chunk_bytes: int) -> Iterator[Piece]:
    for file in files:
        if file.layout is Layout.PLAIN_TEXT:
            yield Piece(file, 0, file.size_bytes)
        else:
            for start in range(0, file.size_bytes, chunk_bytes):
                yield Piece(file, start, min(start + chunk_bytes, file.size_bytes))
