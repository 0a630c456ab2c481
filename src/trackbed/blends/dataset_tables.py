"""Readers of `[[dataset]]`: pairs and the amount to draw; and of `[[stage]]`: weights from a given sample on."""

import json
import os
from collections import Counter
from glob import escape, has_magic
from pathlib import Path
from typing import Any, Final

from trackbed.blends.blend_file import DatasetEntry, StageEntry
from trackbed.blends.sizes import samples_for
from trackbed.blends.toml_tables import (
    COUNT,
    FLAG,
    NUMBER,
    POSITIVE,
    TABLE,
    TEXT,
    TEXTS,
    WHOLE,
    Rule,
    TableReader,
    one_of,
    parse_count,
    reason_of,
)
from trackbed.datasets.config import COMPUTED
from trackbed.errors import ArgumentError, FormatError, StoreError
from trackbed.files.stores import is_address
from trackbed.index.splits import Split
from trackbed.tokens.shard_list import SHARD_LIST_SUFFIX, is_shard_list, read_shard_list

_KINDS: Final = ("path", "glob", "group")
_MEASURES: Final = ("weight", "ratio", "epochs")
_NAMES: Final = tuple(split.name for split in Split)
_GROUP: Final = Rule(
    f"a list of at least one string, or the path of a list of shards ({SHARD_LIST_SUFFIX})",
    lambda value: TEXTS.holds(value) or (TEXT.holds(value) and value.endswith(SHARD_LIST_SUFFIX)),
)
_SPLITS: Final = Rule(
    f"a list of at least one of {', '.join(map(repr, _NAMES))}, each at most once",
    lambda value: TEXTS.holds(value) and set(value) <= set(_NAMES) and len(set(value)) == len(value),
)


def read_datasets(reader: TableReader, folder: Path, *, split: str | None, order: str) -> tuple[DatasetEntry, ...]:
    """Reads every `[[dataset]]` of a file.

    Args:
        reader: the whole file.
        folder: folder that paths are relative to.
        split: shares of every dataset; None if the datasets name their splits.
        order: order of the samples.
    """
    tables = reader.tables("dataset")
    if not tables:
        reader.refuse("dataset", "must be given at least once, as a [[dataset]] table")
    entries = [_read_dataset(table, folder) for table in tables]
    _check_splits(reader, tables, split)
    _check_measures(tables, entries)
    counts = Counter(entry.name for entry in entries)
    for table, entry in zip(tables, entries, strict=True):
        if table.given("packed") and order != "packed":
            table.refuse("packed", f"needs order = 'packed', found {order!r}")
        if counts[entry.name] > 1:
            table.refuse("name", f"must be unique among datasets, found {entry.name!r} twice")
        table.refuse_unknown()
    return tuple(entries)


def _read_dataset(table: TableReader, folder: Path) -> DatasetEntry:
    values: dict[str, Any] = {kind: table.take(kind, _GROUP if kind == "group" else TEXT) for kind in _KINDS}
    kinds = table.given(*_KINDS)
    if len(kinds) != 1:
        found = " and ".join(kinds) or "none"
        table.refuse(kinds[-1] if kinds else "path", f"must be the only one of path, glob and group, found {found}")
    kind = kinds[0] if kinds else "path"
    _check_no_list(table, folder, values["path"])
    value = values[kind] or "unnamed"
    is_list = kind == "group" and isinstance(value, str)
    key = _read_key(table, is_list=is_list)
    patterns = tuple(value) if isinstance(value, list) else (value,)
    default_name = _last_part(patterns[0])
    if is_list:
        patterns = _listed_shards(table, folder, value, key)
        default_name = f"{Path(value).stem}{f'_{key}' if key else ''}"
    measures = {measure: table.take(measure, NUMBER if measure == "weight" else POSITIVE) for measure in _MEASURES}
    given = table.given(*_MEASURES)
    for measure in given[1:]:
        table.refuse(measure, f"must be omitted with dataset.{given[0]}, found both")
    amount = measures[given[0]] if given else None
    splits = table.take("splits", _SPLITS)
    return DatasetEntry(
        name=table.take("name", TEXT, default_name),
        kind=kind,  # type: ignore[arg-type]  # of _KINDS
        patterns=tuple(pattern if is_address(pattern) else path_of_pattern(folder, pattern) for pattern in patterns),
        measure=given[0] if given else None,  # type: ignore[arg-type]  # of _MEASURES
        amount=1.0 if amount is None else _as_double(amount),
        divide=_read_divide(table, kind),
        max_epochs=_as_double(table.take("max_epochs", POSITIVE)),
        incomplete=_read_incomplete(table, kind, patterns),
        repeated=bool(table.take("repeated", FLAG)),
        packed=table.take("packed", FLAG) is not False,
        splits=None if splits is None else tuple(Split[one] for one in splits),
        where=table.where,
    )


