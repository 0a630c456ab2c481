"""Counts of everything read and written, the report of them, and checks before the work and before publishing."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Final

from trackbed.errors import ArgumentError, FormatError, PlanError
from trackbed.files.stores import is_address
from trackbed.plural import number_of
from trackbed.preprocess.chat.trained_column import TrainedRuns
from trackbed.preprocess.chunks import InputChunk
from trackbed.preprocess.columns import KeyTokens
from trackbed.preprocess.config import PreprocessConfig
from trackbed.preprocess.find_inputs import names_by_reason
from trackbed.preprocess.inputs import InputFile, InputFormat, Inputs
from trackbed.preprocess.records import LineCounter
from trackbed.preprocess.splitter import SentenceSplitter
from trackbed.preprocess.tokenise_chunk import TokenisedChunk

BAD_SHOWN: Final = 20
"""Bad records whose location is reported."""


@dataclass(frozen=True, slots=True)
class Output:
    """The pair written for one key, or its pairs in all shards."""

    key: str
    prefix: str
    """Prefix of the pair; of shards, with `*` for their numbers."""
    documents: int
    sequences: int
    """Sentences if they are split, texts and images if there are images, else documents."""
    tokens: int
    """Tokens, and the numbers of images."""
    dropped: int
    """Texts that become no document: texts without tokens, or with `drop_record` all texts of the same record."""
    unknown: int | None = None
    """Unknown tokens, for text that the vocabulary does not cover; None if the tokenizer has none, records have images,
    or a shard of an earlier version does not tell."""
    empty: int = 0
    """Texts without tokens that are one sequence without text, as there are several keys."""
    trained: int | None = None
    """Trained tokens; None if records are texts."""
    untrained: int = 0
    """Conversations that become no document, as nothing of them is trained."""
    open_turns: int = 0
    """Trained parts of conversations whose stop token is not trained."""

    def with_more(self, chunk: KeyTokens) -> "Output":
        """Returns a copy that includes the documents of one more chunk."""
        return replace(
            self,
            documents=self.documents + len(chunk.counts),
            sequences=self.sequences + len(chunk.lengths),
            tokens=self.tokens + len(chunk.tokens),
            dropped=self.dropped + chunk.dropped,
            unknown=None if chunk.unknown is None else (self.unknown or 0) + chunk.unknown,
            empty=self.empty + chunk.empty,
            **self._with_more_trained(chunk.trained),
        )

    def _with_more_trained(self, found: TrainedRuns | None) -> dict[str, Any]:
        if found is None:
            return {}
        return {
            "trained": (self.trained or 0) + found.num_trained,
            "untrained": self.untrained + found.untrained,
            "open_turns": self.open_turns + found.open_turns,
        }


_COUNTED: Final = tuple(field.name for field in fields(Output) if field.name not in ("key", "prefix"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Counts of everything read and written."""

    outputs: tuple[Output, ...]
    files: int
    input_bytes: int
    """Stored bytes of all input."""
    records: int
    """JSON records and plain texts, usable or not."""
    blank: int
    """Blank lines."""
    bad: int
    """Records that were skipped."""
    first_bad: tuple[str, ...]
    """Locations and faults of the first bad records, at most 20."""
    left_out_files: int
    """Files in folders that were skipped, as their suffix is unknown."""
    formats: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Names of the files that were read, by format: `jsonl`, `text` or `parquet`."""
    left_out: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Names that were not read, by reason: `hidden`, `given twice`, `unknown suffix` or `written by trackbed`. The name
    of a folder stands for all that is in it."""
    kept_bytes: int = 0
    """Stored bytes of input whose work was kept from an earlier run."""
    text_bytes: int | None = None
    """Unpacked bytes of all input, of Parquet those of all columns; None if no input is packed, or if a shard of an
    earlier version does not tell."""
    shard_list: str | None = None
    """Path of the list of shards; None if one pair was written for each key."""
    shards: int = 0
    """Number of shards; each has one pair for each key."""
    finished_shards: int = 0
    """Number of shards that an earlier run had finished."""
    failed_attempts: int = 0
    """Number of attempts at a shard whose worker died."""


