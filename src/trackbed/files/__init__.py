"""Atomic publication of files and folders; mapping, writeback and checksums of files."""

from trackbed.files.boot import boot_id
from trackbed.files.checksum import CHUNK_BYTES, Checksum, FileSum, checksum_bytes, checksum_file, crc32
from trackbed.files.compare import Chunk, chunks_of, compare_chunks
from trackbed.files.flush import BackgroundFlush, flush_file_system
from trackbed.files.index_ends import RawIndexEnds, read_index_ends
from trackbed.files.local import is_local, is_on_this_machine, local_host_path
from trackbed.files.many import (
    Claim,
    FileSet,
    NewFile,
    Stamps,
    commit_file_sets,
    join_names,
    read_parts,
    read_stamps,
)
from trackbed.files.mapping import drop_pages, map_readonly, mapped_files, read_ahead
from trackbed.files.publish import (
    PartialFile,
    Writer,
    claim,
    clear_dead_partials,
    find_partials,
    flush_to_disk,
    is_partial_name,
    new_partial,
    partial_name,
    publish,
    remove_partial,
    write_new,
)
from trackbed.files.publish_folder import commit_folder, flush_files, make_partial_folder
from trackbed.files.regular import open_regular, read_regular
from trackbed.files.resource_limit import DESCRIPTORS, MAPS, Holder, ResourceLimit
from trackbed.files.stamp import Stamp, check_stamp, remove_unless_changed, stamp_of
from trackbed.files.writeback import BackgroundWriteback, Writeback

__all__ = [
    "CHUNK_BYTES",
    "DESCRIPTORS",
    "MAPS",
    "BackgroundFlush",
    "BackgroundWriteback",
    "Checksum",
    "Chunk",
    "Claim",
    "FileSet",
    "FileSum",
    "Holder",
    "NewFile",
    "PartialFile",
    "RawIndexEnds",
    "ResourceLimit",
    "Stamp",
    "Stamps",
    "Writeback",
    "Writer",
    "boot_id",
    "check_stamp",
    "checksum_bytes",
    "checksum_file",
    "chunks_of",
    "claim",
    "clear_dead_partials",
    "commit_file_sets",
    "commit_folder",
    "compare_chunks",
    "crc32",
    "drop_pages",
    "find_partials",
    "flush_file_system",
    "flush_files",
    "flush_to_disk",
    "is_local",
    "is_on_this_machine",
    "is_partial_name",
    "join_names",
    "local_host_path",
    "make_partial_folder",
    "map_readonly",
    "mapped_files",
    "new_partial",
    "open_regular",
    "partial_name",
    "publish",
    "read_ahead",
    "read_index_ends",
    "read_parts",
    "read_regular",
    "read_stamps",
    "remove_partial",
    "remove_unless_changed",
    "stamp_of",
    "write_new",
]
