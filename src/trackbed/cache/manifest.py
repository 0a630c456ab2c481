"""The manifest of an entry: the last file to be written, and the proof that the others are whole."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from trackbed.cache.fingerprint import Decisions, fingerprint
from trackbed.errors import FormatError
from trackbed.files import Checksum

__all__ = ["FileRecord", "Manifest", "encode_manifest", "read_manifest"]

FORMAT: Final = "trackbed-cache"
VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class FileRecord:
    """Size and checksums of one file."""

    size_bytes: int
    crc32: list[str]
    """One per 64 MiB."""

    @classmethod
    def of(cls, checksum: Checksum) -> "FileRecord":
        """What was summed up."""
        return cls(checksum.size_bytes, checksum.chunks())


@dataclass(frozen=True, slots=True)
class Manifest:
    """What an entry was decided by, and what its files are."""

    decisions: Decisions
    files: Mapping[str, FileRecord]
    """By file name."""

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the decisions."""
        return fingerprint(self.decisions)


def encode_manifest(manifest: Manifest) -> str:
    """The JSON text of a manifest."""
    fields: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "fingerprint": manifest.fingerprint,
        "files": {name: asdict(record) for name, record in manifest.files.items()},
        "decisions": manifest.decisions,
    }
    return json.dumps(fields, indent=1) + "\n"


def read_manifest(path: Path) -> Manifest | None:
    """The manifest at `path`, or None where there is none.

    One of another version says nothing here but its version, so that it fits no entry of ours.

    Raises:
        FormatError: the file is no manifest, or was changed.
    """
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        return None
    try:
        fields = json.loads(raw)
        found = (fields["format"], fields["version"])
        if found != (FORMAT, VERSION):
            return Manifest({"manifest": list(found)}, {})
        files = {name: FileRecord(**record) for name, record in fields["files"].items()}
        manifest = Manifest(fields["decisions"], files)
        stated = fields["fingerprint"]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        msg = f"{path}: a manifest must be a JSON object with the fields of docs/formats/cache.md: {error}"
        raise FormatError(msg) from error
    if manifest.fingerprint != stated:
        msg = f"{path}: the fingerprint must be {manifest.fingerprint}, as the decisions say, found {stated}"
        raise FormatError(msg)
    return manifest
