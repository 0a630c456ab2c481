"""Paths of the files of a prefix."""

import os
from typing import Final


def get_bin_path(path_prefix: str | os.PathLike[str]) -> str:
    """Path of the data file, which contains the tokens.

    >>> get_bin_path("corpus_text_document")
    'corpus_text_document.bin'
    """
    return os.fspath(path_prefix) + ".bin"


def get_idx_path(path_prefix: str | os.PathLike[str]) -> str:
    """Path of the index file, which contains the starts of sequences and documents."""
    return os.fspath(path_prefix) + ".idx"


def get_seal_path(path_prefix: str | os.PathLike[str]) -> str:
    """Path of the seal, which contains counts, sizes and checksums of the other two files."""
    return os.fspath(path_prefix) + ".trackbed.json"


BESIDE: Final = ("src", "mask")
"""Names of the files that may lie beside a pair, and that its seal then names."""


def get_beside_path(path_prefix: str | os.PathLike[str], name: str) -> str:
    """Path of a file beside a pair, of a name in `BESIDE`.

    >>> get_beside_path("corpus_text_document", "src")
    'corpus_text_document.src'
    """
    return f"{os.fspath(path_prefix)}.{name}"
