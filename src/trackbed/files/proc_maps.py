"""Which files the living processes of this host have mapped."""

import re
from pathlib import Path
from typing import Final

from trackbed.files.stamp import signed

__all__ = ["mapped_files"]

_LINE: Final = re.compile(
    rb"^[0-9a-f]+-[0-9a-f]+ \S+ [0-9a-f]+ [0-9a-f]+:[0-9a-f]+ (?P<inode>\d+) +/.*?(?P<name>[^/\n]+)$", re.MULTILINE
)


def mapped_files(name_ends: tuple[str, ...]) -> frozenset[tuple[int, str]]:
    """Inode and name of the mapped files whose name ends like one of these, as far as this user may look.

    Paths and devices say less than these two: a process in a container may see a file under another path, and some file
    systems give a mapped file another device.
    """
    found: set[tuple[int, str]] = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            maps = (process / "maps").read_bytes()
        except OSError:
            continue  # it has ended, or is somebody else's
        for line in _LINE.finditer(maps):
            name = line["name"].decode(errors="surrogateescape")
            if name.endswith(name_ends):
                found.add((signed(int(line["inode"])), name))
    return frozenset(found)
