"""Pipeline from raw text to indexed files: plans chunks, tokenises them in workers, writes them in order."""

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from itertools import islice, tee
from typing import Any

import numpy as np

from trackbed.errors import ArgumentError
from trackbed.preprocess.beside import (
    SOURCE_ARRAYS,
    TRAINED_ARRAYS,
    add_sources,
    add_trained,
    keep_sources,
    keep_trained,
)
from trackbed.preprocess.chat.config import open_rules
from trackbed.preprocess.chunks import InputChunk, plan_chunks
from trackbed.preprocess.config import InputProgress, Level, PreprocessConfig, format_of, output_prefix
from trackbed.preprocess.engines import FailedAttempt
from trackbed.preprocess.images import IMAGE_CHUNK_BYTES, ImageFolder, image_modes
from trackbed.preprocess.inputs import InputFile, find_inputs
from trackbed.preprocess.open_input import chunk_bytes_of
from trackbed.preprocess.report import Report, Tally, check_inputs, check_outputs, make_output_folder
from trackbed.preprocess.resume import UnfinishedFolder, decisions
from trackbed.preprocess.shards.run import preprocess_shards
from trackbed.preprocess.splitter import SentenceSplitter
from trackbed.preprocess.tokenise_chunk import BatchTokenizer, ChunkTokenizer, TokenisedChunk
from trackbed.preprocess.worker_pool import map_in_order
from trackbed.tokens import DType, IndexedDatasetBuilder, get_bin_path, get_idx_path

logger = logging.getLogger(__name__)


def preprocess(
    config: PreprocessConfig,
    tokenizer: BatchTokenizer,
    *,
    splitter: SentenceSplitter | None = None,
    progress: InputProgress | None = None,
    executor: Executor | Callable[[], Executor] | None = None,
    on_failure: Callable[[FailedAttempt], None] | None = None,
    on_save: InputProgress | None = None,
) -> Report:
    """Writes one pair for each key of `config`, with all texts of that key in the order of the input.

    The pairs appear after all input has been tokenised; on failure, existing files stay. A run over a large input
    saves its tokens to the folder `<output>.unfinished` at each save interval, and after a failure or a kill the same
    call resumes from there. This requires a tokenizer with a `fingerprint`, a string that changes when its ids change;
    the same holds for a splitter.

    With `config.shard_bytes`, writes shards, each one pair for each key, and `<output>.toml`, which lists them. A shard
    is a task, which any process of any host can do: on an engine, or on `executor`. A finished shard is never made
    again. A task whose worker dies is tried again, at most three times.

    With several workers, a script needs an `if __name__ == "__main__"` guard, as for every use of processes.

    Args:
        config: inputs, outputs and options.
        tokenizer: tokenizer of the texts; must be picklable if `config.workers` is above 1.
        splitter: splits each text into sentences, which become the sequences of its document, and names the pairs
            `<output>_<key>_sentence`; must be picklable too. None if a document is one sequence.
        progress: called at the start and after each chunk of input, or after each shard.
        executor: makes the shards, `config.workers` at once, in the place of an engine; or a function that creates an
            executor, which replaces one that a dead worker has broken.
        on_failure: called for each attempt at a shard whose worker died and that is tried again; None to log it.
        on_save: called at the start, after each save, and after each shard, with the bytes of input whose work a
            resumed run keeps, and the bytes of all input.

    Returns:
        Counts of everything read and written; a resumed run includes the counts of the run before.

    Raises:
        FormatError: a record is bad and `config.skip_bad` is False, or a file is damaged or changes during the run.
        PlanError: a pair would have no document, and `config.allow_empty` is False.
        ArgumentError: an input or the folder of the images is missing, that of the output cannot be made, plain texts
            are combined with several keys, images with a splitter or with inputs that are no JSON lines, or a library
            that reads an input is not installed; shards need a fingerprint that tokenizer or splitter do not have; or a
            shard exists that was made in another way, and `config.overwrite` is False.
        TrackbedError: a worker died, at each of four attempts if it was making a shard; or a host has another version
            of Trackbed, another tokenizer, or no view of the output's folder.
        OSError: a file cannot be read or written.
    """
    if config.shard_bytes is not None:
        return preprocess_shards(
            config,
            tokenizer,
            splitter=splitter,
            progress=progress or _ignore_progress,
            executor=executor,
            on_failure=on_failure or _log_failure,
            on_save=on_save or _ignore_progress,
        )
    if executor is not None:
        raise ArgumentError("an executor must be combined with shard_bytes, found none")
    inputs = find_inputs(config.inputs, input_format=format_of(config.input_format))
    files = inputs.files
    check_inputs(config, files, splitter)
    dtype = np.dtype(np.int32 if config.images is not None else DType.optimal_dtype(tokenizer.vocab_size))
    work = ChunkTokenizer(
        tokenizer=tokenizer,
        keys=config.json_keys,
        dtype=dtype,
        eod=tokenizer.eod if config.append_eod else None,
        unknown_id=None if config.images is not None else getattr(tokenizer, "unknown_id", None),
        skip_bad=config.skip_bad,
        max_record_bytes=config.max_record_bytes,
        splitter=splitter,
        drop_record=config.drop_record,
        chat=None if config.chat is None else open_rules(config.chat, tokenizer),
        images=None if config.images is None else ImageFolder.open(config.images, max_bytes=config.max_record_bytes),
        keeps_sources=config.keep_sources,
    )
    make_output_folder(config.output)
    prefixes = _prefixes(config, splitter)
    tally = Tally(config, inputs, prefixes)
    report_progress, report_save = progress or _ignore_progress, on_save or _ignore_progress
    folder = UnfinishedFolder(config, decisions(config, files, work), array_names=_array_names(config, splitter))
    with contextlib.closing(folder) as unfinished:
        with _builders(config, prefixes, dtype, unfinished) as builders:
            keep_sources(builders, files if config.keep_sources else None)
            if config.chat is not None:
                keep_trained(builders)
            saved = unfinished.saved
            if saved is not None:
                tally.restore(saved.counts)
            report_save(unfinished.kept_bytes, tally.input_bytes)
            report_progress(tally.done_bytes, tally.input_bytes)
            plan = plan_chunks(files, chunk_bytes=_chunk_bytes(config, files), max_record_bytes=config.max_record_bytes)
            jobs, chunks = tee(islice(plan, 0 if saved is None else saved.chunks, None))
            with contextlib.closing(map_in_order(work, jobs, workers=config.workers)) as results:
                for result, chunk in zip(results, chunks, strict=True):
                    tally.add(chunk, result)
                    for builder, found in zip(builders, result.keys, strict=True):
                        modes = None if config.images is None else image_modes(len(found.counts))
                        builder.add_documents(found.tokens, found.lengths, counts=found.counts, modes=modes)
                        add_sources(builder, chunk, found)
                        add_trained(builder, found)
                    if unfinished.after_chunk(_read_bytes(config, chunk, result), builders, tally):
                        report_save(unfinished.kept_bytes, tally.input_bytes)
                    report_progress(tally.done_bytes, tally.input_bytes)
            unfinished.after_last_chunk(builders, tally)
            check_outputs(config, tally.report())
            for builder, output in zip(builders, tally.outputs, strict=True):
                builder.finalize(get_idx_path(output.prefix))
        unfinished.clear()
    return tally.report()


