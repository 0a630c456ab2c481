"""Words of a command line as a shell divides it."""

import re
import shlex
from collections.abc import Iterator
from typing import Final

from trackbed.errors import ArgumentError

__all__ = ["shell_words"]

_IS_SEVERAL: Final = re.compile(r"--\S+\s")
_IS_END: Final = re.compile(r"[|&;]+|\d*>+(&?\d)?\S*|<+[^>\s]*")
"""The word that ends a command in a shell. A token such as <unk> is none."""
_IS_START: Final = re.compile(r"\S")
_IS_WORD: Final = re.compile(r"""(?:'[^']*'|"(?:\\.|[^"\\])*"|\\.|[^\s'"\\])+""", re.DOTALL)
"""A word of a command line, with its quotes."""


def shell_words(arguments: str, where: str) -> list[str]:
    """Returns the words of a command line, up to the end of the command and without comments.

    Args:
        arguments: text of the command line.
        where: what it is, for errors.

    Raises:
        ArgumentError: it is not UTF-8, or a quotation does not end.
    """
    if not arguments.isprintable() and any("\ud800" <= char <= "\udfff" for char in arguments):
        msg = f"{where}: must be UTF-8, found other bytes"
        raise ArgumentError(msg)
    words: list[str] = []
    for quoted in _quoted_words(arguments.replace("\\\n", " "), where):
        if _IS_END.fullmatch(quoted):
            break
        is_last = quoted.endswith(";") and not quoted.endswith("\\;")
        (word,) = shlex.split(quoted.removesuffix(";") if is_last else quoted)
        try:
            # Scripts keep several arguments in one variable, which a shell splits again.
            words += shlex.split(word) if _IS_SEVERAL.match(word) else [word]
        except ValueError as error:
            raise _not_quoted(where, str(error)) from None
        if is_last:
            break
    return words


def _quoted_words(text: str, where: str) -> Iterator[str]:
    """Yields the words with their quotes, as only a character without quotes ends a command or begins a comment."""
    position = 0
    while (start := _IS_START.search(text, position)) is not None:
        if start[0] == "#":
            position = text.find("\n", start.start())
            if position < 0:
                return
            continue
        word = _IS_WORD.match(text, start.start())
        if word is None or not (word.end() == len(text) or text[word.end()].isspace()):
            found = "No closing quotation"
            raise _not_quoted(where, found)
        yield word[0]
        position = word.end()


def _not_quoted(where: str, found: str) -> ArgumentError:
    return ArgumentError(f"{where}: must be quoted as in a shell, found: {found}")
