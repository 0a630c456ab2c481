"""This host: its boot, and the folders that no other host sees."""

import os
import re
import socket
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Final

_LOCAL: Final = frozenset(
    ("bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "jfs", "overlay", "ramfs", "tmpfs", "xfs", "zfs")
)
_MOUNT: Final = re.compile(r"\d+ \d+ (?P<device>\d+:\d+) \S+ (?P<point>\S+) .* - (?P<kind>\S+) ")


def is_local(folder: str) -> bool:
    """True if only this machine sees the files in `folder`; False if others may, or if that is unknown.

    Raises:
        OSError: there is no such folder.
    """
    try:
        mounts = Path("/proc/self/mountinfo").read_text(errors="surrogateescape").splitlines()
    except OSError:
        return False
    device = os.stat(folder).st_dev
    return kind_of(mounts, f"{os.major(device)}:{os.minor(device)}", os.path.realpath(folder)) in _LOCAL


@lru_cache(maxsize=64)
def is_on_this_machine(folder: str) -> bool:
    """Cached version of `is_local`."""
    return is_local(folder)


def local_host_path(folder: str) -> str:
    """Host name and path of a local folder, as `host:path`; empty for a folder that other machines may see too.

    The folder need not exist yet.
    """
    path = os.path.realpath(folder)
    there = path
    while not os.path.exists(there):
        there = os.path.dirname(there)
    return f"{socket.gethostname()}:{path}" if is_local(there) else ""


def kind_of(mounts: Iterable[str], device: str, folder: str) -> str:
    """Type of the file system of `folder`, from the lines of mountinfo; empty if they do not list it.

    On some file systems, files have another device number than the mount: then the path decides.

    >>> kind_of(["36 35 0:9 / /data rw,noatime shared:1 - nfs4 host:/export rw"], "0:9", "/data/cache")
    'nfs4'
    """
    found = [match for match in map(_MOUNT.match, mounts) if match is not None]
    on_the_way = [match for match in found if f"{folder}/".startswith(f"{_unescaped(match['point']).rstrip('/')}/")]
    # The deepest mount holds the folder; of several mounts on one point, the last does.
    deepest = max(enumerate(on_the_way), key=lambda each: (len(each[1]["point"]), each[0]), default=None)
    by_device = [match for match in found if match["device"] == device]
    chosen = by_device[-1] if by_device else None if deepest is None else deepest[1]
    return "" if chosen is None else chosen["kind"]


def _unescaped(point: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), point)


def boot_id() -> str:
    """Identifier of the current boot of this host; empty if the system does not provide one.

    The environment variable `TRACKBED_BOOT_ID` overrides it with any non-empty text.
    """
    return os.environ.get("TRACKBED_BOOT_ID") or _boot_id_of_system()


@lru_cache(maxsize=1)
def _boot_id_of_system() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
