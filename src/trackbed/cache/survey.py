"""What lies at the place of an entry: the entry, nothing, a damaged copy of it, or something else."""

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from itertools import accumulate, chain, pairwise
from pathlib import Path
from typing import Final

import numpy as np

from trackbed.cache.chunks import chunks_of, compare_chunks
from trackbed.cache.entry import ArraySpec, Entry, Place
from trackbed.cache.fingerprint import differences
from trackbed.cache.manifest import Manifest, parse_manifest, read_manifest
from trackbed.cache.notes import data_note, entry_digest, flush_later, flushed_note, note_data, read_notes
from trackbed.cache.npy import read_npy_spec
from trackbed.cache.sighting import Stamps
from trackbed.errors import FormatError
from trackbed.files import CHUNK_BYTES, boot_id, open_regular, read_regular, stamp_of
from trackbed.kernels import file_stamps, poll_now, read_parts

__all__ = ["Expected", "Finding", "State", "survey", "survey_together"]

_NOTHING: Final = (-1, -1, -1)
_LONGEST_MANIFEST: Final = 1 << 16
"""Bytes of one that is read with others."""

Expected = Callable[[], Mapping[str, ArraySpec]]
"""What the arrays must look like; asked only where no manifest answers, as it may cost reading lengths."""


class State(Enum):
    """How an entry is found."""

    whole = auto()
    absent = auto()
    damaged = auto()
    """Ours, but incomplete, cut short, unreadable or computed from other data: it is built again in place."""
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
    """Of a whole or a damaged entry, as it was found."""
    data_crc32: str = ""
    """CRC-32 of the data that a whole entry was computed from; empty where no manifest tells."""


def survey(entry: Entry, place: Place, expected: Expected, *, is_vouched: bool = False) -> Finding:
    """Look at `place` without changing an entry. Reads no more than headers, unless there is doubt.

    A manifest decides by fingerprint and sizes. Without one (Megatron Core wrote the entry) every file is compared
    with what the configuration asks for. Where there is one that cannot be read, files that look right may be those of
    other decisions: then the entry is damaged.

    There is doubt where the files of the data are not those that the manifest was written for: then the part of the
    data that decides the arrays is read, and its checksum compared. And where the entry was written in another boot and
    no note says that it is on the disk: after a loss of power, files of the right size may be full of zeros. Then its
    files are compared with their checksums. What was found right is noted.

    Args:
        entry: what is wanted.
        place: where to look.
        expected: what its arrays must look like.
        is_vouched: whether a rank of this start has built the entry, or removed such doubt.
    """
    stamps = np.array([stamp_of(path) or _NOTHING for path in place.paths(entry.arrays)], dtype=np.int64)
    found = _judge(entry, place, stamps, expected, is_vouched=is_vouched)
    return replace(found, stamps=stamps) if found.state in (State.whole, State.damaged) else found