class Tally:
    """Running counts over the chunks, added in the order of the plan, which the line numbers depend on.

    Args:
        config: options of the run.
        inputs: all input files.
        prefixes: prefix of the pair of each key.
    """

    def __init__(self, config: PreprocessConfig, inputs: Inputs, prefixes: Sequence[str]) -> None:
        self.input_bytes = sum(file.size_bytes for file in inputs.files)
        self.done_bytes = 0
        self._kept_bytes = self._text_bytes = 0
        self.outputs = [Output(key, prefix, 0, 0, 0, 0) for key, prefix in zip(config.json_keys, prefixes, strict=True)]
        self._skip_bad = config.skip_bad
        self._inputs = inputs
        self._records = self._blank = self._bad = 0
        self._first_bad: list[str] = []
        self._line_counter = LineCounter()

    def add(self, chunk: InputChunk, result: TokenisedChunk) -> None:
        """Adds the counts of the next chunk."""
        for segment, found in zip(chunk.segments, result.segments, strict=False):
            for record in found.bad:
                self._add_bad(self._line_counter.describe(segment, record))
            self._line_counter.advance(segment, found.lines)
            self._records += found.records
            self._blank += found.blank
        self.outputs = [output.with_more(texts) for output, texts in zip(self.outputs, result.keys, strict=True)]
        self.done_bytes += chunk.size_bytes
        self._text_bytes += chunk.text_bytes

    def to_json(self) -> dict[str, Any]:
        """Returns all counts as JSON values, for `restore`."""
        return {
            "done_bytes": self.done_bytes,
            "text_bytes": self._text_bytes,
            "outputs": [[getattr(one, name) for name in _COUNTED] for one in self.outputs],
            "records": self._records,
            "blank": self._blank,
            "bad": self._bad,
            "first_bad": self._first_bad,
            "lines": self._line_counter.lines,
        }

    def restore(self, counts: dict[str, Any]) -> None:
        """Sets the counts to those that `to_json` returned for the same input."""
        self.done_bytes = self._kept_bytes = counts["done_bytes"]
        self._text_bytes = counts["text_bytes"]
        self.outputs = [
            Output(output.key, output.prefix, **dict(zip(_COUNTED, numbers, strict=True)))
            for output, numbers in zip(self.outputs, counts["outputs"], strict=True)
        ]
        self._records, self._blank, self._bad = counts["records"], counts["blank"], counts["bad"]
        self._first_bad = list(counts["first_bad"])
        self._line_counter = LineCounter(counts["lines"])

    def _add_bad(self, message: str) -> None:
        if not self._skip_bad:
            raise FormatError(message)
        self._bad += 1
        if len(self._first_bad) < BAD_SHOWN:
            self._first_bad.append(message)

    def report(self) -> Report:
        """Returns the report of the counts."""
        return Report(
            outputs=tuple(self.outputs),
            files=len(self._inputs.files),
            input_bytes=self.input_bytes,
            records=self._records,
            blank=self._blank,
            bad=self._bad,
            first_bad=tuple(self._first_bad),
            left_out_files=self._inputs.left_out,
            formats=self._inputs.names_by_format(),
            left_out=names_by_reason(self._inputs.skipped),
            kept_bytes=self._kept_bytes,
            text_bytes=self._text_bytes if any(file.is_packed for file in self._inputs.files) else None,
        )


logger = logging.getLogger(__name__)


def check_inputs(config: PreprocessConfig, files: Sequence[InputFile], splitter: SentenceSplitter | None) -> None:
    """Checks that inputs and options fit together."""
    if config.images is not None:
        _check_images(config, files, splitter)
    if len(config.json_keys) > 1:
        for file in files:
            if file.format is InputFormat.PLAIN_TEXT:
                raise ArgumentError(
                    f"{file.name}: a plain text has one text, json_keys asks for {len(config.json_keys)}"
                )


def make_output_folder(output: str) -> None:
    """Makes the folder of the output if it is missing; does nothing for an address."""
    if is_address(output):
        return
    folder = Path(output).parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ArgumentError(
            f"{folder}: the folder of the output must exist or be one that can be made, found: {error.strerror}"
        ) from error


def _check_images(config: PreprocessConfig, files: Sequence[InputFile], splitter: SentenceSplitter | None) -> None:
    if splitter is not None:
        raise ArgumentError(f"{config.output}: texts with images must be whole, found a splitter of sentences")
    for file in files:
        if file.format is not InputFormat.JSON_LINES:
            raise ArgumentError(
                f"{file.name}: records with images must be JSON lines, found a {file.format.value} file"
            )
    if not config.append_eod:
        logger.warning("%s: without --append-eod, --pad-length has no effect: texts keep their length", config.output)


def check_outputs(config: PreprocessConfig, report: Report) -> None:
    """Refuses pairs without documents, as they would replace existing pairs by empty ones."""
    for output in report.outputs:
        if output.documents == output.empty and not config.allow_empty:
            what = "document with text" if output.empty else "document"
            left_out = _why_untrained(config, output) if output.untrained else ""
            bad = f", {report.bad:,} of them bad, the first one {report.first_bad[0]}" if report.bad else ""
            raise PlanError(
                f"{output.prefix}: a pair must have at least one {what}, found none in "
                f"{number_of(report.records, 'record')} of {number_of(report.files, 'file')}{left_out}{bad}; "
                "--allow-empty writes it anyway"
            )


def _why_untrained(config: PreprocessConfig, output: Output) -> str:
    """Says that nothing is trained of conversations, and what may be wrong."""
    start = None if config.chat is None else config.chat.turn_start
    hint = "" if start is None else f", as {start!r} (--turn-start; in bash, $'\\n' is a line end) is in none of them"
    return f", {output.untrained:,} conversations of which nothing is trained{hint}"
