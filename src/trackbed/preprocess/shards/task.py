"""Work of one shard, which any process of any host can do: tokenise its part of the input, and publish its pairs.

The counts of its records are kept in its seal.
"""

import contextlib
import pickle
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np

from trackbed.datasets.tokenizers.base import OpenedAs
from trackbed.datasets.tokenizers.fastokens import open_fastest_tokenizer
from trackbed.errors import ArgumentError, FormatError, StoreError, TrackbedError
from trackbed.files import stores
from trackbed.files.stores import is_address, parse_address
from trackbed.preprocess.beside import add_sources, add_trained, keep_sources, keep_trained
from trackbed.preprocess.chat.trained_column import TrainedRuns
from trackbed.preprocess.chunks import InputChunk, plan_segment_chunks
from trackbed.preprocess.inputs import InputFile, InputSegment
from trackbed.preprocess.open_input import chunk_bytes_of
from trackbed.preprocess.records import LineCounter, count_lines_before
from trackbed.preprocess.report import BAD_SHOWN
from trackbed.preprocess.shards.shard_files import Shard, ShardRequirements, open_shard
from trackbed.preprocess.shards.spec import ShardSpec, ShardTask, made_by, recipe_of
from trackbed.preprocess.tokenise_chunk import ChunkTokenizer, TokenisedChunk
from trackbed.tokens import IndexedDatasetBuilder
from trackbed.tokens.paths import get_seal_path
from trackbed.tokens.seal import Seal
from trackbed.version import __version__

_MAX_REASON: Final = 500


@dataclass(frozen=True, slots=True)
class BadLine:
    """A record that was skipped."""

    path: str
    line: int
    """Line in its file, from 0; in a file that the shard begins inside of, lines of earlier shards are not counted."""
    is_relative: bool
    """True if the shard begins inside the file."""
    reason: str


@dataclass(slots=True)
class ShardCounts:
    """Running counts over the chunks of a shard, added in order.

    Args:
        segments: parts of the input that the shard consists of.
        num_keys: number of keys.
        skip_bad: False if a bad record is an error.
        has_unknown: True if the tokenizer has an unknown token.
    """

    segments: Sequence[InputSegment]
    num_keys: int
    skip_bad: bool
    has_unknown: bool
    text_bytes: int = 0
    records: int = 0
    blank: int = 0
    bad: int = 0
    first_bad: list[BadLine] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)
    unknown: list[int | None] = field(default_factory=list)
    empty: list[int] = field(default_factory=list)
    trained: dict[str, int] = field(default_factory=dict)
    """Counts of conversations; empty if records are texts."""
    _counter: LineCounter = field(default_factory=LineCounter)
    _is_inside: bool = False
    """True while the segments are of a file that the shard begins inside of."""

    def __post_init__(self) -> None:
        self.dropped = [0] * self.num_keys
        self.empty = [0] * self.num_keys
        self.unknown = [0 if self.has_unknown else None] * self.num_keys
        self._is_inside = bool(self.segments) and self.segments[0].start > 0

    def add(self, chunk: InputChunk, result: TokenisedChunk) -> None:
        """Adds the counts of the next chunk."""
        self.text_bytes += chunk.text_bytes
        for segment, found in zip(chunk.segments, result.segments, strict=False):
            self._is_inside = self._is_inside and segment.start > 0
            for record in found.bad:
                self._add_bad(segment, self._counter.line_of(segment, record), record.reason)
            self._counter.advance(segment, found.lines)
            self.records += found.records
            self.blank += found.blank
        for key, texts in enumerate(result.keys):
            if texts.trained is not None:
                self._add_trained(texts.trained)
            self.dropped[key] += texts.dropped
            self.empty[key] += texts.empty
            if texts.unknown is not None:
                self.unknown[key] = (self.unknown[key] or 0) + texts.unknown

    def to_json(self, key: int) -> dict[str, Any]:
        """Returns the counts for the seal of the pair of one key."""
        return {
            "text_bytes": self.text_bytes,
            "records": self.records,
            "blank": self.blank,
            "bad": self.bad,
            "dropped": self.dropped[key],
            **({"empty": self.empty[key]} if self.num_keys > 1 else {}),
            "unknown": self.unknown[key],
            **self.trained,
            "lines": self._counter.lines,
            "first_bad": [[one.path, one.line, one.is_relative, one.reason] for one in self.first_bad],
        }

    def _add_trained(self, found: TrainedRuns) -> None:
        more = {"trained": found.num_trained, "untrained": found.untrained, "open_turns": found.open_turns}
        self.trained = {name: self.trained.get(name, 0) + count for name, count in more.items()}

    def _add_bad(self, segment: InputSegment, line: int, reason: str) -> None:
        if not self.skip_bad:
            before = count_lines_before(segment.file, self.segments[0].start) if self._is_inside else 0
            raise FormatError(f"{segment.file.name}:{before + line + 1}: {reason}")
        self.bad += 1
        if len(self.first_bad) < BAD_SHOWN:
            self.first_bad.append(BadLine(segment.file.name, line, self._is_inside, reason[:_MAX_REASON]))


