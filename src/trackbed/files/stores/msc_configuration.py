"""Addresses that multi-storage-client's configuration file gives for those of a profile."""

import json
import os
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from trackbed.files.stores.address import Address

__all__ = ["equivalent_address"]

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
