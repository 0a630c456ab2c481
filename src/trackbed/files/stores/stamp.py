"""Identity of objects, and ranges of their bytes."""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

from trackbed.errors import StoreError
from trackbed.files.stores.address import Address

__all__ = ["ObjectRange", "ObjectStamp", "has_etag", "stamp_of_metadata"]

_MODIFIED: Final = "Last-Modified: "
_NO_TIME: Final = datetime.fromtimestamp(0, UTC)
"""Time that obstore gives if the server gave none."""


class ObjectStamp(NamedTuple):
    """Identity of an object: another object under the same address has another one."""

    size_bytes: int
    tag: str
    """`ETag`, or `Last-Modified` where there is no strong one."""


class ObjectRange(NamedTuple):
    """Range of the bytes of an object."""

    address: Address
    stamp: ObjectStamp
    """Identity of the object; another one under the address is an error."""
    start: int
    stop: int
    """Half-open, in bytes, within the object."""


def has_etag(stamp: ObjectStamp) -> bool:
    """True if the tag is an `ETag`, which a request can carry as its condition."""
    return not stamp.tag.startswith(_MODIFIED)


def stamp_of_metadata(found: Mapping[str, Any], address: Address) -> ObjectStamp:
    """Returns the stamp in the metadata of an answer.

    Raises:
        StoreError: it has neither a strong `ETag` nor `Last-Modified`.
    """
    tag, modified = found.get("e_tag"), found.get("last_modified")
    if not tag or tag.startswith("W/"):
        if modified is None or modified == _NO_TIME:
            msg = f"{address.text}: the server must give a strong ETag or Last-Modified, found neither"
            raise StoreError(msg)
        tag = _MODIFIED + modified.astimezone(UTC).isoformat()
    return ObjectStamp(int(found["size"]), str(tag))
