"""Object stores: addresses, and requests that end within a time limit.

The modules that make requests are imported on first access to a name: a program that reads files only does not wait
for asyncio. Callers write `stores.fetch(...)` after `from trackbed.files import stores`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from trackbed.files.stores.address import (
    Address,
    ObjectRange,
    ObjectStamp,
    is_address,
    lost_address_hint,
    parse_address,
    redact,
    secret_part,
)

if TYPE_CHECKING:
    from trackbed.files.stores.open_bucket import endpoint_of
    from trackbed.files.stores.reads import (
        fetch,
        fetch_heads,
        fetch_to_file,
        list_objects,
        read_object,
        stamp_of_object,
        stamps_of_objects,
    )
    from trackbed.files.stores.writes import delete_object, put_bytes, put_file, put_if_absent

__all__ = [
    "Address",
    "ObjectRange",
    "ObjectStamp",
    "delete_object",
    "endpoint_of",
    "fetch",
    "fetch_heads",
    "fetch_to_file",
    "is_address",
    "list_objects",
    "lost_address_hint",
    "parse_address",
    "put_bytes",
    "put_file",
    "put_if_absent",
    "read_object",
    "redact",
    "secret_part",
    "stamp_of_object",
    "stamps_of_objects",
]

_MODULES = {
    "delete_object": "writes",
    "endpoint_of": "open_bucket",
    "fetch": "reads",
    "fetch_heads": "reads",
    "fetch_to_file": "reads",
    "list_objects": "reads",
    "put_bytes": "writes",
    "put_file": "writes",
    "put_if_absent": "writes",
    "read_object": "reads",
    "stamp_of_object": "reads",
    "stamps_of_objects": "reads",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
