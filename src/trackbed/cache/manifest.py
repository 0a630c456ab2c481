"""The manifest of an entry: the last file to be written, and the proof that the others are whole."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import orjson

from trackbed.cache.fingerprint import Decisions
from trackbed.errors import FormatError
from trackbed.files import FileSum

__all__ = ["Manifest", "encode_manifest", "read_manifest"]

FORMAT: Final = "trackbed-cache"
VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class Manifest:
    """What an entry was decided by, and what its files are."""

    fingerprint: str
    """SHA-256 of the decisions."""
    decisions: Decisions
    files: Mapping[str, FileSum]
    """By file name."""


def encode_manifest(manifest: Manifest) -> bytes:
    """The JSON text of a manifest."""
    fields: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "fingerprint": manifest.fingerprint,
        "files": dict(manifest.files),
        "decisions": manifest.decisions,
    }
    return orjson.dumps(fields, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)


def read_manifest(path: str) -> Manifest | None:
    """The manifest at `path`, or None where there is none.

    One of another version says nothing here but its version, so that it fits no entry of ours.

    Raises:
        FormatError: the file is no manifest.
    """
    try:
        raw = Path(path).read_bytes()
    except FileNotFoundError:
        return None
    try:
        fields = orjson.loads(raw)
        found = (fields["format"], fields["version"])
        if found != (FORMAT, VERSION):
            return Manifest("", {"manifest": list(found)}, {})
        files = {name: FileSum(**record) for name, record in fields["files"].items()}
        return Manifest(fields["fingerprint"], fields["decisions"], files)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        msg = f"{path}: a manifest must be a JSON object with the fields of docs/formats/cache.md: {error}"
        raise FormatError(msg) from error
