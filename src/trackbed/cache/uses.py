"""When entries were last in use, so that those that nobody uses any more can be told.

A start uses thousands of entries, so it does not touch each of them: it leaves one small file that lists them all,
named by what it lists, and from then on touches that file, at most once a day. When files were read last, as the system
keeps it, is of no use for this: whoever looks at a cache, or copies it, reads them too.
"""

import contextlib
import hashlib
import logging
import os
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Final

from trackbed.cache.entry import Entry
from trackbed.cache.notes import write_data_notes
from trackbed.cache.traces import leaves_traces
from trackbed.errors import FormatError
from trackbed.files import partial_name, publish, read_regular, write_new

__all__ = ["DAY_SECONDS", "Use", "find_uses", "last_uses", "note_use", "noting", "touch_use", "use_name"]

logger = logging.getLogger(__name__)

DAY_SECONDS: Final = 86_400.0
"""How exactly the last use of an entry is known."""


class Use:
    """The entries that one start used, and when it last did.

    Args:
        path: the file that says so.
        names: stems of entries, or fingerprints of those that have no place but their own.
        last_used: seconds since 1970.
    """

    def __init__(self, path: str, names: tuple[str, ...], last_used: float) -> None:
        self.path = path
        self.names = names
        self.last_used = last_used


_NOTED: ContextVar[list[Entry] | None] = ContextVar("noted", default=None)


@contextlib.contextmanager
def noting() -> Iterator[list[Entry]]:
    """Note is taken at the end of the block, of all entries used in it and of those in the list given, together."""
    noted: list[Entry] = []
    token = _NOTED.set(noted)
    try:
        yield noted
    finally:
        _NOTED.reset(token)
    if leaves_traces():
        _note_all(noted)
        write_data_notes()


def note_use(entry: Entry) -> None:
    """Take note that an entry is in use now, where that can be written."""
    noted = _NOTED.get()
    if not leaves_traces():
        return
    if noted is None:
        _note_all([entry])
        write_data_notes()
    else:
        noted.append(entry)


def use_name(entries: Iterable[Entry]) -> str:
    """Name of the file that says that these entries of one cache were used."""
    return _name(_listing(entries))


def touch_use(own: str, name: str) -> bool:
    """Take note that the entries of an earlier use are in use again. Returns whether there is one of that name."""
    path = f"{own}/uses/{name}"
    try:
        if time.time() - os.stat(path).st_mtime > DAY_SECONDS:  # noqa: PTH116  see Place
            with contextlib.suppress(PermissionError):  # a cache that can only be read is used, too
                os.utime(path)
    except OSError:
        return False
    return True


def _note_all(entries: Sequence[Entry]) -> None:
    """One call of the file system where note was taken within a day, whatever the number of entries."""
    by_folder: defaultdict[str, list[Entry]] = defaultdict(list)
    for entry in entries:
        by_folder[entry.own].append(entry)
    for own, used in by_folder.items():
        try:
            _note(own, _listing(used))
        except OSError as error:  # a cache that can only be read is used, too
            logger.debug("%s: no note of its use: %s", own, error)


def _listing(entries: Iterable[Entry]) -> bytes:
    names = {entry.stem if entry.megatron else entry.fingerprint for entry in entries}
    return "".join(f"{name}\n" for name in sorted(names)).encode()


def _name(listing: bytes) -> str:
    return f"{hashlib.sha256(listing).hexdigest()[:32]}.txt"


def _note(own: str, listing: bytes) -> None:
    name = _name(listing)
    if touch_use(own, name):
        return
    for folder in (
        f"{own}/uses",
        f"{own}/partial",
    ):  # a folder that Megatron Core alone has written to is left as it is
        Path(folder).mkdir(exist_ok=True)
    partial = f"{own}/partial/{partial_name(name)}"
    try:
        write_new(partial, listing)
        publish(partial, f"{own}/uses/{name}")
    except BaseException:
        Path(partial).unlink(missing_ok=True)
        raise


def find_uses(own: str) -> list[Use]:
    """What starts have left in the folder `own`, which is Trackbed's."""
    found = []
    with contextlib.suppress(FileNotFoundError):
        for path in sorted(Path(own, "uses").glob("*.txt")):
            with contextlib.suppress(OSError, FormatError):  # removed meanwhile, or unreadable
                names = tuple(read_regular(path).decode(errors="replace").split())
                found.append(Use(f"{path}", names, path.stat().st_mtime))
    return found


def last_uses(uses: Sequence[Use]) -> Mapping[str, float]:
    """When each name was last in use, in seconds since 1970."""
    latest: dict[str, float] = {}
    for use in uses:
        for name in use.names:
            latest[name] = max(use.last_used, latest.get(name, 0.0))
    return latest
