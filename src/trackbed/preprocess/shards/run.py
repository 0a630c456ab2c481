"""Driver of a sharded run: finds the shards that are missing, has an engine make them, and writes the list of all."""

import contextlib
import glob
import os
import re
import secrets
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Final

from trackbed.datasets.tokenizers.fastokens import absolute_name
from trackbed.errors import ArgumentError, TrackbedError
from trackbed.files import clear_dead_partials, flush_to_disk, new_partial, publish, remove_partial, stores, write_new
from trackbed.files.publish import Writer, find_partials
from trackbed.files.stores import is_address, parse_address
from trackbed.files.stores.waiting import call_all
from trackbed.preprocess.chat.config import open_rules
from trackbed.preprocess.config import InputProgress, PreprocessConfig, format_of
from trackbed.preprocess.engines import (
    Engine,
    ExecutorEngine,
    FailedAttempt,
    InProcessEngine,
    ProcessEngine,
    RayEngine,
    run_tasks,
)
from trackbed.preprocess.inputs import Inputs, InputSegment, find_inputs
from trackbed.preprocess.report import Report, check_inputs, check_outputs, make_output_folder
from trackbed.preprocess.shards.partition import ShardPlan, is_cut_anywhere, plan_shards
from trackbed.preprocess.shards.spec import Probe, ShardSpec, ShardTask, shard_stem
from trackbed.preprocess.shards.task import ShardWorker, find_shard
from trackbed.preprocess.shards.totals import Totals
from trackbed.preprocess.splitter import SentenceSplitter
from trackbed.preprocess.tokenise_chunk import BatchTokenizer
from trackbed.tokens import DType
from trackbed.tokens.commit import LOCK_SUFFIX, check_pair_name, locked_pair
from trackbed.tokens.paths import get_seal_path
from trackbed.tokens.seal import Seal
from trackbed.tokens.shard_list import SHARD_LIST_SUFFIX, shard_list_text
from trackbed.version import __version__

_THREADS: Final = 16  # they wait for the file system, or the store
_STORE_THREADS: Final = 64
_AT_ONCE: Final = 1024
_PROBE: Final = "driver"
_NOT_NEEDED: Final = frozenset({Writer.dead, Writer.elsewhere})
"""Workers whose files are removed when all shards are finished: dead ones, and those of hosts that may be lost."""


def preprocess_shards(
    config: PreprocessConfig,
    tokenizer: BatchTokenizer,
    *,
    splitter: SentenceSplitter | None,
    progress: InputProgress,
    executor: Executor | Callable[[], Executor] | None,
    on_failure: Callable[[FailedAttempt], None],
    on_save: InputProgress,
) -> Report:
    """Writes the pairs of all shards, and the list of them; see `preprocess`."""
    inputs = _with_absolute_paths(find_inputs(config.inputs, input_format=format_of(config.input_format)))
    check_inputs(config, inputs.files, splitter)
    make_output_folder(config.output)
    plan = _plan(config, inputs)
    output = _absolute_output(config)
    failures: list[None] = []

    def count_failure(failed: FailedAttempt) -> None:
        failures.append(None)
        on_failure(failed)

    _check_others(config, output, len(plan))
    with _probe(output) as probe:
        spec = _spec(config, tokenizer, splitter, plan, output, probe)
        if not is_address(spec.output):
            for prefix in spec.prefixes(0):
                check_pair_name(prefix)
        totals = Totals(inputs, spec, plan)
        missing = []
        for shard, seals in _look_up(spec, plan, inputs):
            if seals is None:
                missing.append(shard)
            else:
                totals.add(shard, seals)
        kept_bytes = totals.done_bytes
        on_save(kept_bytes, plan.total_bytes)
        progress(kept_bytes, plan.total_bytes)
        if missing:
            tasks = ((shard, _task(plan, inputs, shard)) for shard in missing)
            try:
                with contextlib.closing(_open_engine(config, ShardWorker(spec), executor)) as engine:
                    _ask_hosts(engine)
                    for shard, made in run_tasks(engine, tasks, on_failure=count_failure):
                        totals.add(shard, made)
                        on_save(totals.done_bytes, plan.total_bytes)
                        progress(totals.done_bytes, plan.total_bytes)
            finally:
                _remove_leftovers(output, len(plan), of=frozenset({Writer.dead}))
    report = replace(
        totals.report(),
        shard_list=f"{config.output}{SHARD_LIST_SUFFIX}",
        finished_shards=len(plan) - len(missing),
        kept_bytes=kept_bytes,
        failed_attempts=len(failures),
    )
    check_outputs(config, report)
    _write_list(spec)
    _remove_leftovers(output, len(plan), of=_NOT_NEEDED)
    return report


