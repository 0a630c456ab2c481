"""Commit of entries: complete files appear under their names, the manifest first, as a claim on the name.

Where two jobs want different entries under one name, the manifest that appears first has the name, and the other entry
goes aside; docs/formats/cache.md, "Writing", describes the steps and what they guarantee.
"""

import contextlib
import errno
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from trackbed.cache.entry import ArraySpec, Entry, EntryLocation
from trackbed.cache.lookup import LookupResult, State, advice_on
from trackbed.cache.manifest import encode_manifest, manifest_of, read_manifest
from trackbed.errors import CacheError, FormatError
from trackbed.files import (
    Claim,
    FileSet,
    FileSum,
    NewFile,
    Stamp,
    Stamps,
    claim,
    commit_file_sets,
    is_on_this_machine,
    partial_name,
    publish,
    read_stamps,
    remove_unless_changed,
    stamp_of,
)

logger = logging.getLogger(__name__)

_ATTEMPTS: Final = 100


class CompleteFile(NamedTuple):
    """A file of an entry, whose content is known."""

    content: Sequence[bytes | memoryview] | str
    """Its bytes, or the path of the partial file that holds them."""
    sum: FileSum


class NewEntry:
    """An entry that is built and has not appeared yet.

    Args:
        entry: the entry.
        location: where it is to appear, unless another entry takes the name first.
        files: description and arrays.
        specs: dtypes and shapes of the arrays.
        damaged: `[F, 3]` stamps of the damaged files that it replaces, the description's first and the manifest's last.
    """

    def __init__(
        self,
        entry: Entry,
        location: EntryLocation,
        files: Sequence[CompleteFile],
        specs: Mapping[str, ArraySpec],
        damaged: Stamps | None,
    ) -> None:
        self.entry = entry
        self.location = location
        self._damaged = damaged
        # Aside, the folder is named by the fingerprint, so that no other entry can want the name.
        self.claim = Claim.take if location == entry.shared else Claim.replace
        self._contents = [file.content for file in files]
        sums = {name: one.sum for name, one in zip(location.names(entry.arrays), files, strict=True)}
        self.manifest = manifest_of(entry, sums, specs)
        self._encoded = encode_manifest(self.manifest)

    def file_set(self, ending: str) -> FileSet:
        """Returns its files, whose partial names have this ending."""
        files = []
        for path, content in zip(
            self.location.paths(self.entry.arrays), [*self._contents, [self._encoded]], strict=True
        ):
            if isinstance(content, str):
                files.append(NewFile(path, content, None))
            else:
                partial = f"{self.entry.own_folder}/partial/{path.rpartition('/')[2]}{ending}"
                files.append(NewFile(path, partial, content))
        return FileSet(files, self.claim)

    def found(self, stamps: Stamps) -> LookupResult:
        """Returns the result of building it."""
        specs, crc32 = self.manifest.arrays, self.manifest.data_crc32
        is_aside = self.location != self.entry.shared
        return LookupResult(State.whole, is_aside, stamps, specs=specs, data_crc32=crc32, is_built=True)

    def replace_damaged(self) -> None:
        """Prepares to replace a damaged entry, if there is one, unless another builder has replaced it.

        Its manifest is replaced and not removed: were the name free for a moment, another entry could take it while a
        builder that claimed it before still renames its files.
        """
        if self._damaged is None:
            return
        description, *_, manifest = (Stamp(*stamp) for stamp in self._damaged.tolist())
        with explained(self.entry, self.location):
            # Files of the right size may lie there: until its own description is there, the new entry looks damaged.
            remove_unless_changed(self.description, description)
            try:
                found = read_manifest(self.location.manifest)
            except FormatError:
                return
            # With another stamp it was written since the lookup, by a builder that was faster: it need not be damaged.
            # Then the entry claims the name as if there were nothing to replace, and finds it taken.
            is_own = found is not None and found.fingerprint == self.manifest.fingerprint
            if is_own and stamp_of(self.location.manifest) == manifest:
                self.claim = Claim.replace

    def take_turn(self) -> None:
        """Decides what to do about a name that is taken."""
        location = self.location
        description, stamp = stamp_of(self.description), stamp_of(location.manifest)
        try:
            taken = read_manifest(location.manifest)
        except FormatError:  # a machine that lost its power leaves such files, which claim the name for no entry
            # The files may have the sizes that the new manifest says: without its description the entry looks damaged.
            remove_unless_changed(self.description, description)
            self._discard_manifest(stamp)
            return
        if taken is None:
            return
        if taken.identity == self.manifest.identity:
            # The builder that claimed the name may have been killed since. So files that are missing, or have another
            # size, still appear, under its manifest; if there is none, nothing changes.
            self.claim = Claim.none
            return
        logger.warning("%s: another index took this name meanwhile; this one lies in .trackbed/", location.array("*"))
        self.location, self.claim = self.entry.aside, Claim.replace
        os.makedirs(self.location.directory, exist_ok=True)

    def _discard_manifest(self, unreadable: Stamp | None) -> None:
        """Removes the manifest that was found unreadable, but none that has replaced it meanwhile."""
        path = self.location.manifest
        aside = f"{self.entry.own_folder}/partial/{partial_name(path.rpartition('/')[2])}"
        # Looking at the stamp and removing the file then would remove a manifest that another builder has put there in
        # between. So the file is moved first to where nobody replaces it; one that is not the unreadable one is put
        # back, unless the name was claimed meanwhile.
        with contextlib.suppress(FileNotFoundError):
            publish(path, aside)
            if stamp_of(aside) == unreadable or not claim(aside, path):
                Path(aside).unlink(missing_ok=True)

    def check_claim(self) -> None:
        """Damages the entry on purpose if its name belongs to another entry by now.

        That one must not look whole with files of this entry, which were renamed since.
        """
        try:
            taken = read_manifest(self.location.manifest)
        except FormatError:
            taken = None
        if taken is None or taken.identity != self.manifest.identity:
            Path(self.description).unlink(missing_ok=True)

    @property
    def description(self) -> str:
        """Path of the description."""
        return self.location.paths(())[0]


