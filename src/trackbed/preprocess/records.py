"""Readers of the lines and texts in a segment of the input, and the line numbers of bad records.

Nothing is stripped or normalised. Lines end at LF only, so that CR, U+0085 or U+2028 inside a text stay. A segment
starts anywhere in a file, so line numbers are counted over the segments that were read in order.
"""

import json
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, BinaryIO, Final, TypeVar

import orjson

from trackbed.preprocess.chat.conversation import (
    COLUMNS,
    ID_COLUMNS,
    TEXT,
    Conversation,
    WholeText,
    is_conversation,
    parse_conversation,
    without_nulls,
)
from trackbed.preprocess.inputs import (
    Compression,
    InputFile,
    InputFormat,
    InputSegment,
    LongRecord,
    RowGroup,
    TextBlock,
)
from trackbed.preprocess.known_data import HEAD_BYTES, kind_of
from trackbed.preprocess.lenient_json import read_object
from trackbed.preprocess.open_input import open_input
from trackbed.preprocess.record_error import RecordError
from trackbed.preprocess.row_groups import LongCell, MissingColumn, read_columns, read_rows

_READ_BYTES: Final = 256 << 10
_BYTE_ORDER_MARK: Final = "\ufeff".encode()
_KEYS_SHOWN: Final = 8
_NO_NUMBER: Final = re.compile("NaN|Infinity")
_DIGITS_AS_ZEROS: Final = bytes.maketrans(b"123456789", b"0" * 9)
_MANY_ZEROS: Final = b"0" * 19
_LENIENT: Final = re.compile("infinity|surrogate|depth limit")  # in the strict parser's words


@dataclass(frozen=True, slots=True)
class TextRecord:
    """The texts of one record."""

    line: int
    """Line in its segment, from 0."""
    texts: tuple[str, ...]
    """One text per key."""
    place: int = field(default=0, compare=False)
    """First byte of the record in the unpacked text of its file, or its row."""

    @property
    def size(self) -> int:
        """Number of characters."""
        return sum(map(len, self.texts))


@dataclass(frozen=True, slots=True)
class ConversationRecord:
    """The conversation of one record."""

    line: int
    """Line in its segment, from 0."""
    conversation: Conversation
    place: int = field(default=0, compare=False)
    """First byte of the record in the unpacked text of its file, or its row."""

    @property
    def size(self) -> int:
        """About the number of characters."""
        return self.conversation.size


@dataclass(frozen=True, slots=True)
class BadRecord:
    """A record that cannot be used."""

    line: int
    """Line in its segment, from 0."""
    reason: str


def read_segment(
    segment: InputSegment, *, keys: Sequence[str], max_record_bytes: int
) -> Iterator[TextRecord | BadRecord | None]:
    """Yields a record for each line of a segment, None for a blank one; a plain text is one record, as is a row.

    Args:
        segment: segment to read.
        keys: keys of the texts in a JSON record, or names of columns, at least one; exactly one for a plain text.
        max_record_bytes: maximum size of one line, one plain text or one cell, at least 1; a larger line or plain
            text is not held in memory.
    """
    if segment.file.format is InputFormat.PLAIN_TEXT:
        yield _read_plain(segment, max_record_bytes)
        return
    if isinstance(segment, RowGroup):
        for number, values in enumerate(read_columns(segment, keys, max_cell_bytes=max_record_bytes)):
            found = _as_record(number, keys, values)
            yield replace(found, place=segment.first_row + number) if isinstance(found, TextRecord) else found
        return
    yield from _read_json_lines(
        segment, max_record_bytes, lambda number, line, place: TextRecord(number, parse_record(line, keys), place)
    )


def read_conversations(
    segment: InputSegment, *, max_record_bytes: int
) -> Iterator[ConversationRecord | BadRecord | None]:
    """Does the same as `read_segment` for conversations: see `parse_conversation`.

    Args:
        segment: segment to read.
        max_record_bytes: maximum size of one line, one plain text or one row, at least 1.
    """
    if segment.file.format is InputFormat.PLAIN_TEXT:
        text = _read_plain(segment, max_record_bytes)
        yield text if isinstance(text, BadRecord) else ConversationRecord(0, WholeText(text.texts[0]))
        return
    if isinstance(segment, RowGroup):
        names = (*COLUMNS, *ID_COLUMNS, TEXT)
        for number, row in enumerate(read_rows(segment, names, max_row_bytes=max_record_bytes)):
            yield _as_conversation(number, row, segment.first_row + number)
        return
    yield from _read_json_lines(
        segment,
        max_record_bytes,
        lambda number, line, place: ConversationRecord(number, parse_conversation(_fields_of(line)), place),
    )


