"""The manifest of an entry: its decisions, and the sizes and checksums that prove its files whole."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, NamedTuple

import numpy as np
import orjson

from trackbed.cache.entry import ArraySpec, Decisions, Entry
from trackbed.errors import FormatError
from trackbed.files import FileSum, boot_id, read_regular

_FORMAT: Final = "trackbed-cache"
_VERSION: Final = 1
_DTYPES: Final = {name: np.dtype(name) for name in ("<i2", "<u2", "<i4", "<u4", "<i8")}


@dataclass(frozen=True, slots=True)
class DataSum:
    """The part of the data that an index was computed from, at the time of the build."""

    crc32: str
    """Eight hexadecimal digits."""
    stamps: str
    """Inode, size and time of its files."""


class Manifest(NamedTuple):
    """The decisions of an entry, and its files."""

    fingerprint: str
    """SHA-256 of the decisions."""
    decisions: Decisions
    files: Mapping[str, FileSum]
    """By file name."""
    arrays: Mapping[str, ArraySpec]
    """By array name."""
    boot: str = ""
    """Name of the boot in which the files were written; empty if it is not known."""
    data: DataSum | None = None
    """None where the decisions hold all of the data."""

    @property
    def data_crc32(self) -> str:
        """CRC-32 of the data; empty where no manifest tells."""
        return "" if self.data is None else self.data.crc32

    @property
    def identity(self) -> tuple[str, str]:
        """Equal for entries that were built of the same decisions and data."""
        return self.fingerprint, self.data_crc32


def manifest_of(entry: Entry, files: Mapping[str, FileSum], arrays: Mapping[str, ArraySpec]) -> Manifest:
    """Returns the manifest of an entry that this process has just built."""
    data = None if entry.data is None else DataSum(entry.data.checksum, entry.data.stamps)
    return Manifest(entry.fingerprint, entry.decisions, files, arrays, boot_id(), data)


def encode_manifest(manifest: Manifest) -> bytes:
    """Returns the JSON text of a manifest."""
    fields: dict[str, Any] = {
        "format": _FORMAT,
        "version": _VERSION,
        "fingerprint": manifest.fingerprint,
        "boot": manifest.boot,
        "data": manifest.data,
        "files": dict(manifest.files),
        "arrays": {name: {"dtype": spec.dtype.str, "shape": spec.shape} for name, spec in manifest.arrays.items()},
        "decisions": manifest.decisions,
    }
    return orjson.dumps(fields, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)


def read_manifest(path: str) -> Manifest | None:
    """Reads the manifest at `path`; returns None if there is none."""
    try:
        raw = read_regular(path)
    except FileNotFoundError:
        return None
    return parse_manifest(raw, path)


def parse_manifest(raw: bytes | memoryview, path: str) -> Manifest:
    """Parses the manifest that was read at `path`.

    A manifest of another version gives a manifest with that version alone, which fits no entry.
    """
    try:
        fields = orjson.loads(raw)
        found = (fields["format"], fields["version"])
        if found != (_FORMAT, _VERSION):
            return Manifest("", {"manifest": list(found)}, {}, {})
        files = {name: FileSum.from_json(record) for name, record in fields["files"].items()}
        arrays = {name: _array_spec(**record) for name, record in fields["arrays"].items()}
        boot, record = f"{fields['boot']}", fields["data"]
        data = None if record is None else DataSum(f"{record['crc32']}", f"{record['stamps']}")
        return Manifest(fields["fingerprint"], fields["decisions"], files, arrays, boot, data)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise FormatError(
            f"{path}: a manifest must be a JSON object with the fields of docs/formats/cache.md: {str(error)[:200]}"
        ) from error


def _array_spec(dtype: str, shape: list[int]) -> ArraySpec:
    if type(dtype) is not str or {*map(type, shape)} - {int}:
        raise ValueError(f"arrays must have a dtype and a shape, found {dtype!r} and {shape!r}")
    return _shared_spec(dtype, tuple(shape))


@lru_cache(maxsize=1 << 10)
def _shared_spec(dtype: str, shape: tuple[int, ...]) -> ArraySpec:
    """One object for thousands of entries with arrays of equal shapes."""
    if not (dtype in _DTYPES and all(length >= 0 for length in shape)):
        raise ValueError(f"arrays must be of {' or '.join(_DTYPES)}, found {dtype!r} of shape {list(shape)!r}")
    return ArraySpec(_DTYPES[dtype], shape)
