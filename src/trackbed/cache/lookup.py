"""Lookup of entries: whole, absent, damaged or foreign, and waits for entries that other processes commit."""

import errno
import os
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum, auto
from itertools import accumulate, chain, pairwise
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from trackbed.cache.entry import ArraySpec, Entry, EntryLocation, Request, differences
from trackbed.cache.manifest import Manifest, parse_manifest, read_manifest
from trackbed.cache.notes import data_note, entry_digest, flush_later, flushed_note, read_notes, write_notes
from trackbed.cache.npy import read_npy_header, read_npy_start
from trackbed.cancellation import check_cancelled
from trackbed.errors import CacheError, FormatError
from trackbed.files import (
    CHUNK_BYTES,
    FileSum,
    Stamps,
    boot_id,
    chunks_of,
    compare_chunks,
    look_again_in,
    read_parts,
    read_regular,
    read_stamps,
)

_ADVICE: Final = {
    errno.EACCES: "path_to_cache must name a folder that you may read from and write to",
    errno.EPERM: "path_to_cache must name a folder that you may read from and write to",
    errno.EROFS: "path_to_cache must name a folder that can be written to, or one where every index is built",
    errno.ENOSPC: "path_to_cache must name a folder with room: `trackbed cache gc` makes some",
    errno.EDQUOT: "your quota on path_to_cache must have room: `trackbed cache gc` makes some",
    errno.EMFILE: "the limit on open files (ulimit -n) must be higher",
    errno.ENOMEM: "the system must have room for one more map: see vm.max_map_count, and ulimit -v",
    errno.ELOOP: "a link must lead to a file: remove it and start again",
    errno.ENOENT: "it was there at the start and has been removed since: start again, and it is built again",
    errno.ESTALE: "another host removed or replaced it meanwhile: start again",
    errno.EIO: "the disk or the file server reports an error of its own: see its log",
}
_OTHERS: Final = "path_to_cache must name a folder with room that you may write to"


_NO_FOLDER: Final = (errno.ENOENT, errno.EEXIST, errno.ENOTDIR)
"""Errors of a folder that cannot be made."""


def advice_on(error: OSError, *, is_writing: bool = False) -> str:
    """Returns the condition under which the system would accept the file.

    >>> advice_on(OSError(errno.ESTALE, "Stale file handle"))
    'another host removed or replaced it meanwhile: start again'
    """
    if is_writing and error.errno in _NO_FOLDER:
        return _OTHERS
    return _ADVICE.get(error.errno or 0, _OTHERS)


_BATCH: Final = 32
"""Entries of a call: with more, the objects of their manifests live long enough to cause a full garbage collection."""
_LONGEST_MANIFEST: Final = 1 << 16
"""Bytes of a manifest that is read in one call with others."""
_NO_SPECS: Final[Mapping[str, ArraySpec]] = {}


class State(Enum):
    """State of an entry."""

    whole = auto()
    absent = auto()
    damaged = auto()
    """Incomplete, truncated, unreadable, or computed from other data: it is built again in place."""
    foreign = auto()
    """Something else has the name: it is left alone."""


class LookupResult(NamedTuple):
    """Result of looking up an entry, or of building it."""

    state: State
    is_aside: bool
    """False if it is, or is to be built, where Megatron Core looks for it."""
    stamps: Stamps
    """`[F, 3]` stamps of its files, the description's first and the manifest's last."""
    why: str = ""
    """Reason for the state, unless it is whole."""
    specs: Mapping[str, ArraySpec] = _NO_SPECS
    """Dtypes and shapes of the arrays of a whole entry."""
    data_crc32: str = ""
    """CRC-32 of the data that a whole entry was computed from; empty where no manifest tells."""
    taken: str = ""
    """Why another index has the name that Megatron Core gives this one; empty if none does."""
    is_built: bool = False
    """True if this process has built it."""


def look_up(requests: Sequence[Request], *, is_vouched: bool = False, leave_notes: bool = True) -> list[LookupResult]:
    """Looks up entries, each where Megatron Core looks for it, or aside if another entry is there.

    A manifest decides by fingerprint and sizes. Nothing else is read unless the files may be lost to a power failure,
    or the data replaced since: then checksums are compared, and a note of the outcome saves the next lookup the work.
    docs/formats/cache.md, "Opening", lists all cases.

    Args:
        requests: entries that are wanted. None is changed.
        is_vouched: True if a rank of this start has built the entries, or removed all doubt.
        leave_notes: False to leave no notes in the cache.

    Raises:
        CacheError: the system refuses to examine a file.
    """
    notes = None if is_vouched else _Notes(defaultdict(list), [])
    results: list[LookupResult] = []
    for first in range(0, len(requests), _BATCH):
        check_cancelled(first)
        results += _look_up_batch(requests[first : first + _BATCH], notes)
    if notes is not None and leave_notes:
        for own, lines in notes.lines.items():
            write_notes(own, lines)
        flush_later(notes.to_flush)
    return results


