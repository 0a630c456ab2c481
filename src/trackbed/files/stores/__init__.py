"""Object stores: addresses, and requests that end within a time limit."""

from trackbed.files.stores.address import Address, is_address, parse_address
from trackbed.files.stores.client import ObjectStamp, fetch_ranges, stamp_of_object

__all__ = ["Address", "ObjectStamp", "fetch_ranges", "is_address", "parse_address", "stamp_of_object"]
