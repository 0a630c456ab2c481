"""Publication of shards in a folder or a store: how a finished shard is recognised, and how its files appear.

The seal of a shard is published last, so a shard with a seal is complete.
"""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np

from trackbed.cache.entry import differences
from trackbed.errors import ArgumentError, FormatError
from trackbed.files import claim, flush_to_disk, publish, stores
from trackbed.files.stores import Address, is_address, parse_address
from trackbed.preprocess.shards.spec import made_by
from trackbed.tokens import IndexedDatasetBuilder, get_bin_path, get_idx_path
from trackbed.tokens.commit import PairFiles, locked_pair
from trackbed.tokens.paths import get_beside_path, get_seal_path
from trackbed.tokens.seal import Seal, parse_seal, read_seal

_MAX_SEAL_BYTES: Final = 16 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardRequirements:
    """Recipe that the shard at a prefix must have."""

    prefix: str
    recipe: dict[str, Any]
    skip_bad: bool
    """True if the shard may have skipped bad records."""
    overwrite: bool
    """True to replace a shard that was made in another way."""

    def accept(self, found: Seal) -> bool:
        """Returns True if a shard with this seal is the wanted one, False if it is to be replaced."""
        if found.made_by == made_by(self.recipe) and (self.skip_bad or not (found.counts or {}).get("bad")):
            return True
        if self.overwrite:
            return False
        where, why = get_seal_path(self.prefix), self._why(found)
        raise ArgumentError(
            f"{where}: the shard must have been made in the same way, found {why}; --overwrite replaces it"
        )

    def _why(self, found: Seal) -> str:
        if found.recipe is None:
            return "a pair that is no shard"
        if found.made_by == made_by(self.recipe):
            return f"{(found.counts or {}).get('bad')} bad records that were skipped"
        return differences(found.recipe, self.recipe) or "another made_by for the same recipe"


class Shard(Protocol):
    """The pair of one key of a shard."""

    @property
    def wanted(self) -> ShardRequirements:
        """Its prefix, and how it must have been made."""

    def find(self) -> Seal | None:
        """Returns the seal of the finished shard; None if there is none, or its files do not have the seal's sizes.

        Raises:
            ArgumentError: the shard was made in another way, and must not be replaced.
            FormatError: the seal is damaged, and must not be replaced.
        """

    def open_builder(self, dtype: str) -> IndexedDatasetBuilder:
        """Opens a builder that writes under a name of its own."""

    def publish(self, builder: IndexedDatasetBuilder, *, sign: Callable[[Seal], Seal]) -> Seal:
        """Publishes a pair unless another worker has finished the shard, and returns the seal of the finished shard.

        Args:
            builder: builder with all tokens; it is closed.
            sign: adds to the seal how the shard was made.

        Raises:
            ArgumentError: the other worker has made the shard in another way.
            FormatError: the files of the shard have other sizes than were written.
            OSError: a file cannot be written.
        """

    def close(self) -> None:
        """Removes what the builder has left."""


def open_shard(wanted: ShardRequirements) -> Shard:
    """Returns the shard at a path or address."""
    return StoreShard(wanted) if is_address(wanted.prefix) else FolderShard(wanted)


@dataclass(frozen=True, slots=True)
class FolderShard:
    """The pair of one key of a shard, on a disk.

    Args:
        wanted: its prefix, and how it must have been made.
    """

    wanted: ShardRequirements

    def find(self) -> Seal | None:
        """See `Shard`."""
        prefix = self.wanted.prefix
        return _finished(
            self.wanted,
            read=lambda: read_seal(Path(get_seal_path(prefix))),
            sizes=lambda paths: list(map(_size_of, paths)),
        )

    def open_builder(self, dtype: str) -> IndexedDatasetBuilder:
        """See `Shard`."""
        return _ShardBuilder(get_bin_path(self.wanted.prefix), np.dtype(dtype).type)

    def publish(self, builder: IndexedDatasetBuilder, *, sign: Callable[[Seal], Seal]) -> Seal:
        """See `Shard`."""
        try:
            builder.finalize_by(self._commit, get_idx_path(self.wanted.prefix), sign=sign)
        except FileNotFoundError:
            # A driver that found all shards finished has removed the files of this worker, which it took for dead.
            if self.find() is None:
                raise
        return _still_there(self)

    def close(self) -> None:
        """Does nothing."""

    def _commit(self, partials: PairFiles, finals: PairFiles) -> None:
        with locked_pair(finals.idx):
            if self.find() is not None:
                return
            for path in (finals.seal, finals.idx):  # in this order: no seal beside files of another writer
                path.unlink(missing_ok=True)
                flush_to_disk(path.parent)
            named = [(partial, finals.beside[name]) for name, partial in partials.beside.items()]
            for partial, final in (*named, (partials.bin, finals.bin), (partials.idx, finals.idx)):
                publish(partial, final)
                flush_to_disk(final.parent)
            # False on a file system without locks, where another worker was as fast: the caller looks at its seal.
            claim(str(partials.seal), str(finals.seal))
            flush_to_disk(finals.seal.parent)


