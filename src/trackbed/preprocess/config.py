"""Options of preprocessing."""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from trackbed.errors import ArgumentError
from trackbed.files.stores import is_address, lost_address_hint, parse_address
from trackbed.preprocess.chat.config import CHAT_KEY, ChatConfig
from trackbed.preprocess.cpu_quota import cpu_quota
from trackbed.preprocess.inputs import FORMATS, InputFormat

CHUNK_BYTES: Final = 2 << 20
"""Text per chunk, the unit of work of one worker: takes milliseconds to half a second, and returns about a MiB."""

SAVE_INTERVAL_BYTES: Final = 64 << 20
"""Input between two saves of the tokens; a resumed run repeats about this much, which takes seconds."""

MAX_RECORD_BYTES: Final = 1 << 30
"""Default limit on the size of one line, one plain text or one cell."""

FormatName = Literal["jsonl", "txt", "parquet"]
_READ_ONLY: Final = ("http", "https", "msc")
Level = Literal["document", "sentence"]
EngineName = Literal["local", "ray"]
ENGINES: Final[tuple[EngineName, ...]] = ("local", "ray")
InputProgress = Callable[[int, int], None]
"""Callback that receives the bytes of input processed so far and the bytes of all input."""


def available_cores() -> int:
    """Number of cores that this process may use: those that it may run on, or fewer by the quota of its container."""
    cores = len(os.sched_getaffinity(0))
    quota = cpu_quota()
    return cores if quota is None else min(cores, quota)


def output_prefix(output: str, key: str, *, level: Level = "document") -> str:
    """Returns the prefix of the pair for the texts of one JSON key, named as Megatron names it.

    Args:
        output: common prefix of all output files.
        key: key of the texts.
        level: what a sequence of the pair holds.

    >>> output_prefix("corpus", "text")
    'corpus_text_document'
    """
    return f"{output}_{key}_{level}"


def format_of(name: FormatName | None) -> InputFormat | None:
    """Returns the format of that name; None for None."""
    return None if name is None else FORMATS[name]


