"""Listing of pairs in object stores."""

import re
from fnmatch import translate
from glob import has_magic
from typing import Final

from trackbed.errors import ArgumentError
from trackbed.files import stores
from trackbed.files.stores import Address, parse_address

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
    found = {
        address[: -len(suffix)]
        for address, _ in stores.list_objects(parse_address(base))
        for suffix in (".bin", ".idx")
        if address.endswith(suffix) and "/" not in address.removeprefix(base)
    }
    if not found:
        raise ArgumentError(f"{folder}: there must be a pair, or a folder with .bin and .idx objects, found neither")
    return sorted(found)
