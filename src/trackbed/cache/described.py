"""Dataset, split and class of an entry as it lies in the folder, from its name and description."""

import json
import re
from typing import Final, NamedTuple

from trackbed.cache.inventory import StoredEntry
from trackbed.errors import FormatError
from trackbed.files import open_regular

__all__ = ["Described", "describe_stored"]

_MOST_BYTES: Final = 64 << 10
"""Beginning of a description that is read: that of a blend of thousands of datasets has megabytes."""
_FIELD: Final = re.compile(r'^    "(class|dataset_path|index_split|split)": ("(?:[^"\\]|\\.)*")', re.MULTILINE)


class Described(NamedTuple):
    """Dataset, split and class of an entry; a field is empty if it is not known."""

    dataset: str
    """Prefix of the dataset, or the number of datasets of a blend."""
    split: str
    class_name: str


def describe_stored(entry: StoredEntry) -> Described:
    """Reads what an entry is the index of. Reads no more than the beginning of its description."""
    text = _beginning(entry)
    found = {name: json.loads(value) for name, value in reversed(_FIELD.findall(text))}  # the first one counts
    is_one = "dataset_path" in found
    return Described(
        dataset=found["dataset_path"] if is_one else _blend(entry, text),
        split=entry.split or found.get("index_split" if is_one else "split", ""),
        class_name=entry.class_name or found.get("class", ""),
    )


def _blend(entry: StoredEntry, text: str) -> str:
    if not text.startswith("{"):
        return text.partition("\n")[0]  # of the balanced order: a sentence
    number = entry.record.decisions.get("num_datasets") if entry.record is not None else None
    return f"blend of {number} datasets" if number else "blend"


def _beginning(entry: StoredEntry) -> str:
    """Returns the beginning of the description; empty if it cannot be read."""
    path = next((file.path for file in entry.files if file.path.endswith("description.txt")), None)
    if path is None:
        return ""
    try:
        with open(open_regular(path)[0], "rb") as file:  # noqa: PTH123  a descriptor
            return file.read(_MOST_BYTES).decode(errors="replace")
    except (OSError, FormatError):
        return ""
