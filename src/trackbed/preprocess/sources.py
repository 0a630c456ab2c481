"""Sources of the documents of a run: input files, and the places of records in them."""

from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np

from trackbed.preprocess.chunks import InputChunk
from trackbed.preprocess.inputs import InputFile, InputFormat
from trackbed.preprocess.tokenise_chunk import KeyTokens
from trackbed.tokens import IndexedDatasetBuilder
from trackbed.tokens.document_sources import SourceColumns, SourceFile

SOURCE_ARRAYS: Final = ("places", "files")
"""Names of the arrays that are saved of an unfinished run: those of `SourceColumns`."""


def source_file(file: InputFile) -> SourceFile:
    """Returns an input file as sources name it."""
    return SourceFile(file.with_absolute_path().name, "row" if file.format is InputFormat.PARQUET else "byte")


def keep_sources(builders: Iterable[IndexedDatasetBuilder], files: Sequence[InputFile] | None) -> None:
    """Has builders keep sources in these files, in front of those that they have; None to keep none."""
    if files is None:
        return
    named = [source_file(file) for file in files]
    for builder in builders:
        if builder.sources is None:
            builder.sources = SourceColumns()
        builder.sources.add(named, np.empty(0, dtype=np.uint32), np.empty(0, dtype=np.int64))


def add_sources(builder: IndexedDatasetBuilder, chunk: InputChunk, found: KeyTokens) -> None:
    """Appends the sources of the documents of a chunk, if they are kept."""
    if builder.sources is not None and found.segments is not None and found.places is not None:
        files = [source_file(segment.file) for segment in chunk.segments]
        builder.sources.add(files, found.segments, found.places)
