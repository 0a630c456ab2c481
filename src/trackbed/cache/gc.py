"""Removal of entries that have not been used for long: first the plan, then the act."""

import contextlib
from collections.abc import Container
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from trackbed.cache.inventory import Condition, Inventory, StoredEntry
from trackbed.cache.notes import DAY_SECONDS, NoteFile, Use, last_uses
from trackbed.files import PartialFile, Writer, mapped_files, remove_unless_changed

_FORSAKEN_SECONDS: Final = 7 * DAY_SECONDS


@dataclass(frozen=True, slots=True)
class Removal:
    """The files to be removed from a cache."""

    entries: tuple[StoredEntry, ...]
    """Damaged entries first, then the least recently used."""
    partials: tuple[PartialFile, ...]
    uses: tuple[Use, ...]
    """Notes of starts that are not the latest use of any entry that stays."""
    notes: tuple[NoteFile, ...]
    """Notes that do not concern any entry that stays."""
    left_bytes: int
    """Size of the entries that stay."""

    @property
    def size_bytes(self) -> int:
        """Size of the entries that are removed."""
        return sum(entry.size_bytes for entry in self.entries)


def entries_in_use(inventory: Inventory) -> frozenset[str]:
    """Paths of the entries of which a living process of this host has a file mapped, as far as this user may look.

    Arrays are mapped when they are first read: a process that has not read any yet is not seen.
    """
    mapped = mapped_files((".npy",))
    return frozenset(
        entry.path
        for entry in inventory.entries
        if any((file.stamp.inode, file.path.rpartition("/")[2]) in mapped for file in entry.files)
    )


def plan_removal(
    inventory: Inventory,
    *,
    now: float,
    keep_bytes: int = 0,
    unused_for_seconds: float = DAY_SECONDS,
    in_use: Container[str] = (),
    foreign: bool = False,
) -> Removal:
    """Chooses the entries to remove, so that the others take at most `keep_bytes` if possible.

    Args:
        inventory: what lies in the cache.
        now: seconds since 1970.
        keep_bytes: size of the cache below which no more entries are removed.
        unused_for_seconds: only entries that were not used for this time are removed. Uses are known to the day.
        in_use: paths of entries that must stay.
        foreign: True if entries may be removed that are not known to be Trackbed's: those without a manifest, and
            those whose manifest is of another version.
    """
    may_go = [
        entry
        for entry in inventory.entries
        if now - entry.last_used >= unused_for_seconds
        and entry.path not in in_use
        and (foreign or (entry.manifest is not None and entry.condition is not Condition.unknown))
    ]
    goes, remaining_bytes = [], inventory.size_bytes
    for entry in sorted(may_go, key=lambda entry: (entry.condition is not Condition.damaged, entry.last_used)):
        if remaining_bytes <= keep_bytes:
            break
        goes.append(entry)
        remaining_bytes -= entry.size_bytes
    partials = tuple(partial for partial in inventory.partials if _is_forsaken(partial, now))
    gone = {entry.path for entry in goes}
    stay = [entry for entry in inventory.entries if entry.path not in gone]
    digests = {entry.digest for entry in stay}
    # An empty one belongs to entries that are being flushed, or to a process that was killed before the flush.
    idle = (note for note in inventory.notes if note.digests or now - note.last_written >= DAY_SECONDS)
    notes = tuple(note for note in idle if not note.digests & digests)
    names = {name for entry in stay for name in (entry.stem, entry.directory.rpartition("/")[2])}
    latest = {(name, last) for name, last in last_uses(inventory.uses).items() if name in names}
    uses = tuple(use for use in inventory.uses if not any((name, use.last_used) in latest for name in use.names))
    return Removal(tuple(goes), partials, uses, notes, remaining_bytes)


def _is_forsaken(partial: PartialFile, now: float) -> bool:
    """True if no process writes a partial file any more, as far as can be told."""
    if partial.writer is not Writer.elsewhere:
        return partial.writer is Writer.dead
    with contextlib.suppress(FileNotFoundError):
        return now - Path(partial.path).stat().st_mtime > _FORSAKEN_SECONDS
    return False


def remove(removal: Removal) -> None:
    """Removes files as planned, entry by entry. Files that were replaced since then stay.

    An interrupt leaves at most one entry behind that is not whole; lookups find it damaged, and it is not served. A
    process that has a file mapped keeps it until the process ends.

    Raises:
        OSError: a file cannot be removed.
    """
    for entry in removal.entries:
        # Without its description an entry is damaged, by its manifest and, once that is gone, by its headers. Were the
        # manifest to go first, the others would look like an entry that Megatron Core wrote, and be served for other
        # decisions than theirs.
        first, *others = entry.files or (None,)
        for file in (first, entry.manifest, *others):
            if file is not None:
                remove_unless_changed(file.path, file.stamp)
        if entry.is_aside:
            with contextlib.suppress(OSError):  # something else lies in it
                Path(entry.directory).rmdir()
    for found in (removal.partials, removal.uses, removal.notes):
        for one in found:
            Path(one.path).unlink(missing_ok=True)
