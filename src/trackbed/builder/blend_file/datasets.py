"""Reader of `[[dataset]]`: a pair, many pairs, or a group of pairs, and the amount to draw."""

from collections import Counter
from glob import has_magic
from pathlib import Path
from typing import Any, Final

from trackbed.builder.blend_file.description import DatasetEntry
from trackbed.builder.blend_file.tables import NUMBER, POSITIVE, TEXT, TEXTS, Rule, TableReader, one_of
from trackbed.files.stores import is_address
from trackbed.index.splits import Split

__all__ = ["read_datasets"]

_KINDS: Final = ("path", "glob", "group")
_MEASURES: Final = ("weight", "ratio", "epochs")
_NAMES: Final = tuple(split.name for split in Split)
_SPLITS: Final = Rule(
    f"a list of at least one of {', '.join(map(repr, _NAMES))}, each at most once",
    lambda value: TEXTS.holds(value) and set(value) <= set(_NAMES) and len(set(value)) == len(value),
)


def read_datasets(reader: TableReader, folder: Path, *, split: str | None) -> tuple[DatasetEntry, ...]:
    """Reads every `[[dataset]]` of a file.

    Args:
        reader: the whole file.
        folder: folder that paths are relative to.
        split: shares of every dataset; None if the datasets name their splits.
    """
    tables = reader.tables("dataset")
    if not tables:
        reader.refuse("dataset", "must be given at least once, as a [[dataset]] table")
    entries = [_read_dataset(table, folder) for table in tables]
    _check_splits(reader, tables, split)
    _check_measures(tables, entries)
    counts = Counter(entry.name for entry in entries)
    for table, entry in zip(tables, entries, strict=True):
        if counts[entry.name] > 1:
            table.refuse("name", f"must be unique among datasets, found {entry.name!r} twice")
        table.refuse_unknown()
    return tuple(entries)


def _read_dataset(table: TableReader, folder: Path) -> DatasetEntry:
    values: dict[str, Any] = {kind: table.take(kind, TEXTS if kind == "group" else TEXT) for kind in _KINDS}
    kinds = table.given(*_KINDS)
    if len(kinds) != 1:
        found = " and ".join(kinds) or "none"
        table.refuse(kinds[-1] if kinds else "path", f"must be the only one of path, glob and group, found {found}")
    kind = kinds[0] if kinds else "path"
    value = values[kind] or "unnamed"
    patterns = tuple(value) if isinstance(value, list) else (value,)
    measures = {measure: table.take(measure, NUMBER if measure == "weight" else POSITIVE) for measure in _MEASURES}
    given = table.given(*_MEASURES)
    for measure in given[1:]:
        table.refuse(measure, f"must be omitted with dataset.{given[0]}, found both")
    amount = measures[given[0]] if given else None
    splits = table.take("splits", _SPLITS)
    return DatasetEntry(
        name=table.take("name", TEXT, _last_part(patterns[0])),
        kind=kind,  # type: ignore[arg-type]  # of _KINDS
        patterns=tuple(pattern if is_address(pattern) else str(folder / pattern) for pattern in patterns),
        measure=given[0] if given else None,  # type: ignore[arg-type]  # of _MEASURES
        amount=1.0 if amount is None else _as_double(amount),
        divide=_read_divide(table, kind),
        max_epochs=_as_double(table.take("max_epochs", POSITIVE)),
        incomplete=_read_incomplete(table, kind, patterns),
        splits=None if splits is None else tuple(Split[one] for one in splits),
        where=table.where,
    )


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
