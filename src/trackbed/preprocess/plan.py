"""Cutting the input into chunks that workers take one at a time.

Files that can be read from the middle are cut by arithmetic: sizes in, byte ranges out. Packed files cannot; one
process unpacks them as chunks are asked for, and the workers get their lines.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from trackbed.preprocess.inputs import InputFile, Layout, Packing
from trackbed.preprocess.pieces import Piece
from trackbed.preprocess.row_groups import read_row_groups
from trackbed.preprocess.unpack import read_blocks, read_whole

__all__ = ["Chunk", "plan_chunks"]


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


def plan_chunks(files: Iterable[InputFile], *, chunk_bytes: int, max_record_bytes: int) -> Iterator[Chunk]:
    """Chunks that cover the files in order: parts of large files, and small files together.

    Args:
        files: what is to be read.
        chunk_bytes: size that the texts of a chunk exceed only where a single plain text, line or row group does, at
            least 1.
        max_record_bytes: size that a line or plain text may have, at least 1; larger ones of packed files are passed
            over.

    Raises:
        FormatError: a packed file is damaged, or is not as large any more as it was.
    """
    pieces: list[Piece] = []
    filled = 0
    for file in files:
        for piece in _cut(file, chunk_bytes, max_record_bytes):
            if pieces and filled + piece.text_bytes > chunk_bytes:
                yield Chunk(tuple(pieces))
                pieces, filled = [], 0
            pieces.append(piece)
            filled += piece.text_bytes
    if pieces:
        yield Chunk(tuple(pieces))


def _cut(file: InputFile, chunk_bytes: int, max_record_bytes: int) -> Iterator[Piece]:
    if file.layout is Layout.PARQUET:
        yield from read_row_groups(file)
    elif file.packing is not Packing.NONE:
        if file.layout is Layout.PLAIN_TEXT:
            yield read_whole(file, max_bytes=max_record_bytes)
        else:
            yield from read_blocks(file, chunk_bytes, max_line_bytes=max_record_bytes)
    elif file.layout is Layout.PLAIN_TEXT:
        yield Piece(file, 0, file.size_bytes)
    else:
        for start in range(0, file.size_bytes, chunk_bytes):
            yield Piece(file, start, min(start + chunk_bytes, file.size_bytes))
