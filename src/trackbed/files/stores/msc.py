"""Requests by multi-storage-client, and the addresses that its configuration file gives for a profile's.

Its reads carry no condition: `fetch` compares stamps before and after them.
"""

import asyncio
import json
import os
from collections.abc import AsyncIterator, Callable, Mapping
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any, Final, TypeVar

from trackbed.daemon_threads import call_on_thread
from trackbed.files.stores.address import Address, ObjectRange, ObjectStamp, stamp_of_metadata
from trackbed.files.stores.bucket import Answer
from trackbed.files.stores.requests import WrongAnswerError

_Result = TypeVar("_Result")
_PAGE: Final = 1000


class MscBucket:
    """A profile of multi-storage-client.

    Args:
        library: multistorageclient.
        client: its client for the profile.
    """

    is_conditional = False

    def __init__(self, library: Any, client: Any) -> None:
        self._library = library
        self._client = client

    async def head(self, address: Address) -> ObjectStamp:
        """Returns the stamp of an object."""
        found = await _on_thread(lambda: self._client.info(address.key))
        if found.type != "file":
            raise FileNotFoundError(address.key)
        fields = {"size": found.content_length, "e_tag": found.etag, "last_modified": found.last_modified}
        return stamp_of_metadata(fields, address)

    async def get(self, wanted: ObjectRange) -> memoryview:
        """Returns a range that is not empty."""
        return await self._read(wanted.address, wanted.start, wanted.stop)

    async def get_first(self, address: Address, num_bytes: int) -> Answer:
        """Returns the first bytes of an object, fewer if it is shorter."""
        stamp = await self.head(address)
        stop = min(num_bytes, stamp.size_bytes)
        raw = await self._read(address, 0, stop) if stop else memoryview(b"")
        if await self.head(address) != stamp:
            raise WrongAnswerError("the object was replaced while it was read")
        return Answer(stamp, raw)

    async def pages(self, address: Address, after: str) -> AsyncIterator[list[tuple[str, int]]]:
        """Yields keys and sizes of the objects below a folder address, those after a key."""
        folder = f"{address.key.strip('/')}/" if address.key.strip("/") else ""
        found = iter(self._client.list_recursive(folder, start_after=after or None))
        while page := await _on_thread(lambda: list(islice(found, _PAGE))):
            yield [(one.key, one.content_length) for one in page if one.type == "file"]

    async def _read(self, address: Address, start: int, stop: int) -> memoryview:
        part = self._library.types.Range(start, stop - start)
        raw = await _on_thread(lambda: self._client.read(address.key, byte_range=part))
        if len(raw) != stop - start:
            raise WrongAnswerError(f"bytes [{start}, {stop}) were asked for, and {len(raw)} bytes came")
        return memoryview(raw).toreadonly()


async def _on_thread(function: Callable[[], _Result]) -> _Result:
    """Calls a blocking function on a thread of its own, for which nothing waits if the call is given up."""
    return await asyncio.wrap_future(call_on_thread(function, "trackbed-msc"))


_SCHEMES: Final = {"s3": "s3", "s8k": "s3", "gcs": "gs", "azure": "az", "file": "file"}
"""Our scheme for each type of storage that has one."""


def equivalent_address(address: Address) -> str | None:
    """Returns the address that reads the same object without multi-storage-client.

    Returns:
        None if no configuration file can be read, or it has no such profile, or one of a store without a scheme.
    """
    storage = _mapping(_mapping(_mapping(_configuration().get("profiles")).get(address.bucket)).get("storage_provider"))
    scheme = _SCHEMES.get(str(storage.get("type")))
    if scheme is None:
        return None
    folder = str(_mapping(storage.get("options")).get("base_path", "")).strip("/")
    path = f"{folder}/{address.key}".strip("/")
    return f"file:///{path}" if scheme == "file" else f"{scheme}://{path}"


def _configuration() -> Mapping[str, Any]:
    """Returns the first configuration file that there is, in the order of multi-storage-client."""
    path = next((path for path in _paths() if path.is_file()), None)
    try:
        if path is None:
            return {}
        text = path.read_text(encoding="utf-8")
        return _mapping(json.loads(text) if path.suffix == ".json" else import_module("yaml").safe_load(text))
    except Exception:  # noqa: BLE001 - a file that cannot be read only makes an error shorter
        return {}


def _paths() -> list[Path]:
    paths = [Path(os.environ["MSC_CONFIG"])] if os.environ.get("MSC_CONFIG") else []
    if os.environ.get("XDG_CONFIG_HOME"):
        paths += _both(Path(os.environ["XDG_CONFIG_HOME"], "msc", "config"))
    home = Path(os.environ.get("HOME", "/"))
    paths += [*_both(home / ".msc_config"), *_both(home / ".config" / "msc" / "config")]
    for folder in (os.environ.get("XDG_CONFIG_DIRS") or "/etc/xdg").split(":"):
        paths += _both(Path(folder.strip(), "msc", "config"))
    return [*paths, *_both(Path("/etc/msc_config"))]


def _both(path: Path) -> list[Path]:
    return [Path(f"{path}.yaml"), Path(f"{path}.json")]


def _mapping(found: object) -> Mapping[str, Any]:
    return found if isinstance(found, Mapping) else {}
