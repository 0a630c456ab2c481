"""Reading the tables of a TOML file: every key by a rule, and everything that is wrong at once.

A problem names the file, the line, and the key.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final

from trackbed.builder.blend_file.counts import parse_count
from trackbed.builder.blend_file.positions import KeyPath
from trackbed.errors import ArgumentError, BlendFileError

__all__ = [
    "COUNT",
    "FLAG",
    "NUMBER",
    "POSITIVE",
    "TABLE",
    "TABLES",
    "TEXT",
    "TEXTS",
    "WHOLE",
    "WHOLE_POSITIVE",
    "Problems",
    "Rule",
    "TableReader",
    "one_of",
]


_MOST_CHARS: Final = 2000
_LARGEST: Final = sys.float_info.max


@dataclass(frozen=True, slots=True)
class Rule:
    """What a value must be."""

    says: str
    """Goes on after "must be"."""
    holds: Callable[[Any], bool]


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and -_LARGEST <= value <= _LARGEST


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63


def _is_count(value: object) -> bool:
    try:
        count = parse_count(value) if isinstance(value, str) else value
        return _is_whole(count) and count >= 1  # type: ignore[operator]  # a whole number it is
    except ArgumentError:
        return False


FLAG: Final = Rule("true or false", lambda value: isinstance(value, bool))
TEXT: Final = Rule(
    "a text without NUL that is not empty", lambda value: isinstance(value, str) and value != "" and "\0" not in value
)
TEXTS: Final = Rule(
    "a list of at least one text",
    lambda value: isinstance(value, list) and len(value) > 0 and all(TEXT.holds(one) for one in value),
)
NUMBER: Final = Rule("a finite number of at least 0", lambda value: _is_number(value) and value >= 0)
POSITIVE: Final = Rule("a finite number above 0", lambda value: _is_number(value) and value > 0)
WHOLE: Final = Rule("a whole number of at least 0 and below 2**63", lambda value: _is_whole(value) and value >= 0)
WHOLE_POSITIVE: Final = Rule(
    "a whole number of at least 1 and below 2**63", lambda value: _is_whole(value) and value >= 1
)
COUNT: Final = Rule("a whole number of at least 1 and below 2**63, or a text such as '20M', '1.5B' or '2T'", _is_count)
TABLE: Final = Rule("a table", lambda value: isinstance(value, dict))
TABLES: Final = Rule(
    "a list of tables, each begun by its name in double brackets",
    lambda value: isinstance(value, list) and all(isinstance(one, dict) for one in value),
)


def one_of(choices: Sequence[str | int]) -> Rule:
    """A rule that names all that there are."""
    return Rule(f"one of {', '.join(map(repr, choices))}", lambda value: _is_plain(value) and value in choices)


def _is_plain(value: object) -> bool:
    return isinstance(value, (str, int)) and not isinstance(value, bool)


class Problems:
    """Everything that is wrong in a file.

    Args:
        path: the file, as errors call it.
        lines: where its keys stand.
    """

    def __init__(self, path: Path, lines: Mapping[KeyPath, int]) -> None:
        self._path = path
        self._lines = lines
        self._found: list[tuple[int, str]] = []

    def add(self, where: KeyPath, text: str) -> None:
        """Note that something is wrong with a key, or with the table in which it should be."""
        at = where
        while at and at not in self._lines:
            at = at[:-1]
        line = self._lines.get(at, 1)
        name = ".".join(key for key in where if isinstance(key, str) and key)
        problem = f"{self._path}:{line}: {name}{' ' if name else ''}{text}"
        self._found.append((line, _shortened(" ".join(problem.splitlines()))))

    def stop(self) -> None:
        """Raise what was found, in the order of lines, if anything was.

        Raises:
            BlendFileError: something is wrong.
        """
        if self._found:
            raise BlendFileError([text for _, text in sorted(self._found, key=lambda found: found[0])])


class TableReader:
    """One table, from which keys are taken; `done` refuses what is left.

    Args:
        table: as `tomllib` reads it.
        where: the keys that lead to it.
        problems: takes what is wrong.
    """

    def __init__(self, table: Mapping[str, Any], where: KeyPath, problems: Problems) -> None:
        self.where = where
        self._table = table
        self._problems = problems
        self._known: list[str] = []

    def take(self, key: str, rule: Rule, default: Any = None) -> Any:
        """The value of a key, or the default where it is missing or breaks the rule, which is a problem."""
        self._known.append(key)
        if key not in self._table:
            return default
        value = self._table[key]
        if rule.holds(value):
            return value
        self.refuse(key, f"must be {rule.says}, found {_shown(value)}")
        return default

    def need(self, key: str, rule: Rule, default: Any) -> Any:
        """`take` for a key that must be there; the default stands in where it is not, to go on looking."""
        if key not in self._table:
            self.refuse(key, f"must be given: {rule.says}")
        return self.take(key, rule, default)

    def table(self, key: str) -> "TableReader":
        """The table under a key; an empty one where it is missing."""
        return TableReader(self.take(key, TABLE, {}), (*self.where, key), self._problems)

    def tables(self, key: str) -> "list[TableReader]":
        """The tables of the list under a key."""
        found = self.take(key, TABLES, [])
        return [TableReader(one, (*self.where, key, number), self._problems) for number, one in enumerate(found)]

    def given(self, *keys: str) -> list[str]:
        """Those of the keys that are there."""
        return [key for key in keys if key in self._table]

    @property
    def keys(self) -> list[str]:
        """All keys that are there."""
        return list(self._table)

    def refuse(self, key: str, text: str) -> None:
        """Note that something is wrong with a key; with the table itself if it is empty."""
        self._problems.add((*self.where, key), text)

    def done(self) -> None:
        """Refuse the keys that nobody took, and say which one may be meant."""
        for key in self._table:
            if key not in self._known:
                near = get_close_matches(key, self._known, n=1, cutoff=0.5)
                names = f"{near[0]!r} may be meant" if near else f"known are {', '.join(sorted(self._known))}"
                self.refuse(key, f"is not a key that a blend file has here; {names}")


def _shortened(text: str) -> str:
    """The text, without its middle if it is longer than anybody reads."""
    return text if len(text) <= _MOST_CHARS else f"{text[: _MOST_CHARS // 2]} ... {text[-_MOST_CHARS // 2 :]}"


def _shown(value: object) -> str:
    """A value as TOML writes it, or nearly so, and not too much of it."""
    try:
        text = str(value).lower() if isinstance(value, bool) else repr(value)
    except (ValueError, RecursionError):  # of thousands of digits, or of lists in lists
        return "a number of thousands of digits" if isinstance(value, int) else "a value too large to show"
    return text if len(text) <= 60 else text[:57] + "..."