def _plan(config: PreprocessConfig, inputs: Inputs) -> ShardPlan:
    if config.shard_bytes is None:
        raise ArgumentError(f"{config.output}: shards must have a size, found no shard_bytes")
    return plan_shards(
        [file.size_bytes for file in inputs.files],
        list(map(is_cut_anywhere, inputs.files)),
        shard_bytes=config.shard_bytes,
    )


def _with_absolute_paths(inputs: Inputs) -> Inputs:
    """Returns the inputs by paths that workers in other folders understand."""
    return replace(inputs, files=tuple(file.with_absolute_path() for file in inputs.files))


def _absolute_output(config: PreprocessConfig) -> str:
    return config.output if is_address(config.output) else str(Path(config.output).absolute())


def _check_others(config: PreprocessConfig, output: str, num_shards: int) -> None:
    """Raises ArgumentError if there are shards of this output that are cut in another way: a pattern would match both.

    With `config.overwrite` they stay where they are.
    """
    if config.overwrite:
        return
    name = re.compile(re.escape(output.rpartition("/")[2]) + r"-\d{5,}-of-(\d{5,})_.*" + re.escape(get_seal_path("")))
    folder = output.rpartition("/")[0]
    if is_address(output):
        names = [address for address, _ in stores.list_objects(parse_address(f"{folder}/"))]
    else:
        names = os.listdir(folder)  # noqa: PTH208  names are all that is wanted
    found = [match[1] for match in (name.fullmatch(one.rpartition("/")[2]) for one in names) if match is not None]
    other = next((number for number in found if int(number) != num_shards), None)
    if other is not None:
        raise ArgumentError(
            f"{output}: the output must have no shards that are cut in another way, found some of {int(other)}, "
            f"now {num_shards}; remove them, or --overwrite leaves them beside the new ones"
        )


def _spec(
    config: PreprocessConfig,
    tokenizer: BatchTokenizer,
    splitter: SentenceSplitter | None,
    plan: ShardPlan,
    output: str,
    probe: Probe | None,
) -> ShardSpec:
    opened_as = getattr(tokenizer, "opened_as", None)
    return ShardSpec(
        output=output,
        num_shards=len(plan),
        shard_bytes=plan.shard_bytes,
        json_keys=config.json_keys,
        level="document" if splitter is None else "sentence",
        append_eod=config.append_eod,
        drop_record=config.drop_record,
        skip_bad=config.skip_bad,
        max_record_bytes=config.max_record_bytes,
        chunk_bytes=config.chunk_bytes,
        overwrite=config.overwrite,
        keep_sources=config.keep_sources,
        chat=None if config.chat is None else open_rules(config.chat, tokenizer),
        tokenizer=tokenizer if opened_as is None else replace(opened_as, name=absolute_name(opened_as.name)),
        tokenizer_fingerprint=_fingerprint_of(tokenizer, "tokenizer"),
        dtype=DType.optimal_dtype(tokenizer.vocab_size).__name__,
        eod=tokenizer.eod if config.append_eod else None,
        splitter=splitter,
        splitter_fingerprint="" if splitter is None else _fingerprint_of(splitter, "splitter"),
        trackbed=__version__,
        probe=probe,
    )


