"""Building the indices of GPT datasets: many small ones in one kernel call, large ones one by one."""

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Final

import numpy as np
import numpy.typing as npt

from trackbed.cache import Allocate, Arrays, Kind, Request
from trackbed.datasets.gpt.indices import MOST_VISITS, SMALL_COST, GPTIndices
from trackbed.datasets.gpt.visits import ARRAYS
from trackbed.datasets.low_level import drop_pages
from trackbed.errors import FormatError, PlanError
from trackbed.kernels import SmallDataset, small_indices
from trackbed.tokens import IndexedDataset
from trackbed.tokens.headers import read_lengths

_MOST_TOGETHER: Final = 64
"""Datasets of a call. A thread seldom takes more at once: together they cost it about 20 ms."""
_HIGHEST: Final = int(np.iinfo(np.int32).max)


class GPTKind(Kind):
    """The three indices of a GPT dataset; the ingredients of a request are its `GPTIndices`."""

    def build(
        self, requests: Sequence[Request], allocate: Callable[[Request], Allocate]
    ) -> Iterator[Sequence[tuple[Request, Arrays]]]:
        """Builds small indices in batches of up to 64."""
        for is_small, alike in groupby(requests, self.is_small):
            some = list(alike)
            for first in range(0, len(some), _MOST_TOGETHER):
                batch = some[first : first + _MOST_TOGETHER]
                if is_small:
                    arrays = build_small([one.ingredients for one in batch])
                    yield [(one, made) for one, made in zip(batch, arrays, strict=True) if made is not None]
                    batch = [one for one, made in zip(batch, arrays, strict=True) if made is None]
                for one in batch:
                    indices: GPTIndices = one.ingredients
                    yield [(one, indices.build(allocate(one)))]
                    drop_pages(indices.dataset)  # most of thousands are not read for a long time

    def is_small(self, request: Request) -> bool:
        """True if they are built in batches with others."""
        indices: GPTIndices = request.ingredients
        return isinstance(indices.dataset, IndexedDataset) and indices.cost() <= SMALL_COST

    def read_ahead(self, request: Request) -> None:
        """Starts to read the lengths of the documents from the disk, where they are many."""
        indices: GPTIndices = request.ingredients
        if not self.is_small(request) and isinstance(indices.dataset, IndexedDataset):
            indices.read_ahead()


GPT_KIND: Final = GPTKind()


def build_small(indices: Sequence[GPTIndices]) -> list[Arrays | None]:
    """Returns the arrays of each; None if they are not small, or something is wrong: `GPTIndices.build` says what.

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
    """Returns the input of the kernel for a dataset, or None."""
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
