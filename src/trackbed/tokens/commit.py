"""Atomic replacement of a pair, although two files cannot be renamed at once.

The new files first get names that end in `.pending`, the index last. Removing the old `.idx` commits the new pair: from
then on any process can complete it by `finish_pair`. An interruption therefore leaves the old pair, the new pair, or no
`.idx` and an error that says how to finish, but never the `.bin` of one pair under the `.idx` of the other.
"""

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Final

from trackbed.errors import ArgumentError, TrackbedError
from trackbed.files import flush_to_disk, publish
from trackbed.files.stores import lost_address_hint
from trackbed.tokens.paths import BESIDE, get_beside_path, get_bin_path, get_idx_path, get_seal_path

_PENDING: Final = ".pending"
_NAMES: Final = tuple(
    f"{path}{_PENDING}"
    for path in (get_bin_path(""), get_seal_path(""), get_idx_path(""), *(get_beside_path("", name) for name in BESIDE))
)
LOCK_SUFFIX: Final = f"{get_idx_path('')}.lock"
"""End of the name of a pair's lock."""
_NO_LOCKS: Final = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
_USUAL_NAME_BYTES: Final = 255
_CHARS_SHOWN: Final = 80
_WAIT_SECONDS: Final = 60.0
_POLL_SECONDS: Final = 0.01


@dataclass(frozen=True, slots=True)
class PairFiles:
    """Paths of the three files of a pair, and of those beside it, final or not."""

    bin: Path
    seal: Path
    idx: Path
    beside: Mapping[str, Path] = field(default_factory=dict)
    """Files beside the pair by name; of final paths all that there may be."""

    @classmethod
    def of(cls, path_prefix: str) -> "PairFiles":
        """The final paths of a pair."""
        beside = {name: Path(get_beside_path(path_prefix, name)) for name in BESIDE}
        binary, seal, idx = (Path(path_of(path_prefix)) for path_of in (get_bin_path, get_seal_path, get_idx_path))
        return cls(binary, seal, idx, beside)

    @property
    def pending(self) -> "PairFiles":
        """Paths of the complete files until they are renamed to these."""
        beside = {name: Path(f"{path}{_PENDING}") for name, path in self.beside.items()}
        binary, seal, idx = (Path(f"{path}{_PENDING}") for path in (self.bin, self.seal, self.idx))
        return PairFiles(binary, seal, idx, beside)


def is_pending_name(name: str) -> bool:
    """True for the names that files of a pair have while it is being replaced.

    >>> is_pending_name("corpus.idx.pending"), is_pending_name("corpus.idx.lock"), is_pending_name("corpus.idx")
    (True, True, False)
    """
    return name.endswith((*_NAMES, LOCK_SUFFIX))


def check_pair_name(path_prefix: str | os.PathLike[str]) -> None:
    """Checks that the names of all files that are made for a pair are short enough, before any work.

    Raises:
        ArgumentError: they are not.
    """
    folder, name = os.path.split(os.fspath(path_prefix))
    try:
        longest = os.pathconf(folder or ".", "PC_NAME_MAX")
    except (OSError, ValueError):
        longest = _USUAL_NAME_BYTES
    size = len(os.fsencode(name))
    most = longest - max(map(len, (*_NAMES, LOCK_SUFFIX)))
    if size > most:
        shown = f"{os.fspath(path_prefix)[:_CHARS_SHOWN]}..."
        why = "so that the names of its files fit"
        raise ArgumentError(f"{shown}: the name of a pair must have at most {most} bytes here, {why}, found {size}")


def commit_pair(partials: PairFiles, finals: PairFiles) -> None:
    """Renames complete files to their final names, replacing an older pair.

    Processes that commit to the same name wait for each other. If this fails before the old `.idx` is removed, the old
    pair stays and the `.bin` gets its partial name back.

    Args:
        partials: files that are complete and flushed to disk, on the file system of the final names.
        finals: final paths.
    """
    pending = finals.pending
    with locked_pair(finals.idx):
        # A writer that was killed after its commit has left pending files: they are the pair, and get their names
        # first. Otherwise they would be mixed with the files that follow.
        _finish(finals)
        for path in (pending.idx, *pending.beside.values()):
            path.unlink(missing_ok=True)  # left by a writer that was interrupted before it committed
        try:
            # The `.idx` last: where it is pending, any process may take all files for complete (`_finish`).
            for partial, path in (
                *((partial, pending.beside[name]) for name, partial in partials.beside.items()),
                (partials.bin, pending.bin),
                (partials.seal, pending.seal),
                (partials.idx, pending.idx),
            ):
                publish(partial, path)
            # The new names must be on the disk before the old `.idx` goes, or a loss of power could leave neither pair.
            _flush_folders(finals)
            finals.idx.unlink(missing_ok=True)
            _finish(finals)
            for name in finals.beside.keys() - partials.beside.keys():  # of an older pair: the seal does not name it
                finals.beside[name].unlink(missing_ok=True)
        except BaseException:
            # Once the old `.idx` is gone there is no way back: other processes may be completing the pair. So an
            # interruption after that is completed, and one before it is undone.
            if not _finish(finals):
                _undo(partials, finals)
            raise


