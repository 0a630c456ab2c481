"""The trained tokens of the documents of a chunk, and the accumulator of them.

Shapes: D documents, R runs of trained tokens.
"""

from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from trackbed.preprocess.chat.encode import MarkedDocuments
from trackbed.preprocess.chat.trained_spans import Numbers

_TAIL: Final = 4
"""Tokens at the end of a trained run, one of which ends the turn."""


@dataclass(frozen=True, slots=True)
class TrainedRuns:
    """Trained tokens of the documents of a chunk, and counts of conversations."""

    counts: Numbers
    """`[D]` runs of trained tokens of each document."""
    runs: Numbers
    """`[R, 2]` first token of each run in its document, and number of tokens."""
    untrained: int
    """Number of conversations that become no document, as no token but the first one is trained."""
    open_turns: int
    """Number of trained runs whose stop token is not trained: a special token, or the end, follows."""

    @property
    def num_trained(self) -> int:
        """Number of trained tokens."""
        return int(self.runs[:, 1].sum())


@dataclass(slots=True)
class TrainedColumn:
    """Accumulator for the trained tokens of documents.

    Args:
        special: ids that may end a turn.
    """

    special: npt.NDArray[Any]
    counts: list[Numbers] = field(default_factory=list)
    runs: list[Numbers] = field(default_factory=list)
    untrained: int = 0
    open_turns: int = 0

    def add(self, found: MarkedDocuments, *, has_end: bool) -> None:
        """Appends documents.

        Args:
            found: documents of at least one token each.
            has_end: True if a token will be appended to each, which is trained like the one before it.
        """
        documents = np.repeat(np.arange(len(found.counts)), found.counts)
        runs = found.runs.copy()
        stops = runs.sum(axis=1)
        is_last = stops == found.lengths[documents]
        bases = (np.cumsum(found.lengths) - found.lengths)[documents]
        is_special = np.isin(found.tokens, self.special)
        behind = is_special[np.minimum(bases + stops, len(is_special) - 1)]
        # A template may have a line end behind the token that ends a turn, inside of the mark.
        before = np.concatenate([[0], np.cumsum(is_special)])
        tail = np.maximum(runs[:, 0], stops - _TAIL)
        is_closed = before[bases + stops] > before[bases + tail]
        self.open_turns += int(np.count_nonzero(np.where(is_last, not has_end, behind) & ~is_closed))
        if has_end:
            runs[is_last, 1] += 1
        self.counts.append(found.counts)
        self.runs.append(runs)

    def to_runs(self) -> TrainedRuns:
        """Returns everything that was appended."""
        counts = np.concatenate([np.empty(0, dtype=np.int64), *self.counts])
        runs = np.concatenate([np.empty((0, 2), dtype=np.int64), *self.runs])
        return TrainedRuns(counts, runs, self.untrained, self.open_turns)
