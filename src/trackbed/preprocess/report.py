"""What was read and written: counts that grow chunk by chunk, and the report of them."""

from dataclasses import dataclass, replace
from typing import Any, Final

from trackbed.errors import FormatError
from trackbed.preprocess.config import PreprocessConfig, output_prefix
from trackbed.preprocess.inputs import Inputs
from trackbed.preprocess.line_numbers import Places
from trackbed.preprocess.plan import Chunk
from trackbed.preprocess.tokenise import KeyTokens, TokenisedChunk

__all__ = ["Output", "Report", "Tally"]

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
    left_out_files: int
    """Files in folders that were not read, as their suffix is unknown."""


class Tally:
    """What the chunks have had so far, taken in the order of the plan: only so are line numbers known.

    Args:
        config: what was asked for.
        inputs: all the input.
    """

    def __init__(self, config: PreprocessConfig, inputs: Inputs) -> None:
        self.input_bytes = sum(file.size_bytes for file in inputs.files)
        self.done_bytes = 0
        self.outputs = [Output(key, output_prefix(config.output, key), 0, 0, 0) for key in config.json_keys]
        self._skip_bad = config.skip_bad
        self._inputs = inputs
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

    def to_json(self) -> dict[str, Any]:
        """All counts, as JSON values: a tally of the same input goes on from them."""
        return {
            "done_bytes": self.done_bytes,
            "outputs": [[one.documents, one.tokens, one.dropped] for one in self.outputs],
            "records": self._records,
            "blank": self._blank,
            "bad": self._bad,
            "first_bad": self._first_bad,
            "lines": self._places.lines,
        }

    def go_on(self, counts: dict[str, Any]) -> None:
        """Go on from what `to_json` gave."""
        self.done_bytes = counts["done_bytes"]
        self.outputs = [
            replace(output, documents=documents, tokens=tokens, dropped=dropped)
            for output, (documents, tokens, dropped) in zip(self.outputs, counts["outputs"], strict=True)
        ]
        self._records, self._blank, self._bad = counts["records"], counts["blank"], counts["bad"]
        self._first_bad = list(counts["first_bad"])
        self._places = Places(counts["lines"])

    def _add_bad(self, message: str) -> None:
        if not self._skip_bad:
            raise FormatError(message)
        self._bad += 1
        if len(self._first_bad) < _BAD_SHOWN:
            self._first_bad.append(message)

    def report(self) -> Report:
        """What came of it all."""
        return Report(
            outputs=tuple(self.outputs),
            files=len(self._inputs.files),
            input_bytes=self.input_bytes,
            records=self._records,
            blank=self._blank,
            bad=self._bad,
            first_bad=tuple(self._first_bad),
            left_out_files=self._inputs.left_out,
        )