def _as_conversation(number: int, row: Any, place: int) -> ConversationRecord | BadRecord:
    if isinstance(row, UnicodeDecodeError):
        return BadRecord(number, _why_no_text(row))
    if isinstance(row, LongCell):
        return BadRecord(number, f"a row must have at most {row.max_bytes:,} bytes, found {row.size_bytes:,}")
    try:
        return ConversationRecord(number, parse_conversation(without_nulls(row)), place)
    except RecordError as error:
        return BadRecord(number, str(error))


def _fields_of(line: bytes) -> dict[str, Any]:
    """Returns a JSON object, with the values that Python's `json` reads."""
    try:
        # The strict parser makes floats of integers beyond 64 bits. A regular expression for 19 digits would take ten
        # times as long to find.
        has_large = _MANY_ZEROS in line.translate(_DIGITS_AS_ZEROS)
        fields = json.loads(line) if has_large else orjson.loads(line)
    except ValueError as error:
        fields = _fields_leniently(line, error)
    except RecursionError:
        raise RecordError("a line must not be nested so deeply, found more levels than can be read") from None
    if not isinstance(fields, dict):
        raise RecordError(f"a line must be a JSON object, found {_kind(fields)}")
    return fields


def _fields_leniently(line: bytes, strict: ValueError) -> Any:
    try:
        return json.loads(line)
    except UnicodeDecodeError as undecodable:
        raise RecordError(_why_no_text(undecodable)) from None
    except json.JSONDecodeError as error:
        raise RecordError(_why_no_json(strict if isinstance(strict, json.JSONDecodeError) else error)) from None
    except (ValueError, RecursionError) as error:
        raise RecordError(f"a line must be JSON that can be read, found: {error}") from None


Record = TypeVar("Record")


def _read_json_lines(
    segment: InputSegment, max_bytes: int, make: Callable[[int, bytes, int], Record]
) -> Iterator[Record | BadRecord | None]:
    """Yields what `make` returns for the number, the text and the place of each line; None for a blank one."""
    may_be_array = segment.start == 0
    for number, (place, line) in enumerate(_placed_lines(segment, max_bytes=max_bytes)):
        if line is None:
            may_be_array = False
            yield BadRecord(number, f"a line must have at most {max_bytes:,} bytes, found more")
            continue
        if line.isspace():
            yield None
            continue
        try:
            if number == 0 and segment.start == 0:
                _check_beginning(line)
            record: Record | BadRecord = make(number, line, place)
        except RecordError as error:
            is_array = may_be_array and line.lstrip().startswith(b"[")
            record = BadRecord(number, _why_no_array(segment) if is_array else str(error))
        may_be_array = False
        yield record


def read_lines(segment: InputSegment, *, max_bytes: int) -> Iterator[bytes | None]:
    """Yields the lines that start inside a segment, with their line ends; None for a line that is too long.

    Args:
        segment: segment of a file of lines.
        max_bytes: maximum size of a line without its end, at least 1.
    """
    for _, line in _placed_lines(segment, max_bytes=max_bytes):
        yield line


def _placed_lines(segment: InputSegment, *, max_bytes: int) -> Iterator[tuple[int, bytes | None]]:
    """Does the same as `read_lines`, with the first byte of each line in the text of the file; 0 if it is unknown."""
    if isinstance(segment, LongRecord):
        yield 0, None
        return
    if isinstance(segment, TextBlock):
        text, is_whole, first = segment.text, True, segment.first_byte
    else:
        text, is_whole, first = _read_range(segment, max_bytes)
    start = 0
    while start < len(text):
        stop = text.find(b"\n", start) + 1 or len(text)
        is_last = stop == len(text)
        size = stop - start - text.endswith(b"\n", start, stop)
        yield first + start, None if size > max_bytes or (is_last and not is_whole) else text[start:stop]
        start = stop


