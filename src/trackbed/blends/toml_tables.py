"""Readers of TOML tables that check every key by a rule, and report all problems at once.

A problem names the file, the line, and the key.
"""

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fractions import Fraction
from pathlib import Path
from typing import Any, Final

from trackbed.blends.toml_lines import KeyPath
from trackbed.errors import ArgumentError, BlendFileError

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
        """Returns those of the given keys that are in the table."""
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