def survey_together(entries: Sequence[Entry], vouched: Sequence[bool]) -> list[Finding | None]:
    """`survey` of the places that entries share with Megatron Core's, in a few calls for all of them.

    What is whole by its manifest, without doubt, and what is absent is found; anything else is None, and takes a closer
    look.
    """
    places = [entry.shared for entry in entries]
    paths = [place.paths(entry.arrays) for entry, place in zip(entries, places, strict=True)]
    stamps = file_stamps(".", list(chain.from_iterable(paths)))
    ends = list(accumulate(map(len, paths)))
    manifests = _read_manifests([place.manifest for place in places], stamps[np.array(ends, dtype=np.int64) - 1])
    return [
        _judge_as_read(entry, place, stamps[start:stop], manifest, is_vouched=is_vouched)
        for entry, place, (start, stop), manifest, is_vouched in zip(
            entries, places, pairwise([0, *ends]), manifests, vouched, strict=True
        )
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


def _judge_as_read(
    entry: Entry, place: Place, stamps: Stamps, manifest: Manifest | None, *, is_vouched: bool
) -> Finding | None:
    """What can be said without reading more: of what is whole, or absent."""
    if manifest is None:
        return Finding(State.absent) if (stamps[:, 1] < 0).all() else None
    found = _by_manifest(entry, place, manifest, stamps)
    if found.state is not State.whole or not _tells_all(manifest, entry):
        return None
    if not is_vouched and not (_is_on_disk(entry, manifest, stamps) and _is_of_data(entry, manifest, stamps)):
        return None
    return replace(found, stamps=stamps)


def _is_on_disk(entry: Entry, manifest: Manifest, stamps: Stamps) -> bool:
    """True if no loss of power can have damaged the entry since it was written, or a note says that none did."""
    if manifest.boot and manifest.boot == boot_id():
        return True
    return flushed_note(entry_digest(stamps)) in read_notes(entry.own)


def _is_of_data(entry: Entry, manifest: Manifest, stamps: Stamps) -> bool:
    """True if the data are known to be those that the entry was computed from."""
    if entry.data is None:
        return True
    if manifest.data is None:
        return False
    if manifest.data.stamps == entry.data.stamps:
        return True
    return data_note(entry_digest(stamps), entry.data.stamps) in read_notes(entry.own)


def _judge_content(entry: Entry, place: Place, manifest: Manifest, stamps: Stamps) -> str:
    """Remove the doubt about an entry whose fingerprint and sizes fit. Returns what is wrong with it, or nothing."""
    if entry.data is not None and manifest.data is None:
        return f"{place.manifest}: must hold a checksum of the data, found one of an older Trackbed"
    if not _is_on_disk(entry, manifest, stamps):
        paths = place.paths(entry.arrays)[:-1]
        sums = {path: manifest.files[path.rpartition("/")[2]] for path in paths}
        for path, one in sums.items():
            if len(one.crc32) != -(-one.size_bytes // CHUNK_BYTES):
                return f"{place.manifest}: must have a checksum for each chunk of {path}, found {len(one.crc32)}"
        for _, problem in compare_chunks(chain.from_iterable(chunks_of(*one) for one in sums.items())):
            poll_now()
            if problem:
                return problem
        flush_later({entry.own: [stamps]})
    if entry.data is not None and manifest.data is not None and not _is_of_data(entry, manifest, stamps):
        found = entry.data.checksum
        if found != manifest.data.crc32:
            return f"{place.manifest}: must be of data with the checksum {found}, found {manifest.data.crc32}"
        note_data(entry.own, data_note(entry_digest(stamps), entry.data.stamps))
    return ""


def _judge(entry: Entry, place: Place, stamps: Stamps, expected: Expected, *, is_vouched: bool) -> Finding:
    unread = ""
    try:
        manifest = read_manifest(place.manifest)
    except (FormatError, OSError) as error:
        manifest, unread = None, str(error)
    if manifest is not None:
        found = _by_manifest(entry, place, manifest, stamps)
        if found.state is State.whole and not is_vouched:
            problem = _judge_content(entry, place, manifest, stamps)
            found = Finding(State.damaged, problem) if problem else found
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
    return Finding(State.whole, specs=manifest.arrays, data_crc32=manifest.data.crc32 if manifest.data else "")


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
    try:
        found = read_regular(path)
    except FormatError as error:
        return Finding(State.foreign, str(error))
    if found == wanted.encode():
        return Finding(State.whole)
    if wanted.encode().startswith(found):
        return Finding(State.damaged, f"{path}: must have {len(wanted.encode())} bytes, found {len(found)}")
    if _is_zeroed(found, wanted.encode()):
        return Finding(State.damaged, f"{path}: must describe the index, found zeros, as a loss of power leaves them")
    return Finding(State.foreign, f"{path} describes another index")


def _judge_array(path: Path, wanted: ArraySpec) -> Finding:
    if not path.exists():
        return Finding(State.absent)
    size = path.stat().st_size
    try:
        header = read_npy_spec(path)
    except FormatError as error:
        # The header of a small array has 128 bytes: what is shorter was cut while it was being written.
        is_damaged = size < 128 or _begins_with_zeros(path)
        return Finding(State.damaged if is_damaged else State.foreign, str(error))
    if (header.dtype, header.shape) != (wanted.dtype, wanted.shape):
        return Finding(
            State.foreign,
            f"{path} holds {header.dtype} of shape {header.shape}, not {wanted.dtype} of shape {wanted.shape}",
        )
    if size != header.size_bytes:
        return Finding(State.damaged, f"{path}: must have {header.size_bytes} bytes, found {size}")
    return Finding(State.whole)


def _is_zeroed(found: bytes, wanted: bytes) -> bool:
    """True if `found` is what is left of `wanted` where some of it became zeros, or all of it."""
    if not any(found):
        return True
    if len(found) > len(wanted):
        return False
    left = np.frombuffer(found, dtype=np.uint8)
    return bool(((left == np.frombuffer(wanted, dtype=np.uint8)[: len(left)]) | (left == 0)).all())


def _begins_with_zeros(path: Path) -> bool:
    try:
        descriptor, _ = open_regular(path)
    except FormatError:
        return False
    try:
        return not any(os.read(descriptor, 128))
    finally:
        os.close(descriptor)