def check_reading(*, input_format: str | None, max_record_bytes: int) -> None:
    """Checks the options that control how inputs are read."""
    if input_format is not None and input_format not in FORMATS:
        raise ArgumentError(f"input_format must be one of {', '.join(FORMATS)}, or None, found {input_format!r}")
    if max_record_bytes < 1:
        raise ArgumentError(f"max_record_bytes must be at least 1, found {max_record_bytes}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ImagesConfig:
    """Images that go with the texts, as for Megatron's `preprocess_mmdata.py`.

    Raises:
        ArgumentError: a field is out of its range.
    """

    folder: Path
    """Folder of the images."""
    pad_length: int
    """Number of tokens, at least 1, to which a text is cut or filled with the end-of-document token; without
    `append_eod` texts keep their length."""
    key: str = "image"
    """Key of the path of the image in a JSON record, below the folder."""

    def __post_init__(self) -> None:
        if self.pad_length < 1:
            raise ArgumentError(f"pad_length must be at least 1, found {self.pad_length}")
        if not self.key:
            raise ArgumentError("the key of the images must have at least one character, found none")


@dataclass(frozen=True, slots=True, kw_only=True)
class PreprocessConfig:
    """Options of `preprocess`: the texts to tokenise, and the files to write.

    Raises:
        ArgumentError: a field is out of its range.
    """

    inputs: tuple[Path | str, ...]
    """Files and folders, and addresses of objects or of folders of objects, at least one; texts are written in this
    order."""
    output: str
    """Common prefix of the paths of all output files; its folder is made if it is missing. Of shards, it may be an
    address."""
    json_keys: tuple[str, ...] = ("text",)
    """Keys of the texts in a JSON record, without duplicates; each key gets its own pair."""
    append_eod: bool = False
    """If True, appends the end-of-document token to each document."""
    chat: ChatConfig | None = None
    """Options of conversations, which then are the records: the pair has the key "chat" in its name and beside it
    `<prefix>.mask`, the tokens that are trained on. None if records are texts."""
    drop_record: bool = False
    """With several keys: if True, a record with a text without tokens is left out of all pairs; if False, such a text
    is one sequence without text. Either way, the documents of the pairs correspond."""
    images: ImagesConfig | None = None
    """Images of the records: the pair then has the prefix `output`, int32 numbers and modes; None for texts alone."""
    skip_bad: bool = False
    """If True, counts and skips bad records; if False, the first one is an error."""
    input_format: FormatName | None = None
    """Format of every input; None to take it from each suffix. If set, a folder stands for every file in it."""
    allow_empty: bool = False
    """If True, a pair without documents may be written."""
    max_record_bytes: int = MAX_RECORD_BYTES
    """Maximum size of one line, one plain text or one cell, at least 1; a larger one is a bad record."""
    workers: int = field(default_factory=available_cores)
    """Number of processes that tokenise, at least 1; 1 is this process alone. Does not affect the output."""
    chunk_bytes: int = CHUNK_BYTES
    """Text per chunk, at least 1. Does not affect the output."""
    save_interval_bytes: int = SAVE_INTERVAL_BYTES
    """Save interval: input between two saves of the tokens, at least 1. Does not affect the output."""
    shard_bytes: int | None = None
    """Stored bytes of input in each shard, at least 1; None to write one pair for each key."""
    engine: EngineName = "local"
    """Engine that makes the shards: processes of this host, or Ray. Does not affect the output."""
    keep_sources: bool = False
    """If True, writes `<prefix>.src` beside each pair: the input file of each document, and its place there."""
    overwrite: bool = False
    """If True, shards that were made in another way are replaced; if False, they are an error."""

    def __post_init__(self) -> None:
        if not self.inputs:
            raise ArgumentError("inputs must name at least one file or folder, found none")
        if not Path(self.output).name or self.output.endswith("/"):
            raise ArgumentError(f"output must end in a file name prefix, as in out/corpus, found {self.output!r}")
        hint = lost_address_hint(self.output)
        if hint:
            raise ArgumentError(
                f"{self.output}: output must be a path or an address, found an address without a slash{hint}"
            )
        self._check_chat()
        wrong = [key for key in self.json_keys if not key or "/" in key or "\0" in key]
        if not self.json_keys or wrong or len(set(self.json_keys)) != len(self.json_keys):
            raise ArgumentError(f"json_keys must be distinct and usable in a file name, found {list(self.json_keys)}")
        if self.images is not None and len(self.json_keys) != 1:
            raise ArgumentError(f"json_keys must be one key if records have images, found {list(self.json_keys)}")
        if self.images is not None and self.images.key in self.json_keys:
            raise ArgumentError(
                f"the key of the images must not be that of the texts, found {self.images.key!r} for both"
            )
        if self.drop_record and len(self.json_keys) == 1:
            raise ArgumentError(f"drop_record must be combined with several json_keys, found {list(self.json_keys)}")
        check_reading(input_format=self.input_format, max_record_bytes=self.max_record_bytes)
        self._check_shards()
        for name in ("workers", "chunk_bytes", "save_interval_bytes"):
            if getattr(self, name) < 1:
                raise ArgumentError(f"{name} must be at least 1, found {getattr(self, name)}")

    def _check_chat(self) -> None:
        if self.chat is None:
            return
        if self.json_keys not in (("text",), (CHAT_KEY,)):
            raise ArgumentError(f"json_keys must be omitted with chat, found {list(self.json_keys)}")
        if self.images is not None:
            raise ArgumentError("images must be omitted with chat, found both")
        object.__setattr__(self, "json_keys", (CHAT_KEY,))

    def _check_shards(self) -> None:
        if is_address(self.output):
            address = parse_address(self.output)
            if not address.key or address.scheme in _READ_ONLY:
                raise ArgumentError(
                    f"{self.output}: an output must have a key in a store that can be written to, found another"
                )
        if self.engine not in ENGINES:
            raise ArgumentError(f"engine must be one of {', '.join(ENGINES)}, found {self.engine!r}")
        if self.shard_bytes is None:
            if is_address(self.output):
                raise ArgumentError(
                    f"{self.output}: an output in a store must be combined with shard_bytes, found none"
                )
            for name, is_given in (("engine 'ray'", self.engine != "local"), ("overwrite", self.overwrite)):
                if is_given:
                    raise ArgumentError(f"{name} must be combined with shard_bytes, found none")
            return
        if self.shard_bytes < 1:
            raise ArgumentError(f"shard_bytes must be at least 1, found {self.shard_bytes}")
        if self.images is not None:
            raise ArgumentError("images must be omitted with shard_bytes, found both")
