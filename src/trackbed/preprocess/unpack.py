"""Reading packed files, from their beginning to their end."""

import gzip
import zlib
from collections.abc import Iterator
from typing import Any, BinaryIO, Final

from isal import igzip, igzip_lib

from trackbed.datasets.extras import require
from trackbed.errors import FormatError
from trackbed.preprocess.inputs import InputFile, Packing
from trackbed.preprocess.pieces import Block, LongRecord, check_size

__all__ = ["read_blocks", "read_whole"]

_READ_BYTES: Final = 1 << 20
_PACKED_BYTES: Final = 4 << 10  # unpacked at a time: zstandard makes up to 32,768 times as much of it


def read_blocks(file: InputFile, block_bytes: int, *, max_line_bytes: int) -> Iterator[Block | LongRecord]:
    """Yields the text of a packed file in blocks of whole lines, with a `LongRecord` for each line that is too long.

    A long line is not held in memory beyond `max_line_bytes`.

    Args:
        file: the file.
        block_bytes: size from which a block ends with its line, at least 1.
        max_line_bytes: size that a line may have without its end, at least 1.

    Raises:
        FormatError: the file is damaged, cut short, or of another size than it had when the work was planned.
    """
    with file.path.open("rb", buffering=0) as raw:
        check_size(raw, file)
        lines = _LineBuffer(max_line_bytes)
        start = 0
        for data in _unpacked(file, raw):
            for text in lines.split(data, block_bytes):
                stop = raw.tell()
                yield LongRecord(file, start, stop) if text is None else Block(file, start, stop, text)
                start = stop
        rest = lines.rest()
        if rest or start < file.size_bytes:
            yield Block(file, start, file.size_bytes, rest)


def read_whole(file: InputFile, *, max_bytes: int) -> Block | LongRecord:
    """Reads all the text of a packed file, or a `LongRecord` if it has more than `max_bytes` bytes.

    Raises:
        FormatError: as `read_blocks`; damage behind the first `max_bytes` is not looked for.
    """
    with file.path.open("rb", buffering=0) as raw:
        check_size(raw, file)
        parts: list[bytes] = []
        filled = 0
        for data in _unpacked(file, raw):
            parts.append(data)
            filled += len(data)
            if filled > max_bytes:
                return LongRecord(file, 0, file.size_bytes)
        return Block(file, 0, file.size_bytes, b"".join(parts))


class _LineBuffer:
    """Collects unpacked data until it makes blocks of whole lines.

    Args:
        max_line_bytes: size that a line may have without its end.
    """

    def __init__(self, max_line_bytes: int) -> None:
        self._max = max_line_bytes
        self._lines: list[bytes] = []  # whole ones
        self._lines_bytes = 0
        self._open: list[bytes] = []  # the beginning of the line that goes on
        self._open_bytes = 0
        self._is_long = False
        """True inside a line that is too long, of which nothing is kept."""

    def split(self, data: bytes, block_bytes: int) -> Iterator[bytes | None]:
        """Takes the next data. Yields blocks of whole lines, and None for each line that is too long."""
        cut = data.rfind(b"\n") + 1
        first = data.find(b"\n") + 1
        if not cut:
            yield from self._extend(data)
            return
        if self._is_long:
            self._is_long = False
        else:
            yield from self._extend(data[: first - 1])
            if self._is_long:
                self._is_long = False
            else:
                self._take([*self._open, b"\n"])
        self._open, self._open_bytes = [], 0
        yield from self._whole_lines(data[first:cut])
        if self._lines_bytes >= block_bytes:
            yield self._flush()
        yield from self._extend(data[cut:])

    def rest(self) -> bytes:
        """Returns what is left at the end of the file."""
        self._take(self._open)
        self._open, self._open_bytes = [], 0
        return self._flush()

    def _extend(self, data: bytes) -> Iterator[bytes | None]:
        """Adds to the line that goes on."""
        if self._is_long:
            return
        self._open.append(data)
        self._open_bytes += len(data)
        if self._open_bytes > self._max:
            self._open, self._open_bytes, self._is_long = [], 0, True
            if self._lines_bytes:
                yield self._flush()
            yield None

    def _whole_lines(self, text: bytes) -> Iterator[bytes | None]:
        """Takes lines with their ends; looks at each one only where a line can be too long."""
        start = 0
        while len(text) - start > self._max and start < len(text):
            stop = text.find(b"\n", start) + 1
            if stop - 1 - start > self._max:
                if self._lines_bytes:
                    yield self._flush()
                yield None
            else:
                self._take([text[start:stop]])
            start = stop
        self._take([text[start:]])

    def _take(self, parts: list[bytes]) -> None:
        self._lines += parts
        self._lines_bytes += sum(map(len, parts))

    def _flush(self) -> bytes:
        text = b"".join(self._lines)
        self._lines, self._lines_bytes = [], 0
        return text


def _unpacked(file: InputFile, raw: BinaryIO) -> Iterator[bytes]:
    unpack = {Packing.GZIP: _gunzip, Packing.ZSTANDARD: _unzstd}[file.packing]
    library: Any = igzip_lib  # whose types say nothing
    failures: tuple[type[Exception], ...] = (EOFError, zlib.error, gzip.BadGzipFile, library.IsalError)
    if file.packing is Packing.ZSTANDARD:
        failures = (EOFError, require("zstandard", where=file.path).ZstdError)
    try:
        yield from unpack(file, raw)
    except failures as error:
        msg = f"{file.path}: must be a whole {file.packing.value} file, found at byte {raw.tell()}: {error}"
        raise FormatError(msg) from error


def _gunzip(_file: InputFile, raw: BinaryIO) -> Iterator[bytes]:
    library: Any = igzip  # whose types say nothing
    with library.IGzipFile(fileobj=raw) as unpacked:
        while data := unpacked.read(_READ_BYTES):
            yield data


def _unzstd(file: InputFile, raw: BinaryIO) -> Iterator[bytes]:
    """Not by the library's own reader of files, which takes the end of the file for the end of what it packs."""
    library = require("zstandard", where=file.path)
    frame = None
    for packed in _slices(raw):
        while packed:
            frame = frame or library.ZstdDecompressor().decompressobj()
            yield frame.decompress(packed)
            packed = frame.unused_data
            if frame.eof:
                frame = None
            else:
                break
    if frame is not None:
        msg = "the end of the file inside a frame"
        raise EOFError(msg)


def _slices(raw: BinaryIO) -> Iterator[bytes]:
    while data := raw.read(_READ_BYTES):
        for start in range(0, len(data), _PACKED_BYTES):
            yield data[start : start + _PACKED_BYTES]
