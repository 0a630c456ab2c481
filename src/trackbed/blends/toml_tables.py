"""Readers of TOML tables that check every key by a rule, and report all problems at once.

A problem names the file, the line, and the key. `tomllib` returns values without their positions, and so do the
libraries that preserve comments and layout. A text that it has accepted needs no second parser: `find_key_lines`
skips strings, follows brackets, and records keys.
"""

import re
import sys
import tomllib
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fractions import Fraction
from pathlib import Path
from typing import Any, Final

from trackbed.errors import ArgumentError, BlendFileError

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


_POWERS: Final = {"": 0, "K": 3, "M": 6, "B": 9, "T": 12}
_MOST_DIGITS: Final = 64
_COUNT: Final = re.compile(r"(\d[\d_,]*(?:\.\d+)?)\s*([KMBT]?)")


def parse_count(text: str) -> int:
    """Parses a whole number with an optional unit.

    Args:
        text: digits, optionally grouped by `_` or `,`, then optionally K, M, B or T: thousands to trillions.

    Raises:
        ArgumentError: the text is no such number, or the number is not whole.

    >>> parse_count("1.5T"), parse_count("300_000")
    (1500000000000, 300000)
    """
    match = _COUNT.fullmatch(text.strip()) if len(text) <= _MOST_DIGITS else None
    # Exact, unlike Decimal, which rounds to the precision of its context.
    number = Fraction(re.sub("[_,]", "", match[1])) * 10 ** _POWERS[match[2]] if match else None
    if number is None or number.denominator > 1:
        shown = text if len(text) <= _MOST_DIGITS else f"{text[:_MOST_DIGITS]}..."
        raise ArgumentError(f"a count must be a whole number such as 300_000, 20M, 1.5B or 2T, found {shown!r}")
    return int(number)


_MOST_CHARS: Final = 2000
_LARGEST: Final = sys.float_info.max


@dataclass(frozen=True, slots=True)
class Rule:
    """Condition on a value."""

    text: str
    """Description that follows "must be" in a message."""
    holds: Callable[[Any], bool]


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and -_LARGEST <= value <= _LARGEST


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63


def _is_count(value: object) -> bool:
    try:
        count = parse_count(value) if isinstance(value, str) else value
        return _is_whole(count) and count >= 1  # type: ignore[operator]  # it is an int
    except ArgumentError:
        return False


FLAG: Final = Rule("true or false", lambda value: isinstance(value, bool))
TEXT: Final = Rule(
    "a non-empty string without NUL", lambda value: isinstance(value, str) and value != "" and "\0" not in value
)
TEXTS: Final = Rule(
    "a list of at least one string",
    lambda value: isinstance(value, list) and len(value) > 0 and all(TEXT.holds(one) for one in value),
)
NUMBER: Final = Rule("a finite number of at least 0", lambda value: _is_number(value) and value >= 0)
POSITIVE: Final = Rule("a finite number above 0", lambda value: _is_number(value) and value > 0)
WHOLE: Final = Rule("a whole number of at least 0 and below 2**63", lambda value: _is_whole(value) and value >= 0)
WHOLE_POSITIVE: Final = Rule(
    "a whole number of at least 1 and below 2**63", lambda value: _is_whole(value) and value >= 1
)
COUNT: Final = Rule(
    "a whole number of at least 1 and below 2**63, or a string such as '20M', '1.5B' or '2T'", _is_count
)
TABLE: Final = Rule("a table", lambda value: isinstance(value, dict))
TABLES: Final = Rule(
    "a list of tables, each with a header in double brackets",
    lambda value: isinstance(value, list) and all(isinstance(one, dict) for one in value),
)


def one_of(choices: Sequence[str | int]) -> Rule:
    """Returns the rule that a value is one of the choices."""
    return Rule(f"one of {', '.join(map(repr, choices))}", lambda value: _is_plain(value) and value in choices)


def reason_of(error: Exception) -> str:
    """Returns the text of an error; of the system's, which path must be readable.

    >>> reason_of(PermissionError(13, "Permission denied", "data/web.idx"))
    'data/web.idx: the path must be readable, found: Permission denied'
    """
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{error.filename}: the path must be readable, found: {error.strerror}"
    return str(error)


def _is_plain(value: object) -> bool:
    return isinstance(value, (str, int)) and not isinstance(value, bool)


