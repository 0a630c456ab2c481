"""Identifier of the current boot of this host: files written since then cannot have lost data in a crash."""

import os
from functools import lru_cache
from pathlib import Path


def boot_id() -> str:
    """Identifier of the current boot of this host; empty if the system does not provide one.

    The environment variable `TRACKBED_BOOT_ID` overrides it with any non-empty text.
    """
    return os.environ.get("TRACKBED_BOOT_ID") or _boot_id_of_system()


@lru_cache(maxsize=1)
def _boot_id_of_system() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