class StoreShard:
    """The pair of one key of a shard, in an object store. Its files are written to a temporary folder first.

    Args:
        wanted: its prefix, and how it must have been made.
    """

    def __init__(self, wanted: ShardRequirements) -> None:
        self.wanted = wanted
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def find(self) -> Seal | None:
        """See `Shard`."""
        return _finished(self.wanted, read=self._read_seal, sizes=self._sizes)

    def open_builder(self, dtype: str) -> IndexedDatasetBuilder:
        """See `Shard`."""
        self._folder = tempfile.TemporaryDirectory(prefix="trackbed-shard-")
        return _ShardBuilder(get_bin_path(f"{self._folder.name}/shard"), np.dtype(dtype).type)

    def publish(self, builder: IndexedDatasetBuilder, *, sign: Callable[[Seal], Seal]) -> Seal:
        """See `Shard`."""
        if self._folder is None:
            raise ArgumentError(f"{self.wanted.prefix}: a builder must have been opened, found none")
        builder.finalize_by(self._commit, get_idx_path(f"{self._folder.name}/shard"), sign=sign)
        return _still_there(self)

    def close(self) -> None:
        """Removes the temporary folder."""
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _commit(self, partials: PairFiles, finals: PairFiles) -> None:
        if self.find() is not None:
            return
        for path in (get_seal_path, get_idx_path):  # in this order: no .idx beside a .bin of another writer
            stores.delete_object(self._address(path))
        for name, partial in partials.beside.items():
            stores.put_file(parse_address(get_beside_path(self.wanted.prefix, name)), partial)
        stores.put_file(self._address(get_bin_path), partials.bin)
        stores.put_file(self._address(get_idx_path), partials.idx)
        # If False, the caller looks at the seal that is there: another worker's, or our own after a lost answer.
        if not stores.put_if_absent(self._address(get_seal_path), partials.seal.read_bytes()):
            self._check_files_of(read_seal(partials.seal))

    def _check_files_of(self, mine: Seal) -> None:
        """Checks that the seal in the store fits the files there, which this worker has just put.

        Workers of one run put the same bytes. One of another run may have put its seal meanwhile.
        """
        try:
            found = self._read_seal()
        except FileNotFoundError:
            return
        if (found.bin, found.idx) != (mine.bin, mine.idx):
            stores.delete_object(self._address(get_seal_path))
            raise ArgumentError(
                f"{self.wanted.prefix}: one run at a time must write shards there, found the seal of another; it is "
                "removed, as the files of the shard were replaced: run one of the two again"
            )

    def _read_seal(self) -> Seal:
        seal = self._address(get_seal_path)
        return parse_seal(stores.read_object(seal, most_bytes=_MAX_SEAL_BYTES)[1], where=seal.text)

    def _sizes(self, paths: list[str]) -> list[int | None]:
        """Returns the sizes of objects; None for one that is missing."""
        sizes: list[int | None] = []
        for stamp in stores.stamps_of_objects(list(map(parse_address, paths))):
            if isinstance(stamp, Exception) and not isinstance(stamp, FileNotFoundError):
                raise stamp
            sizes.append(None if isinstance(stamp, Exception) else stamp.size_bytes)
        return sizes

    def _address(self, path_of: Callable[[str], str]) -> Address:
        return parse_address(path_of(self.wanted.prefix))


def _finished(
    requirements: ShardRequirements, *, read: Callable[[], Seal], sizes: Callable[[list[str]], list[int | None]]
) -> Seal | None:
    """Returns the seal of a finished shard; see `Shard.find`.

    Args:
        requirements: how it must have been made.
        read: returns its seal.
        sizes: returns the sizes of files; None for one that is missing.
    """
    try:
        seal = read()
    except FileNotFoundError:
        return None
    except FormatError:
        if requirements.overwrite:
            return None
        raise
    if not requirements.accept(seal):
        return None
    prefix, beside = requirements.prefix, seal.beside or {}
    wanted = {get_bin_path(prefix): seal.bin, get_idx_path(prefix): seal.idx}
    wanted |= {get_beside_path(prefix, name): found for name, found in beside.items()}
    return seal if sizes(list(wanted)) == [found.size_bytes for found in wanted.values()] else None


def _still_there(shard: Shard) -> Seal:
    """Returns the seal of a shard that was just published, by this worker or another."""
    found = shard.find()
    if found is None:
        raise FormatError(f"{shard.wanted.prefix}: the files of the shard must stay as they were written, found others")
    return found


class _ShardBuilder(IndexedDatasetBuilder):
    """Builder in a folder of many shards, which only the driver lists, at the end."""

    clears_partials = False


def _size_of(path: str) -> int | None:
    try:
        return Path(path).stat().st_size
    except FileNotFoundError:
        return None
