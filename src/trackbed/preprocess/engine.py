"""Raw text to indexed files: plan the chunks, let workers tokenise them, write in the order of the plan."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import tee
from pathlib import Path
from typing import Any, Final

import numpy as np

from trackbed.errors import ArgumentError, FormatError
from trackbed.preprocess.config import PreprocessConfig, Progress, output_prefix
from trackbed.preprocess.inputs import InputFile, Layout, find_inputs
from trackbed.preprocess.places import Places
from trackbed.preprocess.plan import Chunk, plan_chunks
from trackbed.preprocess.pool import map_in_order
from trackbed.preprocess.tokenise import BatchTokenizer, ChunkTokenizer, KeyTokens, TokenisedChunk
from trackbed.tokens import DType, IndexedDatasetBuilder, get_bin_path, get_idx_path

__all__ = ["Output", "Report", "preprocess"]

_BAD_SHOWN: Final = 20


@dataclass(frozen=True, slots=True)
class Output:
    """The pair written for one key."""

    key: str
    prefix: str
    documents: int
    tokens: int
    dropped: int
    """Texts that gave no tokens, and so no document."""

    def with_more(self, found: KeyTokens) -> "Output":
        """The same with the documents of one more chunk."""
        return replace(
            self,
            documents=self.documents + len(found.lengths),
            tokens=self.tokens + len(found.tokens),
            dropped=self.dropped + found.dropped,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What was read, and what was written."""

    outputs: tuple[Output, ...]
    files: int
    input_bytes: int
    records: int
    """JSON records and plain texts, usable or not."""
    blank: int
    """Lines without a record."""
    bad: int
    """Records that were left out."""
    first_bad: tuple[str, ...]
    """Where the first of them are, and what is wrong with them: at most 20."""


def preprocess(config: PreprocessConfig, tokenizer: BatchTokenizer, *, progress: Progress | None = None) -> Report:
    """Write one pair for each key of `config`, each with all texts of that key in the order of the input.

    The pairs appear when everything has been tokenised; if tokenising fails, files that were there stay. With
    several workers a script needs an `if __name__ == "__main__"` guard, as for every use of processes.

    Args:
        config: what to read, and where to write.
        tokenizer: makes tokens of texts; has to pickle if `config.workers` is above 1.
        progress: called at the start and after each chunk of input.

    Raises:
        FormatError: a record is bad, and those are not skipped; or a file changes meanwhile.
        ArgumentError: an input or the output's folder is missing, or plain texts are to fill several keys.
        TrackbedError: a worker died.
        OSError: a file cannot be read or written.
    """
    files = find_inputs(config.inputs)
    _check(config, files)
    jobs, chunks = tee(plan_chunks(files, chunk_bytes=config.chunk_bytes))
    dtype = DType.optimal_dtype(tokenizer.vocab_size)
    work = ChunkTokenizer(
        tokenizer=tokenizer,
        keys=config.json_keys,
        dtype=np.dtype(dtype),
        eod=tokenizer.eod if config.append_eod else None,
        skip_bad=config.skip_bad,
    )
    tally = _Tally(config, files)
    tell = progress or _tell_nobody
    tell(0, tally.input_bytes)
    with _builders(config, dtype) as builders:
        with contextlib.closing(map_in_order(work, jobs, workers=config.workers)) as results:
            for result, chunk in zip(results, chunks, strict=True):
                tally.add(chunk, result)
                for builder, found in zip(builders, result.keys, strict=True):
                    builder.add_documents(found.tokens, found.lengths)
                tell(tally.done_bytes, tally.input_bytes)
        for builder, output in zip(builders, tally.outputs, strict=True):
            builder.finalize(get_idx_path(output.prefix))
    return tally.report(files=len(files))


def _tell_nobody(done_bytes: int, total_bytes: int) -> None:
    pass


def _check(config: PreprocessConfig, files: Sequence[InputFile]) -> None:
    folder = Path(config.output).parent
    if not folder.is_dir():
        msg = f"{folder}: the folder of the output must exist, found none"
        raise ArgumentError(msg)
    if len(config.json_keys) > 1:
        for file in files:
            if file.layout is Layout.PLAIN_TEXT:
                msg = f"{file.path}: a plain text has one text, json_keys asks for {len(config.json_keys)}"
                raise ArgumentError(msg)


@contextlib.contextmanager
def _builders(config: PreprocessConfig, dtype: type[np.number[Any]]) -> Iterator[list[IndexedDatasetBuilder]]:
    """A builder for each key. Whatever fails, none of them leaves anything behind."""
    builders: list[IndexedDatasetBuilder] = []
    try:
        for key in config.json_keys:
            path = get_bin_path(output_prefix(config.output, key))
            builders.append(IndexedDatasetBuilder(path, dtype))
        yield builders
    except BaseException:
        for builder in builders:
            builder.discard()
        raise


class _Tally:
    """What the chunks have had so far, taken in the order of the plan: only so are line numbers known.

    Args:
        config: what was asked for.
        files: all the input.
    """

    def __init__(self, config: PreprocessConfig, files: Sequence[InputFile]) -> None:
        self.input_bytes = sum(file.size_bytes for file in files)
        self.done_bytes = 0
        self.outputs = [Output(key, output_prefix(config.output, key), 0, 0, 0) for key in config.json_keys]
        self._skip_bad = config.skip_bad
        self._records = self._blank = self._bad = 0
        self._first_bad: list[str] = []
        self._places = Places()

    def add(self, chunk: Chunk, result: TokenisedChunk) -> None:
        """Count what was found in the next chunk.

        Raises:
            FormatError: there is a bad record, and those are not skipped.
        """
        for piece, found in zip(chunk.pieces, result.pieces, strict=False):
            for record in found.bad:
                self._add_bad(self._places.describe(piece, record))
            self._places.passed(piece, found.lines)
            self._records += found.records
            self._blank += found.blank
        self.outputs = [output.with_more(texts) for output, texts in zip(self.outputs, result.keys, strict=True)]
        self.done_bytes += chunk.size_bytes

    def _add_bad(self, message: str) -> None:
        if not self._skip_bad:
            raise FormatError(message)
        self._bad += 1
        if len(self._first_bad) < _BAD_SHOWN:
            self._first_bad.append(message)

    def report(self, *, files: int) -> Report:
        """What came of it all."""
        return Report(
            outputs=tuple(self.outputs),
            files=files,
            input_bytes=self.input_bytes,
            records=self._records,
            blank=self._blank,
            bad=self._bad,
            first_bad=tuple(self._first_bad),
        )
