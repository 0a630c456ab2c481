"""Lists of shards: the file `<output>.toml`, which names the pairs of a sharded corpus (docs/formats/shards.md)."""

import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from trackbed.errors import ArgumentError, FormatError
from trackbed.files import read_regular, stores
from trackbed.files.stores import is_address, parse_address

SHARD_LIST_SUFFIX: Final = ".toml"
_MARK: Final = "# Shards written by trackbed preprocess."
_GROUP: Final = "group"
_MOST_BYTES: Final = 64 << 20

ShardList = Mapping[str, tuple[str, ...]]
"""Prefixes of the pairs of each key, in order; the key is empty if the list has one key without a name."""


def shard_list_text(groups: Mapping[str, Sequence[str]]) -> str:
    """Returns the content of a list: `group = [...]`, in a table for each key if there are several.

    Args:
        groups: prefixes of the pairs of each key, relative to the folder of the list; at least one key.
    """
    lines = [_MARK]
    for key, names in groups.items():
        if len(groups) > 1:
            lines += ["", f"[{_quoted(key)}]"]
        lines += [f"{_GROUP} = [", *(f"    {_quoted(name)}," for name in names), "]"]
    return "\n".join(lines) + "\n"


def is_shard_list(path: Path) -> bool:
    """True if a file begins like the lists that Trackbed writes."""
    if path.suffix != SHARD_LIST_SUFFIX or not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(_MARK)) == _MARK.encode()


def read_shard_list(path: str | Path, *, key: str | None = None) -> list[str]:
    """Returns the prefixes that a list names, below its folder.

    Args:
        path: path or address of the list.
        key: key of the texts; may be None if the list has one key.

    Raises:
        FormatError: the file is no list of shards.
        ArgumentError: it has no such key, or several and none was named.
        OSError: it cannot be read.
        StoreError: an object store refuses, or does not answer in time.
    """
    groups = _read(path)
    return [_below(path, name) for name in _group_of(groups, key, where=str(path))]


def read_all_shards(path: str | Path) -> list[str]:
    """Returns the prefixes of all keys of a list, below its folder; see `read_shard_list`."""
    return [prefix for group in read_shard_groups(path).values() for prefix in group]


def read_shard_groups(path: str | Path) -> dict[str, list[str]]:
    """Returns the prefixes of each key of a list, below its folder; the key is empty if the list does not name it.

    Raises:
        FormatError: the file is no list of shards.
        OSError: it cannot be read.
        StoreError: an object store refuses, or does not answer in time.
    """
    return {key: [_below(path, name) for name in group] for key, group in _read(path).items()}


def _read(path: str | Path) -> ShardList:
    if is_address(path):
        _, raw = stores.read_object(parse_address(str(path)), most_bytes=_MOST_BYTES)
    else:
        raw = read_regular(path)
    return parse_shard_list(raw, where=str(path))


def _below(path: str | Path, name: str) -> str:
    return f"{str(path).rpartition('/')[0]}/{name}" if is_address(path) else str(Path(path).parent / name)


def parse_shard_list(raw: bytes, *, where: str) -> ShardList:
    """Parses the content of a list.

    Args:
        raw: content of the file.
        where: its path or address, for error messages.
    """
    try:
        fields: dict[str, Any] = tomllib.loads(raw.decode())
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{where}: a list of shards must be TOML, found: {error}") from error
    tables = {"": fields} if isinstance(fields.get(_GROUP), list) else fields
    groups = {key: table.get(_GROUP) if isinstance(table, dict) else None for key, table in tables.items()}
    for key, names in groups.items():
        is_texts = isinstance(names, list) and names and all(isinstance(name, str) and name for name in names)
        if not is_texts or set(tables[key]) != {_GROUP}:
            what = f"{str(tables[key])[:80]}{f' under {key!r}' if key else ''}"
            raise FormatError(
                f"{where}: a list of shards must have group = [...] of at least one prefix and no more, found {what}"
            )
    if not groups:
        raise FormatError(f"{where}: a list of shards must have group = [...], found an empty file")
    return {key: tuple(names) for key, names in groups.items() if names is not None}


def _group_of(groups: ShardList, key: str | None, *, where: str) -> tuple[str, ...]:
    if key is None and len(groups) == 1:
        return next(iter(groups.values()))
    if key is None or key not in groups:
        known = ", ".join(map(repr, groups)) if "" not in groups else "one without a name"
        found = "none was named" if key is None else f"{key!r}"
        raise ArgumentError(f"{where}: the key of the shards must be one of those listed ({known}), found {found}")
    return groups[key]


def _quoted(text: str) -> str:
    """Returns a TOML string: a JSON string, whose escapes TOML has too."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007F")
