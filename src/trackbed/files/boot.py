"""Name of the time since this machine was started: files written since then are as they were written."""

import os
from functools import lru_cache
from pathlib import Path

__all__ = ["boot_id"]


def boot_id() -> str:
    """Name of the current boot of this host; empty where the system does not tell.

    `TRACKBED_BOOT_ID` overrides it, with any text that is not empty.
    """
    return os.environ.get("TRACKBED_BOOT_ID") or _boot_id_of_system()


@lru_cache(maxsize=1)
def _boot_id_of_system() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
