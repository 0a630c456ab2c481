"""Building many small entries in a few calls: for each of them alone, Python would take longer than all the rest.

What is in the way of that (a file that is there already, an array that is not small, a full disk) is left to the way
that entries are built one by one, which knows what to do, or what to say.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import lru_cache
from typing import Any, Final

import numpy as np

from trackbed.cache.entry import ArraySpec, Entry
from trackbed.cache.look import look_together
from trackbed.cache.manifest import encode_manifest, manifest_of
from trackbed.cache.npy import encode_npy_header
from trackbed.cache.once import Pending
from trackbed.cache.opened import Arrays
from trackbed.cache.write import Recipe, make_folders
from trackbed.files import FileSum, crc32, is_on_this_machine, partial_name
from trackbed.kernels import FileSetFolders, poll_now, publish_file_sets

__all__ = ["bundles_of", "find_together", "make_together"]

_MOST: Final = 16
"""Entries of a call: more would gain little, and whoever waits for the first of them would wait longer."""
_MOST_LOOKED_FOR: Final = 256
"""Entries of a call; more would take memory for their manifests, and gain nothing."""


def bundles_of(pending: Sequence[Pending]) -> list[Sequence[Pending]]:
    """These entries, cut where others cannot be built in one call with those before them.

    Of those that can, one, two, four and so on up to 16 are a bundle: so the first is there soon.
    """
    bundles = []
    first, most = 0, 1
    while first < len(pending):
        stop = first + 1
        while stop < min(first + most, len(pending)) and _are_alike(pending[first], pending[stop]):
            stop += 1
        most = 1 if pending[first].recipe is None else min(2 * most, _MOST)
        bundles.append(pending[first:stop])
        first = stop
    return bundles


def _are_alike(one: Pending, other: Pending) -> bool:
    return (
        one.recipe is not None
        and other.recipe is not None
        and one.recipe.build == other.recipe.build
        and (one.entry.directory, one.entry.arrays) == (other.entry.directory, other.entry.arrays)
    )


def make_together(bundle: Sequence[Pending], *, alone: AbstractContextManager[object]) -> None:
    """Build the entries of a bundle.

    Args:
        bundle: entries of `bundles_of`.
        alone: entered for each entry that must be built on its own, as it is large or something was in the way.

    Raises:
        Exception: whatever `Pending.make` does.
    """
    recipe = bundle[0].recipe
    if recipe is not None:
        list(_note_together([one for one in bundle if one.was_absent is None]))  # what is left, `make` looks at
        _make_small(recipe, [one for one in bundle if one.was_absent and not one.is_open])
    for one in bundle:
        if not one.is_open:
            with alone:
                poll_now()
                one.make()


def _make_small(recipe: Recipe, pending: Sequence[Pending]) -> None:
    built = recipe.build([one.recipe.ingredients for one in pending if one.recipe is not None])
    small = [(one, arrays) for one, arrays in zip(pending, built, strict=True) if arrays is not None]
    if small:
        _write([one for one, _ in small], [arrays for _, arrays in small])


def find_together(pending: Sequence[Pending]) -> list[bool]:
    """Open the entries that are there, looking for many in one call. Returns whether each of them is."""
    for number, one in enumerate(_note_together(pending)):
        poll_now(number)
        one.find()
    return [one.is_open for one in pending]


def _note_together(pending: Sequence[Pending]) -> Iterator[Pending]:
    """Take note of those that are whole or absent. Gives those that take a closer look."""
    for first in range(0, len(pending), _MOST_LOOKED_FOR):
        poll_now(first)
        some = [one for one in pending[first : first + _MOST_LOOKED_FOR] if not one.is_open]
        looks = look_together([one.entry for one in some], [one.is_vouched for one in some])
        for one, found in zip(some, looks, strict=True):
            if found is None:
                yield one
            else:
                one.note(found)


def _write(pending: Sequence[Pending], built: Sequence[Arrays]) -> None:
    """Write small entries of one cache, all at once, to the places that they share with Megatron Core's.

    Those that cannot be written, as of two builders another was faster or the disk is full, stay as they were.

    Args:
        pending: with the same names of arrays. None of their files was there a moment ago.
        built: the arrays of each, 64 MiB at most.
    """
    first = pending[0].entry
    place = first.shared
    try:
        make_folders(first, place)
    except OSError:
        return
    endings = [path.rpartition("/")[2].removeprefix(first.stem) for path in place.paths(first.arrays)]
    parts: list[Any] = []
    specs = [_add_parts(one.entry, endings, arrays, parts) for one, arrays in zip(pending, built, strict=True)]
    errors, stamps = publish_file_sets(
        FileSetFolders(files=place.directory, claims=first.own, partials=f"{first.own}/partial"),
        [one.entry.stem for one in pending],
        endings,
        parts,
        [1, *[2] * len(first.arrays), 1],
        partial_ending=partial_name(""),
        may_be_unnamed=is_on_this_machine(first.own),  # where what is not closed yet is seen by all
    )
    for one, found, rows, error in zip(pending, specs, stamps, errors.tolist(), strict=True):
        if not error:
            one.note_written(found, rows)


def _add_parts(entry: Entry, endings: Sequence[str], arrays: Arrays, parts: list[Any]) -> Mapping[str, ArraySpec]:
    """Add what the files of an entry consist of, in the order in which they are written. Returns what arrays hold."""
    description = entry.description.encode()
    files = {f"{entry.stem}{endings[0]}": _sum_of(description)}
    specs = {}
    parts.append(description)
    for name, ending in zip(entry.arrays, endings[1:-1], strict=True):
        array = np.ascontiguousarray(arrays[name])
        header, before = _header(array.dtype, array.shape)
        parts += header, array
        files[f"{entry.stem}{ending}"] = _sum_of(array, size_bytes=len(header), crc32_before=before)
        specs[name] = _spec(array.dtype, array.shape)
    parts.append(encode_manifest(manifest_of(entry, files, specs)))
    return specs


def _sum_of(content: Any, *, size_bytes: int = 0, crc32_before: int = 0) -> FileSum:
    """Of a file that ends with `content`, after so many bytes of that CRC-32."""
    return FileSum(size_bytes + memoryview(content).nbytes, [f"{crc32(content, crc32_before):08x}"])


@lru_cache(maxsize=1 << 8)
def _header(dtype: np.dtype[Any], shape: tuple[int, ...]) -> tuple[bytes, int]:
    """What comes before an array in its file, and its CRC-32."""
    header = encode_npy_header(dtype, shape)
    return header, crc32(header)


@lru_cache(maxsize=1 << 8)
def _spec(dtype: np.dtype[Any], shape: tuple[int, ...]) -> ArraySpec:
    return ArraySpec(dtype, shape)