def path_of_pattern(folder: Path, pattern: str) -> str:
    """Returns the path of a pattern in the blend file of a folder, on which the names of indices depend.

    `conf/../data/web` becomes `data/web`, as a job in the working directory names it; but a path that would then lead
    elsewhere, because a folder is a symbolic link, stays as it is. So do absolute paths, and those of a blend file in
    the working directory.
    """
    if folder == Path() or Path(pattern).is_absolute():
        return pattern
    path = folder / pattern
    if ".." not in path.parts or has_magic(str(path.parent)):
        return str(path)
    plain = Path(os.path.normpath(path))
    return str(plain if plain.parent.resolve() == path.parent.resolve() else path)


def _check_no_list(table: TableReader, folder: Path, path: str | None) -> None:
    """Refuses a list of shards in the place of a pair."""
    if path is not None and not is_address(path) and is_shard_list(folder / path):
        table.refuse("path", f"must name a pair, found a list of shards; use group = {json.dumps(path)} instead")


def _read_key(table: TableReader, *, is_list: bool) -> str | None:
    if table.given("key") and not is_list:
        table.refuse("key", "must be combined with a list of shards as the group, found none")
    key: str | None = table.take("key", TEXT)
    return key


def _listed_shards(table: TableReader, folder: Path, path: str, key: str | None) -> tuple[str, ...]:
    """Returns the prefixes in a list of shards, relative to the folder of the blend file, or addresses."""
    below = Path(path).parent
    try:
        found = read_shard_list(path if is_address(path) else folder / path, key=key)
    except (ArgumentError, FormatError, StoreError, OSError) as error:
        table.refuse("group", f"must name a list of shards, found {reason_of(error)}")
        return (path,)
    if is_address(path):
        return tuple(map(escape, found))
    return tuple(escape(str(below / Path(prefix).relative_to((folder / path).parent))) for prefix in found)


def _as_double(number: Any) -> Any:
    """Converts a whole number of 2**53 or more to a double, so that arithmetic does not overflow."""
    return float(number) if isinstance(number, int) and number >= 2**53 else number


def _last_part(pattern: str) -> str:
    """Returns the default name of a dataset.

    >>> _last_part("data/web-*.bin")
    'web-*'
    """
    return Path(pattern).name.removesuffix(".bin").removesuffix(".idx")


def _read_divide(table: TableReader, kind: str) -> Any:
    if table.given("divide") and (kind != "glob" or not table.given("weight")):
        table.refuse("divide", "must be combined with the weight of a glob, found none")
    return table.take("divide", one_of(["tokens", "equally"]), "tokens")


def _read_incomplete(table: TableReader, kind: str, patterns: tuple[str, ...]) -> Any:
    if table.given("incomplete") and (kind == "path" or not any(map(has_magic, patterns))):
        table.refuse("incomplete", "must be combined with a glob, or a group with a pattern, found neither")
    return table.take("incomplete", one_of(["error", "skip"]), "error")


def _check_splits(reader: TableReader, tables: list[TableReader], split: str | None) -> None:
    named = [table for table in tables if table.given("splits")]
    for table in named if reader.given("split") else []:
        table.refuse("splits", f"must be omitted if split divides every dataset, found split {split!r}")
    if not reader.given("split") and not named:
        reader.refuse("split", "must be given, such as '98,1,1', or splits in every dataset, found neither")
    for table in tables if named and not reader.given("split") else []:
        if table not in named:
            table.refuse("splits", "must be given in every dataset, or in none and split for all, found only some")


