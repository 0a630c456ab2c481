"""Pairs in a bucket, for tests."""

from pathlib import Path

from trackbed.tokens import IndexedDataset, ObjectStorageConfig


class StoredPath:
    """An object under the few names of `pathlib.Path` that contracts use."""

    def __init__(self, bucket, key):
        self._bucket, self._key = bucket, key

    def __str__(self):
        return self._bucket.text(self._key)

    def write_bytes(self, data):
        self._bucket.put(self._key, data)

    def with_name(self, name):
        return StoredPath(self._bucket, str(Path(self._key).with_name(name)))

    def replace(self, other):
        other.write_bytes(self._bucket.get(self._key))
        self.unlink()

    def unlink(self):
        self._bucket.delete(self._key)


def upload(bucket, prefix, key):
    """Copies a pair into a bucket, and returns its address."""
    for suffix in (".bin", ".idx"):
        bucket.put(key + suffix, Path(f"{prefix}{suffix}").read_bytes())
    return bucket.text(key)


def open_stored(address, folder, **options):
    """A pair in a bucket, with copies of indexes in a folder."""
    storage = ObjectStorageConfig(str(folder))
    return IndexedDataset(address, mmap=False, object_storage_config=storage, **options)