class _Notes(NamedTuple):
    """Notes to leave in each cache; None instead where a rank of this start vouches for the entries."""

    lines: defaultdict[str, list[str]]
    to_flush: list[tuple[str, Stamps]]


def _look_up_batch(requests: Sequence[Request], notes: _Notes | None) -> list[LookupResult]:
    locations = [each.entry.shared if each.entry.megatron else each.entry.aside for each in requests]
    results = _look_at(requests, locations, notes)
    is_foreign = [result.state is State.foreign for result in results]
    taken = [number for number, request in enumerate(requests) if is_foreign[number] and request.entry.megatron]
    if taken:
        others = [requests[number] for number in taken]
        aside = _look_at(others, [each.entry.aside for each in others], notes)
        for number, result in zip(taken, aside, strict=True):
            results[number] = result._replace(taken=results[number].why)
    return results


def _look_at(
    requests: Sequence[Request], locations: Sequence[EntryLocation], notes: _Notes | None
) -> list[LookupResult]:
    paths = [location.paths(one.entry.arrays) for one, location in zip(requests, locations, strict=True)]
    joined = list(chain.from_iterable(paths))
    stamps = read_stamps(joined)
    # A file that the system refuses to examine, as for want of permission, may be whole. It is neither built again nor
    # replaced: the error says what to change.
    for number in np.flatnonzero((stamps[:, 0] == -1) & (stamps[:, 2] > 0)).tolist():
        errno = int(stamps[number, 2])
        raise _refused(joined[number], OSError(errno, os.strerror(errno)))
    ends = list(accumulate(map(len, paths)))
    manifests = _read_manifests(
        [location.manifest for location in locations], stamps[np.array(ends, dtype=np.int64) - 1]
    )
    results = []
    for request, location, (start, stop), manifest in zip(
        requests, locations, pairwise([0, *ends]), manifests, strict=True
    ):
        try:
            results.append(_judge(request, location, stamps[start:stop], manifest, notes))
        except OSError as error:
            raise _refused(error.filename or location.directory, error) from error
    return results


def _refused(path: str, error: OSError) -> CacheError:
    return CacheError(f"{path}: the index cannot be looked up: {error.strerror}; {advice_on(error)}")


def _read_manifests(paths: Sequence[str], stamps: Stamps) -> list[Manifest | str | None]:
    """Returns each manifest, why it cannot be read, or None where there is none."""
    manifests: list[Manifest | str | None] = [None] * len(paths)
    there = np.flatnonzero(stamps[:, 1] >= 0).tolist()
    small = [number for number in there if stamps[number, 1] <= _LONGEST_MANIFEST]
    sizes = stamps[small, 1].tolist()
    content, seen = read_parts([paths[number] for number in small], [0] * len(small), sizes)
    # A manifest may be replaced between the two calls by one of another size, of which only a part was read then. Such
    # a one is read again below, whole.
    is_same = (seen == stamps[small]).all(axis=1).tolist()
    parts = (content[start:stop].data for start, stop in pairwise(accumulate(sizes, initial=0)))
    read = {number: part for number, part, same in zip(small, parts, is_same, strict=True) if same}
    for number in there:
        path, raw = paths[number], read.get(number)
        try:
            manifests[number] = read_manifest(path) if raw is None else parse_manifest(raw, path)
        except (FormatError, OSError) as error:
            manifests[number] = str(error)
    return manifests