def _read_range(segment: InputSegment, max_line_bytes: int) -> tuple[bytes, bool, int]:
    """Reads the lines that start inside a segment, and returns the first byte of the first one.

    The flag is False if the last one is too long, and so incomplete.
    """
    with open_input(segment.file) as file:
        # A line starts after a line end. Searching no further than the end of the segment keeps the segments
        # inside one very long line from each reading the rest of that line.
        before = min(segment.start, 1)
        file.seek(segment.start - before)
        text = _read_exactly(file, segment.stop - segment.start + before)
        skipped = (text.find(b"\n") + 1 or len(text)) if before else 0
        text, first = text[skipped:], segment.start - before + skipped
        if text.endswith(b"\n") or not text:
            return text, True, first
        rest = _rest_of_line(file, max_line_bytes - (len(text) - text.rfind(b"\n") - 1))
        return (text, False, first) if rest is None else (text + rest, True, first)


def _read_exactly(file: BinaryIO, size_bytes: int) -> bytes:
    parts = []
    while size_bytes > 0 and (data := file.read(size_bytes)):
        parts.append(data)
        size_bytes -= len(data)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _rest_of_line(file: BinaryIO, max_bytes: int) -> bytes | None:
    """Reads the rest of a line, with its end; None if it has more than `max_bytes` without the end.

    If the end is not in the first read, searches for it before holding any data.
    """
    start = file.tell()
    size = 0
    while data := file.read(_READ_BYTES):
        stop = data.find(b"\n")
        size += len(data) if stop < 0 else stop
        if size > max_bytes:
            return None
        if stop >= 0:
            if size == stop:
                return data[: stop + 1]
            size += 1
            break
    file.seek(start)
    return _read_exactly(file, size)


def parse_record(line: bytes, keys: Sequence[str]) -> tuple[str, ...]:
    """Returns the texts of a JSON object under `keys`.

    >>> parse_record(b'{"title": "A", "text": "B"}', ["text", "title"])
    ('B', 'A')
    """
    try:
        fields = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        return _parse_leniently(line, keys, error)
    return _texts_of(fields, keys)


def _parse_leniently(line: bytes, keys: Sequence[str], strict: orjson.JSONDecodeError) -> tuple[str, ...]:
    """Returns the texts of a line that only Python's `json` reads: it has NaN, for instance, in another field."""
    try:
        text = line.decode()
    except UnicodeDecodeError as undecodable:
        raise RecordError(_why_no_text(undecodable)) from None
    if not (_NO_NUMBER.search(text, max(0, strict.pos - 1), strict.pos + 9) or _LENIENT.search(strict.msg)):
        raise RecordError(_why_no_json(strict)) from None
    try:
        texts = _texts_of(read_object(text), keys)
    except json.JSONDecodeError as error:
        raise RecordError(_why_no_json(error)) from None
    for key, found in zip(keys, texts, strict=True):
        try:
            found.encode()
        except UnicodeEncodeError as error:
            half = f"U+{ord(found[error.start]):X}"
            raise RecordError(
                _why_no_json(strict)
                if "surrogate" in strict.msg
                else f"the value of {key!r} must be text, found half of a surrogate pair, {half}"
            ) from None
    return texts


def _texts_of(fields: Any, keys: Sequence[str]) -> tuple[str, ...]:
    if not isinstance(fields, dict):
        raise RecordError(f"a line must be a JSON object, found {_kind(fields)}")
    texts = []
    for key in keys:
        if key not in fields:
            hint = "; `trackbed preprocess --chat` reads conversations" if is_conversation(fields) else ""
            raise RecordError(f"a record must have the key {key!r}, found {_listed(fields)}{hint}")
        text = fields[key]
        if not isinstance(text, str):
            raise RecordError(f"the value of {key!r} must be a string, found {_kind(text)}")
        texts.append(text)
    return tuple(texts)


