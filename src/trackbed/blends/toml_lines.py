"""Line numbers of the keys of a TOML text.

`tomllib` returns values without their positions, and so do the libraries that preserve comments and layout. A text that
it has accepted needs no second parser: this scanner skips strings, follows brackets, and records keys.
"""

import re
import tomllib
from bisect import bisect_right
from typing import Final

KeyPath = tuple[str | int, ...]
"""Path to a value from the top: keys of tables, and numbers of elements of lists."""

_BLANK: Final = re.compile(r"(?:[ \t\n]|#[^\n]*)*")
_SPACE: Final = re.compile(r"[ \t]*")
_BARE_KEY: Final = re.compile(r"[A-Za-z0-9_-]+")
_SCALAR: Final = re.compile(r"[^,\]}\n#]*")
# Up to two quotation marks may precede the three that end a long string.
_STRING: Final = re.compile(
    r"\"\"\"(?:[^\\]|\\.)*?\"{3,5}(?!\")|'''.*?'{3,5}(?!')|\"(?:[^\"\\\n]|\\.)*\"|'[^'\n]*'", re.DOTALL
)


def find_key_lines(text: str) -> dict[KeyPath, int]:
    r"""Returns the line, from 1, of each key and of each element of a list.

    Args:
        text: TOML that `tomllib` parses without an error.

    >>> find_key_lines("a.b = 1\n[[c]]\nd = [\n 2]")
    {('a',): 1, ('a', 'b'): 1, ('c',): 2, ('c', 0): 2, ('c', 0, 'd'): 3, ('c', 0, 'd', 0): 4}
    """
    scan = _KeyScanner(text.replace("\r\n", "\n"))
    scan.document()
    return scan.lines


class _KeyScanner:
    """Scanner of the text; `_at` is the offset of the next character."""

    def __init__(self, text: str) -> None:
        self.lines: dict[KeyPath, int] = {}
        self._text = text
        self._at = 0
        self._line_ends = [match.start() for match in re.finditer("\n", text)]
        self._lengths: dict[KeyPath, int] = {}
        """Number of elements so far of each list of `[[...]]` tables."""

    def document(self) -> None:
        table: KeyPath = ()
        self._skip(_BLANK)
        while self._at < len(self._text):
            if self._accepts("[["):
                table = self._header(is_list=True)
            elif self._accepts("["):
                table = self._header(is_list=False)
            else:
                self._assignment(table)
            self._skip(_BLANK)

    def _header(self, *, is_list: bool) -> KeyPath:
        line = self._line()
        path: KeyPath = ()
        *above, last = self._keys()
        for key in above:
            path = self._record((*path, key), line)
            if path in self._lengths:  # a key below a list belongs to its last element
                path = (*path, self._lengths[path] - 1)
        path = self._record((*path, last), line)
        if is_list:
            number = self._lengths.get(path, 0)
            self._lengths[path] = number + 1
            path = self._record((*path, number), line)
        self._at += 2 if is_list else 1
        return path

    def _assignment(self, table: KeyPath) -> None:
        line = self._line()
        path = table
        for key in self._keys():
            path = self._record((*path, key), line)
        self._at += 1  # the equals sign
        self._skip(_SPACE)
        self._value(path)

    def _value(self, path: KeyPath) -> None:
        if self._accepts("["):
            self._list(path)
        elif self._accepts("{"):
            self._inline_table(path)
        elif self._text[self._at] in "\"'":
            self._skip(_STRING)
        else:
            self._skip(_SCALAR)

    def _list(self, path: KeyPath) -> None:
        number = 0
        self._skip(_BLANK)
        while not self._accepts("]"):
            self._value(self._record((*path, number), self._line()))
            number += 1
            self._skip(_BLANK)
            self._accepts(",")
            self._skip(_BLANK)

    def _inline_table(self, path: KeyPath) -> None:
        self._skip(_BLANK)
        while not self._accepts("}"):
            self._assignment(path)
            self._skip(_BLANK)
            self._accepts(",")
            self._skip(_BLANK)

    def _keys(self) -> list[str]:
        """Scans a dotted key. Returns its parts."""
        keys = [self._key()]
        while self._accepts("."):
            keys.append(self._key())
        return keys

    def _key(self) -> str:
        self._skip(_SPACE)
        is_quoted = self._text[self._at] in "\"'"
        raw = self._skip(_STRING if is_quoted else _BARE_KEY)
        self._skip(_SPACE)
        return str(tomllib.loads(f"key = {raw}")["key"]) if is_quoted else raw

    def _record(self, path: KeyPath, line: int) -> KeyPath:
        self.lines.setdefault(path, line)
        return path

    def _line(self) -> int:
        return bisect_right(self._line_ends, self._at - 1) + 1

    def _accepts(self, word: str) -> bool:
        found = self._text.startswith(word, self._at)
        self._at += len(word) if found else 0
        return found

    def _skip(self, pattern: re.Pattern[str]) -> str:
        match = pattern.match(self._text, self._at)
        found = match.group() if match else ""
        self._at += len(found)
        return found
