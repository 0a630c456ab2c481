"""Opening inputs, on a disk or in an object store, and sequential readers of compressed ones."""

import gzip
import io
import os
import zlib
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO, Final

from isal import igzip, igzip_lib

from trackbed.datasets.extras import require
from trackbed.errors import FormatError
from trackbed.files import stores
from trackbed.files.stores import Address, ObjectRange, ObjectStamp
from trackbed.preprocess.inputs import Compression, InputFile, LongRecord, TextBlock
from trackbed.preprocess.known_data import GZIP, HEAD_BYTES, ZSTANDARD, begins_as, kind_of

_OBJECT_CHUNK_BYTES: Final = 16 << 20
"""Text per chunk of an object, so that the latency of a store matters little."""

_BUFFER_BYTES: Final = 256 << 10
_FIRST_READ_BYTES: Final = 256 << 10
_READ_AHEAD_BYTES: Final = 16 << 20
_RANGE_BYTES: Final = 4 << 20
"""Bytes of a request: four are in flight to fill the read-ahead."""


def open_input(file: InputFile) -> BinaryIO:
    """Opens an input for reading, without a buffer of its own on a disk."""
    if file.address is not None:
        reader = _ObjectReader(file.address, ObjectStamp(file.size_bytes, file.version))
        return io.BufferedReader(reader, _BUFFER_BYTES)  # whose reads are never short
    raw = file.path.open("rb", buffering=0)
    size = os.fstat(raw.fileno()).st_size
    if size != file.size_bytes:
        raw.close()
        raise FormatError(f"{file.name}: a file must keep its {file.size_bytes} bytes while it is read, found {size}")
    return raw


def chunk_bytes_of(files: Iterable[InputFile], chunk_bytes: int) -> int:
    """Returns the size of the chunks of files: larger if there are objects of a store among them."""
    return max(chunk_bytes, _OBJECT_CHUNK_BYTES) if any(file.address for file in files) else chunk_bytes


