"""Functions of Megatron Core's module on object stores, over Trackbed's client."""

import os
from pathlib import Path
from typing import Any, Protocol

from trackbed.errors import ArgumentError
from trackbed.files import new_partial, publish, stores
from trackbed.files.stores import parse_address
from trackbed.tokens import ObjectStorageConfig
from trackbed.tokens.stored.index_cache import StoredIndex
from trackbed.tokens.stored.open_pairs import stored_pair_exists

_S3, _MSC = "s3://", "msc://"


class S3Client(Protocol):
    """Methods of boto3's S3 client that Megatron Core calls. Trackbed has a client of its own."""

    def download_file(self, Bucket: str, Key: str, Filename: str) -> None:  # noqa: N803  boto3's names
        """Downloads an object to a file."""

    def upload_file(self, Filename: str, Bucket: str, Key: str) -> None:  # noqa: N803
        """Uploads a file."""

    def head_object(self, Bucket: str, Key: str) -> dict[str, Any]:  # noqa: N803
        """Returns the metadata of an object."""

    def get_object(self, Bucket: str, Key: str, Range: str) -> dict[str, Any]:  # noqa: N803
        """Returns an object, or a part of it."""

    def close(self) -> None:
        """Closes the client."""


def is_s3_path(path: str) -> bool:
    """True for an address with the scheme `s3`."""
    return path.startswith(_S3)


def is_object_storage_path(path: str) -> bool:
    """True for an address with the scheme `s3` or `msc`, as in Megatron Core; Trackbed reads others, too."""
    return path.startswith((_S3, _MSC))


def get_object_storage_access(path: str) -> str:
    """Returns "s3" for an address with that scheme, else "msc"."""
    return "s3" if is_s3_path(path) else "msc"


def get_index_cache_path(idx_path: str, object_storage_config: ObjectStorageConfig) -> str:
    """Returns the path where Megatron Core keeps its copy of an `.idx`. Trackbed's lie elsewhere in the folder."""
    _check(idx_path)
    return os.path.join(object_storage_config.path_to_idx_cache, idx_path.partition("://")[2])  # noqa: PTH118  as text


def parse_s3_path(path: str) -> tuple[str, str]:
    """Returns bucket and key of an address."""
    if not is_s3_path(path):
        raise ArgumentError(f"{path}: an address must begin with {_S3}, found another")
    bucket, _, key = path.removeprefix(_S3).partition("/")
    return bucket, key


def dataset_exists(path_prefix: str, idx_path: str, bin_path: str) -> bool:
    """True if both objects of a pair exist."""
    _check(path_prefix)
    return stored_pair_exists(path_prefix)


def cache_index_file(remote_path: str, local_path: str) -> None:
    """Copies an `.idx` object to a file, which appears whole. It is fetched once per host, not on rank 0 only.

    Args:
        remote_path: address of the object.
        local_path: path of the file.
    """
    _check(remote_path)
    address, final = parse_address(remote_path), Path(local_path)
    final.parent.mkdir(parents=True, exist_ok=True)
    copied = StoredIndex(address, str(final.parent)).fetch(stores.stamp_of_object(address))
    partial = new_partial(final)
    try:
        os.link(copied, partial)
        publish(partial, final)
    finally:
        partial.unlink(missing_ok=True)


def _check(path: str) -> None:
    if not is_object_storage_path(path):
        raise ArgumentError(f"{path}: an address must begin with {_S3} or {_MSC}, found another")
