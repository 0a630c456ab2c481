"""What decides the files that preprocessing writes."""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from trackbed.errors import ArgumentError
from trackbed.preprocess.inputs import FORMATS, Layout

__all__ = [
    "CHUNK_BYTES",
    "MAX_RECORD_BYTES",
    "SHARD_BYTES",
    "Format",
    "PreprocessConfig",
    "Progress",
    "available_cores",
    "check_reading",
    "layout_of",
    "output_prefix",
]

CHUNK_BYTES: Final = 2 << 20
"""Text that one worker takes at a time: some milliseconds to half a second of work, and a MiB on its way back."""

SHARD_BYTES: Final = 64 << 20
"""Input that is not tokenised again once it has been: seconds of work."""

MAX_RECORD_BYTES: Final = 1 << 30
"""Size that one line, one plain text or one cell may have unless the caller says otherwise."""

Format = Literal["jsonl", "txt", "parquet"]
Progress = Callable[[int, int], None]
"""Called with the bytes of input done so far, and the bytes of all input."""


def available_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def output_prefix(output: str, key: str) -> str:
    """Prefix of the pair that one JSON key's texts go to: Megatron's naming.

    >>> output_prefix("corpus", "text")
    'corpus_text_document'
    """
    return f"{output}_{key}_document"


def layout_of(name: Format | None) -> Layout | None:
    """The layout of that name; None for None."""
    return None if name is None else FORMATS[name]


def check_reading(*, input_format: str | None, max_record_bytes: int) -> None:
    """Checks the options that say how inputs are read.

    Raises:
        ArgumentError: one of them is out of its range.
    """
    if input_format is not None and input_format not in FORMATS:
        msg = f"input_format must be one of {', '.join(FORMATS)}, or None, found {input_format!r}"
        raise ArgumentError(msg)
    if max_record_bytes < 1:
        msg = f"max_record_bytes must be at least 1, found {max_record_bytes}"
        raise ArgumentError(msg)


@dataclass(frozen=True, slots=True, kw_only=True)
class PreprocessConfig:
    """Which texts to tokenise, and where to.

    Raises:
        ArgumentError: a field is out of its range.
    """

    inputs: tuple[Path, ...]
    """Files and folders, at least one; their texts are written in this order."""
    output: str
    """Path that the names of all output files begin with; its folder must exist."""
    json_keys: tuple[str, ...] = ("text",)
    """Keys of the texts in a JSON record, all different; each gets a pair of its own."""
    append_eod: bool = False
    """Whether the end-of-document token follows each document."""
    skip_bad: bool = False
    """Whether records that cannot be used are counted and left out; otherwise the first one is an error."""
    input_format: Format | None = None
    """Layout of every input; None to take it from each suffix. With a layout, a folder means every file in it."""
    allow_empty: bool = False
    """Whether a pair without a document may be written."""
    max_record_bytes: int = MAX_RECORD_BYTES
    """Size of one line, one plain text or one cell, at least 1; a larger one is a bad record."""
    workers: int = field(default_factory=available_cores)
    """Processes that tokenise, at least 1, which is this one. Has no influence on what is written."""
    chunk_bytes: int = CHUNK_BYTES
    """Text that a worker takes at a time, at least 1. Has no influence on what is written."""
    shard_bytes: int = SHARD_BYTES
    """Input after which what is done is kept, at least 1. Has no influence on what is written."""

    def __post_init__(self) -> None:
        if not self.inputs:
            msg = "inputs must name at least one file or folder, found none"
            raise ArgumentError(msg)
        if not Path(self.output).name or self.output.endswith("/"):
            msg = f"output must end in the beginning of a file name, as in out/corpus, found {self.output!r}"
            raise ArgumentError(msg)
        wrong = [key for key in self.json_keys if not key or "/" in key or "\0" in key]
        if not self.json_keys or wrong or len(set(self.json_keys)) != len(self.json_keys):
            msg = f"json_keys must be different names that fit into a file name, found {list(self.json_keys)}"
            raise ArgumentError(msg)
        check_reading(input_format=self.input_format, max_record_bytes=self.max_record_bytes)
        for name in ("workers", "chunk_bytes", "shard_bytes"):
            if getattr(self, name) < 1:
                msg = f"{name} must be at least 1, found {getattr(self, name)}"
                raise ArgumentError(msg)
