"""Paths of the files of a prefix."""

import os


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