def _fingerprint_of(found: Any, what: str) -> str:
    fingerprint = getattr(found, "fingerprint", None)
    if not fingerprint:
        raise ArgumentError(f"{type(found).__name__}: a {what} must have a fingerprint to write shards, found none")
    return str(fingerprint)


def _task(plan: ShardPlan, inputs: Inputs, shard: int) -> ShardTask:
    ranges = plan.ranges(shard)
    return ShardTask(shard, tuple(InputSegment(inputs.files[file], start, stop) for file, start, stop in ranges))


def _look_up(spec: ShardSpec, plan: ShardPlan, inputs: Inputs) -> Iterator[tuple[int, tuple[Seal, ...] | None]]:
    """Yields each shard with its seals, or None if it is not finished."""
    shards = iter(range(len(plan)))
    num_threads = _STORE_THREADS if is_address(spec.output) else _THREADS
    while some := list(islice(shards, _AT_ONCE)):
        calls = [partial(find_shard, spec, _task(plan, inputs, shard)) for shard in some]
        yield from zip(some, call_all(calls, num_threads=num_threads), strict=True)


@contextlib.contextmanager
def _probe(output: str) -> Iterator[Probe | None]:
    """Writes a file beside an output on a disk, which every worker looks for."""
    if is_address(output):
        probe = parse_address(f"{output}.{secrets.token_hex(8)}.{_PROBE}")
        stores.put_bytes(probe, b"")  # a store that cannot be written to is an error before any work
        stores.delete_object(probe)
        yield None
        return
    final = Path(f"{output}.{_PROBE}")
    clear_dead_partials(final.parent, final_name=final.name)
    path = new_partial(final)
    content = secrets.token_hex(16)
    try:
        write_new(path, content.encode())
        yield Probe(str(path), content)
    finally:
        path.unlink(missing_ok=True)


def _open_engine(
    config: PreprocessConfig, work: ShardWorker, executor: Executor | Callable[[], Executor] | None
) -> Engine:
    if executor is not None:
        return ExecutorEngine(work, executor, slots=config.workers)
    if config.engine == "ray":
        return RayEngine.open(work, workers=config.workers)
    return InProcessEngine(work) if config.workers == 1 else ProcessEngine(work, workers=config.workers)


def _ask_hosts(engine: Engine) -> None:
    """Checks on every host that shards can be made there."""
    for attempt in engine.ask_hosts(None):
        if attempt.error is not None:
            raise attempt.error
        if attempt.death is not None:
            raise TrackbedError(
                f"every host must answer before the first shard, found that a worker ended: {attempt.death}"
            )


def _write_list(spec: ShardSpec) -> None:
    names = [[Path(prefix).name for prefix in spec.prefixes(shard)] for shard in range(spec.num_shards)]
    text = shard_list_text({key: [row[number] for row in names] for number, key in enumerate(spec.json_keys)})
    if is_address(spec.output):
        stores.put_bytes(parse_address(f"{spec.output}{SHARD_LIST_SUFFIX}"), text.encode())
        return
    final = Path(f"{spec.output}{SHARD_LIST_SUFFIX}")
    clear_dead_partials(final.parent, final_name=final.name)
    partial = new_partial(final)
    try:
        write_new(partial, text.encode())
        flush_to_disk(partial)
        publish(partial, final)
        flush_to_disk(final.parent)
    finally:
        partial.unlink(missing_ok=True)


def _remove_leftovers(prefix: str, num_shards: int, *, of: frozenset[Writer]) -> None:
    """Removes partial files of shards, and locks, that workers in one of these states have left on a disk."""
    if is_address(prefix):
        return
    output = Path(prefix)
    of_shard = re.compile(re.escape(shard_stem(output.name, 0, num_shards)).replace("00000", r"\d{5,}", 1) + "_")
    for found in find_partials(output.parent):
        if found.writer in of and of_shard.match(found.final_name):
            remove_partial(Path(found.path))
    for path in output.parent.glob(f"{glob.escape(output.name)}-*{LOCK_SUFFIX}"):
        if of_shard.match(path.name):
            with locked_pair(path.with_suffix("")):
                pass  # removed when it is released
