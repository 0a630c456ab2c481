"""Time of the last use of entries, for removing those that are no longer used.

A start uses thousands of entries and does not touch each of them: it leaves one small file that lists them all, named
by its content, and from then on touches that file at most once a day. Access times that the system keeps are of no use
for this, as listing or copying a cache changes them too.
"""

import contextlib
import hashlib
import logging
import os
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from trackbed.cache.entry import Entry
from trackbed.cache.notes import texts_in
from trackbed.files import partial_name, publish, write_new

logger = logging.getLogger(__name__)

DAY_SECONDS: Final = 86_400.0
"""Resolution of the time of last use."""


class Use(NamedTuple):
    """The entries that one start used, and when it last did."""

    path: str
    """The file that says so."""
    names: tuple[str, ...]
    """Stems of entries, or fingerprints of those that have no place but their own."""
    last_used: float
    """Seconds since 1970."""


def note_use(entries: Iterable[Entry]) -> None:
    """Records that entries are in use now, in each cache that can be written.

    Takes one system call if the same entries were used within a day, however many they are.
    """
    by_folder: defaultdict[str, set[str]] = defaultdict(set)
    for entry in entries:
        by_folder[entry.own].add(entry.stem if entry.megatron else entry.fingerprint)
    for own, names in by_folder.items():
        try:
            _note(own, "".join(f"{name}\n" for name in sorted(names)).encode())
        except OSError as error:  # a read-only cache is used, too
            logger.debug("%s: no note of its use: %s", own, error)


def _note(own: str, listing: bytes) -> None:
    name = f"{hashlib.sha256(listing).hexdigest()[:32]}.txt"
    path = f"{own}/uses/{name}"
    with contextlib.suppress(FileNotFoundError):
        if time.time() - os.stat(path).st_mtime > DAY_SECONDS:
            os.utime(path)
        return
    for folder in (f"{own}/uses", f"{own}/partial"):  # but not `own`: it is absent if only Megatron Core wrote here
        Path(folder).mkdir(exist_ok=True)
    partial = f"{own}/partial/{partial_name(name)}"
    try:
        write_new(partial, listing)
        publish(partial, path)
    except BaseException:
        Path(partial).unlink(missing_ok=True)
        raise


def find_uses(own: str) -> list[Use]:
    """Returns the uses that starts have recorded in the folder `own`, which is Trackbed's."""
    found = []
    for path, text in texts_in(f"{own}/uses"):
        with contextlib.suppress(OSError):  # removed meanwhile
            found.append(Use(path, tuple(text.split()), os.stat(path).st_mtime))
    return found


def last_uses(uses: Sequence[Use]) -> Mapping[str, float]:
    """Returns the time of the last use of each name, in seconds since 1970."""
    latest: dict[str, float] = {}
    for use in uses:
        for name in use.names:
            latest[name] = max(use.last_used, latest.get(name, 0.0))
    return latest
