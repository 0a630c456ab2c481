"""The indices of many small GPT datasets, made in one call."""

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from trackbed.cache import Arrays
from trackbed.datasets.gpt_indices import GPTIndices
from trackbed.datasets.gpt_visits import ARRAYS
from trackbed.errors import FormatError, PlanError
from trackbed.kernels import SmallDataset, small_indices
from trackbed.tokens.lengths import read_lengths

__all__ = ["MOST_VISITS", "build_together"]

MOST_VISITS: Final = 1 << 16
"""Visits and samples of a small dataset. What is larger takes several times as long as a call of its own costs."""
_HIGHEST: Final = int(np.iinfo(np.int32).max)


def build_together(indices: Sequence[GPTIndices]) -> list[Arrays | None]:
    """The arrays of each; None where they are not small, or something is wrong: `GPTIndices.build` says what.

    Args:
        indices: each of an `IndexedDataset`, which is not mapped for this.
    """
    runs = [one.run if one.run is not None and one.run[1] - one.run[0] <= MOST_VISITS else (0, 0) for one in indices]
    lengths = read_lengths([one.dataset.index for one in indices], runs)
    described = [_describe(one, run, found) for one, run, found in zip(indices, runs, lengths, strict=True)]
    small = [
        (dataset, found) for dataset, found in zip(described, lengths, strict=True) if dataset and found is not None
    ]
    made = iter(small_indices([dataset for dataset, _ in small], [found for _, found in small]))
    return [dict(zip(ARRAYS, next(made), strict=True)) if dataset else None for dataset in described]


def _describe(indices: GPTIndices, run: tuple[int, int], lengths: npt.NDArray[np.int32] | None) -> SmallDataset | None:
    """What the kernel needs to know of a dataset, or None."""
    if indices.run != run or lengths is None or max(run[1], indices.sequence_length) > _HIGHEST:
        return None
    indices.note_lengths(lengths)
    try:
        plan = indices.plan_over(lengths)
    except (PlanError, FormatError):
        return None
    if plan.num_epochs * len(lengths) + plan.num_samples > MOST_VISITS:
        return None
    return SmallDataset(
        first=run[0],
        num_documents=len(lengths),
        num_epochs=plan.num_epochs,
        num_samples=plan.num_samples,
        samples_before_last=-1 if plan.samples_before_last is None else plan.samples_before_last,
        sequence_length=indices.sequence_length,
        extra_token=indices.extra_token,
        seed=indices.seed,
    )
