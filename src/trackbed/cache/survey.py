"""What lies at the place of an entry: the entry, nothing, a damaged copy of it, or something else."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from itertools import accumulate, chain, pairwise
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from trackbed.cache.entry import ArraySpec, Entry, Place
from trackbed.cache.fingerprint import differences
from trackbed.cache.manifest import Manifest, parse_manifest, read_manifest
from trackbed.cache.npy import read_npy_spec
from trackbed.errors import FormatError
from trackbed.files import stamp_of
from trackbed.kernels import file_stamps, read_parts

__all__ = ["Expected", "Finding", "Sighting", "State", "survey", "survey_together"]

_NOTHING: Final = (-1, -1, -1)
_LONGEST_MANIFEST: Final = 1 << 16
"""Bytes of one that is read with others."""

Stamps = npt.NDArray[np.int64]
"""`[F, 3]` what files were when they were looked at, as `file_stamps` gives it: of an entry, the manifest's last."""


class Sighting(NamedTuple):
    """An entry that was seen whole."""

    place: Place
    names: tuple[str, ...]
    """Its arrays, in the order in which they are written."""
    specs: Mapping[str, ArraySpec]
    """What its arrays hold."""
    stamps: Stamps

    @property
    def paths(self) -> list[str]:
        """`[F]` its files."""
        return self.place.paths(self.names)


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
    stamps: Stamps | None = None
    """Of a whole entry."""


def survey(entry: Entry, place: Place, expected: Expected) -> Finding:
    """Look at `place` without changing anything, and without reading more than headers.

    A manifest decides by fingerprint and sizes. Without one (Megatron Core wrote the entry) every file is compared
    with what the configuration asks for. Where there is one that cannot be read, files that look right may be those of
    other decisions: then the entry is damaged.
    """
    stamps = np.array([stamp_of(path) or _NOTHING for path in place.paths(entry.arrays)], dtype=np.int64)
    found = _judge(entry, place, stamps, expected)
    return replace(found, stamps=stamps) if found.state is State.whole else found


def survey_together(entries: Sequence[Entry]) -> list[Finding | None]:
    """`survey` of the places that entries share with Megatron Core's, in a few calls for all of them.

    What is whole by its manifest and what is absent is found; anything else is None, and takes a closer look.
    """
    places = [entry.shared for entry in entries]
    paths = [place.paths(entry.arrays) for entry, place in zip(entries, places, strict=True)]
    stamps = file_stamps(".", list(chain.from_iterable(paths)))
    ends = list(accumulate(map(len, paths)))
    manifests = _read_manifests([place.manifest for place in places], stamps[np.array(ends, dtype=np.int64) - 1])
    return [
        _judge_as_read(entry, place, stamps[start:stop], manifest)
        for entry, place, (start, stop), manifest in zip(entries, places, pairwise([0, *ends]), manifests, strict=True)
    ]


def _read_manifests(paths: Sequence[str], stamps: Stamps) -> list[Manifest | None]:
    """Those that can be read, and are what they were when `[N, 3]` stamps were taken."""
    found: list[Manifest | None] = [None] * len(paths)
    there = np.flatnonzero((stamps[:, 1] >= 0) & (stamps[:, 1] <= _LONGEST_MANIFEST)).tolist()
    sizes = stamps[there, 1].tolist()
    content, seen = read_parts([paths[number] for number in there], [0] * len(sizes), sizes)
    are_same = (seen == stamps[there]).all(axis=1).tolist()
    bounds = pairwise(accumulate(sizes, initial=0))
    for number, is_same, (start, stop) in zip(there, are_same, bounds, strict=True):
        with contextlib.suppress(FormatError):
            found[number] = parse_manifest(content[start:stop].data, paths[number]) if is_same else None
    return found


def _judge_as_read(entry: Entry, place: Place, stamps: Stamps, manifest: Manifest | None) -> Finding | None:
    """What can be said without reading more: of what is whole, or absent."""
    if manifest is None:
        return Finding(State.absent) if (stamps[:, 1] < 0).all() else None
    found = _by_manifest(entry, place, manifest, stamps)
    if found.state is not State.whole or not _tells_all(manifest, entry):
        return None
    return Finding(State.whole, specs=found.specs, stamps=stamps)


def _judge(entry: Entry, place: Place, stamps: Stamps, expected: Expected) -> Finding:
    unread = ""
    try:
        manifest = read_manifest(place.manifest)
    except (FormatError, OSError) as error:
        manifest, unread = None, str(error)
    if manifest is not None:
        found = _by_manifest(entry, place, manifest, stamps)
        is_clear = found.state is not State.whole or _tells_all(manifest, entry)
        return found if is_clear else _by_headers(entry, place.files(entry.arrays), expected())
    if (stamps[:-1, 1] < 0).all():
        return Finding(State.absent, unread)
    found = _by_headers(entry, place.files(entry.arrays), expected())
    return Finding(State.damaged, unread) if unread and found.state is State.whole else found


def _tells_all(manifest: Manifest, entry: Entry) -> bool:
    """Whether it says what all arrays hold, as those of an older Trackbed do not."""
    return manifest.arrays.keys() >= set(entry.arrays)


def _by_manifest(entry: Entry, place: Place, manifest: Manifest, stamps: Stamps) -> Finding:
    if manifest.fingerprint != entry.fingerprint:
        return Finding(State.foreign, differences(manifest.decisions, entry.decisions))
    for path, size in zip(place.paths(entry.arrays)[:-1], stamps[:-1, 1].tolist(), strict=True):
        record = manifest.files.get(path.rpartition("/")[2])
        if record is None or size < 0 or size != record.size_bytes:
            wanted = None if record is None else record.size_bytes
            found = None if size < 0 else size
            return Finding(State.damaged, f"{path}: must have {wanted} bytes, found {found}")
    return Finding(State.whole, specs=manifest.arrays)


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
