"""Which pairs of indexed files are meant by prefixes, files and folders."""

from collections.abc import Iterable
from pathlib import Path
from typing import Final

from trackbed.errors import ArgumentError
from trackbed.tokens import get_idx_path

__all__ = ["find_pairs"]

_SUFFIXES: Final = (".bin", ".idx")


def find_pairs(names: Iterable[str], *, besides: str | None = None) -> list[str]:
    """The prefixes that `names` stand for, in order. Whether there are such pairs is for their reader to say.

    One file of a pair stands for the pair. A folder stands for all pairs in it, sorted by name, except the
    pair `besides`.

    Raises:
        ArgumentError: a folder has no pair.
    """
    prefixes: list[str] = []
    for name in names:
        path = Path(name)
        if path.suffix in _SUFFIXES:
            prefixes.append(str(path.with_suffix("")))
        elif path.is_dir() and not Path(get_idx_path(name)).exists():
            prefixes += _pairs_in(path, besides)
        else:
            prefixes.append(name)
    return prefixes


def _pairs_in(folder: Path, besides: str | None) -> list[str]:
    found = {path.with_suffix("") for path in folder.iterdir() if path.suffix in _SUFFIXES}
    if besides is not None:
        found = {path for path in found if path.absolute() != Path(besides).absolute()}
    if not found:
        msg = f"{folder}: a folder must have .bin and .idx files, found none"
        raise ArgumentError(msg)
    return sorted(map(str, found))