class ShardWorker:
    """Callable that makes the shard of a task; picklable.

    A copy in a process with another version of Trackbed cannot be unpickled: the error names both versions.

    Args:
        spec: values that all shards have in common.
    """

    def __init__(self, spec: ShardSpec) -> None:
        self._spec = spec

    def __reduce__(self) -> tuple[Any, ...]:
        return _open_worker, (self._spec.trackbed, pickle.dumps(self._spec))

    def __call__(self, task: ShardTask | None) -> tuple[Seal, ...]:
        """Makes a shard, unless it is finished; with None, only checks that this process can make shards.

        Returns:
            The seal of each key; none for None.
        """
        self._check_probe()
        tokenise = self._tokenise
        if task is None:
            self._check_store()
            return ()
        finished = find_shard(self._spec, task)
        return finished or self._make(task, tokenise)

    def _make(self, task: ShardTask, tokenise: ChunkTokenizer) -> tuple[Seal, ...]:
        spec = self._spec
        shards = _shards(spec, task)
        has_unknown = tokenise.unknown_id is not None
        counts = ShardCounts(task.segments, len(spec.json_keys), spec.skip_bad, has_unknown)
        with _builders(shards, spec.dtype) as builders:
            keep_sources(builders, [segment.file for segment in task.segments] if spec.keep_sources else None)
            if spec.chat is not None:
                keep_trained(builders)
            chunk_bytes = chunk_bytes_of((segment.file for segment in task.segments), spec.chunk_bytes)
            chunks = plan_segment_chunks(task.segments, chunk_bytes=chunk_bytes, max_record_bytes=spec.max_record_bytes)
            for chunk in chunks:
                result = tokenise(chunk)
                counts.add(chunk, result)
                for builder, found in zip(builders, result.keys, strict=True):
                    builder.add_documents(found.tokens, found.lengths, counts=found.counts)
                    add_sources(builder, chunk, found)
                    add_trained(builder, found)
            for segment in task.segments:
                _check_unchanged(segment.file)
            return tuple(
                shard.publish(builder, sign=_Sign(shard.wanted.recipe, counts.to_json(key)))
                for key, (shard, builder) in enumerate(zip(shards, builders, strict=True))
            )

    def _check_probe(self) -> None:
        probe = self._spec.probe
        if probe is None:
            return
        try:
            found = Path(probe.path).read_text()
        except FileNotFoundError:
            found = ""
        if found != probe.content:
            raise TrackbedError(
                f"{socket.gethostname()}: must see the file {probe.path} as the driver has written it, found "
                f"{'another' if found else 'none'}: every host must have the folder of the output under this path"
            )

    def _check_store(self) -> None:
        """Makes a request to the store of the output: hosts have credentials of their own."""
        if not is_address(self._spec.output):
            return
        try:
            stores.stamp_of_object(parse_address(get_seal_path(self._spec.prefixes(0)[0])))
        except FileNotFoundError:
            pass
        except (StoreError, ArgumentError) as error:
            raise TrackbedError(
                f"{socket.gethostname()}: must be able to read from the store of the output, found: {error}; "
                "credentials and endpoint in the environment of the driver do not reach other hosts: set them there"
            ) from None

    @cached_property
    def _tokenise(self) -> ChunkTokenizer:
        spec = self._spec
        tokenizer: Any = spec.tokenizer
        if isinstance(tokenizer, OpenedAs):
            name = tokenizer.name
            try:
                tokenizer = open_fastest_tokenizer(
                    name,
                    lower_case=tokenizer.lower_case,
                    eod_token=tokenizer.eod_token,
                    special_tokens=tokenizer.special_tokens,
                )
            except ArgumentError as error:
                raise TrackbedError(
                    f"{socket.gethostname()}: must be able to open the tokenizer of the driver, found: {error}"
                ) from error
            if str(tokenizer.fingerprint) != spec.tokenizer_fingerprint:
                raise TrackbedError(
                    f"{socket.gethostname()}: the tokenizer {name} must be that of the driver, with the fingerprint "
                    f"{spec.tokenizer_fingerprint}, found {tokenizer.fingerprint}"
                )
        return ChunkTokenizer(
            tokenizer=tokenizer,
            keys=spec.json_keys,
            dtype=np.dtype(spec.dtype),
            eod=spec.eod,
            unknown_id=getattr(tokenizer, "unknown_id", None),
            drop_record=spec.drop_record,
            chat=spec.chat,
            skip_bad=spec.skip_bad,
            max_record_bytes=spec.max_record_bytes,
            splitter=spec.splitter,
            keeps_sources=spec.keep_sources,
        )


