"""The indices of many small GPT datasets, made in one call."""

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from trackbed.cache import Arrays
from trackbed.datasets.gpt_indices import ARRAYS, GPTIndices
from trackbed.datasets.low_level import first_lengths
from trackbed.errors import FormatError, PlanError
from trackbed.kernels import SmallDataset, small_indices

__all__ = ["build_together"]

_MOST: Final = 1 << 14
"""Visits and samples of a small dataset. What is larger takes so long that a call of its own costs next to nothing."""
_LAST_DOCUMENT: Final = int(np.iinfo(np.int32).max)


def build_together(indices: Sequence[GPTIndices]) -> list[Arrays | None]:
    """The arrays of each; None where they are not small, or something is wrong: `GPTIndices.build` says what."""
    candidates = [number for number, one in enumerate(indices) if _may_be_small(one.run)]
    stops = [indices[number].run[1] for number in candidates]  # type: ignore[index]  # it may be small
    lengths = first_lengths([indices[number].dataset for number in candidates], stops)
    small: dict[int, tuple[SmallDataset, npt.NDArray[np.int32]]] = {}
    for number, found in zip(candidates, lengths, strict=True):
        described = None if found is None else _describe(indices[number], found)
        if found is not None and described is not None:
            small[number] = described, found
    made = small_indices([described for described, _ in small.values()], [found for _, found in small.values()])
    arrays = dict(zip(small, made, strict=True))
    return [
        dict(zip(ARRAYS, arrays[number], strict=True)) if number in arrays else None for number in range(len(indices))
    ]


def _may_be_small(run: tuple[int, int] | None) -> bool:
    return run is not None and run[1] - run[0] <= _MOST and run[1] <= _LAST_DOCUMENT


def _describe(indices: GPTIndices, lengths: npt.NDArray[np.int32]) -> SmallDataset | None:
    """What the kernel needs to know of a dataset, or None."""
    start, stop = indices.run or (0, 0)
    try:
        plan = indices.plan_over(lengths[start:stop])
    except (PlanError, FormatError):
        return None
    if plan.num_epochs * (stop - start) + plan.num_samples > _MOST or lengths.dtype != np.int32:
        return None
    return SmallDataset(
        first=start,
        num_documents=stop - start,
        num_epochs=plan.num_epochs,
        num_samples=plan.num_samples,
        samples_before_last=-1 if plan.samples_before_last is None else plan.samples_before_last,
        sequence_length=indices.sequence_length,
        extra_token=indices.extra_token,
        seed=indices.seed,
    )