def finish_pair(path_prefix: str) -> bool:
    """Completes a pair whose writer was interrupted after it committed the new files.

    Args:
        path_prefix: path of the pair without `.bin` and `.idx`.

    Returns:
        True if there was something to complete.

    Raises:
        TrackbedError: another process has been committing to this name for a minute, or the `.bin` is elsewhere.
        OSError: a file cannot be renamed.
    """
    finals = PairFiles.of(path_prefix)
    if finals.idx.exists() or not finals.pending.idx.exists():
        return False
    if not finals.pending.bin.exists() and not finals.bin.exists():
        raise TrackbedError(
            f"{finals.pending.idx}: its .bin must be in the same folder, found none: write the pair again"
        )
    with locked_pair(finals.idx):
        return _finish(finals)


def interruption(path_prefix: str) -> str:
    """Hint for an error message about a missing `.idx`: how to finish the pair. Empty if no writer was interrupted."""
    finals = PairFiles.of(path_prefix)
    if finals.idx.exists() or not finals.pending.idx.exists():
        return ""
    return f"; a writer was interrupted while it replaced the pair: run trackbed finish {path_prefix}"


def _finish(finals: PairFiles) -> bool:
    """Renames pending files to their final names if the old `.idx` is gone. Returns True if there were such files."""
    pending = finals.pending
    if finals.idx.exists() or not pending.idx.exists():
        return False
    for path, final in (
        *((pending.beside[name], final) for name, final in finals.beside.items()),
        (pending.bin, finals.bin),
        (pending.seal, finals.seal),
        (pending.idx, finals.idx),
    ):
        if path.exists():  # else it already has its final name
            publish(path, final)
            path.unlink(missing_ok=True)  # renaming one of two links to the same file does nothing
    _flush_folders(finals)
    return True


def _undo(partials: PairFiles, finals: PairFiles) -> None:
    """Reverts pending files. Called only if nothing was committed, or if all files have their final names."""
    pending = finals.pending
    pending.idx.unlink(missing_ok=True)
    for path in (pending.seal, *pending.beside.values()):
        path.unlink(missing_ok=True)
    if pending.bin.exists() and not partials.bin.exists():
        publish(pending.bin, partials.bin)


def _flush_folders(finals: PairFiles) -> None:
    for folder in {finals.bin.parent, finals.idx.parent}:
        flush_to_disk(folder)


@contextlib.contextmanager
def locked_pair(idx: Path) -> Iterator[None]:
    """Holds the lock of a pair's name. The system releases it when the process ends, even if it is killed.

    Does nothing on a file system without locks.
    """
    path = Path(f"{idx}.lock")
    descriptor = _acquire(path)
    try:
        yield
    finally:
        # Removed while it is locked: after that, the next writer may have locked it, and would share its name with a
        # third one.
        if descriptor is not None:
            path.unlink(missing_ok=True)
            os.close(descriptor)


def _acquire(path: Path) -> int | None:
    deadline = time.monotonic() + _WAIT_SECONDS
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Between the open and the lock, the owner may have removed the file. A lock of a file without a name
            # excludes nobody, as the next writer makes a new one.
            if path.exists() and os.path.samestat(os.fstat(descriptor), path.stat()):
                return descriptor
        except FileNotFoundError:
            pass  # the previous owner has just removed it
        except OSError as error:
            if error.errno in _NO_LOCKS:
                os.close(descriptor)
                path.unlink(missing_ok=True)
                return None
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                os.close(descriptor)
                raise
            if time.monotonic() > deadline:
                os.close(descriptor)
                raise TrackbedError(
                    f"{path}: no other process may be replacing the pair, found one for {_WAIT_SECONDS:.0f} s"
                ) from None
            time.sleep(_POLL_SECONDS)
        os.close(descriptor)


_MOST_NAMES: Final = 500
"""Pairs of a folder whose names are compared: a blend may miss thousands of pairs."""
_MOST_SHOWN: Final = 3
_LEAST_RATIO: Final = 0.75
_USUAL_END: Final = "_text_document"


def hint_for_missing_pair(path_prefix: str) -> str:
    """Returns the end of an error message about a missing pair: what to do, or which pair may be meant; or nothing."""
    hint = interruption(path_prefix) or lost_address_hint(path_prefix)
    if hint:
        return hint
    similar = _similar_prefixes(path_prefix)
    if not similar:
        return ""
    *first, last = similar
    return f"; did you mean {', '.join(first)}{' or ' if first else ''}{last}?"


def _similar_prefixes(path_prefix: str) -> list[str]:
    """Returns up to three pairs in the same folder with similar names, first those that preprocess makes of it."""
    folder, name = os.path.split(path_prefix)
    if _is_pair(f"{path_prefix}{_USUAL_END}"):
        return [f"{path_prefix}{_USUAL_END}"]
    try:
        found = {entry.removesuffix(".idx") for entry in os.listdir(folder or ".") if entry.endswith(".idx")}  # noqa: PTH208
    except (OSError, ValueError):
        return []
    if len(found) > _MOST_NAMES:
        return []
    made_of_it = sorted(one for one in found if one.startswith(f"{name}_"))
    close = get_close_matches(name, sorted(found - {name, *made_of_it}), n=_MOST_SHOWN, cutoff=_LEAST_RATIO)
    prefixes = (os.path.join(folder, one) for one in (*made_of_it, *close))  # noqa: PTH118  as it was written
    return list(filter(_is_pair, prefixes))[:_MOST_SHOWN]


def _is_pair(path_prefix: str) -> bool:
    return Path(get_idx_path(path_prefix)).is_file() and Path(get_bin_path(path_prefix)).is_file()
