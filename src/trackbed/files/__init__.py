"""Files that appear whole under their final name or not at all, and checksums of them."""

from trackbed.files.behind import WrittenBehind
from trackbed.files.checksum import CHUNK_BYTES, Checksum, FileSum, checksum_bytes, checksum_file
from trackbed.files.publish import (
    clear_dead_partials,
    flush_to_disk,
    new_partial,
    partial_name,
    publish,
    write_new,
)
from trackbed.files.writeback import Writeback

__all__ = [
    "CHUNK_BYTES",
    "Checksum",
    "FileSum",
    "Writeback",
    "WrittenBehind",
    "checksum_bytes",
    "checksum_file",
    "clear_dead_partials",
    "flush_to_disk",
    "new_partial",
    "partial_name",
    "publish",
    "write_new",
]
