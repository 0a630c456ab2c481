"""Finding and opening pairs in object stores: a few ranges of each `.idx`, for many pairs in flight together."""

import re
from collections.abc import Sequence
from fnmatch import translate
from glob import has_magic
from typing import Final, NamedTuple

from trackbed.errors import ArgumentError, FormatError, TrackbedError
from trackbed.files import RawIndexEnds, read_index_ends, stores
from trackbed.files.stores import Address, ObjectRange, ObjectStamp, parse_address
from trackbed.tokens.format import IndexEnds, PairHeader, ends_of
from trackbed.tokens.idx_header import HEADER_BYTES, Header, decode_header
from trackbed.tokens.paths import get_bin_path, get_idx_path
from trackbed.tokens.stored.index_cache import StoredIndex

_END_BYTES: Final = 4096


def open_stored_pairs(prefixes: Sequence[str], folder: str) -> list[PairHeader | Exception]:
    """Reads the headers of pairs; an error stands in the place of a pair that cannot be read.

    A pair whose `.idx` has been copied to this host takes two HEAD requests. Another one takes two rounds: the first
    bytes of the `.idx` with a HEAD of the `.bin`, then its last numbers and bytes.

    Args:
        prefixes: addresses without `.bin` and `.idx`.
        folder: folder of copies of `.idx` objects.
    """
    indexes = [StoredIndex(parse_address(get_idx_path(prefix)), folder) for prefix in prefixes]
    bins = [parse_address(get_bin_path(prefix)) for prefix in prefixes]
    copied = [next(index.copied_stamps(), None) is not None for index in indexes]
    warm = [index.address for index, is_copied in zip(indexes, copied, strict=True) if is_copied]
    stamps = stores.stamps_of_objects([*bins, *warm])
    found_warm = iter(stamps[len(bins) :])
    ends: list[IndexEnds | Exception | None] = [
        _copied_ends(index, next(found_warm)) if is_copied else None
        for index, is_copied in zip(indexes, copied, strict=True)
    ]
    is_there = [isinstance(stamp, (ObjectStamp, FileNotFoundError)) for stamp in stamps]  # else its store is not
    cold = [number for number, found in enumerate(ends) if found is None and is_there[number]]
    for number, found in zip(cold, _fetch_ends([indexes[number].address for number in cold]), strict=True):
        ends[number] = found
    return [_header_of(*one) for one in zip(ends, stamps, strict=False)]


def open_stored_pair(prefix: str, folder: str, *, multimodal: bool = False) -> PairHeader:
    """Reads the header of a pair.

    Args:
        prefix: address without `.bin` and `.idx`.
        folder: folder of copies of `.idx` objects.
        multimodal: True to require modes.
    """
    (pair,) = open_stored_pairs([prefix], folder)
    if isinstance(pair, FileNotFoundError):
        raise ArgumentError(f"{prefix}: a .bin and an .idx object must exist, missing {pair.filename}") from pair
    if isinstance(pair, Exception):
        raise pair
    wanted = pair.ends.header.size_bytes + pair.ends.header.sequence_count
    if multimodal and pair.ends.size_bytes != wanted:
        raise FormatError(
            f"{get_idx_path(prefix)}: an index with modes must have {wanted} bytes, found {pair.ends.size_bytes}"
        )
    return pair


def stored_pair_exists(prefix: str) -> bool:
    """True if both objects of a pair exist.

    Raises:
        StoreError: the store refuses, or does not answer in time.
    """
    found = stores.stamps_of_objects([parse_address(path(prefix)) for path in (get_idx_path, get_bin_path)])
    for stamp in found:
        if isinstance(stamp, Exception) and not isinstance(stamp, FileNotFoundError):
            raise stamp
    return not any(isinstance(stamp, Exception) for stamp in found)


def _header_of(ends: IndexEnds | Exception | None, stamp: ObjectStamp | Exception) -> PairHeader | Exception:
    if isinstance(ends, IndexEnds) and isinstance(stamp, ObjectStamp):
        return PairHeader(ends, stamp)
    return ends if isinstance(ends, Exception) else stamp if isinstance(stamp, Exception) else FormatError("not read")


def _copied_ends(index: StoredIndex, stamp: ObjectStamp | Exception) -> IndexEnds | Exception | None:
    """Returns the metadata of an index from its copy on this host; None if there is no copy of this version."""
    if isinstance(stamp, Exception):
        return stamp
    path = index.find(stamp)
    if path is None:
        return None
    (raw,) = read_index_ends([str(path)])
    if isinstance(raw, OSError):  # removed meanwhile
        return None
    try:
        return ends_of(raw, index.address.text, stamp=stamp)
    except FormatError as error:
        return error


