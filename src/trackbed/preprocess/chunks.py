"""Partition of the input into chunks for the workers.

Files with random access are split by arithmetic: sizes in, byte ranges out. Compressed files have none, so one
process decompresses them lazily, as chunks are requested, and the workers receive their lines.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from trackbed.preprocess.inputs import Compression, InputFile, InputFormat, InputSegment
from trackbed.preprocess.open_input import read_blocks, read_whole
from trackbed.preprocess.row_groups import read_row_groups


@dataclass(frozen=True, slots=True)
class InputChunk:
    """Unit of work of a worker: at least one segment, in the order of the input."""

    segments: tuple[InputSegment, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of input that the chunk covers."""
        return sum(segment.stop - segment.start for segment in self.segments)

    @property
    def text_bytes(self) -> int:
        """Bytes of its text, unpacked; see `InputSegment`."""
        return sum(segment.text_bytes for segment in self.segments)

    def __str__(self) -> str:
        first, last = self.segments[0], self.segments[-1]
        if len(self.segments) == 1:
            return f"{first.file.name}: bytes [{first.start}, {first.stop})"
        return f"{first.file.name} to {last.file.name} ({len(self.segments)} segments)"


def plan_chunks(files: Iterable[InputFile], *, chunk_bytes: int, max_record_bytes: int) -> Iterator[InputChunk]:
    """Returns chunks that cover the files in order; splits large files and groups small ones.

    Args:
        files: input files.
        chunk_bytes: maximum size of a chunk's texts, at least 1; exceeded only by a single plain text, line or row
            group.
        max_record_bytes: maximum size of a line or plain text, at least 1; larger ones in compressed files are
            skipped.
    """
    whole = (InputSegment(file, 0, file.size_bytes) for file in files)
    return plan_segment_chunks(whole, chunk_bytes=chunk_bytes, max_record_bytes=max_record_bytes)


def plan_segment_chunks(
    parts: Iterable[InputSegment], *, chunk_bytes: int, max_record_bytes: int
) -> Iterator[InputChunk]:
    """Does the same as `plan_chunks` for parts of files. Files other than unpacked JSON lines must be whole."""
    segments: list[InputSegment] = []
    filled = 0
    for part in parts:
        for segment in _cut(part, chunk_bytes, max_record_bytes):
            if segments and filled + segment.text_bytes > chunk_bytes:
                yield InputChunk(tuple(segments))
                segments, filled = [], 0
            segments.append(segment)
            filled += segment.text_bytes
    if segments:
        yield InputChunk(tuple(segments))


def _cut(part: InputSegment, chunk_bytes: int, max_record_bytes: int) -> Iterator[InputSegment]:
    file = part.file
    if file.format is InputFormat.PARQUET:
        yield from read_row_groups(file)
    elif file.compression is not Compression.NONE:
        if file.format is InputFormat.PLAIN_TEXT:
            yield read_whole(file, max_bytes=max_record_bytes)
        else:
            yield from read_blocks(file, chunk_bytes, max_line_bytes=max_record_bytes)
    elif file.format is InputFormat.PLAIN_TEXT:
        yield InputSegment(file, 0, file.size_bytes)
    else:
        for start in range(part.start, part.stop, chunk_bytes):
            yield InputSegment(file, start, min(start + chunk_bytes, part.stop))
