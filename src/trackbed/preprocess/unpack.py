"""Reading packed files, from their beginning to their end."""

import gzip
import zlib
from collections.abc import Iterator
from typing import Any, BinaryIO, Final

from isal import igzip

from trackbed.datasets.extras import require
from trackbed.errors import FormatError
from trackbed.preprocess.inputs import InputFile, Packing
from trackbed.preprocess.pieces import Block, check_size

__all__ = ["read_blocks", "read_whole"]

_READ_BYTES: Final = 1 << 20
_PACKED_BYTES: Final = 64 << 10  # unpacked at a time: what comes of it may be thousands of times as large


def read_blocks(file: InputFile, block_bytes: int) -> Iterator[Block]:
    """The text of a packed file, in blocks of whole lines.

    Args:
        file: the file.
        block_bytes: size from which a block ends with its line, at least 1.

    Raises:
        FormatError: the file is damaged, cut short, or of another size than it had when the work was planned.
    """
    with file.path.open("rb", buffering=0) as raw:
        check_size(raw, file)
        start = filled = 0
        parts: list[bytes] = []
        for data in _unpacked(file, raw):
            parts.append(data)
            filled += len(data)
            if filled < block_bytes or (cut := data.rfind(b"\n") + 1) == 0:
                continue
            stop = raw.tell()
            yield Block(file, start, stop, b"".join([*parts[:-1], data[:cut]]))
            parts = [data[cut:]]
            start, filled = stop, len(data) - cut
        if filled or start < file.size_bytes:
            yield Block(file, start, file.size_bytes, b"".join(parts))


def read_whole(file: InputFile) -> Block:
    """All the text of a packed file.

    Raises:
        FormatError: as `read_blocks`.
    """
    with file.path.open("rb", buffering=0) as raw:
        check_size(raw, file)
        return Block(file, 0, file.size_bytes, b"".join(_unpacked(file, raw)))


def _unpacked(file: InputFile, raw: BinaryIO) -> Iterator[bytes]:
    unpack = {Packing.GZIP: _gunzip, Packing.ZSTANDARD: _unzstd}[file.packing]
    failures: tuple[type[Exception], ...] = (EOFError, zlib.error, gzip.BadGzipFile)
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
    while packed := raw.read(_PACKED_BYTES):
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
