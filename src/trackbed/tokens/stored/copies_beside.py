"""Copies on this host of what lies beside pairs in object stores, such as their masks.

A copy is named by the checksums in the seal of its pair, and compared with them whenever it is opened.
"""

import hashlib
import os
from pathlib import Path

from trackbed.errors import ArgumentError, FormatError
from trackbed.files import FileSum, checksum_file, new_partial, publish, stores
from trackbed.files.stores import parse_address
from trackbed.tokens.stored.index_cache import place_of


def copy_beside(address: str, wanted: FileSum, folder: str) -> Path:
    """Returns the path of a copy of an object, which is fetched if there is none.

    Processes that start together may each fetch it; the copies are the same.

    Args:
        address: the object.
        wanted: its size and checksums.
        folder: folder of the copies, which is that of the copies of `.idx` objects.

    Raises:
        FormatError: the object has other bytes.
        FileNotFoundError: there is no such object.
        ArgumentError: the folder cannot be written to.
        StoreError: the store refuses, or does not answer in time.
    """
    object_address = parse_address(address)
    place = place_of(object_address, folder)
    name = hashlib.sha256(f"{wanted.size_bytes} {wanted.crc32}".encode()).hexdigest()[:32]
    final = place / f"{name}{Path(object_address.key).suffix}"
    if _is_whole(final, wanted):
        return final
    stamp = stores.stamp_of_object(object_address)
    partial = None
    try:
        place.mkdir(parents=True, exist_ok=True)
        partial = new_partial(final)
        descriptor = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            stores.fetch_to_file(object_address, stamp, descriptor)
        finally:
            os.close(descriptor)
        if not _is_whole(partial, wanted):
            raise FormatError(
                f"{address}: must be the {wanted.size_bytes} bytes that the seal of its pair names, found others"
            )
        publish(partial, final)
        for other in place.glob(f"*{final.suffix}"):  # of earlier versions; processes that have mapped them keep them
            if other != final:
                other.unlink(missing_ok=True)
    except OSError as error:
        if isinstance(error, FileNotFoundError) and error.filename == address:
            raise
        raise ArgumentError(
            f"{folder}: path_to_idx_cache must be a folder with space for copies, found: {error}"
        ) from error
    finally:
        if partial is not None:
            partial.unlink(missing_ok=True)
    return final


def _is_whole(path: Path, wanted: FileSum) -> bool:
    try:
        return path.stat().st_size == wanted.size_bytes and FileSum.of(checksum_file(path)) == wanted
    except OSError:
        return False
