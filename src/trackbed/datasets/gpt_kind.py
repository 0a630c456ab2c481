"""Building the indices of GPT datasets: many small ones in one kernel call, large ones one by one."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from trackbed.cache import Allocate, Arrays, ArraySpec, Request
from trackbed.datasets.gpt_indices import GPTIndices
from trackbed.datasets.gpt_visits import ARRAYS
from trackbed.datasets.low_level import drop_pages, most_tokens, num_sequences
from trackbed.errors import FormatError, PlanError
from trackbed.kernels import SmallDataset, small_indices
from trackbed.tokens import IndexedDataset
from trackbed.tokens.lengths import read_lengths

__all__ = ["GPT_KIND", "build_small"]

MOST_VISITS: Final = 1 << 16
"""Visits and samples of a small dataset. A larger one takes several times as long as a call of its own costs."""
_ENTRY_COST: Final = 4e5
_VISIT_COST: Final = 18.0
_SAMPLE_COST: Final = 8.0
"""Nanoseconds of an entry, a visit and a sample: files and their names, shuffle and cut, shuffle and writing."""
_SMALL_COST: Final = _ENTRY_COST + MOST_VISITS * _VISIT_COST
"""Highest cost of indices that are built in batches, as far as is known without reading lengths."""
_MOST_TOGETHER: Final = 16
"""Datasets of a call: more save little, and whoever waits for the first would wait longer."""
_HIGHEST: Final = int(np.iinfo(np.int32).max)


class GPTKind:
    """The three indices of a GPT dataset; the ingredients of a request are its `GPTIndices`."""

    is_blend = False

    def build(
        self, requests: Sequence[Request], allocate: Callable[[Request], Allocate]
    ) -> Iterator[Sequence[tuple[Request, Arrays]]]:
        """Builds small indices in batches of 1, 2, 4 and so on up to 16, so that the first is there soon."""
        first, count = 0, 1
        while first < len(requests):
            batch = requests[first : first + count]
            if batch[0].is_small:
                batch = [one for one in batch if one.is_small]
                arrays = build_small([one.ingredients for one in batch])
                built = [(one, found) for one, found in zip(batch, arrays, strict=True) if found is not None]
                if built:
                    yield built
                done = {id(one) for one, _ in built}
                batch = [one for one in batch if id(one) not in done]
                first, count = first + len(built) + len(batch), min(2 * count, _MOST_TOGETHER)
            else:
                batch = batch[:1]
                first, count = first + 1, 1
            for one in batch:
                indices: GPTIndices = one.ingredients
                yield [(one, indices.build(allocate(one)))]
                drop_pages(indices.dataset)  # most of thousands are not read for a long time

    def expected(self, request: Request) -> Mapping[str, ArraySpec]:
        """Returns dtypes and shapes of the three arrays."""
        indices: GPTIndices = request.ingredients
        return indices.expected()

    def cost(self, request: Request) -> float:
        """Estimates the nanoseconds to build them, from what is known without reading lengths."""
        indices: GPTIndices = request.ingredients
        room, documents = most_tokens(indices.dataset), num_sequences(indices.dataset) or 1
        visits = documents if indices.documents is None else len(indices.documents)
        tokens = (room or 0) * visits / documents
        epochs = max(1.0, (indices.num_samples or 0) * indices.sequence_length / tokens) if tokens else 1.0
        return _ENTRY_COST + epochs * (visits * _VISIT_COST + tokens / indices.sequence_length * _SAMPLE_COST)

    def is_small(self, request: Request) -> bool:
        """True if they are built in batches with others."""
        return self.cost(request) <= _SMALL_COST and isinstance(request.ingredients.dataset, IndexedDataset)

    def read_ahead(self, request: Request) -> None:
        """Starts to read the lengths of the documents from the disk, where they are many."""
        if not request.is_small and isinstance(request.ingredients.dataset, IndexedDataset):
            request.ingredients.read_ahead()


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