def _ignore_progress(done_bytes: int, total_bytes: int) -> None:
    pass


def _log_failure(failed: FailedAttempt) -> None:
    logger.warning(
        "%s: attempt %d failed, as its worker ended: %s; trying again", failed.task, failed.attempt, failed.how
    )


def _prefixes(config: PreprocessConfig, splitter: SentenceSplitter | None) -> list[str]:
    """Returns the prefix of the pair of each key."""
    if config.images is not None:
        return [config.output]
    level: Level = "document" if splitter is None else "sentence"
    return [output_prefix(config.output, key, level=level) for key in config.json_keys]


def _array_names(config: PreprocessConfig, splitter: SentenceSplitter | None) -> tuple[str, ...]:
    names: tuple[str, ...] = ("lengths",) if splitter is None else ("lengths", "counts")
    if config.images is not None:
        names = ("lengths", "counts", "modes")
    names += TRAINED_ARRAYS if config.chat is not None else ()
    return (*names, *SOURCE_ARRAYS) if config.keep_sources else names


def _chunk_bytes(config: PreprocessConfig, files: Sequence[InputFile]) -> int:
    if config.images is not None:
        return min(config.chunk_bytes, IMAGE_CHUNK_BYTES)
    return chunk_bytes_of(files, config.chunk_bytes)


def _read_bytes(config: PreprocessConfig, chunk: InputChunk, result: TokenisedChunk) -> int:
    """Returns about the number of bytes that a chunk took to read."""
    images = sum(found.tokens.nbytes for found in result.keys) if config.images is not None else 0
    return chunk.size_bytes + images


@contextlib.contextmanager
def _builders(
    config: PreprocessConfig, prefixes: Sequence[str], dtype: np.dtype[Any], unfinished: UnfinishedFolder
) -> Iterator[list[IndexedDatasetBuilder]]:
    """Opens a builder for each pair, with its saved tokens. On failure, only saved files stay on disk."""
    paths = [get_bin_path(prefix) for prefix in prefixes]
    builders = unfinished.reopen_builders(paths, dtype.type)
    try:
        for path in paths[len(builders) :]:
            builders.append(IndexedDatasetBuilder(path, dtype.type, config.images is not None))
        yield builders
    except BaseException:
        for builder in builders:
            if unfinished.has_saved:
                builder.leave()
            else:
                builder.discard()
        raise
