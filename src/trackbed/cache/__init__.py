"""Index files on disk, under Megatron Core's names and with its bytes (docs/formats/cache.md)."""

from trackbed.cache.entry import ArraySpec, DataPart, Entry
from trackbed.cache.fingerprint import Decisions, fingerprint
from trackbed.cache.gc import Removal, entries_in_use, plan_removal, remove
from trackbed.cache.inventory import Condition, Inventory, StoredEntry, StoredFile, take_inventory
from trackbed.cache.memo import Memo, read_memo, write_memo
from trackbed.cache.notes import await_flush, entry_digest, flushed_note, read_notes
from trackbed.cache.npy import map_npy, read_npy_spec
from trackbed.cache.once import Access, Pending, access, collecting, flush_built, open_entry, open_or_build
from trackbed.cache.opened import Arrays, arrays_of, damage, data_crc32_of, shape_of
from trackbed.cache.recall import Recall, recalled, recalling, record_of
from trackbed.cache.together import bundles_of, find_together, make_together
from trackbed.cache.traces import without_traces
from trackbed.cache.uses import DAY_SECONDS, touch_use, use_name
from trackbed.cache.verify import bytes_to_read, find_problems
from trackbed.cache.visibility import await_entry
from trackbed.cache.write import Allocate, Build, Recipe, in_memory

__all__ = [
    "DAY_SECONDS",
    "Access",
    "Allocate",
    "ArraySpec",
    "Arrays",
    "Build",
    "Condition",
    "DataPart",
    "Decisions",
    "Entry",
    "Inventory",
    "Memo",
    "Pending",
    "Recall",
    "Recipe",
    "Removal",
    "StoredEntry",
    "StoredFile",
    "access",
    "arrays_of",
    "await_entry",
    "await_flush",
    "bundles_of",
    "bytes_to_read",
    "collecting",
    "damage",
    "data_crc32_of",
    "entries_in_use",
    "entry_digest",
    "find_problems",
    "find_together",
    "fingerprint",
    "flush_built",
    "flushed_note",
    "in_memory",
    "make_together",
    "map_npy",
    "open_entry",
    "open_or_build",
    "plan_removal",
    "read_memo",
    "read_notes",
    "read_npy_spec",
    "recalled",
    "recalling",
    "record_of",
    "remove",
    "shape_of",
    "take_inventory",
    "touch_use",
    "use_name",
    "without_traces",
    "write_memo",
]