def _judge(
    request: Request, location: EntryLocation, stamps: Stamps, manifest: Manifest | str | None, notes: _Notes | None
) -> LookupResult:
    """Decides the state of an entry from its files."""
    entry = request.entry
    is_aside = location.directory != f"{entry.directory}"
    if isinstance(manifest, Manifest):
        # The fingerprint first: files of another entry are never judged by this one's sizes, as damaged files are
        # replaced.
        if manifest.fingerprint != entry.fingerprint:
            return LookupResult(State.foreign, is_aside, stamps, differences(manifest.decisions, entry.decisions))
        problem = _size_problem(location, entry, manifest, stamps)
        if not problem and not manifest.arrays.keys() >= set(entry.arrays):
            problem = (
                f"{location.manifest}: must describe {', '.join(entry.arrays)}, found {', '.join(manifest.arrays)}"
            )
        if not problem and notes is not None:
            problem = _doubt(entry, location, manifest, stamps, notes)
        if problem:
            return LookupResult(State.damaged, is_aside, stamps, problem)
        return LookupResult(State.whole, is_aside, stamps, specs=manifest.arrays, data_crc32=manifest.data_crc32)
    unread = manifest if isinstance(manifest, str) else ""
    if (stamps[:-1, 1] < 0).all():
        return LookupResult(State.absent, is_aside, stamps, unread)
    expected = request.ingredients.expected()
    problems = [_description_problem(location.paths(())[0], entry.description)]
    problems += [array_problem(location.array(name), expected[name]) for name in entry.arrays]
    # Foreign files first: where one file is of another index and another one is cut, the files must not be replaced.
    for state in (State.foreign, State.damaged):
        for found in problems:
            if found is not None and found[0] is state:
                return LookupResult(state, is_aside, stamps, found[1])
    if unread:
        return LookupResult(State.damaged, is_aside, stamps, unread)
    return LookupResult(
        State.whole,
        is_aside,
        stamps,
        specs={name: _spec_of(location.array(name), expected[name]) for name in entry.arrays},
    )


def _spec_of(path: str, expected: ArraySpec) -> ArraySpec:
    """Dtype and shape of an array whose file fits `expected`."""
    if -1 not in expected.shape:
        return expected
    header = read_npy_header(read_npy_start(path), path=path)
    return ArraySpec(header.dtype, header.shape)


def _size_problem(location: EntryLocation, entry: Entry, manifest: Manifest, stamps: Stamps) -> str:
    """First file whose size differs from the manifest's, as a sentence; empty if all fit."""
    names, files = location.names(entry.arrays), manifest.files
    sizes = stamps[:-1, 1].tolist()
    if [getattr(files.get(name), "size_bytes", None) for name in names] == sizes:
        return ""
    found = {name: size for name, size in zip(names, sizes, strict=True) if size >= 0}
    return next(size_problems(location.directory, {name: files.get(name) for name in names}, found))


def size_problems(directory: str, files: Mapping[str, FileSum | None], sizes: Mapping[str, int]) -> Iterator[str]:
    """Yields a sentence for each file that is missing or has another size than its manifest says.

    Args:
        directory: folder of the entry.
        files: what the manifest says of each file; None if nothing.
        sizes: bytes of each file that exists.
    """
    for name, file_sum in files.items():
        found = f"{sizes[name]}" if name in sizes else "nothing"
        if file_sum is None:
            yield f"{directory}/{name}: must be in the manifest, found it there with no size"
        elif name not in sizes:
            yield f"{directory}/{name}: must be there, as its manifest says, found nothing"
        elif sizes[name] != file_sum.size_bytes:
            yield f"{directory}/{name}: must have {file_sum.size_bytes} bytes, as its manifest says, found {found}"


def _doubt(entry: Entry, location: EntryLocation, manifest: Manifest, stamps: Stamps, notes: _Notes) -> str:
    """Removes all doubt about an entry whose fingerprint and sizes fit. Returns what is wrong with it, if anything."""
    if entry.data is not None and manifest.data is None:
        return f"{location.manifest}: must have a checksum of the data, found none"
    # Within one boot, each process reads what was written, whether it is on the disk or not. After a loss of power a
    # file may have its size and hold zeros: then its checksums are compared, once.
    is_of_boot = manifest.boot != "" and manifest.boot == boot_id()
    is_of_data = entry.data is None or manifest.data is None or manifest.data.stamps == entry.data.stamps
    if is_of_boot and is_of_data:
        return ""
    # Notes are of the stamps of all files, so that none is taken for an entry that was built later under the same name.
    digest, known = entry_digest(stamps), read_notes(entry.own_folder)
    if not is_of_boot and flushed_note(digest) not in known:
        if problem := _content_problem(entry, location, manifest):
            return problem
        notes.to_flush.append((entry.own_folder, stamps))
    if not is_of_data and entry.data is not None and manifest.data is not None:
        note = data_note(digest, entry.data.stamps)
        if note not in known:
            # Other stamps need not mean other data: a copied or restored corpus has new ones. Only the checksum tells,
            # for which the lengths are read.
            found = entry.data.checksum
            if found != manifest.data.crc32:
                return f"{location.manifest}: must be of data with the checksum {found}, found {manifest.data.crc32}"
            notes.lines[entry.own_folder].append(note)
    return ""


