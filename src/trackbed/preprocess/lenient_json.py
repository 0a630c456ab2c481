"""JSON objects as Python's `json` reads them, for lines that a strict parser refuses.

Python's `json` writes and reads NaN, Infinity, numbers beyond the range of a double and half of a surrogate pair, which
are no JSON. In a field that nobody reads they must not cost the record. Nesting is limited by `MOST_LEVELS` alone.
"""

import json
import re
from typing import Any, Final

MOST_LEVELS: Final = 100_000
"""Maximum depth of a value, which bounds the work for a line of brackets."""

# As floats, integers may have any number of digits.
_DECODER: Final = json.JSONDecoder(parse_int=float)
_SPACE: Final = re.compile(r"[ \t\n\r]*")
_CLOSING: Final = {"{": "}", "[": "]"}


def read_object(text: str) -> dict[str, Any]:
    r"""Returns the fields of a JSON object; the last one of several with the same name.

    Integers become floats, and values that are nested deeply become empty.

    Args:
        text: the object, with white space around it.

    Raises:
        json.JSONDecodeError: the text is no object as Python's `json` reads it, or nested deeper than `MOST_LEVELS`.

    >>> read_object('{"text": "a", "score": NaN, "count": 3, "half": "\\ud83d"}')
    {'text': 'a', 'score': nan, 'count': 3.0, 'half': '\ud83d'}
    """
    start = _after_space(text, 0)
    if not text.startswith("{", start):
        raise json.JSONDecodeError("Expecting '{'", text, start)
    try:
        fields, position = _DECODER.raw_decode(text, start)
    except RecursionError:
        fields, position = _read_fields(text, start)
    if _after_space(text, position) != len(text):
        raise json.JSONDecodeError("Extra data", text, position)
    return dict(fields)


def _read_fields(text: str, position: int) -> tuple[dict[str, Any], int]:
    """Returns the fields of an object with deeply nested values, and the position after it."""
    fields: dict[str, Any] = {}
    position = _after_space(text, position + 1)
    while True:
        name, position = _read_name(text, position)
        fields[name], position = _read_value(text, position)
        if text.startswith("}", position):
            return fields, position + 1
        position = _after(text, position, ",")


def _read_name(text: str, position: int) -> tuple[str, int]:
    """Returns the name of a field, and the position of its value."""
    if not text.startswith('"', position):
        raise json.JSONDecodeError("Expecting property name enclosed in double quotes", text, position)
    name, position = _DECODER.raw_decode(text, position)
    return name, _after(text, _after_space(text, position), ":")


def _read_value(text: str, position: int) -> tuple[Any, int]:
    """Returns a value, and the position after it and the white space behind it."""
    try:
        value, position = _DECODER.raw_decode(text, position)
    except RecursionError:
        value, position = {"{": {}, "[": []}[text[position]], _skip_nested(text, position)
    return value, _after_space(text, position)


def _skip_nested(text: str, position: int) -> int:
    """Returns the position after an object or array of any depth. Reads scalars one by one, without recursion."""
    opened: list[str] = []
    while True:
        char = text[position : position + 1]
        if char in ("{", "["):
            opened.append(char)
            if len(opened) > MOST_LEVELS:
                raise json.JSONDecodeError(f"nested deeper than {MOST_LEVELS:,} levels", text, position)
            position = _after_space(text, position + 1)
            if not text.startswith(_CLOSING[char], position):
                if char == "{":
                    _, position = _read_name(text, position)
                continue
        else:
            _, position = _DECODER.raw_decode(text, position)
        position = _after_space(text, position)
        while text.startswith(_CLOSING[opened[-1]], position):
            opened.pop()
            position += 1
            if not opened:
                return position
            position = _after_space(text, position)
        position = _after(text, position, ",")
        if opened[-1] == "{":
            _, position = _read_name(text, position)


def _after(text: str, position: int, char: str) -> int:
    """Returns the position after a character that must be there, and the white space behind it."""
    if not text.startswith(char, position):
        raise json.JSONDecodeError(f"Expecting {char!r}", text, position)
    return _after_space(text, position + 1)


def _after_space(text: str, position: int) -> int:
    found = _SPACE.match(text, position)
    return position if found is None else found.end()
