"""What lies at the place of an entry: the entry, nothing, a damaged copy of it, or something else."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from trackbed.cache.entry import ArraySpec, Entry, Place
from trackbed.cache.fingerprint import differences
from trackbed.cache.manifest import Manifest, read_manifest
from trackbed.cache.npy import read_npy_spec
from trackbed.errors import FormatError
from trackbed.files import Stamp, stamp_of

__all__ = ["Expected", "Finding", "Sighting", "Stamps", "State", "survey"]

Stamps = Mapping[str, Stamp | None]
"""Files by their paths, as they were when they were looked at; None for what was not there."""


class Sighting(NamedTuple):
    """An entry that was seen whole."""

    place: Place
    names: tuple[str, ...]
    """Its arrays, in the order in which they are written."""
    specs: Mapping[str, ArraySpec]
    """What its arrays hold."""
    stamps: npt.NDArray[np.int64]
    """`[F, 3]` what its files were, as `file_stamps` gives it: the manifest's last."""

    @property
    def paths(self) -> list[str]:
        """`[F]` its files."""
        return self.place.paths(self.names)

    @classmethod
    def of(cls, entry: Entry, place: Place, specs: Mapping[str, ArraySpec], stamps: Stamps) -> "Sighting":
        """What was seen of each file, by its path."""
        rows = [stamps[path] or (-1, -1, -1) for path in place.paths(entry.arrays)]
        return cls(place, entry.arrays, specs, np.array(rows, dtype=np.int64))


Expected = Callable[[], Mapping[str, ArraySpec]]
"""What the arrays must look like; asked only where no manifest answers, as it may cost reading lengths."""


class State(Enum):
    """How an entry is found."""

    whole = auto()
    absent = auto()
    damaged = auto()
    """Ours, but incomplete, cut short or unreadable: it is rebuilt in place."""
    foreign = auto()
    """Something else under the same name: it is left alone."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A state, and in words why."""

    state: State
    why: str = ""
    specs: Mapping[str, ArraySpec] = field(default_factory=dict)
    """What the arrays of a whole entry hold."""
    stamps: Stamps = field(default_factory=dict)
    """What the files of a whole entry were when they were looked at, its manifest included."""


def survey(entry: Entry, place: Place, expected: Expected) -> Finding:
    """Look at `place` without changing anything, and without reading more than headers.

    A manifest decides by fingerprint and sizes. Without one (Megatron Core wrote the entry) every file is compared
    with what the configuration asks for. Where there is one that cannot be read, files that look right may be those of
    other decisions: then the entry is damaged.
    """
    stamps = {path: stamp_of(path) for path in place.paths(entry.arrays)}
    found = _judge(entry, place, stamps, expected)
    return replace(found, stamps=stamps) if found.state is State.whole else found


def _judge(entry: Entry, place: Place, stamps: Stamps, expected: Expected) -> Finding:
    paths, unread = place.files(entry.arrays), ""
    try:
        manifest = read_manifest(place.manifest)
    except (FormatError, OSError) as error:
        manifest, unread = None, str(error)
    if manifest is not None:
        return _by_manifest(entry, place, manifest, stamps, expected)
    if all(stamps[path] is None for path in paths.values()):
        return Finding(State.absent)
    found = _by_headers(entry, paths, expected())
    return Finding(State.damaged, unread) if unread and found.state is State.whole else found


def _by_manifest(entry: Entry, place: Place, manifest: Manifest, stamps: Stamps, expected: Expected) -> Finding:
    if manifest.fingerprint != entry.fingerprint:
        return Finding(State.foreign, differences(manifest.decisions, entry.decisions))
    for path in place.files(entry.arrays).values():
        record, stamp = manifest.files.get(path.rpartition("/")[2]), stamps[path]
        size = None if stamp is None else stamp.size_bytes
        if record is None or size != record.size_bytes:
            wanted = None if record is None else record.size_bytes
            return Finding(State.damaged, f"{path}: must have {wanted} bytes, found {size}")
    if set(manifest.arrays) >= set(entry.arrays):
        return Finding(State.whole, specs=manifest.arrays)
    return _by_headers(entry, place.files(entry.arrays), expected())


def _by_headers(entry: Entry, paths: Mapping[str, str], expected: Mapping[str, ArraySpec]) -> Finding:
    findings = [_judge_description(Path(paths["description"]), entry.description)]
    findings += [_judge_array(Path(paths[name]), expected[name]) for name in entry.arrays]
    for state in (State.foreign, State.damaged):
        for finding in findings:
            if finding.state is state:
                return finding
    if any(finding.state is State.absent for finding in findings):
        return Finding(State.damaged, "some of its files are missing")
    return Finding(State.whole, specs=expected)


def _judge_description(path: Path, wanted: str) -> Finding:
    if not path.exists():
        return Finding(State.absent)
    found = path.read_bytes()
    if found == wanted.encode():
        return Finding(State.whole)
    if wanted.encode().startswith(found):
        return Finding(State.damaged, f"{path}: must have {len(wanted.encode())} bytes, found {len(found)}")
    return Finding(State.foreign, f"{path} describes another index")


def _judge_array(path: Path, wanted: ArraySpec) -> Finding:
    if not path.exists():
        return Finding(State.absent)
    size = path.stat().st_size
    try:
        header = read_npy_spec(path)
    except FormatError as error:
        # The header of a small array has 128 bytes: what is shorter was cut while it was being written.
        return Finding(State.damaged if size < 128 else State.foreign, str(error))
    if (header.dtype, header.shape) != (wanted.dtype, wanted.shape):
        return Finding(
            State.foreign,
            f"{path} holds {header.dtype} of shape {header.shape}, not {wanted.dtype} of shape {wanted.shape}",
        )
    if size != header.size_bytes:
        return Finding(State.damaged, f"{path}: must have {header.size_bytes} bytes, found {size}")
    return Finding(State.whole)
