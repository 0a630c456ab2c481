"""Sentences by the library sentencex, which needs no model."""

import re
from collections.abc import Callable
from importlib.metadata import version
from typing import Any, Final

from trackbed.datasets.extras import require
from trackbed.errors import ArgumentError

__all__ = ["SentencexSplitter"]

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

        Raises:
            ArgumentError: the library is not installed, or `language` is no code of a language.
        """
        if not _LANGUAGE.fullmatch(language):
            msg = f"sentencex: the language must be a code such as en or pt-br, found {language!r}"
            raise ArgumentError(msg)
        library: Any = require("sentencex", where="--splitter sentencex", extra="sentences")
        return cls(library.segment, language, version("sentencex"))

    def split(self, text: str) -> list[str]:
        """Returns the sentences of a text.

        Raises:
            ValueError: the library fails, or its parts are not those of the text.

        >>> SentencexSplitter.open().split(" Mr. Smith left.  It rained. ")
        ['Mr. Smith left.', 'It rained.']
        """
        narrow = text if text.isascii() else _WIDE_SPACE.sub(" ", text)
        sentences: list[str] = []
        start, size = 0, _WINDOW_CHARS
        while start < len(text):
            parts = self._parts(narrow[start : start + size])
            if start + size < len(text):
                parts.pop()  # the last one may go on behind the window
                size = _WINDOW_CHARS if parts else 2 * size
            for part in parts:
                stop = start + len(part)
                if sentence := text[start:stop].strip():
                    sentences.append(sentence)
                start = stop
        return sentences

    def _parts(self, text: str) -> list[str]:
        try:
            parts = self._segment(self._language, text)
        except (Exception, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # noqa: BLE001  a panic in Rust is no Exception
            msg = f"sentencex: {error}"
            raise ValueError(msg) from None
        if "".join(parts) != text:
            msg = "sentencex: the parts of a text must make up the text, found others"
            raise ValueError(msg)
        return parts
