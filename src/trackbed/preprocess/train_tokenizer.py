"""Training of a byte-level BPE on a corpus with Hugging Face `tokenizers`."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from trackbed.datasets.tokenizers.rust_libraries import is_panic, panics_as_errors
from trackbed.errors import ArgumentError, FormatError, TrackbedError
from trackbed.files import clear_dead_partials, flush_to_disk, new_partial, publish
from trackbed.preprocess.chunks import plan_chunks
from trackbed.preprocess.config import (
    CHUNK_BYTES,
    MAX_RECORD_BYTES,
    FormatName,
    InputProgress,
    check_reading,
    format_of,
)
from trackbed.preprocess.find_inputs import names_by_reason
from trackbed.preprocess.inputs import InputFile, find_inputs
from trackbed.preprocess.long_text import split_text
from trackbed.preprocess.records import BadRecord, LineCounter, TextRecord, read_segment

_NUM_BYTES: Final = 256
_MOST_TOKENS: Final = 1 << 24
"""Largest vocabulary: the library allocates its memory before it begins."""
_PART_CHARS: Final = 64 << 10  # the library holds hundreds of texts in memory


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingConfig:
    """Options of `train_tokenizer`.

    Raises:
        ArgumentError: a field is out of its range.
    """

    inputs: tuple[Path, ...]
    """Files and folders, at least one."""
    vocab_size: int = 32_768
    """Maximum number of tokens: the 256 bytes, the special tokens, and the learnt ones."""
    special_tokens: tuple[str, ...] = ("<|endoftext|>",)
    """Tokens that no text produces; they get the first ids."""
    json_keys: tuple[str, ...] = ("text",)
    """Keys of the texts in a JSON record."""
    skip_bad: bool = False
    """If True, counts and skips bad records; if False, the first one is an error."""
    input_format: FormatName | None = None
    """Format of every input; None to take it from each suffix. If set, a folder stands for every file in it."""
    max_record_bytes: int = MAX_RECORD_BYTES
    """Maximum size of one line, one plain text or one cell, at least 1; a larger one is a bad record."""

    def __post_init__(self) -> None:
        if not self.inputs:
            raise ArgumentError("inputs must name at least one file or folder, found none")
        if not all(self.special_tokens) or len(set(self.special_tokens)) != len(self.special_tokens):
            raise ArgumentError(f"special_tokens must be different and not empty, found {list(self.special_tokens)}")
        least = _NUM_BYTES + len(self.special_tokens)
        if self.vocab_size > _MOST_TOKENS:
            raise ArgumentError(f"vocab_size must be at most {_MOST_TOKENS:,}, found {self.vocab_size:,}")
        if self.vocab_size < least:
            raise ArgumentError(
                f"vocab_size must be at least {least} for the bytes and special tokens, found {self.vocab_size}"
            )
        check_reading(input_format=self.input_format, max_record_bytes=self.max_record_bytes)
        if not self.json_keys:
            raise ArgumentError("json_keys must name at least one key, found none")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedTokenizer:
    """Result of a training."""

    path: Path
    vocab_size: int
    """Number of tokens; fewer than requested if the corpus is too small."""
    records: int
    bad: int
    """Records that were skipped."""
    formats: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Names of the files that were read, by format, as in the report of `preprocess`."""
    left_out: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Names that were not read, by reason, as in the report of `preprocess`."""


def train_tokenizer(config: TrainingConfig, output: Path, *, progress: InputProgress | None = None) -> TrainedTokenizer:
    """Trains a tokenizer on the texts of `config`, and writes it to the JSON file `output`, replacing an older one.

    The same texts and options always give the same tokenizer. Uses all cores.

    Args:
        config: texts and options.
        output: path of the file, which appears complete.
        progress: called after each chunk of input; training continues for a while after the last one.

    Raises:
        ArgumentError: an input or the output's folder is missing, or there is no text at all.
        FormatError: a record is bad and `config.skip_bad` is False.
    """
    if not output.parent.is_dir():
        raise ArgumentError(f"{output.parent}: the folder of the output must exist, found none")
    tokenizer = Tokenizer(models.BPE())
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = words
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=config.vocab_size,
        special_tokens=list(config.special_tokens),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inputs = find_inputs(config.inputs, input_format=format_of(config.input_format))
    corpus = _Corpus(
        inputs.files,
        config,
        lambda text: [word for word, _ in words.pre_tokenize_str(text)],
        progress,
    )
    try:
        tokenizer.train_from_iterator(corpus.texts(), trainer=trainer)
    except BaseException as error:
        if not is_panic(error):
            raise
        raise TrackbedError(
            f"{output}: the library tokenizers must learn from the texts, found a panic of it: {error}"
        ) from None
    if corpus.num_texts == 0:
        raise ArgumentError(f"{config.inputs[0]}: a tokenizer needs texts to learn from, found none")
    _save(tokenizer, output)
    return TrainedTokenizer(
        path=output,
        vocab_size=tokenizer.get_vocab_size(),
        records=corpus.records,
        bad=corpus.bad,
        formats=inputs.names_by_format(),
        left_out=names_by_reason(inputs.skipped),
    )


class _Corpus:
    """Single pass over the texts of all inputs, with counts.

    Args:
        files: input files.
        config: options of the training.
        words: function that splits a text into words, as the trained tokenizer does.
        progress: called after each chunk of input.
    """

    def __init__(
        self,
        files: Sequence[InputFile],
        config: TrainingConfig,
        words: Callable[[str], list[str]],
        progress: InputProgress | None,
    ) -> None:
        self.records = self.bad = self.num_texts = 0
        self._files = files
        self._config = config
        self._words = words
        self._progress = progress

    def texts(self) -> Iterator[str]:
        """Yields the texts, long ones in parts."""
        limit = self._config.max_record_bytes
        chunks = plan_chunks(self._files, chunk_bytes=CHUNK_BYTES, max_record_bytes=limit)
        done, total = 0, sum(file.size_bytes for file in self._files)
        line_counter = LineCounter()
        for chunk in chunks:
            for segment in chunk.segments:
                lines = 0
                for record in read_segment(segment, keys=self._config.json_keys, max_record_bytes=limit):
                    lines += 1
                    if isinstance(record, BadRecord):
                        self._add_bad(line_counter.describe(segment, record))
                    elif record is not None:
                        parts = self._parts_of(record)
                        if isinstance(parts, BadRecord):
                            self._add_bad(line_counter.describe(segment, parts))
                            continue
                        self.records += 1
                        yield from parts
                line_counter.advance(segment, lines)
            done += chunk.size_bytes
            if self._progress is not None:
                self._progress(done, total)

    def _parts_of(self, record: TextRecord) -> list[str] | BadRecord:
        """Returns the texts of a record, long ones in parts; a `BadRecord` if the library fails at one."""
        texts = list(filter(None, record.texts))
        try:
            with panics_as_errors():
                parts = [part for text in texts for part in split_text(text, self._words, part_chars=_PART_CHARS)]
        except RuntimeError as error:
            return BadRecord(record.line, f"the tokenizer must accept the text, found an error: {error}")
        self.num_texts += len(texts)
        return parts

    def _add_bad(self, message: str) -> None:
        if not self._config.skip_bad:
            raise FormatError(message)
        self.records += 1
        self.bad += 1


def _save(tokenizer: Tokenizer, output: Path) -> None:
    clear_dead_partials(output.parent, final_name=output.name)
    partial = new_partial(output)
    try:
        partial.write_text(tokenizer.to_str(pretty=True) + "\n", encoding="utf-8")
        flush_to_disk(partial)
        publish(partial, output)
        flush_to_disk(output.parent)
    finally:
        partial.unlink(missing_ok=True)
