"""Files beside the pairs of a run: sources of documents, and trained tokens."""

from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np

from trackbed.preprocess.chunks import InputChunk
from trackbed.preprocess.columns import KeyTokens
from trackbed.preprocess.inputs import InputFile, InputFormat
from trackbed.tokens import IndexedDatasetBuilder
from trackbed.tokens.document_sources import SourceColumns, SourceFile
from trackbed.tokens.trained_tokens import TrainedColumns

SOURCE_ARRAYS: Final = ("places", "files")
"""Names of the arrays that are saved of an unfinished run: those of `SourceColumns`."""

TRAINED_ARRAYS: Final = ("mask_firsts", "mask_runs")
"""Names of the arrays that are saved of an unfinished run: those of `TrainedColumns`."""


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


def keep_trained(builders: Iterable[IndexedDatasetBuilder]) -> None:
    """Has builders keep the trained tokens of documents, in addition to those that they have."""
    for builder in builders:
        if builder.trained is None:
            builder.trained = TrainedColumns()


def add_trained(builder: IndexedDatasetBuilder, found: KeyTokens) -> None:
    """Appends the trained tokens of the documents of a chunk, if they are kept."""
    if builder.trained is not None and found.trained is not None:
        counts, runs = found.trained.counts, found.trained.runs
        builder.trained.add(counts, runs.astype("uint32"), lengths=found.lengths, where="a chunk of conversations")
