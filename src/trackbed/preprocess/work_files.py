"""Names of the files that Trackbed writes, which are never inputs."""

import os
import re
from pathlib import Path
from typing import Final

from trackbed.files import is_partial_name
from trackbed.tokens.commit import is_pending_name
from trackbed.tokens.format import is_indexed
from trackbed.tokens.paths import get_bin_path, get_idx_path, get_seal_path
from trackbed.tokens.shard_list import is_shard_list

UNFINISHED_SUFFIX: Final = ".unfinished"
"""Suffix of the folder to which a run saves its work."""

RECORD_NAME: Final = "record.json"
LOCK_NAME: Final = "lock"
_SAVED: Final = re.compile(r"\d+\.(bin|lengths|counts|modes)")
_BIN, _IDX, _SEAL = get_bin_path(""), get_idx_path(""), get_seal_path("")


def is_saved_name(name: str) -> bool:
    """True for the files of tokens and arrays in an unfinished folder.

    >>> is_saved_name("0.bin"), is_saved_name("corpus.bin")
    (True, False)
    """
    return _SAVED.fullmatch(name) is not None


def is_work_file(path: Path) -> bool:
    """True for a file that a running or killed run has written, and for a folder with its saved work."""
    name = path.name
    if is_partial_name(name) or is_pending_name(name):
        return True
    if name.endswith(UNFINISHED_SUFFIX) and path.is_dir():
        return all(_is_saved(entry) for entry in os.listdir(path))  # noqa: PTH208  names are all that is wanted
    return path.parent.name.endswith(UNFINISHED_SUFFIX) and _is_saved(name)


def is_own_file(path: Path) -> bool:
    """True for work files, for the `.bin`, `.idx` and seal of a pair, and for lists of shards."""
    prefix, suffix = os.path.splitext(path)  # noqa: PTH122  with_suffix refuses some names
    if path.name.endswith(_SEAL) or is_work_file(path) or is_shard_list(path):
        return True
    return suffix in (_BIN, _IDX) and is_indexed(prefix)


def _is_saved(name: str) -> bool:
    return name in (RECORD_NAME, LOCK_NAME) or is_saved_name(name) or is_partial_name(name)
