"""Listing of pairs in object stores."""

import re
from fnmatch import translate
from glob import has_magic

from trackbed.errors import ArgumentError
from trackbed.files.stores import Address, list_objects, parse_address, stamp_of_object

__all__ = ["find_stored_pairs", "match_objects", "object_exists"]


def object_exists(address: Address) -> bool:
    """True if there is an object.

    Raises:
        StoreError: the store refuses, or does not answer in time.
    """
    try:
        stamp_of_object(address)
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
    wanted = [re.compile(translate(part)) for part in parts[first:]]
    found = []
    for address, _ in list_objects(parse_address(folder)):
        names = address.removeprefix(folder).split("/")
        is_hidden = any(name.startswith(".") and not part.startswith(".") for name, part in zip(names, parts[first:]))
        if len(names) == len(wanted) and all(map(re.Pattern.match, wanted, names)) and not is_hidden:
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
    found = {
        address[: -len(suffix)]
        for address, _ in list_objects(parse_address(base))
        for suffix in (".bin", ".idx")
        if address.endswith(suffix) and "/" not in address.removeprefix(base)
    }
    if not found:
        msg = f"{folder}: a folder must have .bin and .idx objects, found none"
        raise ArgumentError(msg)
    return sorted(found)