class Problems:
    """Collection of the problems of a file.

    Args:
        path: path of the file, for messages.
        lines: line numbers of its keys; none if the settings do not come from a file.
    """

    def __init__(self, path: Path, lines: Mapping[KeyPath, int]) -> None:
        self._path = path
        self._lines = lines
        self._found: list[tuple[int, str]] = []

    def add(self, where: KeyPath, text: str) -> None:
        """Adds a problem with a key, or with the table that should contain it."""
        name = _name_of(where)
        self.add_sentence(where, f"{name}{' ' if name else ''}{text}")

    def add_sentence(self, where: KeyPath, text: str) -> None:
        """Adds a problem whose text names the key itself, at the line of the key or of its table."""
        line = self._line_of(where)
        place = f"{self._path}:{line}" if self._lines else f"{self._path}"
        problem = f"{place}: {text}"
        self._found.append((line, _shortened(" ".join(problem.splitlines()))))

    def place_of(self, where: KeyPath, name: str) -> str:
        """Returns the line of a key, for the text of a problem with another one; a name where there are no lines."""
        return f"line {self._line_of(where)} ({name!r})" if self._lines else repr(name)

    def _line_of(self, where: KeyPath) -> int:
        at = where
        while at and at not in self._lines:
            at = at[:-1]
        return self._lines.get(at, 1)

    def stop(self) -> None:
        """Raises all problems in the order of lines, if there are any.

        Raises:
            BlendFileError: there is a problem.
        """
        if self._found:
            raise BlendFileError([text for _, text in sorted(self._found, key=lambda found: found[0])])


_OF_THE_FILE: Final = ("version", "sequence_length", "seed", "order", "split", "cache", "tokenizer", "size")
"""Keys of no table. Those that follow the line of a table by mistake are keys of that table."""


class TableReader:
    """Reader of one table, which records the keys that are read; `refuse_unknown` refuses all others.

    Args:
        table: table, as `tomllib` returns it.
        where: path of keys to the table.
        problems: receives the problems.
    """

    def __init__(self, table: Mapping[str, Any], where: KeyPath, problems: Problems) -> None:
        self.where = where
        self._table = table
        self._problems = problems
        self._known: list[str] = []

    def take(self, key: str, rule: Rule, default: Any = None) -> Any:
        """Returns the value of a key; the default if it is missing, or breaks the rule, which adds a problem."""
        self._known.append(key)
        if key not in self._table:
            return default
        value = self._table[key]
        if rule.holds(value):
            return value
        self.refuse(key, f"must be {rule.text}, found {_shown(value)}")
        return default

    def need(self, key: str, rule: Rule, default: Any) -> Any:
        """Does the same as `take` for a required key; a missing one adds a problem."""
        if key not in self._table:
            self.refuse(key, f"must be given: {rule.text}")
        return self.take(key, rule, default)

    def table(self, key: str) -> "TableReader":
        """Returns a reader of the table under a key; an empty one if the key is missing."""
        return TableReader(self.take(key, TABLE, {}), (*self.where, key), self._problems)

    def tables(self, key: str) -> "list[TableReader]":
        """Returns readers of the tables in the list under a key."""
        found = self.take(key, TABLES, [])
        return [TableReader(one, (*self.where, key, number), self._problems) for number, one in enumerate(found)]

    def given(self, *keys: str) -> list[str]:
        """Returns the given keys that are in the table."""
        return [key for key in keys if key in self._table]

    @property
    def keys(self) -> list[str]:
        """All keys of the table."""
        return list(self._table)

    def refuse(self, key: str, text: str) -> None:
        """Adds a problem with a key, or with the table itself if `key` is empty."""
        self._problems.add((*self.where, key), text)

    def refuse_unknown(self) -> None:
        """Refuses keys that were never read, and suggests similar ones."""
        for key in self._table:
            if key not in self._known:
                where = (*self.where, key)
                if self.where and key in _OF_THE_FILE:
                    text = f"{key!r} is a key of the whole file; write it above the first table, such as [[dataset]]"
                    self._problems.add_sentence(where, f"unknown key {_name_of(where)!r}; {text}")
                    continue
                near = get_close_matches(key, self._known, n=1, cutoff=0.5)
                likely = repr(_name_of((*self.where, *near)))
                names = f"did you mean {likely}?" if near else f"known keys: {', '.join(sorted(self._known))}"
                self._problems.add_sentence(where, f"unknown key {_name_of(where)!r}; {names}")


def _name_of(where: KeyPath) -> str:
    """Returns the dotted name of a key, without the numbers of tables in lists.

    >>> _name_of(("dataset", 2, "weight"))
    'dataset.weight'
    """
    return ".".join(key for key in where if isinstance(key, str) and key)


def _shortened(text: str) -> str:
    """Returns the text, without its middle if it is very long."""
    return text if len(text) <= _MOST_CHARS else f"{text[: _MOST_CHARS // 2]} ... {text[-_MOST_CHARS // 2 :]}"


def _shown(value: object) -> str:
    """Formats a value almost as TOML writes it, truncated."""
    try:
        text = str(value).lower() if isinstance(value, bool) else repr(value)
    except (ValueError, RecursionError):  # thousands of digits, or deeply nested lists
        return "a number of thousands of digits" if isinstance(value, int) else "a value too large to show"
    return text if len(text) <= 60 else text[:57] + "..."
