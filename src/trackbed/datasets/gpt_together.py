"""The indices of many small GPT datasets, made in one call."""

from collections.abc import Sequence
from typing import Final

import numpy as np

from trackbed.cache import Arrays
from trackbed.datasets.gpt_indices import ARRAYS, GPTIndices
from trackbed.errors import FormatError, PlanError
from trackbed.kernels import SmallDataset, small_indices

__all__ = ["build_together"]

_MOST: Final = 1 << 14
"""Visits and samples of a small dataset. What is larger takes so long that a call of its own costs next to nothing."""


def build_together(indices: Sequence[GPTIndices]) -> list[Arrays | None]:
    """The arrays of each; None where they are not small, or something is wrong: `GPTIndices.build` says what."""
    small = [_describe(one) for one in indices]
    lengths = [one.lengths for one, described in zip(indices, small, strict=True) if described is not None]
    found = iter(small_indices([described for described in small if described is not None], lengths))
    return [None if described is None else dict(zip(ARRAYS, next(found), strict=True)) for described in small]


def _describe(indices: GPTIndices) -> SmallDataset | None:
    """What the kernel needs to know of a dataset; None where it is not small, or not of consecutive documents."""
    try:
        run, lengths, plan = indices.run, indices.lengths, indices.plan
    except (PlanError, FormatError):
        return None
    if run is None or not isinstance(lengths, np.ndarray) or lengths.dtype != np.int32:
        return None
    count = run[1] - run[0]
    if plan.num_epochs * count + plan.num_samples > _MOST or run[1] > np.iinfo(np.int32).max:
        return None
    return SmallDataset(
        first=run[0],
        num_documents=count,
        num_epochs=plan.num_epochs,
        num_samples=plan.num_samples,
        samples_before_last=-1 if plan.samples_before_last is None else plan.samples_before_last,
        sequence_length=indices.sequence_length,
        extra_token=indices.extra_token,
        seed=indices.seed,
    )
