"""Index files on disk, under Megatron Core's names and with its bytes (docs/formats/cache.md)."""

from trackbed.cache.entry import ArraySpec, Entry
from trackbed.cache.fingerprint import Decisions, fingerprint
from trackbed.cache.npy import map_npy, read_npy_spec
from trackbed.cache.once import Access, Pending, access, collecting, open_entry, open_or_build
from trackbed.cache.opened import Arrays, shape_of
from trackbed.cache.write import Allocate, Build, in_memory

__all__ = [
    "Access",
    "Allocate",
    "ArraySpec",
    "Arrays",
    "Build",
    "Decisions",
    "Entry",
    "Pending",
    "access",
    "collecting",
    "fingerprint",
    "in_memory",
    "map_npy",
    "open_entry",
    "open_or_build",
    "read_npy_spec",
    "shape_of",
]
