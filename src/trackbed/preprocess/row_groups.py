"""Reading Parquet files, of which every row group can be read alone."""

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any, Final

from trackbed.datasets.extras import require
from trackbed.errors import FormatError
from trackbed.preprocess.inputs import InputFile
from trackbed.preprocess.pieces import RowGroup, check_size

__all__ = ["read_columns", "read_row_groups"]

_BATCH_ROWS: Final = 1024


def read_row_groups(file: InputFile) -> Iterator[RowGroup]:
    """The row groups of a Parquet file.

    Raises:
        FormatError: it is no such file, or is not as large any more as it was.
    """
    with _opened(file) as found:
        groups = [found.metadata.row_group(number) for number in range(found.metadata.num_row_groups)]
    sizes = [group.total_byte_size for group in groups]
    total = max(1, sum(sizes))
    ends = [end * file.size_bytes // total for end in accumulate(sizes, initial=0)]
    for number, (start, stop) in enumerate(pairwise(ends)):
        yield RowGroup(file, start, stop, number, sizes[number])


def read_columns(piece: RowGroup, names: Sequence[str]) -> Iterator[tuple[Any, ...]]:
    """The values of each row in the columns of these names: strings, None, or why a string is none.

    Raises:
        FormatError: it has no such column, or one of something else than strings; or it is damaged.
    """
    library = require("pyarrow", where=piece.file.path)
    with _opened(piece.file) as found:
        for name in names:
            _check_column(piece.file, found.schema_arrow, name)
        try:
            for batch in found.iter_batches(
                _BATCH_ROWS, row_groups=[piece.number], columns=list(names), use_threads=False
            ):
                yield from zip(*(_values(batch.column(name), library) for name in names), strict=True)
        except (library.ArrowException, OSError) as error:
            msg = f"{piece.file.path}: must be a whole Parquet file, found in row group {piece.number}: {error}"
            raise FormatError(msg) from error


def _opened(file: InputFile) -> Any:
    library = require("pyarrow", where=file.path)
    parquet = require("pyarrow.parquet", where=file.path)
    with file.path.open("rb") as raw:
        check_size(raw, file)
    try:
        return parquet.ParquetFile(file.path)
    except (library.ArrowException, OSError) as error:
        msg = f"{file.path}: must be a Parquet file: {error}"
        raise FormatError(msg) from error


def _values(column: Any, library: Any) -> list[Any]:
    try:
        return list(column.to_pylist())
    except UnicodeDecodeError:  # nothing checks the strings of a file before somebody wants them
        return [_decoded(value) for value in column.cast(library.binary()).to_pylist()]


def _decoded(value: bytes | None) -> str | UnicodeDecodeError | None:
    try:
        return None if value is None else value.decode()
    except UnicodeDecodeError as error:
        return error


def _check_column(file: InputFile, schema: Any, name: str) -> None:
    types = require("pyarrow", where=file.path).types
    if name not in schema.names:
        msg = f"{file.path}: a Parquet file must have the column {name!r}, found {', '.join(map(repr, schema.names))}"
        raise FormatError(msg)
    kind = schema.field(name).type
    bare = kind.value_type if types.is_dictionary(kind) else kind
    if not (types.is_string(bare) or types.is_large_string(bare) or types.is_string_view(bare)):
        msg = f"{file.path}: the column {name!r} must hold strings, found {kind}"
        raise FormatError(msg)
