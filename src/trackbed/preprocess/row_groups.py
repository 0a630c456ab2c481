"""Readers of Parquet files, whose row groups are independent."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, repeat
from typing import Any, Final

from trackbed.datasets.extras import require
from trackbed.errors import FormatError
from trackbed.preprocess.inputs import InputFile, RowGroup
from trackbed.preprocess.open_input import open_input

_BATCH_ROWS: Final = 1024
_NAMES_SHOWN: Final = 8


@dataclass(frozen=True, slots=True)
class LongCell:
    """Placeholder for a value that exceeds the size limit of a cell."""

    size_bytes: int
    max_bytes: int


@dataclass(frozen=True, slots=True)
class MissingColumn:
    """Placeholder for the value of a column that the file lacks."""

    columns: str
    """Its columns, listed."""


def read_row_groups(file: InputFile) -> Iterator[RowGroup]:
    """Yields the row groups of a Parquet file."""
    with _opened(file) as found:
        groups = [found.metadata.row_group(number) for number in range(found.metadata.num_row_groups)]
    sizes = [group.total_byte_size for group in groups]
    first_rows = accumulate((group.num_rows for group in groups), initial=0)
    total = max(1, sum(sizes))
    ends = [end * file.size_bytes // total for end in accumulate(sizes, initial=0)]
    for number, ((start, stop), first_row) in enumerate(zip(pairwise(ends), first_rows, strict=False)):
        yield RowGroup(file, start, stop, number, sizes[number], first_row)


def read_columns(segment: RowGroup, names: Sequence[str], *, max_cell_bytes: int) -> Iterator[tuple[Any, ...]]:
    """Yields the values of each row in the named columns.

    Args:
        segment: rows to read.
        names: at least one column.
        max_cell_bytes: maximum size of a string, at least 1.

    Returns:
        For each row a tuple with, per column, a string, None, a `LongCell`, a `MissingColumn`, or the error that
        decoding raised.
    """
    library = require("pyarrow", where=segment.file.name)
    with _opened(segment.file) as parquet:
        present = [name for name in names if name in parquet.schema_arrow.names]
        for name in present:
            _check_column(segment.file, parquet.schema_arrow, name)
        missing = MissingColumn(_listed(parquet.schema_arrow.names))
        if not present:
            yield from repeat((missing,) * len(names), _num_rows(parquet, segment))
            return
        try:
            for batch in parquet.iter_batches(
                _BATCH_ROWS, row_groups=[segment.number], columns=present, use_threads=False
            ):
                columns = (
                    _values(batch.column(name), max_cell_bytes) if name in present else repeat(missing, batch.num_rows)
                    for name in names
                )
                yield from zip(*columns, strict=True)
        except (library.ArrowException, OSError) as error:
            raise FormatError(
                f"{segment.file.name}: must be a complete Parquet file, found in row group {segment.number}: {error}"
            ) from error


def read_rows(segment: RowGroup, names: Sequence[str], *, max_row_bytes: int) -> Iterator[Any]:
    """Yields each row with those of the named columns that the file has, of any type.

    Args:
        segment: rows to read.
        names: columns.
        max_row_bytes: maximum size of a row, at least 1.

    Returns:
        For each row a dictionary; or a `LongCell` with its size, or the error that decoding raised.
    """
    library = require("pyarrow", where=segment.file.name)
    with _opened(segment.file) as parquet:
        present = [name for name in names if name in parquet.schema_arrow.names]
        if not present:
            yield from repeat(dict.fromkeys(parquet.schema_arrow.names), _num_rows(parquet, segment))
            return
        try:
            for batch in parquet.iter_batches(
                _BATCH_ROWS, row_groups=[segment.number], columns=present, use_threads=False
            ):
                yield from _rows(batch, max_row_bytes)
        except (library.ArrowException, OSError) as error:
            raise FormatError(
                f"{segment.file.name}: must be a complete Parquet file, found in row group {segment.number}: {error}"
            ) from error


def _rows(batch: Any, max_bytes: int) -> Iterator[Any]:
    """Returns the rows of a batch; one at a time where one of them may be too long, or is no text."""
    if batch.nbytes <= max_bytes:
        with contextlib.suppress(UnicodeDecodeError):
            return iter(batch.to_pylist())
    return _one_by_one(batch, max_bytes)


def _one_by_one(batch: Any, max_bytes: int) -> Iterator[Any]:
    for number in range(batch.num_rows):
        row = batch.slice(number, 1)
        if row.nbytes > max_bytes:
            yield LongCell(row.nbytes, max_bytes)
            continue
        try:
            yield row.to_pylist()[0]
        except UnicodeDecodeError as error:
            yield error


def _num_rows(parquet: Any, segment: RowGroup) -> int:
    return int(parquet.metadata.row_group(segment.number).num_rows)


def _opened(file: InputFile) -> Any:
    library = require("pyarrow", where=file.name)
    parquet = require("pyarrow.parquet", where=file.name)
    if file.size_bytes == 0:
        way = "its writer did not come to an end: remove the file, or write it again"
        raise FormatError(f"{file.name}: must be a complete Parquet file, found 0 bytes: {way}")
    raw = open_input(file)
    source: Any = raw
    if file.address is None:  # the library closes only what it has opened
        raw.close()
        source = file.path
    try:
        return parquet.ParquetFile(source)
    except (library.ArrowException, OSError) as error:
        raise FormatError(f"{file.name}: must be a Parquet file: {error}") from error


def _values(column: Any, max_bytes: int) -> Iterator[Any]:
    """Returns the values of a column; converts one at a time if a dictionary may share one large text among rows."""
    if column.nbytes <= max_bytes and not hasattr(column, "dictionary"):
        with contextlib.suppress(UnicodeDecodeError):
            return iter(column.to_pylist())
    return _cells(column, max_bytes)


def _cells(column: Any, max_bytes: int) -> Iterator[Any]:
    for cell in column:
        size = _size_bytes(cell)
        yield LongCell(size, max_bytes) if size > max_bytes else _text(cell)


def _size_bytes(cell: Any) -> int:
    value = (
        cell.value if hasattr(cell, "dictionary") else cell
    )  # for a dictionary column, the text that the code refers to
    buffer = value.as_buffer() if value.is_valid else None
    return 0 if buffer is None else int(buffer.size)


def _text(cell: Any) -> str | UnicodeDecodeError | None:
    try:
        value: str | None = cell.as_py()
    except UnicodeDecodeError as error:  # pyarrow validates strings only on access
        return error
    return value


def _check_column(file: InputFile, schema: Any, name: str) -> None:
    types = require("pyarrow", where=file.name).types
    if schema.names.count(name) > 1:
        raise FormatError(
            f"{file.name}: a Parquet file must have one column {name!r}, found {schema.names.count(name)}"
        )
    kind = schema.field(name).type
    bare = kind.value_type if types.is_dictionary(kind) else kind
    # Writers that infer types give a column without any value the type null.
    kinds = (types.is_string, types.is_large_string, types.is_string_view, types.is_null)
    if not any(is_kind(bare) for is_kind in kinds):
        raise FormatError(f"{file.name}: the column {name!r} must hold strings, found {kind}")


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(map(repr, names[:_NAMES_SHOWN])) or "none"
    return shown + (f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else "")
