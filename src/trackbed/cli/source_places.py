"""Sources of documents as commands show them: file, place, and line if it is asked for."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trackbed.errors import TrackbedError
from trackbed.files.stores import is_address


@dataclass(frozen=True, slots=True)
class SourcePlace:
    """Where a document comes from."""

    file: str
    byte: int | None = None
    """First byte of its record in the unpacked text."""
    row: int | None = None
    line: int | None = None
    """Line of the record, from 1; None if it was not counted, or the file is gone."""

    def __str__(self) -> str:
        """`file:line`, or the file and the place in it."""
        if self.line is not None:
            return f"{self.file}:{self.line}"
        return f"{self.file}, {f'row {self.row:,}' if self.row is not None else f'byte {self.byte:,}'}"


class Sources:
    """Sources of the documents of any pairs, each opened once.

    Args:
        counts_lines: True to count the line of each source, for which its file is read up to there.
    """

    def __init__(self, *, counts_lines: bool) -> None:
        self._counts_lines = counts_lines
        self._opened: dict[str, Any] = {}

    def of(self, prefix: str, document: int) -> SourcePlace | None:
        """Returns the source of a document; None if it is not known."""
        from trackbed.tokens.document_sources import DocumentSources

        if prefix not in self._opened:
            self._opened[prefix] = DocumentSources.open(prefix)
        sources = self._opened[prefix]
        found = None if sources is None else sources.of(document)
        if found is None:
            return None
        if found.unit == "row":
            return SourcePlace(found.name, row=found.place)
        line = _line_of(found.name, found.place) if self._counts_lines else None
        return SourcePlace(found.name, byte=found.place, line=line)


def _line_of(name: str, byte: int) -> int | None:
    """Returns the line, from 1, that begins at a byte of the unpacked text; None if the file cannot be read."""
    from trackbed.preprocess.inputs import InputFormat, find_inputs
    from trackbed.preprocess.open_input import count_line_ends

    try:
        (file,) = find_inputs([name if is_address(name) else Path(name)], input_format=InputFormat.JSON_LINES).files
        return 1 + count_line_ends(file, byte)
    except (TrackbedError, OSError):
        return None