def _check_measures(tables: list[TableReader], entries: list[DatasetEntry]) -> None:
    """Checks that in each split all datasets or none have a measure, and that weights and ratios are not mixed."""
    for split in Split:
        members = [
            (table, entry)
            for table, entry in zip(tables, entries, strict=True)
            if entry.splits is None or split in entry.splits
        ]
        _check_common_measures(split, members)
        if all(entry.splits is None for entry in entries):
            break  # the datasets are the same in all splits


def _check_common_measures(split: Split, members: list[tuple[TableReader, DatasetEntry]]) -> None:
    measures = {entry.measure for _, entry in members}
    for table, entry in members:
        others = f"if other datasets of {split.name}"
        if entry.measure is None and len(measures) > 1:
            table.refuse("weight", f"must be given {others} have a weight, ratio or epochs, found none")
        if entry.measure == "ratio" and "weight" in measures:
            table.refuse("ratio", f"must be omitted {others} have weights, found both")
    if measures == {"weight"} and not any(entry.amount for _, entry in members):
        members[0][0].refuse("weight", "must be above 0 for at least one dataset, found 0 for all")


_STARTS: Final = ("from_sample", "from_token", "from_iteration")
_RAMPS: Final = ("ramp_samples", "ramp_tokens", "ramp_iterations")


def read_stages(
    reader: TableReader,
    datasets: tuple[DatasetEntry, ...],
    *,
    order: str,
    sequence_length: int,
    global_batch_size: int | None,
) -> tuple[StageEntry, ...]:
    """Reads every `[[stage]]` of a file; none may start before the previous one."""
    names = [entry.name for entry in datasets if entry.splits is None or Split.train in entry.splits]
    stages: list[StageEntry] = []
    tables = reader.tables("stage")
    if tables and order not in COMPUTED:
        reader.refuse("stage", f"needs order = 'instant' or 'packed', found {order!r}")
    for table in tables:
        start = _num_samples(table, _STARTS, sequence_length, global_batch_size)
        ramp = _num_samples(table, _RAMPS, sequence_length, global_batch_size, is_needed=False)
        stage = StageEntry(first_sample=start, weights=_weights(table, names), ramp=ramp, where=table.where)
        if stages and start < stages[-1].first_sample:
            before = stages[-1].first_sample
            table.refuse(table.given(*_STARTS)[0], f"must not decrease, found sample {start} after {before}")
        stages.append(stage)
        table.refuse_unknown()
    return tuple(stages)


def _num_samples(
    table: TableReader,
    keys: tuple[str, str, str],
    sequence_length: int,
    global_batch_size: int | None,
    *,
    is_needed: bool = True,
) -> int:
    """Reads the only one of three keys, which give a number of samples, tokens and iterations, as samples."""
    of_samples, of_tokens, of_iterations = keys
    values = {key: table.take(key, COUNT if key == of_tokens else WHOLE) for key in keys}
    given = table.given(*keys)
    if not given and not is_needed:
        return 0
    if len(given) != 1:
        found = " and ".join(given) or "none"
        table.refuse(given[-1] if given else of_samples, f"must be the only one of {', '.join(keys)}, found {found}")
        return 0
    value: Any = values[given[0]]
    if value is None:
        return 0
    if given[0] == of_tokens:
        return samples_for(parse_count(value) if isinstance(value, str) else value, sequence_length)
    if given[0] == of_iterations and global_batch_size is None:
        table.refuse(of_iterations, "needs size.global_batch_size, found none")
    return int(value) * (global_batch_size or 1 if given[0] == of_iterations else 1)


def _weights(table: TableReader, names: list[str]) -> tuple[tuple[str, float], ...]:
    table.need("weights", TABLE, {})
    inner = table.table("weights")
    weights = [(name, inner.take(name, NUMBER)) for name in names]
    if inner.keys and not any(weight for _, weight in weights):
        table.refuse("weights", "must be above 0 for at least one dataset, found 0 for all")
    inner.refuse_unknown()
    return tuple((name, float(weight)) for name, weight in weights if weight is not None)
