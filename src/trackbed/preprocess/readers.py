"""Reading a piece of the input: its lines, and the texts in them.

Nothing is stripped or normalised. Lines end at LF only, so that CR, U+0085 or U+2028 inside a text stay.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, Final

import orjson

from trackbed.errors import FormatError
from trackbed.preprocess.inputs import Layout
from trackbed.preprocess.plan import Piece

__all__ = ["BadRecord", "Record", "RecordError", "parse_record", "read_lines", "read_piece"]

_BUFFER_BYTES: Final = 1 << 20
_BYTE_ORDER_MARK: Final = "\ufeff".encode()
_KEYS_SHOWN: Final = 8


class RecordError(FormatError):
    """A record cannot be used; the message says what must hold and what was found, the caller knows where."""


@dataclass(frozen=True, slots=True)
class Record:
    """The texts of one record."""

    line: int
    """Line in its piece, from 0."""
    texts: tuple[str, ...]
    """One for each key."""


@dataclass(frozen=True, slots=True)
class BadRecord:
    """A record that cannot be used."""

    line: int
    """Line in its piece, from 0."""
    reason: str


def read_piece(piece: Piece, *, keys: Sequence[str]) -> Iterator[Record | BadRecord | None]:
    """What each line of a piece holds, None for a blank one; a plain text is one record.

    Args:
        piece: what to read.
        keys: keys of the texts in a JSON record, at least one; a plain text is the text of the only key.

    Raises:
        FormatError: the file's size is not what it was when the work was planned.
    """
    if piece.file.layout is Layout.PLAIN_TEXT:
        yield _read_plain(piece)
        return
    for number, line in enumerate(read_lines(piece)):
        if not line.strip():
            yield None
            continue
        try:
            if number == 0 and piece.start == 0:
                _check_beginning(line)
            record: Record | BadRecord = Record(number, parse_record(line, keys))
        except RecordError as error:
            record = BadRecord(number, str(error))
        yield record


def read_lines(piece: Piece) -> Iterator[bytes]:
    """The lines that begin inside a piece, with their line ends."""
    with piece.file.path.open("rb", buffering=_BUFFER_BYTES) as file:
        _check_size(file, piece)
        if piece.start > 0:
            # A line begins where the byte before it is a line end. Looking no further than the end of the piece
            # keeps the pieces inside one very long line from each reading all the rest of it.
            file.seek(piece.start - 1)
            before = file.readline(piece.stop - piece.start)
            if not before.endswith(b"\n"):
                return
        position = file.tell()
        while position < piece.stop:
            line = file.readline()
            if not line:
                return
            position += len(line)
            yield line


def parse_record(line: bytes, keys: Sequence[str]) -> tuple[str, ...]:
    """The texts that a JSON object has under `keys`.

    Raises:
        RecordError: it is no JSON object, a key is missing, or its value no string.

    >>> parse_record(b'{"title": "A", "text": "B"}', ["text", "title"])
    ('B', 'A')
    """
    try:
        fields = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise RecordError(_why_no_json(line, error)) from None
    if not isinstance(fields, dict):
        msg = f"a line must be a JSON object, found {_kind(fields)}"
        raise RecordError(msg)
    texts = []
    for key in keys:
        if key not in fields:
            msg = f"a record must have the key {key!r}, found {_listed(fields)}"
            raise RecordError(msg)
        text = fields[key]
        if not isinstance(text, str):
            msg = f"the value of {key!r} must be a string, found {_kind(text)}"
            raise RecordError(msg)
        texts.append(text)
    return tuple(texts)


def _read_plain(piece: Piece) -> Record | BadRecord:
    with piece.file.path.open("rb", buffering=0) as file:
        _check_size(file, piece)
        raw = file.readall()
    try:
        return Record(0, (raw.decode(),))
    except UnicodeDecodeError as error:
        return BadRecord(raw.count(b"\n", 0, error.start), _why_no_text(error))


def _check_size(file: BinaryIO, piece: Piece) -> None:
    size = os.fstat(file.fileno()).st_size
    if size != piece.file.size_bytes:
        msg = f"{piece.file.path}: a file must keep its {piece.file.size_bytes} bytes while it is read, found {size}"
        raise FormatError(msg)


def _check_beginning(line: bytes) -> None:
    if line.startswith(_BYTE_ORDER_MARK):
        msg = "JSON lines must not begin with a byte order mark, found one (the bytes EF BB BF): remove it"
        raise RecordError(msg)


def _why_no_json(line: bytes, error: orjson.JSONDecodeError) -> str:
    try:
        line.decode()
    except UnicodeDecodeError as undecodable:
        return _why_no_text(undecodable)
    return f"a line must be JSON, found at column {error.colno}: {error.msg.partition(': line ')[0]}"


def _why_no_text(error: UnicodeDecodeError) -> str:
    at = error.start
    column = at - error.object.rfind(b"\n", 0, at)
    byte = error.object[at]
    return f"text must be UTF-8, found the byte 0x{byte:02x} at byte {column} of the line ({error.reason})"


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


def _listed(fields: dict[str, Any]) -> str:
    if not fields:
        return "no key"
    shown = [repr(key) for key in list(fields)[:_KEYS_SHOWN]]
    more = len(fields) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")
