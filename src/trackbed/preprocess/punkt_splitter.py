"""Sentences by nltk's Punkt, with a model of the user: those of Megatron's `preprocess_data.py`.

A model is a folder with four text files, as nltk 3.9 and later distribute them (`punkt_tab`). Models of older versions
are pickles, which can run any program when they are loaded, so they are not read.
"""

import hashlib
import io
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from trackbed.datasets.extras import require
from trackbed.errors import ArgumentError

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