def _content_problem(entry: Entry, location: EntryLocation, manifest: Manifest) -> str:
    """Compares the files of an entry with their checksums. Returns the first difference as a sentence."""
    sums = {path: manifest.files[path.rpartition("/")[2]] for path in location.paths(entry.arrays)[:-1]}
    # If a manifest had fewer checksums than its file has chunks, the chunks beyond them would pass unseen.
    for path, one in sums.items():
        if len(one.crc32) != -(-one.size_bytes // CHUNK_BYTES):
            return f"{location.manifest}: must have a checksum for each chunk of {path}, found {len(one.crc32)}"
    for _, problem in compare_chunks(chain.from_iterable(chunks_of(*one) for one in sums.items())):
        check_cancelled()
        if problem:
            return problem
    return ""


def _description_problem(path: str, text: str) -> tuple[State, str] | None:
    """Returns state and sentence for the description of an entry without a manifest if it has another text."""
    expected = text.encode()
    try:
        raw = read_regular(path)
    except FileNotFoundError:
        return State.damaged, f"{path}: must be there, found nothing"
    except FormatError as error:
        return State.foreign, str(error)
    if raw == expected:
        return None
    # Megatron Core writes in place: a prefix is what it leaves when it is killed.
    if expected.startswith(raw):
        return State.damaged, f"{path}: must have {len(expected)} bytes, found {len(raw)}"
    if _is_zeroed(raw, expected):
        return State.damaged, f"{path}: must describe the index, found zeros, as a loss of power leaves them"
    return State.foreign, f"{path} describes another index"


def array_problem(path: str, expected: ArraySpec | None) -> tuple[State, str] | None:
    """Returns state and sentence for an array of an entry without a manifest if its file is not as it must be.

    Args:
        path: the file.
        expected: its dtype and shape; None for any.
    """
    start = None
    try:
        size = Path(path).stat().st_size
        start = read_npy_start(path)
        header = read_npy_header(start, path=path)
    except FileNotFoundError:
        return State.damaged, f"{path}: must be there, found nothing"
    except OSError as error:
        return State.damaged, f"{path}: {error.strerror}"
    except FormatError as error:
        # The header of a small array has 128 bytes: a shorter file was truncated while it was written.
        is_damaged = size < 128 or (start is not None and not any(start[:128]))
        return State.damaged if is_damaged else State.foreign, str(error)
    if expected is not None and not expected.fits(header.dtype, header.shape):
        found = f"{header.dtype} of shape {header.shape}"
        return State.foreign, f"{path} holds {found}, not {expected.dtype} of shape {expected.shape}"
    if expected is not None and expected.least_rows and header.shape[0] < expected.least_rows:
        return State.damaged, f"{path}: must have at least {expected.least_rows} rows, found {header.shape[0]}"
    if size != header.size_bytes:
        return State.damaged, f"{path}: must have {header.size_bytes} bytes, found {size}"
    return None


def _is_zeroed(found: bytes, wanted: bytes) -> bool:
    """True if `found` is a prefix of `wanted` in which some bytes are zero, or is nothing but zeros, however many."""
    is_prefix = len(found) <= len(wanted) and all(one in (0, other) for one, other in zip(found, wanted, strict=False))
    return is_prefix or not any(found)


_FIRST_GAP_SECONDS: Final = 0.001
_LONGEST_GAP_SECONDS: Final = 0.05
"""Short enough for polls, which are at most that far apart."""


def await_visible(request: Request, *, advice: str, timeout_seconds: float = 5.0) -> LookupResult:
    """Waits for an entry that another process has committed.

    Network file systems cache the content of a folder, usually for up to a minute. Opening the folders again before
    each look makes most of them ask the server.

    Args:
        request: the entry.
        advice: what to do if it does not appear.
        timeout_seconds: longest wait, at least 0.

    Raises:
        CacheError: it did not appear in time; the message ends with `advice`.
    """
    started = time.monotonic()
    gap, entry = _FIRST_GAP_SECONDS, request.entry
    while True:
        # The look comes before the check of the time: after a pause that took too long, as on a host that was stopped,
        # the entry may be there.
        (found,) = look_up([request], is_vouched=True)
        if found.state is State.whole:
            return found
        waited = time.monotonic() - started
        if waited >= timeout_seconds:
            what = f"it damaged: {found.why}" if found.why else "nothing"
            where = entry.shared.array("*")
            raise CacheError(
                f"{where}: the index must appear, looked for it for {waited:.1f} s and found {what}; {advice}"
            )
        check_cancelled()
        time.sleep(min(gap, timeout_seconds - waited))
        gap = min(gap * 1.5, _LONGEST_GAP_SECONDS)
        # Right before the next look, not before the pause: what the server says of a folder is cached from then on, and
        # an entry that appears during the pause would be missed once more.
        for folder in (f"{entry.directory}", entry.own_folder, entry.aside.directory):
            look_again_in(folder)
