"""Splitters of texts into sentences, and opening them by name."""

from pathlib import Path
from typing import Final, Protocol

from trackbed.errors import ArgumentError
from trackbed.preprocess.punkt_splitter import PunktSplitter
from trackbed.preprocess.sentencex_splitter import SentencexSplitter

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
