"""Sentences by the library sentencex, which needs no model."""

import re
from collections.abc import Callable
from importlib.metadata import version
from typing import Any, Final

from trackbed.datasets.extras import require
from trackbed.datasets.tokenizers.rust_libraries import panics_as_errors
from trackbed.errors import ArgumentError

_WINDOW_CHARS: Final = 4096
_LANGUAGE: Final = re.compile(r"[A-Za-z]{2,3}([-_][A-Za-z0-9]+)*")
# The library fails on white space of several bytes before a letter and a full stop, so it gets a space instead.
_WIDE_SPACE: Final = re.compile(r"[^\S\x00-\x7f]")


class SentencexSplitter:
    """Splits texts by the rules that sentencex has for a language.

    Sentences have no white space around them. The library's time grows with the square of the quotation marks in a
    paragraph, so it gets a window of the text at a time, each of which begins where a sentence does.

    Args:
        segment: function of the library, from a language and a text to its parts.
        language: code of the language, such as `en`.
        library_version: version of the library.
    """

    def __init__(self, segment: Callable[[str, str], list[str]], language: str, library_version: str) -> None:
        self.fingerprint = f"sentencex {library_version} {language}"
        """Changes when the sentences may change."""
        self._segment = segment
        self._language = language

    @classmethod
    def open(cls, language: str = "en") -> "SentencexSplitter":
        """Imports the library.

        Args:
            language: code of the language; the library treats those that it does not know as English.
        """
        if not _LANGUAGE.fullmatch(language):
            raise ArgumentError(f"sentencex: the language must be a code such as en or pt-br, found {language!r}")
        library: Any = require("sentencex", where="--splitter sentencex", extra="sentences")
        return cls(library.segment, language, version("sentencex"))

    def split(self, text: str) -> list[str]:
        """Returns the sentences of a text.

        >>> SentencexSplitter.open().split(" Mr. Smith left.  It rained. ")
        ['Mr. Smith left.', 'It rained.']
        """
        narrow = text if text.isascii() else _WIDE_SPACE.sub(" ", text)
        sentences: list[str] = []
        start, size = 0, _WINDOW_CHARS
        while start < len(text):
            found = self._find(narrow, start, start + size)
            if start + size < len(text):
                found = found[:-1]  # the last one may go on behind the window
            sentences += [text[first:stop] for first, stop in found]
            if start + size >= len(text):
                break
            start, size = (found[-1][1], _WINDOW_CHARS) if found else (start, 2 * size)
        return sentences

    def _find(self, text: str, start: int, stop: int) -> list[tuple[int, int]]:
        """Returns where the sentences of `text[start:stop]` begin and end."""
        spans = []
        for part in self._parts(text[start:stop]):
            sentence = part.strip()
            if not sentence:
                continue
            first = text.find(sentence, start, stop)  # the library leaves out some line ends of long texts
            if first < 0 or not _is_blank(text[start:first]):
                raise ValueError("sentencex: only white space may be left out between sentences, found more")
            start = first + len(sentence)
            spans.append((first, start))
        if not _is_blank(text[start:stop]):
            raise ValueError("sentencex: only white space may be left out after the last sentence, found more")
        return spans

    def _parts(self, text: str) -> list[str]:
        with panics_as_errors():
            return self._segment(self._language, text)


def _is_blank(text: str) -> bool:
    return not text or text.isspace()