def commit(entries: Sequence[NewEntry]) -> list[LookupResult | None]:
    """Lets entries appear under their names, or aside where another entry has the name.

    Returns:
        For each entry how it is found now; None if another builder of the same entry was faster, and its files stay.

    Raises:
        CacheError: a file cannot be written, or manifests come and go so fast that none can be claimed.
    """
    results: list[LookupResult | None] = [None] * len(entries)
    for new_entry in entries:
        new_entry.replace_damaged()
    remaining = dict(enumerate(entries))
    for _ in range(_ATTEMPTS):
        if not remaining:
            return results
        remaining = _commit_once(remaining, results)
    where = next(iter(remaining.values())).location.manifest
    raise CacheError(f"{where}: a manifest must stay where it is put, found it gone {_ATTEMPTS} times")


def _commit_once(entries: Mapping[int, NewEntry], results: list[LookupResult | None]) -> dict[int, NewEntry]:
    """Commits entries; returns those whose name is taken."""
    ending = partial_name("")
    own = next(iter(entries.values())).entry.own_folder
    # Where other hosts see the folder too, a file that is not closed yet may not be seen by all.
    errors, stamps = commit_file_sets(
        [new_entry.file_set(ending) for new_entry in entries.values()], may_be_unnamed=is_on_this_machine(own)
    )
    claimed = read_stamps([new_entry.location.manifest for new_entry in entries.values()])
    remaining, refused = {}, None
    for (number, new_entry), error, its_stamps, its_claim in zip(entries.items(), errors, stamps, claimed, strict=True):
        if not error:
            # After the claim and before the last file appeared, the manifest may have been removed, and another entry
            # may have claimed the name: its files and these are then mixed, and may have the sizes that its manifest
            # says. So the manifests are read again, after the files have appeared.
            if new_entry.claim is Claim.none or (its_claim != its_stamps[-1]).any():
                new_entry.check_claim()
            results[number] = new_entry.found(its_stamps) if new_entry.claim is not Claim.none else None
        elif error == errno.EEXIST and new_entry.claim is Claim.take:
            with explained(new_entry.entry, new_entry.location):
                # Nothing of this entry has appeared: the manifest is the first file, and it failed.
                new_entry.take_turn()
            remaining[number] = new_entry
        elif not (error == errno.EALREADY and new_entry.claim is Claim.none):
            refused = refused or cannot_write(new_entry.entry, OSError(error, os.strerror(error)), new_entry.location)
    if refused is not None:
        raise refused
    return remaining


@contextlib.contextmanager
def explained(entry: Entry, location: EntryLocation) -> Iterator[None]:
    """Turns errors of the system in the block into the errors that `cannot_write` makes."""
    try:
        yield
    except OSError as error:
        raise cannot_write(entry, error, location) from error


def cannot_write(entry: Entry, error: OSError, location: EntryLocation) -> CacheError:
    """Returns the error for an entry that cannot be written."""
    where: Any = error.filename or location.directory
    advice = advice_on(error, is_writing=True)
    return CacheError(f"{where}: the index {entry.stem} cannot be written: {error.strerror}; {advice}")
