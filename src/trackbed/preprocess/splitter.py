"""Splitters of texts into sentences: the library sentencex, nltk's Punkt, and opening them by name.

Punkt, with a model of the user, gives the sentences of Megatron's `preprocess_data.py`. A model is a folder with four
text files, as nltk 3.9 and later distribute them (`punkt_tab`). Models of older versions are pickles, which can run any
program when they are loaded, so they are not read.
"""

import hashlib
import io
import re
from collections import Counter
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final, Protocol

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


MODEL_FILES: Final = ("collocations.tab", "sent_starters.txt", "abbrev_types.txt", "ortho_context.tab")
"""Files of a model."""

_PART_CHARS: Final = 1_000_000
"""Characters after which Megatron's tool cuts a text, before it splits the parts."""


class PunktSplitter:
    """Splits texts by a Punkt model, as Megatron's tool does without `--keep-newlines`.

    Sentences keep white space at the start of a text, as the tool's do.

    Args:
        tokenizer: `nltk.tokenize.punkt.PunktSentenceTokenizer`.
        fingerprint: library, version and checksum of the model.
    """

    def __init__(self, tokenizer: Any, fingerprint: str) -> None:
        self.fingerprint = fingerprint
        """Changes when the sentences may change."""
        self._tokenizer = tokenizer

    @classmethod
    def open(cls, folder: Path) -> "PunktSplitter":
        """Reads a model.

        Args:
            folder: folder with the files `MODEL_FILES`.
        """
        _check_model(folder)
        library: Any = require("nltk", where="--splitter punkt", extra="sentences")
        punkt = library.tokenize.punkt
        raw = {name: (folder / name).read_bytes() for name in MODEL_FILES}
        checksum = hashlib.sha256()
        for name, data in raw.items():
            checksum.update(f"{name} {len(data)}\n".encode() + data)
        tokenizer = punkt.PunktSentenceTokenizer(_parameters(punkt, folder, raw))
        return cls(tokenizer, f"punkt nltk {version('nltk')} {checksum.hexdigest()}")

    def split(self, text: str) -> list[str]:
        """Returns the sentences of a text."""
        return [
            sentence
            for start in range(0, len(text), _PART_CHARS)
            for sentence in self._tokenizer.tokenize(text[start : start + _PART_CHARS])
        ]


def _check_model(folder: Path) -> None:
    if folder.is_file():
        raise ArgumentError(
            f"{folder}: a Punkt model must be a folder with {', '.join(MODEL_FILES)}, as nltk's punkt_tab has for each "
            "language, found a file; a pickle is not loaded, as it could run any program"
        )
    missing = [name for name in MODEL_FILES if not (folder / name).is_file()]
    if missing:
        raise ArgumentError(
            f"{folder}: a Punkt model must be a folder with {', '.join(MODEL_FILES)}, found no {missing[0]}"
        )


def _parameters(punkt: Any, folder: Path, raw: dict[str, bytes]) -> Any:
    """Parses the files of a model as nltk does."""
    lines = {name: _lines(folder / name, data) for name, data in raw.items()}
    parameters = punkt.PunktParameters()
    parameters.sent_starters = set(lines["sent_starters.txt"])
    parameters.abbrev_types = set(lines["abbrev_types.txt"])
    collocations = (_two(folder / "collocations.tab", *line) for line in enumerate(lines["collocations.tab"]))
    parameters.collocations = set(collocations)
    # A Counter, as the defaultdict of nltk grows with every word that is looked up.
    parameters.ortho_context = Counter()
    for number, line in enumerate(lines["ortho_context.tab"]):
        word, flags = _two(folder / "ortho_context.tab", number, line)
        if not flags.isdecimal():
            raise ArgumentError(f"{folder / 'ortho_context.tab'}:{number + 1}: flags must be a number, found {flags!r}")
        parameters.ortho_context[word] = int(flags)
    return parameters


def _two(path: Path, number: int, line: str) -> tuple[str, str]:
    first, *rest = line.split("\t")
    if len(rest) != 1:
        raise ArgumentError(f"{path}:{number + 1}: a line must have two values with a tab between them, found {line!r}")
    return first, rest[0]


def _lines(path: Path, data: bytes) -> list[str]:
    try:
        return io.StringIO(data.decode(), newline=None).read().removesuffix("\n").split("\n") if data else []
    except UnicodeDecodeError as error:
        raise ArgumentError(f"{path}: a file of a Punkt model must be UTF-8, found {error}") from None


SENTENCEX: Final = "sentencex"
"""Name of the default splitter, which needs no model."""

PUNKT: Final = "punkt"


class SentenceSplitter(Protocol):
    """Interface of a splitter. Must be picklable to run in worker processes.

    A run saves its work only if the splitter has a `fingerprint`, a string that changes when its sentences change.
    """

    def split(self, text: str) -> list[str]:
        """Returns the sentences of a text, in order; nothing of the text may be left out but white space.

        Raises an error if the text cannot be split, which makes its record a bad one.
        """


def open_splitter(name: str = SENTENCEX) -> SentenceSplitter:
    """Opens the splitter with a given name.

    Args:
        name: `sentencex` for English, `sentencex:LANGUAGE` for the language of that code, or `punkt:FOLDER` for
            nltk's Punkt with the model in that folder.

    Raises:
        ArgumentError: the name is of no splitter, its library is not installed, or the folder has no model.
        OSError: a file of the model cannot be read.

    >>> open_splitter("sentencex").split("He left. She stayed.")
    ['He left.', 'She stayed.']
    """
    library, has_detail, detail = name.partition(":")
    if library == SENTENCEX and (detail or not has_detail):
        return SentencexSplitter.open(detail) if detail else SentencexSplitter.open()
    if library == PUNKT and detail:
        return PunktSplitter.open(Path(detail))
    raise ArgumentError(f"a splitter must be sentencex, sentencex:LANGUAGE or punkt:FOLDER, found {name!r}")
