"""Lookup of the files that processes on this host have mapped."""

import re
from pathlib import Path
from typing import Final

from trackbed.files.stamp import signed

__all__ = ["mapped_files"]

_LINE: Final = re.compile(
    rb"^[0-9a-f]+-[0-9a-f]+ \S+ [0-9a-f]+ [0-9a-f]+:[0-9a-f]+ (?P<inode>\d+) +/.*?(?P<name>[^/\n]+)$", re.MULTILINE
)


def mapped_files(name_ends: tuple[str, ...]) -> frozenset[tuple[int, str]]:
    """Returns inode and name of the mapped files whose name ends with one of `name_ends`.

    Covers the processes that this user may inspect. Paths and devices are less reliable: a process in a container may
    see a file under another path, and some file systems report another device for a mapped file.
    """
    found: set[tuple[int, str]] = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            maps = (process / "maps").read_bytes()
        except OSError:
            continue  # it has ended, or belongs to another user
        for line in _LINE.finditer(maps):
            name = line["name"].decode(errors="surrogateescape")
            if name.endswith(name_ends):
                found.add((signed(int(line["inode"])), name))
    return frozenset(found)