def find_shard(spec: ShardSpec, task: ShardTask) -> tuple[Seal, ...] | None:
    """Returns the seal of each key if the shard is finished, else None."""
    found = [shard.find() for shard in _shards(spec, task)]
    finished = [seal for seal in found if seal is not None]
    return tuple(finished) if len(finished) == len(found) else None


def _shards(spec: ShardSpec, task: ShardTask) -> list[Shard]:
    recipe = recipe_of(spec, task)
    return [
        open_shard(ShardRequirements(prefix=prefix, recipe=recipe, skip_bad=spec.skip_bad, overwrite=spec.overwrite))
        for prefix in spec.prefixes(task.shard)
    ]


class _Sign:
    """Adds to a seal how the shard was made."""

    def __init__(self, recipe: dict[str, Any], counts: dict[str, Any]) -> None:
        self._recipe = recipe
        self._counts = counts

    def __call__(self, seal: Seal) -> Seal:
        return replace(seal, made_by=made_by(self._recipe), recipe=self._recipe, counts=self._counts)


@contextlib.contextmanager
def _builders(shards: list[Shard], dtype: str) -> Iterator[list[IndexedDatasetBuilder]]:
    """Opens a builder for each pair. Removes what they have written and not published."""
    builders: list[IndexedDatasetBuilder] = []
    try:
        for shard in shards:
            builders.append(shard.open_builder(dtype))  # noqa: PERF401  each is removed if the next one fails
        yield builders
    finally:
        for builder, shard in zip(builders, shards, strict=False):
            builder.discard()
            shard.close()


def _check_unchanged(file: InputFile) -> None:
    if file.address is not None:
        return  # every request has named its tag
    status = file.path.stat()
    if (status.st_size, str(status.st_mtime_ns)) != (file.size_bytes, file.version):
        raise FormatError(
            f"{file.path}: a file must not change while it is tokenised, found another size or modification time"
        )


def _open_worker(version: str, spec: bytes) -> ShardWorker:
    if version != __version__:
        raise TrackbedError(
            f"{socket.gethostname()}: Trackbed must have the version of the driver, {version}, found {__version__}"
        )
    return ShardWorker(pickle.loads(spec))