class _Begun(NamedTuple):
    """An index of which the first bytes were read."""

    number: int
    address: Address
    stamp: ObjectStamp
    head: memoryview
    header: Header | None
    """None if the counts exceed the object, which `ends_of` refuses."""

    def spans(self) -> list[tuple[int, int]]:
        """Returns the bytes of the last length, pointer and border, and the last 4 KiB; empty ones if in the head."""
        size, header = self.stamp.size_bytes, self.header
        spans = [(size - min(size, _END_BYTES), size)]
        if header is not None:
            has = header.sequence_count > 0
            stops = [(header.pointers_at, 4 * has), (header.borders_at, 8 * has), (header.size_bytes, 8)]
            spans += [(stop - count, stop) for stop, count in stops]
        return spans


def _fetch_ends(addresses: Sequence[Address]) -> list[IndexEnds | Exception]:
    """Reads the metadata of indices, as `read_index_ends` does of files."""
    results: list[IndexEnds | Exception] = [FormatError("not read")] * len(addresses)
    begun = []
    heads = stores.fetch_heads(addresses, HEADER_BYTES + _END_BYTES) if addresses else []
    for number, (address, answer) in enumerate(zip(addresses, heads, strict=True)):
        if isinstance(answer, Exception):
            results[number] = answer
            continue
        stamp, head = answer[0], memoryview(answer[1])
        try:
            header = decode_header(head[:HEADER_BYTES], path=address.text)
        except FormatError as error:
            results[number] = error
            continue
        begun.append(_Begun(number, address, stamp, head, header if header.size_bytes <= stamp.size_bytes else None))
    for one, ends in zip(begun, _finish_all(begun), strict=True):
        results[one.number] = ends
    return results


def _finish_all(begun: Sequence[_Begun]) -> list[IndexEnds | Exception]:
    try:
        return _finish(begun)
    except (TrackbedError, OSError) as error:
        if len(begun) < 2:
            return [error] * len(begun)
        return [ends for one in begun for ends in _finish_all([one])]


def _finish(begun: Sequence[_Begun]) -> list[IndexEnds | Exception]:
    """Fetches what is not in the heads, and returns the metadata."""
    spans = [(begun_pair, *span) for begun_pair in begun for span in begun_pair.spans()]
    missing = [
        (begun_pair, start, stop) for begun_pair, start, stop in spans if stop > len(begun_pair.head) and stop > start
    ]
    answers = stores.fetch(
        [ObjectRange(begun_pair.address, begun_pair.stamp, start, stop) for begun_pair, start, stop in missing]
    )
    fetched = {
        (begun_pair.number, *span): memoryview(raw) for (begun_pair, *span), raw in zip(missing, answers, strict=True)
    }

    def content(begun_pair: _Begun, start: int, stop: int) -> memoryview:
        return fetched.get((begun_pair.number, start, stop), begun_pair.head[start:stop])

    results: list[IndexEnds | Exception] = []
    for begun_pair in begun:
        tail, *numbers = (content(begun_pair, *span) for span in begun_pair.spans())
        values = [int.from_bytes(raw, "little", signed=True) for raw in numbers] or [0, 0, 0]
        raw = RawIndexEnds((0, 0, 0), 0, begun_pair.head, memoryview(bytes(begun_pair.head) + bytes(tail)), *values)
        try:
            results.append(ends_of(raw, begun_pair.address.text, stamp=begun_pair.stamp))
        except FormatError as error:
            results.append(error)
    return results


_HIDDEN: Final = r"(?!\.)"
"""No pattern matches a name that begins with a dot."""


def object_exists(address: Address) -> bool:
    """True if there is an object.

    Raises:
        StoreError: the store refuses, or does not answer in time.
    """
    try:
        stores.stamp_of_object(address)
    except FileNotFoundError:
        return False
    return True


def match_objects(pattern: str) -> list[str]:
    """Returns the addresses of the objects that match a pattern, as `glob` matches paths: `*` ends at a slash.

    Raises:
        ArgumentError: the store cannot be listed.
        StoreError: the store refuses, or does not answer in time.
    """
    parts = pattern.split("/")
    first = next((number for number, part in enumerate(parts) if has_magic(part)), len(parts))
    folder = "/".join(parts[:first]) + "/"
    wanted = [re.compile(_HIDDEN + translate(part)) for part in parts[first:]]
    found = []
    for address, _ in stores.list_objects(parse_address(folder)):
        names = address.removeprefix(folder).split("/")
        if len(names) == len(wanted) and all(map(re.Pattern.match, wanted, names)):
            found.append(address)
    return sorted(found)


def find_stored_pairs(folder: str) -> list[str]:
    """Returns the prefixes of the pairs directly in a folder, sorted. Does not check that both objects exist.

    Args:
        folder: its address, with or without a slash at the end.

    Raises:
        ArgumentError: there is none, or the store cannot be listed.
        StoreError: the store refuses, or does not answer in time.
    """
    base = folder.rstrip("/") + "/"
    prefixes = {
        address[: -len(suffix)]
        for address, _ in stores.list_objects(parse_address(base))
        for suffix in (".bin", ".idx")
        if address.endswith(suffix) and "/" not in address.removeprefix(base)
    }
    if not prefixes:
        raise ArgumentError(f"{folder}: there must be a pair, or a folder with .bin and .idx objects, found neither")
    return sorted(prefixes)