class _ObjectReader(io.RawIOBase):
    """Object of a store as a file. Reads ahead further and further while reads follow each other.

    Args:
        address: the object.
        stamp: its identity at planning time.
    """

    def __init__(self, address: Address, stamp: ObjectStamp) -> None:
        super().__init__()
        self._address = address
        self._stamp = stamp
        self._position = 0
        self._block = memoryview(b"")
        self._block_start = 0
        self._ahead = _FIRST_READ_BYTES

    def readable(self) -> bool:
        """True."""
        return True

    def seekable(self) -> bool:
        """True."""
        return True

    def tell(self) -> int:
        """Position of the next read."""
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Sets the position of the next read."""
        begin = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._stamp.size_bytes}[whence]
        self._position = begin + offset
        return self._position

    def readinto(self, buffer: object) -> int:
        """Reads up to the size of a buffer; returns 0 at the end."""
        view = memoryview(buffer).cast("B")  # type: ignore[arg-type]  # whatever has a buffer
        wanted = min(len(view), self._stamp.size_bytes - self._position)
        if wanted <= 0:
            return 0
        if not self._block_start <= self._position < self._block_start + len(self._block):
            self._fetch(wanted)
        start = self._position - self._block_start
        found = self._block[start : start + wanted]
        view[: len(found)] = found
        self._position += len(found)
        return len(found)

    def _fetch(self, wanted: int) -> None:
        """Fetches the block at the position: the wanted bytes, and more if the last block ended here."""
        is_next = self._block and self._position == self._block_start + len(self._block)
        self._ahead = min(2 * self._ahead, _READ_AHEAD_BYTES) if is_next else _FIRST_READ_BYTES
        stop = min(self._position + max(wanted, self._ahead), self._stamp.size_bytes)
        self._block = memoryview(b"")  # freed before the next one is fetched
        ranges = [
            ObjectRange(self._address, self._stamp, start, min(start + _RANGE_BYTES, stop))
            for start in range(self._position, stop, _RANGE_BYTES)
        ]
        parts = stores.fetch(ranges)
        self._block = parts[0] if len(parts) == 1 else memoryview(b"".join(parts))
        self._block_start = self._position


_READ_BYTES: Final = 1 << 20
_STEP_BYTES: Final = 4 << 10  # decompressed per step: zstandard expands data up to 32,768 times
_MAX_WINDOW_BYTES: Final = 2 << 30  # the largest that zstandard reads; a decompressor takes the memory that it needs
# Causes, in the words of the libraries.
_OTHER_DATA: Final = ("Not a gzipped file", "Unknown frame descriptor")
_LARGE_WINDOW: Final = "requires too much memory"
_NO_MEMORY: Final = "not enough memory"
_DICTIONARY: Final = "Dictionary mismatch"
_CHECKSUM: Final = ("CRC check failed", "Incorrect length of data", "doesn't match checksum")


def read_blocks(file: InputFile, block_bytes: int, *, max_line_bytes: int) -> Iterator[TextBlock | LongRecord]:
    """Yields the text of a compressed file in blocks of whole lines, and a `LongRecord` for each line that is too long.

    At most `max_line_bytes` of a long line are held in memory.

    Args:
        file: compressed file of lines.
        block_bytes: size at which a block ends with its current line, at least 1.
        max_line_bytes: maximum size of a line without its end, at least 1.
    """
    with open_input(file) as raw:
        lines = _LineBuffer(max_line_bytes)
        start = 0
        for data in _decompressed(file, raw):
            for text in lines.split(data, block_bytes):
                stop = raw.tell()
                block = None if text is None else TextBlock(file, start, stop, text, lines.first_byte)
                yield LongRecord(file, start, stop) if block is None else block
                start = stop
        rest = lines.rest()
        if rest or start < file.size_bytes:
            yield TextBlock(file, start, file.size_bytes, rest, lines.first_byte)


def read_whole(file: InputFile, *, max_bytes: int) -> TextBlock | LongRecord:
    """Reads all text of a compressed file; returns a `LongRecord` if it has more than `max_bytes` bytes."""
    with open_input(file) as raw:
        parts: list[bytes] = []
        filled = 0
        for data in _decompressed(file, raw):
            parts.append(data)
            filled += len(data)
            if filled > max_bytes:
                return LongRecord(file, 0, file.size_bytes)
        return TextBlock(file, 0, file.size_bytes, b"".join(parts))


def count_line_ends(file: InputFile, stop: int) -> int:
    """Returns the number of line ends in the first `stop` bytes of the unpacked text of a file."""
    count = 0
    with open_input(file) as raw:
        is_packed = file.compression is not Compression.NONE
        pieces = _decompressed(file, raw) if is_packed else iter(lambda: raw.read(_READ_BYTES), b"")
        for data in pieces:
            count += data.count(b"\n", 0, max(0, stop))
            stop -= len(data)
            if stop <= 0:
                break
    return count


class _LineBuffer:
    """Buffer that turns decompressed data into blocks of whole lines.

    Args:
        max_line_bytes: maximum size of a line without its end.
    """

    def __init__(self, max_line_bytes: int) -> None:
        self._max = max_line_bytes
        self._lines: list[bytes] = []  # complete lines
        self._lines_bytes = 0
        self._open: list[bytes] = []  # beginning of the incomplete line
        self._open_bytes = 0
        self._is_long = False
        """True inside a line that is too long, whose data is dropped."""
        self.first_byte = 0
        """Place of the last returned block in the text of the file."""
        self._first = 0
        """Place of the lines that wait."""
        self._end = 0
        """Place behind all lines that were taken or dropped."""

    def split(self, data: bytes, block_bytes: int) -> Iterator[bytes | None]:
        """Adds data. Yields blocks of whole lines, and None for each line that is too long."""
        cut = data.rfind(b"\n") + 1
        first = data.find(b"\n") + 1
        if not cut:
            yield from self._extend(data)
            return
        if self._is_long:
            self._is_long = False
            self._end += first
        else:
            yield from self._extend(data[: first - 1])
            if self._is_long:
                self._is_long = False
                self._end += 1
            else:
                self._take([*self._open, b"\n"])
        self._open, self._open_bytes = [], 0
        yield from self._whole_lines(data[first:cut])
        if self._lines_bytes >= block_bytes:
            yield self._flush()
        yield from self._extend(data[cut:])

    def rest(self) -> bytes:
        """Returns the remaining text at the end of the file."""
        self._take(self._open)
        self._open, self._open_bytes = [], 0
        return self._flush()

    def _extend(self, data: bytes) -> Iterator[bytes | None]:
        """Adds data to the incomplete line."""
        if self._is_long:
            self._end += len(data)
            return
        self._open.append(data)
        self._open_bytes += len(data)
        if self._open_bytes > self._max:
            dropped = self._open_bytes
            self._open, self._open_bytes, self._is_long = [], 0, True
            if self._lines_bytes:
                yield self._flush()
            self._end += dropped
            yield None

    def _whole_lines(self, text: bytes) -> Iterator[bytes | None]:
        """Adds lines with their ends; scans them one by one only while a line can be too long."""
        start = 0
        while len(text) - start > self._max and start < len(text):
            stop = text.find(b"\n", start) + 1
            if stop - 1 - start > self._max:
                if self._lines_bytes:
                    yield self._flush()
                self._end += stop - start
                yield None
            else:
                self._take([text[start:stop]])
            start = stop
        self._take([text[start:]])

    def _take(self, parts: list[bytes]) -> None:
        if not self._lines_bytes:
            self._first = self._end
        self._lines += parts
        added = sum(map(len, parts))
        self._lines_bytes += added
        self._end += added

    def _flush(self) -> bytes:
        text = b"".join(self._lines)
        self._lines, self._lines_bytes, self.first_byte = [], 0, self._first
        return text


def _decompressed(file: InputFile, raw: BinaryIO) -> Iterator[bytes]:
    decompress = {Compression.GZIP: _gunzip, Compression.ZSTANDARD: _unzstd}[file.compression]
    library: Any = igzip_lib  # untyped
    failures: tuple[type[Exception], ...] = (EOFError, zlib.error, gzip.BadGzipFile, library.IsalError)
    if file.compression is Compression.ZSTANDARD:
        failures = (EOFError, require("zstandard", where=file.name).ZstdError)
    try:
        yield from decompress(file, raw)
    except failures as error:
        place = raw.tell()
        raw.seek(0)
        raise FormatError(f"{file.name}: {_cause(file, error, place, raw.read(HEAD_BYTES))}") from error


def _cause(file: InputFile, error: Exception, position: int, head: bytes) -> str:
    """Returns what must hold of a file that cannot be decompressed, what was found, and what to do.

    Args:
        file: the file.
        error: error of the library.
        position: byte up to which the file was read.
        head: first bytes of the file.
    """
    suffix, words = file.compression.value, str(error)
    kind = {Compression.GZIP: GZIP, Compression.ZSTANDARD: ZSTANDARD}[file.compression]
    if not begins_as(head, kind):
        found = kind_of(head) or "other data"
        way = f"take {suffix} off its name" if found == "plain text" else "give it the name that fits, or decompress it"
        return f"a file that ends in {suffix} must hold {kind}, found {found}: {way}"
    if any(sign in words for sign in _OTHER_DATA):
        return f"{kind} must go on to the end of the file, found other data before byte {position:,}: cut it off there"
    if _LARGE_WINDOW in words:
        return "a window must have at most 2 GiB (zstd --long=31), found a frame with a larger one: compress it again"
    if _NO_MEMORY in words:
        return f"the window of its frame must fit into memory, found too little free before byte {position:,}"
    if _DICTIONARY in words:
        return (
            "a frame must need no dictionary, found one that does: decompress it with zstd -d -D DICTIONARY, or "
            "compress it again without one"
        )
    if any(sign in words for sign in _CHECKSUM):
        return (
            f"the data must have the checksum that is stored with them, found another before byte "
            f"{position:,} ({words}): the file is damaged; copy or download it again"
        )
    return f"must be a complete {suffix} file, found at byte {position}: {words}; copy or download it again"


def _gunzip(_file: InputFile, raw: BinaryIO) -> Iterator[bytes]:
    library: Any = igzip  # untyped
    with library.IGzipFile(fileobj=raw) as decompressed:
        while data := decompressed.read(_READ_BYTES):
            yield data


def _unzstd(file: InputFile, raw: BinaryIO) -> Iterator[bytes]:
    """Yields the decompressed data. Avoids the file reader of the library, which accepts a truncated file."""
    library = require("zstandard", where=file.name)
    frame = None
    for data in _slices(raw):
        while data:
            frame = frame or library.ZstdDecompressor(max_window_size=_MAX_WINDOW_BYTES).decompressobj()
            yield frame.decompress(data)
            data = frame.unused_data
            if frame.eof:
                frame = None
            else:
                break
    if frame is not None:
        raise EOFError("the end of the file inside a frame")


def _slices(raw: BinaryIO) -> Iterator[bytes]:
    while data := raw.read(_READ_BYTES):
        for start in range(0, len(data), _STEP_BYTES):
            yield data[start : start + _STEP_BYTES]
