"""Options of pairs in object stores."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from trackbed.errors import ArgumentError
from trackbed.files.stores import is_address, redact

_DEFAULT_BYTES: Final = 256 << 20


@dataclass
class ObjectStorageConfig:
    """Options of pairs in object stores, with the fields and defaults of megatron-core 0.16.1.

    Raises:
        ArgumentError: a field is out of its range.
    """

    path_to_idx_cache: str
    """Folder on this host for copies of `.idx` objects; its processes share them, and hosts need not."""

    bin_chunk_nbytes: int = _DEFAULT_BYTES
    """Most bytes of `.bin` objects in flight or fetched ahead, at least 1, of all datasets and threads of a process
    together; of several values the smallest counts. One sample that is larger is still read."""

    def __post_init__(self) -> None:
        """Checks the fields."""
        folder = self.path_to_idx_cache
        if not isinstance(folder, (str, os.PathLike)) or not os.fspath(folder) or "\0" in os.fspath(folder):
            raise ArgumentError(f"path_to_idx_cache must be the path of a folder, found {folder!r}")
        if is_address(folder):
            raise ArgumentError(
                f"path_to_idx_cache must be a folder on this host, found the address {redact(os.fspath(folder))}"
            )
        if type(self.bin_chunk_nbytes) is not int or self.bin_chunk_nbytes < 1:
            raise ArgumentError(
                f"bin_chunk_nbytes must be a whole number of at least 1, found {self.bin_chunk_nbytes!r}"
            )


S3Config = ObjectStorageConfig
"""The older name of `ObjectStorageConfig`."""


def default_idx_cache() -> str:
    """Folder of copies of `.idx` objects if none is given: `$XDG_CACHE_HOME/trackbed/idx`, or below `~/.cache`."""
    return os.fspath(Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "trackbed", "idx"))
