"""Files of JSON lines that grow: a line is whole, or it is the last one and is not read (docs/formats/run.md)."""

import os
import re
from pathlib import Path
from typing import Any, Final

import orjson

from trackbed.errors import FormatError
from trackbed.files.regular import open_regular

_OPTIONS: Final = orjson.OPT_APPEND_NEWLINE | orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY
_BLOCK_BYTES: Final = 1 << 16
_BEGINNING_BYTES: Final = 256


class LineFile:
    """A file to which lines are appended. Opening it cuts off a last line that a killed job has not finished.

    Args:
        path: path of the file, which is made if there is none. Only one process may append to it at a time.

    Raises:
        FormatError: it is no regular file.
        OSError: it cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o666))
        os.close(open_regular(path)[0])
        self._descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            self.size_bytes = _end_of_lines(self._descriptor)
            os.ftruncate(self._descriptor, self.size_bytes)
        except BaseException:
            os.close(self._descriptor)
            raise

    def append(self, fields: dict[str, Any]) -> None:
        """Appends a line. One that does not fit on the disk is removed again.

        Raises:
            OSError: it cannot be written.
        """
        line = orjson.dumps(fields, option=_OPTIONS)
        try:
            done = 0
            while done < len(line):
                done += os.pwrite(self._descriptor, line[done:], self.size_bytes + done)
        except BaseException:
            os.ftruncate(self._descriptor, self.size_bytes)
            raise
        self.size_bytes += len(line)

    def flush(self) -> None:
        """Makes all lines durable."""
        os.fsync(self._descriptor)

    def close(self) -> None:
        """Closes the file."""
        os.close(self._descriptor)


def read_lines(path: Path) -> list[tuple[int, dict[str, Any]]]:
    """Returns the whole lines of a file, each with its first byte; none if there is no file.

    Raises:
        FormatError: a line is no JSON object.
        OSError: the file cannot be read.
    """
    if not path.exists():
        return []
    descriptor, size = open_regular(path)
    with open(descriptor, "rb") as file:  # noqa: PTH123  a descriptor
        content = file.read(size)
    found, start = [], 0
    while (end := content.find(b"\n", start)) >= 0:
        try:
            fields = orjson.loads(content[start:end])
        except orjson.JSONDecodeError as error:
            raise FormatError(f"{path}: the line from byte {start} on must be JSON, found: {error}") from None
        if not isinstance(fields, dict):
            raise FormatError(f"{path}: the line from byte {start} on must be a JSON object, found {fields!r}")
        found.append((start, fields))
        start = end + 1
    return found


def check_lines(path: Path, key: str) -> None:
    """Checks that a file, if there is one, has lines that begin with a key. Changes nothing.

    Looks at the last whole line, and at what a killed job may have left of the next one.

    Raises:
        FormatError: it is no regular file, or one of something else.
    """
    if not path.exists():
        return
    descriptor, _ = open_regular(path)
    try:
        end = _end_of_lines(descriptor)
        whole = os.pread(descriptor, _BEGINNING_BYTES, _end_of_lines(descriptor, end - 1)) if end else b""
        torn = os.pread(descriptor, _BLOCK_BYTES, end)
    finally:
        os.close(descriptor)
    begins = re.compile(rb'\s*\{\s*"%b"\s*:' % key.encode())
    is_torn = b'{"%b":' % key.encode()
    # A line that was not finished; or zeros in its place, after a loss of power.
    may_be_cut_off = begins.match(torn) or is_torn.startswith(torn) or not torn.strip(b"\0")
    if (end and not begins.match(whole)) or not may_be_cut_off:
        raise FormatError(
            f"{path}: must have lines of JSON objects that begin with the key {key!r}, found others; choose another "
            "folder, or put the file elsewhere"
        )


def _end_of_lines(descriptor: int, end: int | None = None) -> int:
    """Byte behind the last newline before byte `end`, or in the whole file."""
    end = os.fstat(descriptor).st_size if end is None else end
    while end > 0:
        start = max(0, end - _BLOCK_BYTES)
        found = os.pread(descriptor, end - start, start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        end = start
    return 0
