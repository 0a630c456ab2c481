"""CPU quota of a container: the share of time that its control group may use, which the mask of CPUs does not show.

Versions 1 and 2 of control groups, and both beside each other, as the kernel's documentation describes them. A group
is also limited by all groups above it, as far as the container sees them.
"""

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_OCTAL: Final = re.compile(r"\\([0-7]{3})")  # how the table of mounts writes a space
_DEFAULT_PERIOD: Final = 100_000


def cpu_quota(root: Path = Path("/")) -> int | None:
    """Returns the CPUs that this process may use at a time by its quota, rounded up; None without a quota.

    Args:
        root: folder with `proc/self`, and with the folders that are mounted.
    """
    found = [quota for folder in _groups(root) for quota in (_version_2(folder), _version_1(folder)) if quota]
    return max(1, math.ceil(min(found))) if found else None


def _groups(root: Path) -> Iterator[Path]:
    """Yields the folders of this process's groups that may limit its CPUs, and of the groups above them."""
    paths = _group_paths(_lines(root / "proc/self/cgroup"))
    for line in _lines(root / "proc/self/mountinfo"):
        mount, _, kind = line.partition(" - ")
        fields, described = mount.split(), kind.split()
        if len(fields) < 5 or len(described) < 3:
            continue
        is_second, is_first = described[0] == "cgroup2", described[0] == "cgroup" and "cpu" in described[2].split(",")
        path = paths.get("" if is_second else "cpu")
        if path is None or not (is_first or is_second):
            continue
        mounted, top = (_OCTAL.sub(lambda code: chr(int(code[1], 8)), field) for field in (fields[4], fields[3]))
        inside = _below(path, top)
        folder = root / mounted.lstrip("/")
        for depth in range(len(inside) + 1):
            yield folder.joinpath(*inside[:depth])


def _group_paths(lines: list[str]) -> dict[str, str]:
    """Returns the path of the group by controller; that of version 2 under an empty name.

    >>> _group_paths(["4:cpu,cpuacct:/a", "0::/b"])
    {'cpu': '/a', 'cpuacct': '/a', '': '/b'}
    """
    parts = [line.split(":", 2) for line in lines if line.count(":") >= 2]
    return {name: path for _, names, path in parts for name in names.split(",")}


def _below(path: str, top: str) -> tuple[str, ...]:
    """Returns the parts of a group's path below the group that is mounted; none if it lies elsewhere.

    >>> _below("/docker/a/b", "/docker/a"), _below("/x", "/docker/a"), _below("/../x", "/")
    (('b',), (), ())
    """
    parts, above = Path(path).parts, Path(top).parts
    if parts[: len(above)] != above or ".." in parts:
        return ()  # the path is seen from outside the container
    return parts[len(above) :]


def _version_2(folder: Path) -> float | None:
    """Returns the CPUs of `cpu.max`, which holds a quota or `max`, and a period."""
    quota, *period = (_lines(folder / "cpu.max") or [""])[0].split() or [""]
    return _ratio(quota, period[0] if period else str(_DEFAULT_PERIOD))


def _version_1(folder: Path) -> float | None:
    """Returns the CPUs of the two files of version 1, where a quota below 0 means none."""
    quota, period = (_lines(folder / f"cpu.cfs_{name}_us")[:1] for name in ("quota", "period"))
    return _ratio(quota[0], period[0]) if quota and period else None


def _ratio(quota: str, period: str) -> float | None:
    try:
        share, length = int(quota), int(period)
    except ValueError:
        return None
    return share / length if share > 0 and length > 0 else None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return []