def _as_record(number: int, keys: Sequence[str], values: tuple[Any, ...]) -> TextRecord | BadRecord:
    for key, value in zip(keys, values, strict=True):
        if isinstance(value, UnicodeDecodeError):
            return BadRecord(number, _why_no_text(value))
        if isinstance(value, MissingColumn):
            return BadRecord(number, f"a Parquet file must have the column {key!r}, found {value.columns}")
        if isinstance(value, LongCell):
            reason = f"the value of {key!r} must have at most {value.max_bytes:,} bytes, found {value.size_bytes:,}"
            return BadRecord(number, reason)
        if not isinstance(value, str):
            return BadRecord(number, f"the value of {key!r} must be a string, found {_kind(value)}")
    return TextRecord(number, values)


def _read_plain(segment: InputSegment, max_bytes: int) -> TextRecord | BadRecord:
    if isinstance(segment, LongRecord) or (not isinstance(segment, TextBlock) and segment.file.size_bytes > max_bytes):
        return BadRecord(0, f"a plain text must have at most {max_bytes:,} bytes, found more")
    raw = segment.text if isinstance(segment, TextBlock) else _read_all(segment)
    try:
        return TextRecord(0, (raw.decode(),))
    except UnicodeDecodeError as error:
        other = _why_no_text_at_all(raw, "a plain text")
        return BadRecord(raw.count(b"\n", 0, error.start) if other is None else 0, other or _why_no_text(error))


def _read_all(segment: InputSegment) -> bytes:
    with open_input(segment.file) as file:
        return _read_exactly(file, segment.file.size_bytes)


def _check_beginning(line: bytes) -> None:
    if line.startswith(_BYTE_ORDER_MARK):
        raise RecordError("JSON lines must not begin with a byte order mark, found one (the bytes EF BB BF): remove it")
    other = _why_no_text_at_all(line, "JSON lines")
    if other is not None:
        raise RecordError(other)


def _why_no_text_at_all(raw: bytes, what: str) -> str | None:
    """Returns a message about text that begins like data of another kind; None if it does not."""
    found = kind_of(raw[:HEAD_BYTES])
    if found in (None, "plain text"):
        return None
    return f"{what} must be text, found {found}: give the file a name that says so, such as a.jsonl.gz, or unpack it"


def _why_no_array(segment: InputSegment) -> str:
    file = segment.file
    is_plain = file.address is None and file.compression is Compression.NONE
    command = f"jq -c '.[]'{f' {shlex.quote(file.name)}' if is_plain else ''}"
    return f"a file of JSON lines must hold one JSON record per line, found an array; `{command}` converts it"


def _why_no_json(error: json.JSONDecodeError) -> str:
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


_COUNTED_BYTES: Final = 1 << 20


class LineCounter:
    """Counts the lines of the segments read so far.

    A segment starts anywhere in a file, so its reader cannot know the line number without reading everything before.

    Args:
        lines: lines before the next segment in its file; ignored if that segment starts the file.
    """

    def __init__(self, lines: int = 0) -> None:
        self.lines = lines

    def describe(self, segment: InputSegment, record: BadRecord) -> str:
        """Returns location and fault of a record in the next segment: `corpus.jsonl:2: ...`."""
        return f"{segment.file.name}:{self.line_of(segment, record) + 1}: {record.reason}"

    def line_of(self, segment: InputSegment, record: BadRecord) -> int:
        """Returns the line of a record in the next segment, from 0."""
        return self._before(segment) + record.line

    def advance(self, segment: InputSegment, lines: int) -> None:
        """Moves past the next segment, which has `lines` lines."""
        self.lines = self._before(segment) + lines

    def _before(self, segment: InputSegment) -> int:
        return 0 if segment.start == 0 else self.lines


def count_lines_before(file: InputFile, offset: int) -> int:
    """Returns the number of lines of a file that start in its first `offset` bytes; reads all of them.

    Args:
        file: an input that is not compressed.
        offset: at most the size of the file.
    """
    if offset == 0:
        return 0
    lines, remaining = 1, offset - 1  # a line end just before `offset` begins a line at it
    with open_input(file) as raw:
        while remaining > 0 and (data := raw.read(min(remaining, _COUNTED_BYTES))):
            lines += data.count(b"\n")
            remaining -= len(data)
    return lines
