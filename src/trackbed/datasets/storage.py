"""Options of a configuration for pairs in object stores."""

from trackbed.datasets.config import BlendedMegatronDatasetConfig
from trackbed.errors import ArgumentError
from trackbed.files.stores import is_address, parse_address
from trackbed.tokens import ObjectStorageConfig

__all__ = ["check_stored", "storage_of"]

_NAMES = ("object_storage_cache_path", "s3_cache_path")


def storage_of(config: BlendedMegatronDatasetConfig) -> ObjectStorageConfig | None:
    """Returns the options of a configuration for pairs in object stores; None if it has none.

    Raises:
        ArgumentError: its two names of the folder have two values, or one that is no folder.
    """
    given = {name: getattr(config, name, None) for name in _NAMES}
    folders = [folder for folder in given.values() if folder]
    if len(set(folders)) > 1:
        found = " and ".join(repr(folder) for folder in folders)
        msg = f"object_storage_cache_path and s3_cache_path are two names of one option, found {found}"
        raise ArgumentError(msg)
    return ObjectStorageConfig(folders[0]) if folders else None


def check_stored(prefix: str, config: BlendedMegatronDatasetConfig) -> None:
    """Checks that a configuration fits a prefix, if that is an address.

    Raises:
        ArgumentError: its indices would be written to an object store.
    """
    if is_address(prefix):
        parse_address(prefix)  # refuses secrets without repeating them
    if is_address(prefix) and config.path_to_cache is None and config.order != "instant":
        msg = f"{prefix}: path_to_cache must be a folder for a pair in an object store, found None (or order='instant')"
        raise ArgumentError(msg)
