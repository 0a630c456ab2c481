"""Object stores: addresses, and requests that end within a time limit."""

from trackbed.files.stores.address import Address, is_address, parse_address
from trackbed.files.stores.listing import list_objects
from trackbed.files.stores.reads import (
    fetch,
    fetch_heads,
    fetch_to_file,
    read_object,
    stamp_of_object,
    stamps_of_objects,
)
from trackbed.files.stores.stamp import ObjectRange, ObjectStamp

__all__ = [
    "Address",
    "ObjectRange",
    "ObjectStamp",
    "fetch",
    "fetch_heads",
    "fetch_to_file",
    "is_address",
    "list_objects",
    "parse_address",
    "read_object",
    "stamp_of_object",
    "stamps_of_objects",
]
