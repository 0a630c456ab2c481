"""Object stores: addresses, and requests that end within a time limit.

The modules that make requests are imported on first access to a name: a program that reads files only does not wait
for asyncio. Callers write `stores.fetch(...)` after `from trackbed.files import stores`.
"""

from typing import TYPE_CHECKING

from trackbed.files.stores.address import Address as Address
from trackbed.files.stores.address import ObjectRange as ObjectRange
from trackbed.files.stores.address import ObjectStamp as ObjectStamp
from trackbed.files.stores.address import ObjectVersion as ObjectVersion
from trackbed.files.stores.address import is_address as is_address
from trackbed.files.stores.address import lost_address_hint as lost_address_hint
from trackbed.files.stores.address import parse_address as parse_address
from trackbed.files.stores.address import redact as redact
from trackbed.files.stores.address import secret_part as secret_part
from trackbed.lazy_names import lazy_names

if TYPE_CHECKING:
    from trackbed.files.stores.open_bucket import endpoint_of as endpoint_of
    from trackbed.files.stores.reads import fetch as fetch
    from trackbed.files.stores.reads import fetch_heads as fetch_heads
    from trackbed.files.stores.reads import fetch_to_file as fetch_to_file
    from trackbed.files.stores.reads import list_objects as list_objects
    from trackbed.files.stores.reads import read_object as read_object
    from trackbed.files.stores.reads import stamp_of_object as stamp_of_object
    from trackbed.files.stores.reads import stamps_of_objects as stamps_of_objects
    from trackbed.files.stores.writes import delete_object as delete_object
    from trackbed.files.stores.writes import delete_objects as delete_objects
    from trackbed.files.stores.writes import list_folders as list_folders
    from trackbed.files.stores.writes import put_buffers as put_buffers
    from trackbed.files.stores.writes import put_bytes as put_bytes
    from trackbed.files.stores.writes import put_file as put_file
    from trackbed.files.stores.writes import put_if as put_if
    from trackbed.files.stores.writes import put_if_absent as put_if_absent
    from trackbed.files.stores.writes import read_version as read_version

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "trackbed.files.stores.open_bucket": "endpoint_of",
        "trackbed.files.stores.reads": (
            "fetch fetch_heads fetch_to_file list_objects read_object stamp_of_object stamps_of_objects"
        ),
        "trackbed.files.stores.writes": (
            "delete_object delete_objects list_folders put_buffers put_bytes put_file put_if put_if_absent read_version"
        ),
    },
    present=(
        "Address ObjectRange ObjectStamp ObjectVersion is_address lost_address_hint parse_address redact secret_part"
    ),
)
