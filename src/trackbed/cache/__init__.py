"""Index files on disk, under Megatron Core's names and with its bytes (docs/formats/cache.md)."""

from trackbed.cache.build import build_batch
from trackbed.cache.entry import Allocate, Arrays, ArraySpec, Entry, Kind, Request, fingerprint, in_memory
from trackbed.cache.gc import Removal, entries_in_use, plan_removal, remove
from trackbed.cache.inventory import (
    Condition,
    Described,
    Inventory,
    StoredEntry,
    bytes_to_read,
    describe_stored,
    find_problems,
    take_inventory,
)
from trackbed.cache.lazy_arrays import LazyArrays, damage
from trackbed.cache.lookup import LookupResult, State, await_visible, look_up
from trackbed.cache.notes import FlushMark, await_flush, flush_and_mark, flush_later, make_marks, note_use

__all__ = [
    "Allocate",
    "ArraySpec",
    "Arrays",
    "Condition",
    "Described",
    "Entry",
    "FlushMark",
    "Inventory",
    "Kind",
    "LazyArrays",
    "LookupResult",
    "Removal",
    "Request",
    "State",
    "StoredEntry",
    "await_flush",
    "await_visible",
    "build_batch",
    "bytes_to_read",
    "damage",
    "describe_stored",
    "entries_in_use",
    "find_problems",
    "fingerprint",
    "flush_and_mark",
    "flush_later",
    "in_memory",
    "look_up",
    "make_marks",
    "note_use",
    "plan_removal",
    "remove",
    "take_inventory",
]
