"""Raw text to indexed files: plan the chunks, let workers tokenise them, write in the order of the plan."""

import contextlib
from collections.abc import Iterator, Sequence
from itertools import islice, tee
from pathlib import Path
from typing import Any

import numpy as np

from trackbed.errors import ArgumentError, PlanError
from trackbed.preprocess.config import PreprocessConfig, Progress, layout_of, output_prefix
from trackbed.preprocess.inputs import InputFile, Layout, find_inputs
from trackbed.preprocess.plan import plan_chunks
from trackbed.preprocess.pool import map_in_order
from trackbed.preprocess.report import Report, Tally
from trackbed.preprocess.resume import Keeper, decisions
from trackbed.preprocess.tokenise import BatchTokenizer, ChunkTokenizer
from trackbed.tokens import DType, IndexedDatasetBuilder, get_bin_path, get_idx_path

__all__ = ["preprocess"]


def preprocess(config: PreprocessConfig, tokenizer: BatchTokenizer, *, progress: Progress | None = None) -> Report:
    """Write one pair for each key of `config`, each with all texts of that key in the order of the input.

    The pairs appear when everything has been tokenised; if tokenising fails, files that were there stay. What has
    been tokenised of a large input is kept in the folder `<output>.unfinished`, shard by shard: after a failure or a
    kill the same call goes on behind it. For that the tokenizer must have a `fingerprint`, a text that changes where
    its ids do.

    With several workers a script needs an `if __name__ == "__main__"` guard, as for every use of processes.

    Args:
        config: what to read, and where to write.
        tokenizer: makes tokens of texts; has to pickle if `config.workers` is above 1.
        progress: called at the start and after each chunk of input.

    Raises:
        FormatError: a record is bad, and those are not skipped; or a file changes meanwhile, or is damaged.
        PlanError: a pair would have no document, and `config.allow_empty` is false.
        ArgumentError: an input or the output's folder is missing, plain texts are to fill several keys, or a library
            that reads an input is not installed.
        TrackbedError: a worker died.
        OSError: a file cannot be read or written.
    """
    inputs = find_inputs(config.inputs, layout=layout_of(config.input_format))
    files = inputs.files
    _check(config, files)
    dtype = np.dtype(DType.optimal_dtype(tokenizer.vocab_size))
    work = ChunkTokenizer(
        tokenizer=tokenizer,
        keys=config.json_keys,
        dtype=dtype,
        eod=tokenizer.eod if config.append_eod else None,
        skip_bad=config.skip_bad,
        max_record_bytes=config.max_record_bytes,
    )
    tally = Tally(config, inputs)
    tell = progress or _tell_nobody
    with contextlib.closing(Keeper(config, decisions(config, files, work))) as keeper:
        with _builders(config, dtype, keeper) as builders:
            begun = keeper.begun
            if begun is not None:
                tally.go_on(begun.counts)
            tell(tally.done_bytes, tally.input_bytes)
            plan = plan_chunks(files, chunk_bytes=config.chunk_bytes, max_record_bytes=config.max_record_bytes)
            jobs, chunks = tee(islice(plan, 0 if begun is None else begun.chunks, None))
            with contextlib.closing(map_in_order(work, jobs, workers=config.workers)) as results:
                for result, chunk in zip(results, chunks, strict=True):
                    tally.add(chunk, result)
                    for builder, found in zip(builders, result.keys, strict=True):
                        builder.add_documents(found.tokens, found.lengths)
                    keeper.passed(chunk, builders, tally)
                    tell(tally.done_bytes, tally.input_bytes)
            keeper.ended(builders, tally)
            _check_outputs(config, tally)
            for builder, output in zip(builders, tally.outputs, strict=True):
                builder.finalize(get_idx_path(output.prefix))
        keeper.clear()
    return tally.report()


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


def _check_outputs(config: PreprocessConfig, tally: Tally) -> None:
    """Refuses pairs without a document: they would replace what is there by nothing."""
    for output in tally.outputs:
        if not output.documents and not config.allow_empty:
            report = tally.report()
            bad = f", {report.bad:,} of them bad, the first one {report.first_bad[0]}" if report.bad else ""
            msg = (
                f"{output.prefix}: a pair must have at least one document, found none in {report.records:,} records of "
                f"{report.files:,} files{bad}; --allow-empty writes it all the same"
            )
            raise PlanError(msg)


@contextlib.contextmanager
def _builders(config: PreprocessConfig, dtype: np.dtype[Any], keeper: Keeper) -> Iterator[list[IndexedDatasetBuilder]]:
    """A builder for each key, with what was kept for it. Whatever fails, nothing but what is kept stays behind."""
    paths = [get_bin_path(output_prefix(config.output, key)) for key in config.json_keys]
    builders = keeper.reopen(paths, dtype.type)
    try:
        for path in paths[len(builders) :]:
            builders.append(IndexedDatasetBuilder(path, dtype.type))
        yield builders
    except BaseException:
        for builder in builders:
            if keeper.has_kept:
                builder.leave()
            else:
                builder.discard()
        raise
