"""Bytes of a checkpoint: records, files, checksums."""

from trackbed.checkpoint.storage.rank_file import WrittenFile, WrittenItem, write_items
from trackbed.checkpoint.storage.verified_reader import FileReader

__all__ = ["FileReader", "WrittenFile", "WrittenItem", "write_items"]
