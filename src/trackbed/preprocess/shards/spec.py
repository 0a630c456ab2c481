"""The values that decide shards: those that all shards of a run have in common, and the task of one shard."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from trackbed.cache import fingerprint
from trackbed.datasets.tokenizers.base import OpenedAs
from trackbed.preprocess.chat.encode import ChatRules
from trackbed.preprocess.config import Level, output_prefix
from trackbed.preprocess.inputs import InputSegment
from trackbed.preprocess.splitter import SentenceSplitter
from trackbed.preprocess.tokenise_chunk import BatchTokenizer


@dataclass(frozen=True, slots=True)
class Probe:
    """A file that the driver has written into the output folder, which every worker must see."""

    path: str
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardSpec:
    """Values that all shards of a run have in common."""

    output: str
    """Common prefix of the shards, absolute."""
    num_shards: int
    shard_bytes: int
    json_keys: tuple[str, ...]
    level: Level
    append_eod: bool
    drop_record: bool = False
    """True to leave a record out of all keys if one of its texts has no tokens."""
    skip_bad: bool
    max_record_bytes: int
    chunk_bytes: int
    overwrite: bool
    """True to replace shards that were made in another way."""
    tokenizer: OpenedAs | BatchTokenizer
    """Name and options of the tokenizer, or the tokenizer itself if it was not opened by name."""
    tokenizer_fingerprint: str
    dtype: str
    eod: int | None
    splitter: SentenceSplitter | None
    splitter_fingerprint: str
    """Fingerprint of the splitter; empty without one."""
    trackbed: str
    """Version of Trackbed on the driver."""
    chat: ChatRules | None = None
    """Rules for the texts of conversations; None if records are texts."""
    keep_sources: bool = False
    """True to write the sources of the documents beside each pair."""
    probe: Probe | None
    """None if the output is not on a disk."""

    def prefixes(self, shard: int) -> list[str]:
        """Prefix of the pair of each key."""
        return [shard_prefix(self.output, shard, self.num_shards, key, self.level) for key in self.json_keys]


@dataclass(frozen=True, slots=True)
class ShardTask:
    """One shard: its number, and its part of the input."""

    shard: int
    segments: tuple[InputSegment, ...]
    """Ranges of files, in the order of the input; only the first may begin inside its file."""

    def __str__(self) -> str:
        if not self.segments:
            return f"shard {self.shard} (no input)"
        first, last = self.segments[0], self.segments[-1]
        end = f"byte {last.stop} of {last.file.name}"
        return f"shard {self.shard} (byte {first.start} of {first.file.name} to {end})"


def shard_stem(output: str, shard: int, num_shards: int) -> str:
    """Returns the prefix of a shard, without its key.

    >>> shard_stem("out/web", 3, 24)
    'out/web-00003-of-00024'
    """
    return f"{output}-{shard:05}-of-{num_shards:05}"


def shard_prefix(output: str, shard: int, num_shards: int, key: str, level: Level) -> str:
    """Returns the prefix of the pair of one key.

    >>> shard_prefix("out/web", 3, 24, "text", "document")
    'out/web-00003-of-00024_text_document'
    """
    return output_prefix(shard_stem(output, shard, num_shards), key, level=level)


def recipe_of(spec: ShardSpec, task: ShardTask) -> dict[str, Any]:
    """Returns everything that decides the bytes of a shard, as JSON values.

    `skip_bad` is left out: without bad records, it does not matter, and their number is counted.
    """
    files = [segment.file for segment in task.segments]
    return {
        "trackbed": spec.trackbed,
        "tokenizer": spec.tokenizer_fingerprint,
        "splitter": spec.splitter_fingerprint,
        "level": spec.level,
        "json_keys": list(spec.json_keys),
        **({"drop_record": spec.drop_record} if len(spec.json_keys) > 1 else {}),
        "dtype": spec.dtype,
        "eod": spec.eod,
        "max_record_bytes": spec.max_record_bytes,
        **({"keep_sources": True} if spec.keep_sources else {}),
        **({} if spec.chat is None else {"chat": _digest([(repr(spec.chat.decisions()),)])}),
        "shard_bytes": spec.shard_bytes,
        "shard": [task.shard, spec.num_shards],
        "input_names": _digest((file.name, file.format.value, file.compression.value) for file in files),
        "input_ranges": _digest((segment.start, segment.stop) for segment in task.segments),
        "input_versions": _digest((file.size_bytes, file.version) for file in files),
    }


def made_by(recipe: dict[str, Any]) -> str:
    """Returns the SHA-256 of a recipe, as 64 hexadecimal digits."""
    return fingerprint(recipe)


def _digest(rows: Iterable[tuple[Any, ...]]) -> str:
    digest = hashlib.sha256()
    for row in rows:
        digest.update(repr(row).encode("utf-8", "surrogateescape") + b"\n")
    return digest.hexdigest()
